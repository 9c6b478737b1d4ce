"""Random texts that satisfy a constraint, for scripted backends, reports and tests."""

from __future__ import annotations

import json
from functools import lru_cache
from random import Random

import msgspec

from sglang_lite.constraints.formal.automaton import Automaton, cached_automaton, shortest_path_from
from sglang_lite.constraints.formal.grammars import referring_rules
from sglang_lite.constraints.formal.nodes import (
    Alternation,
    CharSet,
    Concat,
    Language,
    LiteralText,
    Node,
    Ref,
    Repeat,
    references,
)
from sglang_lite.constraints.formal.terms import DEAD
from sglang_lite.constraints.json_schema.normal_form import normalise
from sglang_lite.constraints.json_schema.wellformed import refuse_duplicate_names
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.schema import parse_json
from sglang_lite.protocol import Constraint, ConstraintError, JsonSchema, ValueValidationError

MAX_CHARS = 20_000
MAX_STEPS = 200_000

_DRAWS = 20  # attempts; a JSON text may repeat a name or an item, which no grammar can rule out
_MORE = 3  # maximum repetitions added to a repeat's minimum
_DEPTH = 12  # depth of nested rules and repeats from which the shortest options are chosen
_STEPS = 6  # random steps through an automaton before taking the shortest path to an end


def sample(constraint: Constraint, random: Random) -> str:
    """Returns a random text that a constraint allows.

    Raises:
        ConstraintError: the constraint is not valid, no text satisfies it, or none of the
            drawn texts fits into `MAX_CHARS` characters and passes the checks that no grammar
            can express.
    """
    sampler = _Sampler(language_for_constraint(constraint), random)
    for deepest in (*[_DEPTH] * _DRAWS, 0):
        text = sampler.draw_text(deepest)
        if text is None:  # in some languages only the shortest options lead to short texts
            text = sampler.draw_text(0)
        if text is None:
            break
        if not isinstance(constraint, JsonSchema) or _passes_checks(constraint, text):
            return text
    # with free order, required members may be missing
    if isinstance(constraint, JsonSchema) and constraint.order == "any":
        return sample(msgspec.structs.replace(constraint, order="schema"), random)
    raise ConstraintError(f"no text of at most {MAX_CHARS:,} characters was found.")


def _passes_checks(constraint: JsonSchema, text: str) -> bool:
    """Returns True if a JSON text passes the checks that its grammar can't express: mask rules and
    distinct names.
    """
    try:
        if normalise(constraint).mask_rules:
            parse_json(constraint, text)
        else:
            json.loads(text, object_pairs_hook=refuse_duplicate_names)
    except (ValueError, RecursionError, ValueValidationError):
        return False
    return True


class _Sampler:
    def __init__(self, language: Language, random: Random) -> None:
        self._language = language
        self._random = random
        self._heights = _rule_depths(language)

    def draw_text(self, deepest: int) -> str | None:
        """Returns a random text of the language, or None if the text or the work exceeds its limit.
        From nesting depth `deepest` on, chooses the least nested options and the fewest
        repetitions.
        """
        written: list[str] = []
        length = 0
        steps = 0
        stack: list[tuple[Node, int]] = [(Ref(self._language.start), 0)]
        while stack:
            node, depth = stack.pop()
            steps += 1
            match node:
                case Concat(parts):
                    stack += [(part, depth) for part in reversed(parts)]
                case Alternation(options):
                    stack.append((self._choose_option(options, brief=depth >= deepest), depth))
                case Repeat(inner, least, most):
                    more = (
                        0
                        if depth >= deepest
                        else _MORE
                        if most is None
                        else min(_MORE, most - least)
                    )
                    stack += [(inner, depth + 1)] * self._random.randint(least, least + more)
                case Ref(name):
                    stack.append((self._language.rules[name], depth + 1))
                case _:
                    written.append(self._draw_node(node))
                    length += len(written[-1])
            if length > MAX_CHARS or steps > MAX_STEPS or len(stack) > MAX_STEPS:
                return None
        return "".join(written)

    def _choose_option(self, options: tuple[Node, ...], *, brief: bool) -> Node:
        if brief:
            return min(options, key=lambda option: _node_depth(option, self._heights))
        # prefers ordinary characters to single escapes
        wide = [option for option in options if _has_many_characters(option)]
        return self._random.choice(wide or options)

    def _draw_node(self, node: Node) -> str:
        match node:
            case LiteralText(text):
                return text
            case CharSet():
                return _draw_character(node, self._random)
        return _random_walk(cached_automaton(node), self._random)


def _rule_depths(language: Language) -> dict[str, float]:
    """Returns, for each rule, the nesting depth of its least nested text."""
    heights = dict.fromkeys(language.rules, float("inf"))
    referring = referring_rules({name: references(body) for name, body in language.rules.items()})
    for name in (queue := list(language.rules)):
        height = 1 + _node_depth(language.rules[name], heights)
        if height < heights[name]:
            heights[name] = height
            queue += referring[name]
    return heights


def _node_depth(node: Node, heights: dict[str, float]) -> float:
    match node:
        case Ref(name):
            return heights[name]
        case Concat(parts):
            return max((_node_depth(part, heights) for part in parts), default=0)
        case Alternation(options):
            return min(_node_depth(option, heights) for option in options)
        case Repeat(inner, least, _):
            return _node_depth(inner, heights) if least else 0
    return 0


def _random_walk(machine: Automaton, random: Random) -> str:
    """Walks through an automaton and returns the text: some random steps, then the shortest path to
    an accepting state.
    """
    text = ""
    state = machine.start
    remaining_steps = _STEPS
    while remaining_steps and len(text) < MAX_CHARS:
        if machine.accepting(state) and random.random() < 0.3:
            return text
        steps = [(c, machine.step(state, c)) for c in machine.classes]
        live = [
            (c, after) for c, after in steps if after != DEAD and machine.accepts_some_text(after)
        ]
        if not live:
            break
        remaining_steps -= len(live) > 1
        printable = [step for step in live if _printable_ranges(machine.class_characters(step[0]))]
        symbol, state = random.choice(printable or live)
        text += _draw_character(machine.class_characters(symbol), random)
    return text + "".join(
        _draw_character(machine.class_characters(c), random)
        for c in shortest_path_from(machine, state)
    )


def _has_many_characters(node: Node) -> bool:
    return isinstance(node, CharSet) and sum(b - a for a, b in _printable_ranges(node)) > 50


@lru_cache(maxsize=1024)
def _printable_ranges(characters: CharSet) -> tuple[tuple[int, int], ...]:
    return tuple((max(a, 32), min(b, 126)) for a, b in characters.ranges if b >= 32 and a <= 126)


def _draw_character(characters: CharSet, random: Random) -> str:
    low, high = random.choice(_printable_ranges(characters) or characters.ranges)
    return chr(random.randint(low, high))
