"""Finds the positions in source texts from which an automaton's text is currently being copied."""

from __future__ import annotations

from typing import TypeAlias

from sglang_lite.constraints.formal.automaton import Automaton
from sglang_lite.constraints.formal.terms import State

Copied: TypeAlias = "tuple[int, tuple[int, ...]]"  # number of a source, and indexes of its text


def find_source_positions(automaton: Automaton, state: State) -> list[Copied]:
    """Returns, for each source that the text is being copied from, the indexes that the copy may
    have reached. Returns an empty list if nothing is being copied.
    """
    kind, *rest = automaton.term_of_state(state)
    match kind:
        case "source":
            return [(rest[0], rest[1])]
        case ".":
            return find_source_positions(automaton, rest[0])
        case "|":
            return [each for part in rest for each in find_source_positions(automaton, part)]
        case "&":
            return [
                _keep_continuable(automaton, state, each)
                for part in rest
                for each in find_source_positions(automaton, part)
            ]
    return []


def _keep_continuable(automaton: Automaton, state: State, found: Copied) -> Copied:
    """Drops the indexes at which an intersection does not allow the source's next character."""
    source, indexes = found
    text = automaton.sources[source].text
    continued = set[int]()
    for char in {text[i] for i in indexes if i < len(text)}:
        after = find_source_positions(automaton, automaton.step(state, automaton.class_of(char)))
        continued.update(i for number, reached in after if number == source for i in reached)
    return source, tuple(i for i in indexes if i + 1 in continued)
