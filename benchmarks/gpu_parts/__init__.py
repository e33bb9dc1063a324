"""Stages and tools of `python -m benchmarks.gpu`."""
