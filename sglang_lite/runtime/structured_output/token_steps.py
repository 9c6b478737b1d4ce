"""Steps of a language's automaton by whole tokens, of all tokens of a vocabulary at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_lite.constraints.formal.automaton import Automaton, Symbol
from sglang_lite.constraints.formal.shortest import Shortest
from sglang_lite.constraints.formal.shortest_search import UNKNOWN
from sglang_lite.constraints.formal.terms import DEAD, too_complex
from sglang_lite.constraints.formal.terms import State as Term
from sglang_lite.runtime.structured_output.token_texts import TokenArrays

_DETOUR = 16  # most characters of a token that do not bring the end nearer
_UNKNOWN = -1  # a step that was not taken yet
_NONE = -1  # no token


class TokenSteps:
    """Steps of one automaton by whole tokens.

    Args:
        automaton, shortest: automaton of the language, and its shortest texts.
        texts: tokens of the vocabulary.
    """

    def __init__(self, automaton: Automaton, shortest: Shortest, texts: TokenArrays) -> None:
        self._automaton, self._shortest, self._texts = automaton, shortest, texts
        columns: dict[Symbol, int] = {symbol: i for i, symbol in enumerate(automaton.classes)}
        self._columns = np.array([columns.get(automaton.class_of(each), -1) for each in texts.alphabet], dtype=np.int32)
        self._known: dict[Term, list[tuple[Term, int]]] = {}
        self._rows: dict[Term, int] = {}  # row of each state in the tables
        self._states: list[Term] = []
        self._steps = np.full((0, len(columns)), _UNKNOWN, dtype=np.int32)
        self._lengths = np.empty(0, dtype=np.float64)  # least number of characters to the end

    def after(self, state: Term) -> list[tuple[Term, int]]:
        """States to which tokens lead, each with one such token. Tokens that take long detours are left out.

        Raises:
            ConstraintError: the automaton is full.
        """
        if state not in self._known:
            self._known[state] = self._found(state)
        return self._known[state]

    def _found(self, state: Term) -> list[tuple[Term, int]]:
        texts, start = self._texts, self._row(state)
        longest = self._lengths[start] + _DETOUR
        found: dict[int, int] = {}
        alive = np.arange(len(texts.tokens))
        at = np.full(len(alive), start, dtype=np.int32)
        for position, letters in enumerate(texts.letters):
            column = self._columns[letters[alive]]
            alive, at, column = alive[column >= 0], at[column >= 0], column[column >= 0]
            at = self._step(at, column)
            near = self._lengths[at] + (position + 1) <= longest
            alive, at = alive[near], at[near]
            more = len(texts.letters[position + 1]) if position + 1 < len(texts.letters) else 0
            ended = alive >= more
            first = np.full(len(self._states), _NONE, dtype=np.int32)
            first[at[ended]] = texts.tokens[alive[ended]]
            for row in np.flatnonzero(first != _NONE).tolist():
                found.setdefault(row, int(first[row]))
            alive, at = alive[~ended], at[~ended]
            if not len(alive):
                break
        return [(self._states[row], token) for row, token in found.items()]

    def _step(self, rows: NDArray[np.int32], columns: NDArray[np.int32]) -> NDArray[np.int32]:
        after = self._steps[rows, columns]
        unknown = after == _UNKNOWN
        if unknown.any():
            width = self._steps.shape[1]
            for key in np.unique(rows[unknown].astype(np.int64) * width + columns[unknown]).tolist():
                if self._automaton.full:  # what is left is for the texts that are written
                    raise too_complex("half of its states")
                row, column = divmod(key, width)
                step = self._automaton.step(self._states[row], self._automaton.classes[column])
                self._steps[row, column] = self._row(step)
            after = self._steps[rows, columns]
        return after

    def _row(self, state: Term) -> int:
        row = self._rows.get(state)
        if row is None:
            row = self._rows[state] = len(self._states)
            self._states.append(state)
            if row == len(self._steps):
                more = max(64, row)
                self._steps = np.concatenate((self._steps, np.full((more, self._steps.shape[1]), _UNKNOWN, np.int32)))
                self._lengths = np.concatenate((self._lengths, np.full(more, UNKNOWN)))
            self._lengths[row] = UNKNOWN if state == DEAD else self._shortest.length(state)
        return row
