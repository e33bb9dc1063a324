"""Transformers models under block attention: attention function, capability probing, CUDA graphs, loading."""
