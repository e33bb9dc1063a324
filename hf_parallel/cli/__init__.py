"""The command `hf-parallel`."""
