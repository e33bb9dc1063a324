"""Images in prompts: ids of their tokens, their features while calls use them, and their positions.

A prompt has one token per feature vector of an image. The cache knows it by an id made of a hash of the image and the
token's place in it, so that prefixes are equal if their tokens and images are.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

FIRST_ID = 1 << 62
"""Ids of image tokens begin here; those of text tokens are lower."""
_PLACE_BITS = 16
MAX_TOKENS = 1 << _PLACE_BITS
"""Maximum number of tokens of an image."""
KEY_BITS = 62 - _PLACE_BITS
SALT = secrets.token_bytes(16)
"""Secret of this process that the keys of images depend on, so that no one can prepare two images with one key."""


@dataclass(frozen=True, eq=False)
class Image:
    """An image: its features, in the order of its tokens, and its positions.

    `key`: hash of content and size, below `2 ** KEY_BITS`. `features`: `[tokens, hidden]` for each place of the model
    that adds image features. `corrections`: int64 `[3, tokens]`, what multi-axis positions (M-RoPE) add to a count of
    tokens; None without. `shift`: what the image adds to the positions of later tokens beside the number of its tokens.
    `bidirectional_layers`: indices of layers in which its tokens attend to later ones of the image, too. `thumbnail`: a
    `data:` URL, or empty.
    """

    key: int
    features: tuple[torch.Tensor, ...]
    layout: Any = None  # how the model packs the features, see `hf_parallel.models.images`
    corrections: torch.Tensor | None = None
    shift: int = 0
    bidirectional_layers: Collection[int] = ()
    thumbnail: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.features[0])

    @property
    def ids(self) -> np.ndarray:
        """Ids of its tokens, int64 `[tokens]`."""
        return FIRST_ID + (self.key << _PLACE_BITS) + np.arange(self.num_tokens)


def is_image(ids: Any) -> Any:
    """Return whether an id stands for an image token; elementwise for an array or tensor."""
    return ids >= FIRST_ID


def count_images(tokens: np.ndarray) -> int:
    """Return the number of images that begin in a prompt, int64 `[length]`."""
    return int((is_image(tokens) & (tokens % MAX_TOKENS == 0)).sum())


class ImageSpan(NamedTuple):
    """Successive tokens of an image, from `first` to `stop`, that begin at index `at` of new tokens."""

    at: int
    image: Image
    first: int
    stop: int

    @property
    def end(self) -> int:
        """Index after the last one among new tokens."""
        return self.at + self.stop - self.first


class ImageTable(WeakValueDictionary[int, Image]):
    """The images that calls use, by key."""

    def __reduce__(self) -> tuple[type[ImageTable], tuple[()]]:
        return ImageTable, ()

    def add(self, images: Sequence[Image]) -> None:
        """Add images, as long as the caller holds them."""
        self.update({image.key: image for image in images})

    def spans(self, tokens: Sequence[int] | np.ndarray) -> Iterator[ImageSpan]:
        """Yield the spans of image tokens in a sequence."""
        ids = np.asarray(tokens, np.int64)
        places = np.flatnonzero(is_image(ids))
        if not len(places):
            return
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        for successive in np.split(places, breaks):
            while len(successive):
                key, first = divmod(int(ids[successive[0]]) - FIRST_ID, MAX_TOKENS)
                image = self[key]
                count = min(len(successive), image.num_tokens - first)
                yield ImageSpan(int(successive[0]), image, first, first + count)
                successive = successive[count:]

    def split(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Split tokens after each image that shifts the positions of later ones."""
        if not len(self):
            return [tokens] if len(tokens) else []
        ends = []
        for span in self.spans(tokens):
            if span.image.shift and span.stop == span.image.num_tokens:
                ends.append(span.end)
        return [part for part in np.split(tokens, ends) if len(part)]

    def cut(self, tokens: Sequence[int] | np.ndarray, count: int) -> int:
        """Return `count`, or less where that many tokens would end within an image whose tokens see each other."""
        spans = self.spans(tokens[: count + 1]) if len(self) else ()
        for span in spans:
            if span.image.bidirectional_layers and span.at < count < span.end:
                return span.at
        return count

    def chunk(self, tokens: Sequence[int] | np.ndarray, count: int) -> int:
        """Return the size of a pass of about `count` tokens, which holds such an image whole, even a larger one."""
        return self.cut(tokens, min(count, len(tokens))) or next(self.spans(tokens)).end

    def shift(self, tokens: np.ndarray) -> int:
        """Return by how much the positions after tokens, a part made by `split`, differ from their number."""
        if not len(self) or not is_image(tokens[-1]):
            return 0
        *_, last = self.spans(tokens)
        return last.image.shift if last.stop == last.image.num_tokens else 0
