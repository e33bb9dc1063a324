"""Blocks of keys and values, the caches that rows share, and the logits trie. Without sampling and text."""

from hf_parallel.cache.arena import Arena, Extent
from hf_parallel.cache.base import BlockCache
from hf_parallel.cache.layout import Block, ForwardPass, Segment, View, plan_pass, view_length

__all__ = ["Arena", "Block", "BlockCache", "Extent", "ForwardPass", "Segment", "View", "plan_pass", "view_length"]
