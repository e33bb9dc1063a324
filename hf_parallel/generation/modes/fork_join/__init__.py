"""`generation_mode="fork_join"`: see `config.py`."""
