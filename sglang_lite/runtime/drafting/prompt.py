"""Drafter that copies: what came behind the last tokens where they came before in the row's own text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request

_MIN, _MAX = 2, 12  # tokens that have to be equal, and beyond which more don't matter
_SEARCHED = 8192  # last tokens of the row that are searched


class PromptDrafter:
    """Drafter of texts that repeat parts of their prompt or of themselves."""

    name = "prompt"

    def propose(self, request: Request, known: Ints, count: int) -> Sequence[int]:
        """Proposes what followed the longest earlier match of the last tokens, the latest of equally long ones."""
        text = known[-_SEARCHED:]
        end = len(text)
        ends = np.flatnonzero(text[_MIN - 1 : end - 1] == text[-1]) + _MIN  # ends of matches of one token
        length = 1
        while length < _MAX and len(ends):
            earlier = ends[(ends > length) & (text[np.maximum(ends - length - 1, 0)] == text[end - length - 1])]
            if not len(earlier):
                break
            ends, length = earlier, length + 1
        if length < _MIN or not len(ends):
            return ()
        at = int(ends[-1])
        proposed: list[int] = text[at : at + count].tolist()
        return proposed

    def learn(self, request: Request, known: Ints) -> None:
        """Remembers nothing: the row's own text is all that it needs."""
