"""The mode `hogwild`: workers that think together over one KV cache (Hogwild! Inference)."""
