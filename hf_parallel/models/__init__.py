"""How a Transformers model meets the cache: attention registration, capability probing, decode graphs, loading."""
