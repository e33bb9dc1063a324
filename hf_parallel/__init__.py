"""Parallel generation over a shared KV cache, for Hugging Face Transformers."""

from hf_parallel.embedded import load_embedded_model

__version__ = "0.1.0"

__all__ = ["load_embedded_model"]
