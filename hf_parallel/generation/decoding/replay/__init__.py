"""Re-sampling from cached logits (Hive, section 6): replay policies, replay, speculative decoding, prefetch."""

from hf_parallel.generation.decoding.replay.policies import Hotspot, ReplayPolicy, Stepwise

__all__ = ["Hotspot", "ReplayPolicy", "Stepwise"]
