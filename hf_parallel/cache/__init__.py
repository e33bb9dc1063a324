"""Blocks of keys and values, the caches that rows share, and the logits trie. Without sampling and text."""

from hf_parallel.cache.arena import Arena
from hf_parallel.cache.base import BlockCache, LayerReads
from hf_parallel.cache.batch import ForwardPass, Segment, View, view_length
from hf_parallel.cache.pool import Block, Pool

__all__ = ["Arena", "Block", "BlockCache", "ForwardPass", "LayerReads", "Pool", "Segment", "View", "view_length"]
