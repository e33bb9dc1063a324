"""What a model can do over blocks, measured when it is enabled."""
