"""Terms of regular languages, numbered so that equal terms share a state of an automaton."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from sglang_lite.protocol import ConstraintError

MAX_STATES = 20_000
MAX_WRITTEN = 200_000  # states for the nodes as written

State: TypeAlias = int
# operator and operands, whose types depend on the operator: see `Terms`
Term: TypeAlias = tuple[Any, ...]

# no continuation; only the empty continuation
DEAD = 0
DONE = 1
_ADDING = threading.Lock()  # held while a state is added to any automaton


class Terms:
    """Table of the terms that an automaton's states stand for. Terms are simplified where that is
    cheap, because the automaton stays small if equal languages become equal terms.

    A term is a tuple: ("set", mask of character classes), ("ref", rule), (".", first,
    second), ("|", …), ("&", …), ("~", state), ("{", state, least, most), ("source", number of
    a text, indexes into it) or ("multiple", divisor, remainder so far).

    Args:
        characters: mask of all character classes.
        most: maximum number of states, not counting those of the nodes as written.

    Attributes:
        nullable: whether each state accepts the empty text.
        every: state that accepts every text of characters.
        most: see the argument.
    """

    def __init__(self, characters: int, most: int = MAX_STATES) -> None:
        self.most = self._limit = most
        self._written = 0
        self._terms: list[Term] = [("|",), ("done",)]
        self._ids: dict[Term, State] = {term: i for i, term in enumerate(self._terms)}
        self.nullable = [False, True]
        self.every = self.repeat(self.characters(characters), 0, None)

    def __len__(self) -> int:
        return len(self._terms)

    def __getitem__(self, state: State) -> Term:
        return self._terms[state]

    @property
    def derived_count(self) -> int:
        """Number of states, without the states that were built for the original nodes."""
        return len(self._terms) - self._written

    def build_written_state(self, make: Callable[[], State]) -> State:
        """Returns the state that `make` creates from nodes of the original language. The states
        added by this call count toward a separate limit.
        """
        derived = self.derived_count
        self._limit = MAX_WRITTEN + derived
        try:
            return make()
        finally:
            self._written = len(self._terms) - derived
            self._limit = self._written + self.most

    def intern_term(self, *term: Any, nullable: bool) -> State:  # an operator and its operands
        state = self._ids.get(term)
        return self._add_term(term, nullable) if state is None else state

    def _add_term(self, term: Term, nullable: bool) -> State:
        """Returns the state of a term, added if it is new. The entry in `_ids` is written last,
        because other threads may look the term up at any time.
        """
        with _ADDING:
            state = self._ids.get(term)
            if state is None:
                if len(self._terms) >= self._limit:
                    raise automaton_too_large_error(f"{self._limit:,} states")
                state = len(self._terms)
                self._terms.append(term)
                self.nullable.append(nullable)
                self._ids[term] = state
        return state

    def characters(self, mask: int) -> State:
        """Returns the state that accepts each single character whose class is in the mask."""
        return self.intern_term("set", mask, nullable=False) if mask else DEAD

    def concat(self, first: State, second: State) -> State:
        if DEAD in (first, second):
            return DEAD
        if first == DONE:
            return second
        if second == DONE:
            return first
        kind, *rest = self._terms[first]
        # nested to the right, so that equal languages become equal terms more often
        if kind == ".":
            return self.concat(rest[0], self.concat(rest[1], second))
        return self.intern_term(
            ".", first, second, nullable=self.nullable[first] and self.nullable[second]
        )

    def union(self, states: Iterable[State]) -> State:
        flat: set[State] = set()
        mask = 0
        for state in states:
            for each in self._terms[state][1:] if self._terms[state][0] == "|" else (state,):
                if self._terms[each][0] == "set":
                    mask |= self._terms[each][1]
                else:
                    flat.add(each)
        if self.every in flat:
            return self.every
        if mask:
            flat.add(self.characters(mask))
        if len(flat) == 1:
            return flat.pop()
        return self.intern_term("|", *sorted(flat), nullable=any(self.nullable[s] for s in flat))

    def intersect(self, states: Iterable[State]) -> State:
        flat: set[State] = set()
        for state in states:
            flat.update(self._terms[state][1:] if self._terms[state][0] == "&" else (state,))
        if DEAD in flat:
            return DEAD
        flat.discard(self.every)
        if len(flat) < 2:
            return flat.pop() if flat else self.every
        return self.intern_term("&", *sorted(flat), nullable=all(self.nullable[s] for s in flat))

    def complement(self, state: State) -> State:
        if state == DEAD:
            return self.every
        if state == self.every:
            return DEAD
        kind, *rest = self._terms[state]
        return (
            rest[0]
            if kind == "~"
            else self.intern_term("~", state, nullable=not self.nullable[state])
        )

    def repeat(self, inner: State, least: int, most: int | None) -> State:
        if most == 0 or inner == DONE:
            return DONE
        if inner == DEAD:
            return DEAD if least else DONE
        if (least, most) == (1, 1):
            return inner
        if self.nullable[inner]:
            least = 0
        return self.intern_term("{", inner, least, most, nullable=least == 0)


def automaton_too_large_error(what: str) -> ConstraintError:
    return ConstraintError(
        f"the language is too complex: its automaton needs more than {what}.",
        hint="Use shorter repeats, fewer alternatives or simpler patterns.",
    )
