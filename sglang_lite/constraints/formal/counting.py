"""Counts the texts of a regular language that begin with a given prefix."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Protocol

from sglang_lite.constraints.formal.automaton import Automaton, useful_states
from sglang_lite.constraints.formal.nodes import Alternation, Concat, LiteralText, Node
from sglang_lite.constraints.formal.terms import State
from sglang_lite.constraints.memo import estimate_bytes, memoize

MAX_LISTED = 10_000  # maximum number of texts listed for a concatenation


class CountedTexts(Protocol):
    """Texts of a regular language, counted by prefix.

    Attributes:
        count: number of all texts, or None if infinite.
        endless: True if every prefix of a text is a prefix of infinitely many texts.
        size: approximate memory in bytes.
    """

    @property
    def count(self) -> int | None: ...

    @property
    def endless(self) -> bool: ...

    @property
    def size(self) -> int: ...

    def count_with_prefix(self, prefix: str) -> int | None:
        """Returns the number of texts that begin with `prefix`, or None if there are infinitely
        many.
        """
        ...

    def prefix_counts(self, text: str) -> list[int | None]:
        """Counts the texts that begin with each prefix of `text`, from the empty prefix to `text`
        itself. A count is None if there are infinitely many texts.
        """
        ...

    def has_text(self, text: str) -> bool:
        """Returns True if a text is in the language."""
        ...


@memoize
def count_texts(node: Node) -> CountedTexts:
    """Returns a counter of the texts of a regular language.

    Raises:
        ConstraintError: the language's automaton is too large.
    """
    texts = _list_combinations(node)
    return _AutomatonTexts(node) if texts is None else _ListedTexts(sorted(texts))


def has_unused_text(texts: CountedTexts, prefix: str, used: Collection[str]) -> bool:
    """Returns True if the language has a text with this prefix that is not in `used`."""
    count = texts.count_with_prefix(prefix)
    return count is None or count > sum(text.startswith(prefix) for text in used)


def _list_combinations(node: Node) -> Collection[str] | None:
    """Returns all texts of a node that consists of literals, concatenations and alternations.
    Returns None for other nodes, or if there are more than `MAX_LISTED` combinations.
    """
    match node:
        case LiteralText(text):
            return (text,)
        case Alternation(options):
            listed = [_list_combinations(option) for option in options]
            return None if None in listed else {text for texts in listed for text in texts or ()}
        case Concat(parts):
            found: Collection[str] = ("",)
            for part in parts:
                more = _list_combinations(part)
                if more is None or len(found) * len(more) > MAX_LISTED:
                    return None
                found = {before + text for before in found for text in more}
            return found
    return None


class _ListedTexts:
    """Texts of a language as a sorted list. An automaton would need a state for each character."""

    endless = False

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self.count = len(texts)
        self.size = estimate_bytes(texts)

    def count_with_prefix(self, prefix: str) -> int:
        length = len(prefix)
        first = bisect_left(self._texts, prefix)
        return bisect_right(self._texts, prefix, lo=first, key=lambda text: text[:length]) - first

    def prefix_counts(self, text: str) -> list[int | None]:
        return [self.count_with_prefix(text[:end]) for end in range(len(text) + 1)]

    def has_text(self, text: str) -> bool:
        at = bisect_left(self._texts, text)
        return at < len(self._texts) and self._texts[at] == text


class _AutomatonTexts:
    def __init__(self, node: Node) -> None:
        self._machine = Automaton(node)
        self._counts = _count_accepted_texts(self._machine)
        self.count = self._counts.get(self._machine.start, 0)
        self.endless = all(count is None for count in self._counts.values())

    @property
    def size(self) -> int:
        return self._machine.size + 100 * len(self._counts)

    def count_with_prefix(self, prefix: str) -> int | None:
        return self._counts.get(self._machine.run(self._machine.start, prefix), 0)

    def prefix_counts(self, text: str) -> list[int | None]:
        states = accumulate(
            text, lambda state, char: self._machine.run(state, char), initial=self._machine.start
        )
        return [self._counts.get(state, 0) for state in states]

    def has_text(self, text: str) -> bool:
        return self._machine.accepting(self._machine.run(self._machine.start, text))


def _count_accepted_texts(machine: Automaton) -> dict[State, int | None]:
    """Returns the number of texts that each state accepts, or None if there are infinitely many.
    Leaves out unreachable states and states that accept no text.
    """
    useful = useful_states(machine, machine.start)
    before: dict[State, list[State]] = {state: [] for state in useful}
    for state, after in useful.items():
        for to in after.values():
            before[to].append(state)
    open_steps = {state: len(after) for state, after in useful.items()}
    counts: dict[State, int | None] = dict.fromkeys(useful)  # states that lead to a cycle keep None
    for state in (queue := [state for state, steps in open_steps.items() if not steps]):
        sizes = (
            _count_class_characters(machine, symbol) * (counts[to] or 0)
            for symbol, to in useful[state].items()
        )
        counts[state] = machine.accepting(state) + sum(sizes)
        for each in before[state]:
            open_steps[each] -= 1
            if not open_steps[each]:
                queue.append(each)
    return counts


def _count_class_characters(machine: Automaton, symbol: int | str) -> int:
    return sum(high - low + 1 for low, high in machine.class_characters(symbol).ranges)
