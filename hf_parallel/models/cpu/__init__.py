"""Layers of a model on a CPU, computed by C kernels."""
