"""Lists the texts of a finite language."""

from __future__ import annotations

from sglang_lite.constraints.formal.automaton import Automaton
from sglang_lite.constraints.formal.nodes import Language
from sglang_lite.constraints.formal.terms import DEAD, State

_LONGEST = 4096  # characters


def list_texts(language: Language, most: int) -> tuple[str, ...] | None:
    """Returns all texts of a language, sorted. Returns None if there are more than `most`, or if
    one of them has more than 4096 characters.

    Raises:
        ConstraintError: the language's automaton is too large.
        RecursionError: a rule refers to itself before any character.
    """
    machine = Automaton(language.rules[language.start], rules=language.rules)
    texts: list[str] = []
    reached: list[tuple[str, State]] = [("", machine.start)]
    for _ in range(_LONGEST + 1):
        texts += [text for text, state in reached if machine.accepting(state)]
        longer: list[tuple[str, State]] = []
        for text, state in reached:
            for symbol in machine.classes:
                after = machine.step(state, symbol)
                if after == DEAD or not machine.accepts_some_text(after):
                    continue
                for low, high in machine.class_characters(symbol).ranges:
                    # Each of them leads to a text of its own.
                    if len(texts) + len(longer) + high - low + 1 > most:
                        return None
                    longer += [(text + chr(code), after) for code in range(low, high + 1)]
        if not longer:
            return tuple(sorted(texts))
        reached = longer
    return None
