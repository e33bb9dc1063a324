"""Forward passes over blocks: the modules' own way, compiled layers, CUDA graphs, dense copies."""
