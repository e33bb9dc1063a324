"""Triton kernels for which a row has the same bits whatever other rows there are (docs/exactness.md)."""
