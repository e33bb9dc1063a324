"""Worker process of `python -m benchmarks engines`."""
