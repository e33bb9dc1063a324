"""The cache floor: what is remembered and who sees it. Knows blocks and views; no sampling, no text."""

from .arena import Arena, Extent
from .base import BlockCache
from .layout import Block, ForwardPass, Segment, View, plan_pass, view_length

__all__ = ["Arena", "Block", "BlockCache", "Extent", "ForwardPass", "Segment", "View", "plan_pass", "view_length"]
