"""The cache floor: what is remembered and who sees it. Knows blocks and views; no sampling, no text."""

from hf_parallel.cache.arena import Arena, Extent
from hf_parallel.cache.base import BlockCache
from hf_parallel.cache.layout import Block, ForwardPass, Segment, View, plan_pass, view_length

__all__ = ["Arena", "Block", "BlockCache", "Extent", "ForwardPass", "Segment", "View", "plan_pass", "view_length"]
