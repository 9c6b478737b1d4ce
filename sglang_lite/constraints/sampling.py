"""Texts drawn at random from a constraint: for scripted backends and tests."""

from __future__ import annotations

from functools import lru_cache
from random import Random

from sglang_lite.constraints.automaton import DEAD, Automaton, State, automaton
from sglang_lite.constraints.compose import language_of
from sglang_lite.constraints.nodes import (
    Alternation,
    CharSet,
    Concat,
    Language,
    Node,
    Ref,
    Repeat,
    Text,
)
from sglang_lite.protocol import Constraint

_MORE = 3  # how far beyond its minimum a repeat goes
_DEPTH = 12  # of rules, from where on the shortest way out is taken
_STEPS = 6  # through an automaton, likewise


def sample(constraint: Constraint, random: Random) -> str:
    """A text the constraint allows.

    Raises:
        ConstraintError: there is none, or it can't be told.
    """
    return _Sampler(language_of(constraint), random).text()


class _Sampler:
    def __init__(self, language: Language, random: Random) -> None:
        self._language, self._random = language, random
        self._heights = _heights(language)

    def text(self) -> str:
        return self._from(Ref(self._language.start), 0)

    def _from(self, node: Node, depth: int) -> str:
        match node:
            case Text(text):
                return text
            case CharSet():
                return _character(node, self._random)
            case Concat(parts):
                return "".join([self._from(part, depth) for part in parts])
            case Alternation(options):
                if depth > _DEPTH:
                    return self._from(min(options, key=self._height), depth)
                wide = [option for option in options if _is_wide(option)]  # rather than single escapes
                return self._from(self._random.choice(wide or options), depth)
            case Repeat(inner, least, most):
                more = 0 if depth > _DEPTH else _MORE if most is None else min(_MORE, most - least)
                return "".join([self._from(inner, depth) for _ in range(self._random.randint(least, least + more))])
            case Ref(name):
                return self._from(self._language.rules[name], depth + 1)
        return _through(automaton(node), self._random)

    def _height(self, node: Node) -> float:
        return _height(node, self._heights)


def _heights(language: Language) -> dict[str, float]:
    """How deep rules nest in the shortest text of each rule."""
    heights = dict.fromkeys(language.rules, float("inf"))
    while True:
        lower = {name: 1 + _height(body, heights) for name, body in language.rules.items()}
        if lower == heights:
            return heights
        heights = lower


def _height(node: Node, heights: dict[str, float]) -> float:
    match node:
        case Ref(name):
            return heights[name]
        case Concat(parts):
            return max((_height(part, heights) for part in parts), default=0)
        case Alternation(options):
            return min(_height(option, heights) for option in options)
        case Repeat(inner, least, _):
            return _height(inner, heights) if least else 0
    return 0


def _through(machine: Automaton, random: Random) -> str:
    """The text of a random way through an automaton: some steps at random, then the shortest way to an end."""
    text, state = "", machine.start
    for _ in range(_STEPS):
        if machine.accepting(state) and random.random() < 0.3:
            return text
        steps = [(c, machine.step(state, c)) for c in machine.classes]
        live = [(c, after) for c, after in steps if after != DEAD and machine.nonempty(after)]
        if not live:
            break
        printable = [step for step in live if _printable(machine.characters(step[0]))]
        symbol, state = random.choice(printable or live)
        text += _character(machine.characters(symbol), random)
    return text + "".join(_character(machine.characters(c), random) for c in _way_out(machine, state))


def _way_out(machine: Automaton, state: State) -> list[int]:
    """The symbols of a shortest text from a state."""
    ways: dict[State, list[int]] = {state: []}
    for each in (queue := [state]):
        if machine.accepting(each):
            return ways[each]
        for symbol in machine.classes:
            after = machine.step(each, symbol)
            if after != DEAD and after not in ways:
                ways[after] = [*ways[each], symbol]
                queue.append(after)
    raise AssertionError("the language is not empty")


def _is_wide(node: Node) -> bool:
    return isinstance(node, CharSet) and sum(b - a for a, b in _printable(node)) > 50


@lru_cache(maxsize=1024)
def _printable(characters: CharSet) -> tuple[tuple[int, int], ...]:
    return tuple((max(a, 32), min(b, 126)) for a, b in characters.ranges if b >= 32 and a <= 126)


def _character(characters: CharSet, random: Random) -> str:
    low, high = random.choice(_printable(characters) or characters.ranges)
    return chr(random.randint(low, high))
