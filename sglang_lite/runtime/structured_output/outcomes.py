"""Outcomes of a model's next tokens for a reader of texts: after which tokens it is still open what
is read, after which a certain text is read, and after which none is.

Ids without text, such as the end of the sequence, count as the end of the free text.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_lite.constraints.reader import TextReader

# Bytes of a token that belong to the text which it ends; or a number <= 0 if the text ended before
# the token, by so many bytes.
End: TypeAlias = "bytes | int"

DEAD = 0
LIVE = 1
FIRST_END = 2
_KEPT = 256  # positions of a reader whose outcomes are kept
_KEPT_LIVE = 2 << 20  # live tokens in all of them, 12 bytes each


@dataclass(frozen=True, eq=False, slots=True)
class Outcomes:
    """Outcomes of all tokens at one position of a reader.

    Attributes:
        vocabulary: the tokens.
        stretches: class of each stretch of the sorted tokens, as (end of the stretch, class).
        without_text: class of the ids without text.
        ends: class of the tokens after which a text is read, by how much of them belongs to it;
            from 2 on, in order.
        live_tokens: the live tokens, int64 [L].
        live_positions: position of the reader after each of them, int32 [L].
    """

    vocabulary: SortedVocabulary
    stretches: tuple[tuple[int, int], ...]
    without_text: int
    ends: Mapping[End, int]
    live_tokens: NDArray[np.int64]
    live_positions: NDArray[np.int32]

    def build_classes(self) -> NDArray[np.int32]:
        """Returns the class of each token, int32 [V]: DEAD for tokens after which nothing can be
        read, LIVE for those after which it is open what is read, and that in `ends` for the others.
        """
        classes = np.full(self.vocabulary.size, self.without_text, dtype=np.int32)
        start = 0
        for end, found in self.stretches:
            classes[self.vocabulary.ids[start:end]] = found
            start = end
        return classes


class TokenOutcomes:
    """Outcomes of a vocabulary's tokens for one reader. May be used by several threads.

    Args:
        reader: the reader.
        vocabulary: tokens of the model.
    """

    def __init__(self, reader: TextReader, vocabulary: SortedVocabulary) -> None:
        self.reader = reader
        self._vocabulary = vocabulary
        self._found: dict[int, Outcomes] = {}
        self._live_tokens = 0  # in all that is found
        self._lock = threading.Lock()  # held by searches

    def get_outcomes(self, position: int) -> Outcomes | None:
        """Returns the outcomes at a position if they are known. Waits for no search."""
        return self._found.get(position)

    def find_outcomes(self, position: int) -> Outcomes:
        """Returns the outcomes at a position. Looks at each token for the first time, which takes
        up to some tenths of a second. Raises as the methods of the reader's language do.
        """
        with self._lock:
            found = self._found.get(position)
            if found is None:
                found = _OutcomeSearch(self.reader, self._vocabulary, position).search()
                self._live_tokens += len(found.live_tokens)
                while self._found and (len(self._found) >= _KEPT or self._live_tokens > _KEPT_LIVE):
                    dropped = self._found.pop(next(iter(self._found)))
                    self._live_tokens -= len(dropped.live_tokens)
                self._found[position] = found
            return found


class SortedVocabulary:
    """Tokens of a model, sorted by their bytes.

    Args:
        tokens: bytes of each id; empty for ids without text.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        order = sorted((token, i) for i, token in enumerate(tokens) if token)
        self.size = len(tokens)
        self.texts = [token for token, _ in order]
        self.ids = np.array([i for _, i in order], dtype=np.int64)


class _OutcomeSearch:
    """Walks the tokens as a tree of bytes, as far as a text of the reader goes with them."""

    def __init__(self, reader: TextReader, vocabulary: SortedVocabulary, position: int) -> None:
        self._reader = reader
        self._vocabulary = vocabulary
        self._position = position
        self._stretches: list[tuple[int, int]] = []
        self._ends: dict[End, int] = {}
        self._live_tokens: list[int] = []
        self._live_positions: list[int] = []

    def search(self) -> Outcomes:
        vocabulary = self._vocabulary
        self._walk(0, len(vocabulary.texts), 0, self._position)
        # An id without text, such as the end of the sequence, ends the text.
        since = self._reader.count_bytes_since_text(self._position, None)
        without_text = DEAD if since is None else self._class_of_end(-since)
        return Outcomes(
            vocabulary,
            tuple(self._stretches),
            without_text,
            self._ends,
            np.array(self._live_tokens, dtype=np.int64),
            np.array(self._live_positions, dtype=np.int32),
        )

    def _walk(self, low: int, high: int, depth: int, position: int) -> None:
        """Finds the outcomes of the tokens from number `low` to `high`, which have their first
        `depth` bytes in common, after which the reader is at `position`.
        """
        texts = self._vocabulary.texts
        while low < high and len(texts[low]) == depth:
            self._live_tokens.append(int(self._vocabulary.ids[low]))
            self._live_positions.append(position)
            low += 1
            self._add_stretch(low, LIVE)
        while low < high:
            byte = texts[low][depth]
            above = texts[low][:depth] + bytes((byte + 1,)) if byte < 255 else None
            end = high if above is None else bisect_left(texts, above, low, high)
            after = self._reader.step(position, byte)
            if after is not None:
                self._walk(low, end, depth + 1, after)
            else:
                since = self._reader.count_bytes_since_text(position, byte)
                kept = 0 if since is None else depth - since
                found = texts[low][:kept] if kept > 0 else kept
                self._add_stretch(end, DEAD if since is None else self._class_of_end(found))
            low = end

    def _add_stretch(self, end: int, found: int) -> None:
        """Gives a class to the tokens up to number `end`."""
        if self._stretches and self._stretches[-1][1] == found:
            self._stretches[-1] = end, found
        else:
            self._stretches.append((end, found))

    def _class_of_end(self, end: End) -> int:
        return self._ends.setdefault(end, len(self._ends) + FIRST_END)
