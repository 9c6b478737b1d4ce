"""Endings of a generation's own constraint in the middle of a grammar that must allow its text, too (prefixed.py)."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from sglang_lite.runtime.structured_output.base import Endings, Growth, TextState

_MAX_TRIED = 300  # texts that one search continues by a character
_MAX_KNOWN = 20_000  # texts that are kept

State = tuple[TextState, TextState]  # state in the part, and in the whole


@dataclass(frozen=True)
class PartEndings:
    """Endings of the texts of a part that the whole allows: not all that complete the part can follow in the whole.

    Args:
        part: endings of the part's texts.
        whole: endings of the whole, which begins where the part does.
    """

    part: Endings
    whole: Endings
    _texts: dict[State, bytes | None] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        return self.part.size

    @property
    def start(self) -> State:
        return self.part.start, self.whole.start

    @property
    def growth(self) -> Growth:
        """The part's, if the whole adds nothing."""
        return self.part.growth

    def after_text(self, text: str) -> PartEndings | None:
        part, whole = self.part.after_text(text), self.whole.after_text(text)
        return None if part is None or whole is None else replace(self, part=part, whole=whole)

    def after(self, state: State, token: int) -> State | None:
        part, whole = self.part.after(state[0], token), self.whole.after(state[1], token)
        return None if part is None or whole is None else (part, whole)

    def text_of(self, token: int) -> bytes:
        return self.part.text_of(token)

    def advance(self, state: State, text: bytes) -> State | None:
        part, whole = self.part.advance(state[0], text), self.whole.advance(state[1], text)
        return None if part is None or whole is None else (part, whole)

    def count(self, state: State) -> float:
        text = self.text(state)
        tokens = None if text is None else self.spell(text)
        return math.inf if tokens is None else len(tokens)

    def text(self, state: State) -> bytes | None:
        if state not in self._texts:
            if len(self._texts) >= _MAX_KNOWN:
                self._texts.clear()
            self._texts[state] = self._found(state)
        return self._texts[state]

    def _found(self, start: State) -> bytes | None:
        """Search by characters, the texts before the part's shortest completions first."""
        number = itertools.count()
        queue = [(self.part.count(start[0]), next(number), b"", start)]
        seen = {start}
        for _ in range(_MAX_TRIED):
            if not queue:
                break
            _, _, written, state = heapq.heappop(queue)
            rest = self.part.text(state[0])
            if rest is not None and self._goes_on(self.whole.advance(state[1], rest)):
                return written + rest
            for char, after in self.characters(state):
                if after not in seen:
                    seen.add(after)
                    text = written + char.encode()
                    heapq.heappush(queue, (len(text) + self.part.count(after[0]), next(number), text, after))
        return None

    def _goes_on(self, whole: TextState | None) -> bool:
        return whole is not None and self.whole.count(whole) < math.inf

    def within(self, state: State, limit: int) -> list[int] | None:
        text = self.text(state)
        tokens = None if text is None else self.spell(text)
        if tokens is None or len(tokens) <= limit:
            return tokens
        tokens = self.part.within(state[0], limit)  # of more characters
        if tokens is None:
            return None
        allowed = self._goes_on(self.whole.advance(state[1], b"".join(map(self.text_of, tokens))))
        return tokens if allowed else None

    def characters(self, state: State) -> Iterator[tuple[str, State]]:
        found = dict.fromkeys([char for char, _ in self.part.characters(state[0])])
        found |= dict.fromkeys([char for char, _ in self.whole.characters(state[1])])  # the part tells others apart
        for char in found:
            after = self.advance(state, char.encode())
            if after is not None and self._goes_on(after[1]):
                yield char, after

    def spell(self, text: bytes) -> list[int] | None:
        return self.part.spell(text)

    def fewest(self, state: State) -> int | None:
        return self.part.fewest(state[0])
