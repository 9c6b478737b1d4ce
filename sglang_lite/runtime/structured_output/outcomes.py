"""Outcomes of a model's next tokens for a text reader.

Each token has one of three outcomes. After a live token, it is still open which text is read. A
token that ends a text makes certain which text is read. After a dead token, no text can be read.
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

# How a token ends a text: the first bytes of the token, if they still belong to the text; otherwise
# minus the number of bytes between the end of the text and the token.
End: TypeAlias = "bytes | int"

DEAD = 0
LIVE = 1
FIRST_END = 2
_KEPT = 256  # most positions of a reader whose outcomes are cached
_KEPT_LIVE = 2 << 20  # most live tokens in all cached outcomes, 12 bytes each


@dataclass(frozen=True, eq=False, slots=True)
class Outcomes:
    """Outcomes of all tokens at one position of a reader.

    Attributes:
        vocabulary: the tokens.
        stretches: stretches of sorted tokens with the same class, as (end of the stretch, class).
        without_text: class of the ids without text.
        ends: classes of the tokens that end a text, by how they end it. The classes are numbered
            from FIRST_END on, in order.
        live_tokens: the live tokens, int64 [L].
        live_positions: position of the reader after each live token, int32 [L].
    """

    vocabulary: SortedVocabulary
    stretches: tuple[tuple[int, int], ...]
    without_text: int
    ends: Mapping[End, int]
    live_tokens: NDArray[np.int64]
    live_positions: NDArray[np.int32]

    def build_classes(self) -> NDArray[np.int32]:
        """Returns the class of each token, int32 [V]: DEAD for dead tokens, LIVE for live tokens,
        and the class in `ends` for tokens that end a text.
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
        self._live_tokens = 0  # in all cached outcomes
        self._lock = threading.Lock()  # held by searches

    def get_outcomes(self, position: int) -> Outcomes | None:
        """Returns the outcomes at a position, or None if they are not cached. Never waits for a
        search.
        """
        return self._found.get(position)

    def find_outcomes(self, position: int) -> Outcomes:
        """Returns the outcomes at a position. If they are not cached, a search over all tokens
        takes up to some tenths of a second. Raises the same errors as the methods of the reader's
        language.
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
    """Search for the outcomes at one position. Walks through the tree of the tokens' bytes, and
    follows a branch until the reader can't continue with the next byte.
    """

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
        """Finds the outcomes of sorted tokens that begin with the same bytes.

        Args:
            low: index of the first token.
            high: index after the last token.
            depth: number of first bytes that all these tokens share.
            position: position of the reader after the shared bytes.
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
        """Assigns a class to the sorted tokens from the end of the last stretch to index `end`."""
        if self._stretches and self._stretches[-1][1] == found:
            self._stretches[-1] = end, found
        else:
            self._stretches.append((end, found))

    def _class_of_end(self, end: End) -> int:
        return self._ends.setdefault(end, len(self._ends) + FIRST_END)
