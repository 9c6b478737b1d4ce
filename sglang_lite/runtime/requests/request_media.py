"""Images, videos and sounds of a request's prompt, and where their features go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.tokens.image_span import MediaItem
from sglang_lite.runtime.tokens.virtual_ids import find_virtual_positions

_SURE = 4  # virtual ids, of 30 bits each, that prove that two images are the same


@dataclass(eq=False, slots=True)
class RequestMedia:
    """Images, videos and sounds of a prompt, in the order of their virtual ids; "image" stands for
    any of them.

    Attributes:
        items: the images.
        positions: int32 [N], positions of the virtual ids.
        rows: int32 [N], their rows in the store of features, once they are reserved there.
        rotary: int32 [3, P], rotary time, row and column of the prompt's first P tokens, up to the
            last image's; P is 0 if the model has no use for them.
        rope_offset: rotary positions of later tokens, minus their positions in the sequence.
        limits: int32 [P], number of tokens that each of the prompt's first ones attends to, up to
            the last image's; P is 0 if none attends to later ones.
    """

    items: tuple[MediaItem, ...]
    positions: Ints
    rows: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    rotary: Ints = field(default_factory=lambda: np.empty((3, 0), dtype=np.int32))
    rope_offset: int = 0
    limits: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    @classmethod
    def from_tokens(
        cls, items: Sequence[MediaItem], tokens: Ints, vocab_size: int
    ) -> RequestMedia | None:
        """Returns the images whose virtual ids are among `tokens`, or None if there are none. The
        tokens may be only the beginning of a prompt; later images are left out.
        """
        positions = find_virtual_positions(tokens, vocab_size)
        if not len(positions):
            return None
        ends = np.cumsum([item.count for item in items])
        used = int(np.searchsorted(ends, len(positions))) + 1
        assert ends[used - 1] == len(positions), "the tokens are not those of the images"
        items = tuple(items[:used])
        if any(item.grids for item in items):
            rotary, offset = _rotary_positions(items, positions)
            return cls(items, positions, rotary=rotary, rope_offset=offset)
        if any(item.both_ways for item in items):
            return cls(items, positions, limits=_attention_limits(items, positions))
        return cls(items, positions)

    def replace_with_row_ids(self, ids: Ints, start: int) -> None:
        """Replaces the images' virtual ids in `ids` with ids of features: -2 - r stands for row r
        of the store. `start` is the position of the first id in the prompt.
        """
        first, end = np.searchsorted(self.positions, (start, start + len(ids)))
        ids[self.positions[first:end] - start] = -2 - self.rows[first:end]

    def find_unsplit_ends(self, end: int) -> tuple[int, int]:
        """Returns two positions at which a chunk can end: the last one up to `end`, and the first
        one from `end` on. A chunk must not split an image whose tokens attend to each other.
        """
        if end > len(self.limits) or self.limits[end - 1] == end:
            return end, end
        after = int(self.limits[end - 1])
        return int(np.argmax(self.limits == after)), after

    def restore_placeholders(self, tokens: Ints) -> Ints:
        """Returns the prompt's token ids after replacing virtual ids with the model's placeholder
        tokens.
        """
        shown = tokens.copy()
        ids = [item.token_id for item in self.items]
        shown[self.positions] = np.repeat(ids, [item.count for item in self.items])
        return shown

    def count_image_tokens_before(self, position: int) -> int:
        """Returns the number of image tokens before a position."""
        return int(np.searchsorted(self.positions, position))

    def trusted_cached_length(self, cached: int) -> int:
        """Returns how many cached tokens of the prompt may be used. If they end within the first
        few tokens of an image, the image's tokens are left out, because another image may have the
        same hashes there by chance.
        """
        inside = int(np.searchsorted(self.positions, cached))
        starts = np.cumsum([0, *(item.count for item in self.items)])
        image = int(np.searchsorted(starts, inside, side="right")) - 1
        return int(self.positions[starts[image]]) if 0 < inside - starts[image] < _SURE else cached


def _attention_limits(items: Sequence[MediaItem], positions: Ints) -> Ints:
    """Computes `RequestMedia.limits`."""
    limits: Ints = np.arange(1, positions[-1] + 2, dtype=np.int32)
    for first, item in zip(np.cumsum([0, *(item.count for item in items)]).tolist(), items):
        own = positions[first : first + item.count]
        limits[own] = own[-1] + 1
    return limits


def _rotary_positions(items: Sequence[MediaItem], positions: Ints) -> tuple[Ints, int]:
    """Computes `RequestMedia.rotary` and `rope_offset`. Tokens of an image have the time, row and
    column in its grid, counted from the end of the text before it. The text after it continues from
    the largest of these (arXiv:2409.12191, section 2.1).
    """
    parts = list[Ints]()
    end = 0
    offset = 0
    at = 0
    for grid in (grid for item in items for grid in item.grids):
        start = int(positions[at])
        places = np.indices((len(grid.times), grid.rows, grid.columns), dtype=np.int32).reshape(
            3, -1
        )
        places[0] = np.array(grid.times, dtype=np.int32)[places[0]]
        parts += [
            np.tile(np.arange(end, start, dtype=np.int32) + offset, (3, 1)),
            places + (start + offset),
        ]
        at = at + grid.size
        end = start + grid.size
        offset += int(places.max()) + 1 - grid.size
    return np.concatenate(parts, 1), offset
