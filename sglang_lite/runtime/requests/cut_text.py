"""Text of a constrained output that a limit may cut off. Determines how much of the text may be
streamed, and closes a text that was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_lite.constraints.unfinished_json import ClosedText, create_unfinished_json
from sglang_lite.protocol import Constraint, InOrder, OneOf, StructuralTag
from sglang_lite.runtime.tokens.detokenize import IncrementalDecoder

# Near its limit an output's unfinished values are held back, because they may be left out: sent
# text can't be taken back. A value that began earlier can't be left out, whether the output is
# streamed or not, which keeps both the same. Share of a limit's tokens that are held back, and
# their minimum number:
_SHARE = 4
_MINIMUM = 64


class CutText:
    """Reads an output that a limit may cut off. Decides how much of its text may be sent, and how
    to close the text.

    Args:
        constraint: constraint of the output.
        limit: maximum number of tokens of the output.
        fewest_tokens: number of tokens of the constraint's shortest text if the limit is smaller,
            otherwise None.

    Attributes:
        fewest_tokens: the same.
        is_free: whether the output may be free text, which may be cut anywhere.
    """

    def __init__(
        self, constraint: Constraint, limit: int, fewest_tokens: int | None = None
    ) -> None:
        self.fewest_tokens = fewest_tokens
        self.is_free = _allows_free_text(constraint)
        self._json = create_unfinished_json(constraint)
        self._limit = limit
        self._held_from = limit - max(limit // _SHARE, _MINIMUM)
        self._read = 0  # characters already pushed to the reader

    def count_sendable_characters(self, text: str, tokens: int) -> int:
        """Returns how many characters of a text may be sent. They remain even if a limit cuts the
        output.

        Args:
            text: the output so far.
            tokens: number of its tokens.
        """
        if self._json is None or tokens <= self._held_from:
            return len(text)
        closed = self._read_and_close(text, 0)
        if closed is not None:
            return closed.kept
        return len(text) if self._json.begin is None else self._json.begin

    def close(
        self, text: str, sent: int, ids: Sequence[int], decoder: IncrementalDecoder
    ) -> ClosedText | None:
        """Closes a text that was cut, if it only lacks values at its end. Returns None otherwise.

        Args:
            text: the output as it was cut.
            sent: number of its characters that were sent.
            ids: its tokens.
            decoder: decoder that has decoded nothing yet.
        """
        if self._json is None:
            return None
        committed = (
            len(decoder.push(ids[: max(self._held_from, 0)])) if len(ids) >= self._limit else 0
        )
        return self._read_and_close(text, max(sent, committed))

    def _read_and_close(self, text: str, first: int) -> ClosedText | None:
        assert self._json is not None
        self._json.push(text[self._read :])
        self._read = len(text)
        return self._json.close(first)


def _allows_free_text(constraint: Constraint) -> bool:
    """Returns whether a constraint allows free text, possibly with tags in it."""
    match constraint:
        case StructuralTag():
            return not constraint.at_least_one
        case InOrder(parts):
            return bool(parts) and _allows_free_text(parts[-1])
        case OneOf(options):
            return any(map(_allows_free_text, options))
    return False


def count_tokens_of_prefix(decoder: IncrementalDecoder, ids: Sequence[int], length: int) -> int:
    """Returns how many tokens of a text it takes to write its first `length` characters.

    Args:
        decoder: decoder that has decoded nothing yet.
        ids: tokens of the text.
        length: number of characters.
    """
    written = count = 0
    while written < length and count < len(ids):
        written += len(decoder.push((ids[count],)))
        count += 1
    return count
