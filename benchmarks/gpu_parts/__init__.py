"""The stages of `python -m benchmarks.gpu`, and what they measure with."""
