"""`generation_mode="search"`: candidates that are scored while they decode; losers are dropped, winners are forked."""

from hf_parallel.generation.modes.search.config import SearchConfig as SearchConfig
