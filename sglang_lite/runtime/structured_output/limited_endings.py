"""Positions in a grammar's texts if only some of the texts are allowed, because of mask rules or of
a surrounding grammar.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from sglang_lite.runtime.structured_output.base import Endings, TextState
from sglang_lite.runtime.structured_output.json_text import JsonText
from sglang_lite.runtime.structured_output.unique_names import UniqueNames

Text: TypeAlias = JsonText | UniqueNames
# state in the grammar, and the text so far, which is never mutated
RuledState: TypeAlias = tuple[TextState, Text]
PartState: TypeAlias = tuple[TextState, TextState]  # state in the part, and in the whole


@dataclass(frozen=True)
class RuledEndings:
    """Positions in texts that obey the rules of a ruled grammar (ruled_grammar.py).

    Args:
        endings: positions in the texts of the grammar without the rules.
        start: state in which the texts begin.
    """

    endings: Endings
    start: RuledState

    @property
    def size(self) -> int:
        return self.endings.size

    def after_text(self, text: str) -> RuledEndings | None:
        state = self.advance_state(self.start, text.encode("utf-8", "surrogatepass"))
        return None if state is None else replace(self, start=state)

    def advance_state(self, state: RuledState, text: bytes) -> RuledState | None:
        after = self.endings.advance_state(state[0], text)
        if after is None:
            return None
        written = state[1].copy()
        written.track_text(text)
        return after, written

    def characters(self, state: RuledState) -> Iterator[tuple[str, RuledState]]:
        for char, after in self.endings.characters(state[0]):
            text = state[1].copy()
            if text.track_text(char.encode()):
                yield char, (after, text)


@dataclass(frozen=True)
class PartEndings:
    """Positions in the texts of one grammar (the part) that a surrounding grammar (the whole) also
    allows; see prefixed.py.

    Args:
        part: positions in the part's texts.
        whole: positions in the texts of the whole, from the point at which the part begins.
    """

    part: Endings
    whole: Endings

    @property
    def size(self) -> int:
        return self.part.size

    @property
    def start(self) -> PartState:
        return self.part.start, self.whole.start

    def after_text(self, text: str) -> PartEndings | None:
        part = self.part.after_text(text)
        whole = self.whole.after_text(text)
        return None if part is None or whole is None else replace(self, part=part, whole=whole)

    def advance_state(self, state: PartState, text: bytes) -> PartState | None:
        part = self.part.advance_state(state[0], text)
        whole = self.whole.advance_state(state[1], text)
        return None if part is None or whole is None else (part, whole)

    def characters(self, state: PartState) -> Iterator[tuple[str, PartState]]:
        found = dict.fromkeys([char for char, _ in self.part.characters(state[0])])
        # the whole may distinguish characters that the part treats alike
        found |= dict.fromkeys([char for char, _ in self.whole.characters(state[1])])
        for char in found:
            after = self.advance_state(state, char.encode())
            if after is not None:
                yield char, after
