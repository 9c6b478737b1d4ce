"""Images of a request's prompt: where their features go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.tokens.image_span import MediaItem
from sglang_lite.runtime.tokens.virtual_ids import virtual_positions

_SURE = 4  # virtual ids, of 30 bits each, that prove that two images are the same


@dataclass(eq=False, slots=True)
class RequestMedia:
    """Images of a prompt, in the order of their virtual ids.

    Attributes:
        items: the images.
        positions: int32 [N], positions of the virtual ids.
        token_id: token that the model's text has in their places.
        rows: int32 [N], their rows in the store of features, once they are reserved there.
    """

    items: tuple[MediaItem, ...]
    positions: Ints
    token_id: int
    rows: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    @classmethod
    def of(cls, items: Sequence[MediaItem], tokens: Ints, vocab_size: int, token_id: int) -> RequestMedia | None:
        """Images of a prompt's tokens; None if there are none. Items behind the tokens, which may be the beginning of a
        prompt, are left out."""
        positions = virtual_positions(tokens, vocab_size)
        if not len(positions):
            return None
        ends = np.cumsum([item.count for item in items])
        used = int(np.searchsorted(ends, len(positions))) + 1
        assert ends[used - 1] == len(positions), "the tokens are not those of the images"
        return cls(tuple(items[:used]), positions, token_id)

    def put_rows(self, ids: Ints, start: int) -> None:
        """Replaces the virtual ids among those of positions from `start` on: -2 - r stands for row r of the store."""
        first, end = np.searchsorted(self.positions, (start, start + len(ids)))
        ids[self.positions[first:end] - start] = -2 - self.rows[first:end]

    def with_placeholders(self, tokens: Ints) -> Ints:
        """The prompt's token ids, as the model's tokenizer would write them."""
        shown = tokens.copy()
        shown[self.positions] = self.token_id
        return shown

    def sure(self, cached: int) -> int:
        """Number of cached tokens of the prompt that may be used: all, unless they end within the first few of an
        image, whose hashes another image may have by chance."""
        inside = int(np.searchsorted(self.positions, cached))
        starts = np.cumsum([0, *(item.count for item in self.items)])
        image = int(np.searchsorted(starts, inside, side="right")) - 1
        return int(self.positions[starts[image]]) if 0 < inside - starts[image] < _SURE else cached
