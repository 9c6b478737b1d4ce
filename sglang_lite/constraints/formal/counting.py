"""Counts of the texts of a regular language that are left behind a beginning."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

from sglang_lite.constraints.formal.automaton import Automaton, State
from sglang_lite.constraints.formal.nodes import Node


class CountedTexts:
    """Texts of a regular language, counted behind each beginning.

    Args:
        node: the language.

    Attributes:
        count: of all its texts; None: without end.

    Raises:
        ConstraintError: its automaton is too large.
    """

    def __init__(self, node: Node) -> None:
        self._machine = Automaton(node)
        self._counts = _counts(self._machine)
        self.count = self._counts.get(self._machine.start, 0)

    def count_behind(self, beginning: str) -> int | None:
        """Number of texts that begin so; None: without end."""
        return self._counts.get(self._machine.run(self._machine.start, beginning), 0)

    def counts_along(self, text: str) -> list[int | None]:
        """Number of texts behind each beginning of a text, the empty one first; None: without end."""
        states = accumulate(text, lambda state, char: self._machine.run(state, char), initial=self._machine.start)
        return [self._counts.get(state, 0) for state in states]

    def has(self, text: str) -> bool:
        """Tells whether a text is one of them."""
        return self._machine.accepting(self._machine.run(self._machine.start, text))

    def any_left(self, beginning: str, used: Collection[str]) -> bool:
        """Tells whether some text begins so and is none of those that are used."""
        count = self.count_behind(beginning)
        return count is None or count > sum(text.startswith(beginning) for text in used)


def _counts(machine: Automaton) -> dict[State, int | None]:
    """Number of texts from each state of which some text is accepted."""
    useful = machine.useful(machine.start)
    before: dict[State, list[State]] = {state: [] for state in useful}
    for state, after in useful.items():
        for to in after.values():
            before[to].append(state)
    open_steps = {state: len(after) for state, after in useful.items()}
    counts: dict[State, int | None] = dict.fromkeys(useful)  # states on the way to a circle stay without end
    for state in (queue := [state for state, steps in open_steps.items() if not steps]):
        ways = (_size(machine, symbol) * (counts[to] or 0) for symbol, to in useful[state].items())
        counts[state] = machine.accepting(state) + sum(ways)
        for each in before[state]:
            open_steps[each] -= 1
            if not open_steps[each]:
                queue.append(each)
    return counts


def _size(machine: Automaton, symbol: int | str) -> int:
    return sum(high - low + 1 for low, high in machine.characters(symbol).ranges)
