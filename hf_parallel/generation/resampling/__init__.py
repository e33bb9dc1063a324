"""Re-sampling from cached logits (Hive, section 6): replay policies, replay, speculative decoding, prefetch."""
