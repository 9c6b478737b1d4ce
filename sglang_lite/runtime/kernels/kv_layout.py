"""Layout of a KV cache: the elements that a token takes in each layer. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

PANEL = 16  # columns of a matrix memory that share a copy of its normaliser and running maximum


@dataclass(frozen=True, slots=True)
class Plane:
    """Elements of a token that are stored together, such as its keys: `size` elements for each of
    `heads` heads.
    """

    heads: int
    size: int


@dataclass(frozen=True, slots=True)
class StatePlanes:
    """Elements of a sequence's state in a recurrent layer. The state summarises all tokens of the
    sequence.

    Attributes:
        tail: number of earlier inputs that the layer's convolution reads.
        channels: elements of each of these inputs.
        sums: shape of the rest of the state.
    """

    tail: int
    channels: int
    sums: tuple[int, ...]

    def count_bytes(self, tail_item: int, sums_item: int) -> int:
        """Returns the size of a state in bytes, given those of an element of its parts."""
        return self.tail * self.channels * tail_item + math.prod(self.sums) * sums_item


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Planes of a token in each layer, such as one for its keys and one for its values.

    Attributes:
        layers: for each layer, a plane of keys and one of values, or a single plane that is read as
            both.
        windows: for each layer, its window in tokens, or None; empty if no layer has one.
    """

    layers: tuple[tuple[Plane, ...], ...]
    windows: tuple[int | None, ...] = ()

    @property
    def window(self) -> int | None:
        """Longest window of a layer, in tokens; None if no layer has one."""
        return max((window for window in self.windows if window is not None), default=None)

    @property
    def window_elements_per_token(self) -> int:
        """Number of elements that a token takes in the layers that have a window."""
        windowed = tuple(
            planes for planes, window in zip(self.layers, self.windows) if window is not None
        )
        return KVLayout(windowed).numbers

    @property
    def numbers(self) -> int:
        """Number of elements that a token takes in all layers."""
        return sum(plane.heads * plane.size for planes in self.layers for plane in planes)


_WHOLE_PAGES = 64  # a sound takes a multiple of this, so text begins with a page of any common size


class SoundPrefix(NamedTuple):
    """First tokens of each sequence, which hold the keys and values of a sound. Text attends to
    them by cross attention.

    Attributes:
        frames: number of tokens that are attended to.
        tokens: number of tokens including the padding after them.
    """

    frames: int
    tokens: int

    @classmethod
    def from_frames(cls, frames: int) -> SoundPrefix:
        return cls(frames, -(-frames // _WHOLE_PAGES) * _WHOLE_PAGES)

    @property
    def padding(self) -> int:
        return self.tokens - self.frames
