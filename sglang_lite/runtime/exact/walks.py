"""Draws texts of any language with the model's own probabilities, token by token.

A walk draws tokens as the model would, and begins again where it would leave the language. What it
has learnt about the beginnings of texts changes its next try: a beginning that is known to lead
nowhere is not drawn again. Each try still gives each text in proportion to its probability.

Source: P. Parys et al., Constrained adaptive rejection sampling, arXiv:2510.01902.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.exact.beginnings import Beginning, MassRow
from sglang_lite.runtime.exact.text_limits import TextLimits
from sglang_lite.runtime.structured_output.outcomes import FIRST_END

_MAX_LISTED = 64  # most texts whose shares are reported, in addition to the drawn texts
_MIN_SHARE = 1e-4  # share above which a text is likely enough to be reported
MIN_MASS = 1e-40  # with less probability, nothing is left to draw
_MAX_REFUSED = 200
# Weights are summed up again if their total has fallen below this share of the last sum.
_SUMMED_AGAIN = 0.5

Rows: TypeAlias = "Mapping[tuple[int, ...], MassRow]"  # by the tokens of their beginnings


class NoMassError(Exception):
    """Raised if the model would write no text of the language, or if a walk has drawn too many
    texts that are not allowed.
    """


class _Node:
    """Beginning that a walk has reached. Each end and each live token has a weight: an upper bound
    of the probability, given the beginning, that it comes next and leads to an allowed text.

    Args:
        row: row of the beginning.
        parent: node before the beginning's last token; None at the root.
        index: index of that token among the parent's weights.

    Attributes:
        row, parent, index: the arguments of these names.
        total: sum of the weights.
    """

    def __init__(self, row: MassRow, parent: _Node | None, index: int) -> None:
        self.row = row
        self.parent = parent
        self.index = index
        self._changed: dict[int, float] = {}  # weights that are lower than the row's probabilities
        self._closed = False  # whether no token may follow
        self.total = self._summed = float(row.ends.sum()) + float(row.live.sum())

    def build_weights(self) -> NDArray[np.float64]:
        """Returns the weights, float64 [E + L]."""
        weights = np.concatenate((self.row.ends, self.row.live))
        if self._changed:
            weights[list(self._changed)] = list(self._changed.values())
        if self._closed:
            weights[len(self.row.ends) :] = 0.0
        return weights

    def weigh(self, index: int, weight: float) -> None:
        """Lowers a weight, and updates the weights of the preceding nodes to match."""
        self.lower_weight(index, weight)
        self.pass_on()

    def close(self) -> None:
        """Sets the weights of all live tokens to 0, and updates the weights of the preceding nodes
        to match. None of these tokens may lead to another node yet.
        """
        self._closed = True
        self.total = self._summed = float(self.build_weights().sum())
        self.pass_on()

    def pass_on(self) -> None:
        """Updates the weights of the preceding nodes to match this node's."""
        node = self
        while node.parent is not None:
            share = node.parent.row_weight(node.index)
            node.parent.lower_weight(node.index, share * node.total)
            node = node.parent

    def lower_weight(self, index: int, weight: float) -> None:
        """Sets a weight to a smaller value."""
        self.total += weight - self._changed.get(index, self.row_weight(index))
        self._changed[index] = weight
        if self.total < _SUMMED_AGAIN * self._summed:  # else rounding would count
            self.total = self._summed = float(self.build_weights().sum())

    def row_weight(self, index: int) -> float:
        """Returns the probability in the row of an end or a live token."""
        ends = len(self.row.ends)
        return float(self.row.ends[index] if index < ends else self.row.live[index - ends])


class Walk:
    """Draws one text, in several tries if necessary.

    Args:
        rows: rows that have been computed, by the tokens of their beginnings. Rows that are added
            for other walks do not change the text that this walk draws.
        start: the empty beginning.
        token_bytes: bytes of each token.
        draw_uniform: returns the next random number, from 0 to 1.
        limits: limits of the text.

    Attributes:
        text: bytes of the text; None until it has been drawn.
        tries: number of tries so far, including the current one.
    """

    def __init__(
        self,
        rows: Rows,
        start: Beginning,
        token_bytes: Sequence[bytes],
        draw_uniform: Callable[[], float],
        limits: TextLimits,
    ) -> None:
        self.text: bytes | None = None
        self.tries = 1
        self._refused = 0  # texts that were read and are not allowed
        self._rows = rows
        self._start = start
        self._token_bytes = token_bytes
        self._draw_uniform = draw_uniform
        self._limits = limits
        self._nodes: dict[tuple[int, ...], _Node] = {}
        self._at = start
        self._came_from: tuple[_Node, int] | None = None

    def advance(self) -> Beginning | None:
        """Continues the walk until a text is drawn or a row is needed. Returns the beginning whose
        row is needed, or None if a text is drawn.

        Raises:
            NoMassError: no text is left that the model would write.
        """
        while self.text is None:
            node = self._nodes.get(self._at.tokens)
            if node is not None:
                self._choose(node)
            elif self._limits.is_too_long(self._at):
                self._leave_out()
            elif (row := self._rows.get(self._at.tokens)) is not None:
                self._enter(row)
            else:
                return self._at
        return None

    def _enter(self, row: MassRow) -> None:
        """Adds a node for a beginning that is reached for the first time. The walk chose it as if
        each of its continuations were allowed. To correct for this, starts the walk again with
        probability 1 - node.total, the share that is now known to lead to no text.
        """
        parent, index = self._came_from or (None, 0)
        node = _Node(row, parent, index)
        self._nodes[row.beginning.tokens] = node
        if not self._limits.may_continue(row.beginning):
            node.close()
        elif parent is not None:
            node.pass_on()
        if parent is not None and self._draw_uniform() >= node.total:
            self._begin_again()

    def _leave_out(self) -> None:
        """Starts again, and excludes all continuations of the previous node, because a further
        token makes them too long.
        """
        if self._came_from is None:
            raise NoMassError
        self._came_from[0].close()
        self._begin_again()

    def _choose(self, node: _Node) -> None:
        """Draws the next token after a node, or the end of the text."""
        if node.total < MIN_MASS:  # only at the root, as no walk enters a node of weight 0
            raise NoMassError
        row = node.row
        index = draw_weighted_index(node.build_weights(), self._draw_uniform())
        if index < len(row.ends):
            text = row.beginning.text_with(list(row.outcomes.ends)[index])
            if self._limits.is_allowed(text):
                self.text = text
                return
            self._refused += 1
            if self._refused > _MAX_REFUSED:
                raise NoMassError
            node.weigh(index, 0.0)
            self._begin_again()
        else:
            self._came_from = node, index
            self._at = row.continue_with_live(index - len(row.ends), self._token_bytes)

    def _begin_again(self) -> None:
        self.tries += 1
        self._at = self._start
        self._came_from = None


def draw_weighted_index(weights: NDArray[np.float64], uniform: float) -> int:
    """Draws an index with a probability in proportion to its weight.

    Args:
        weights: the weights, at least one of which is above 0.
        uniform: random number from 0 to 1.
    """
    sums = np.cumsum(weights)
    index = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))


@dataclass(frozen=True, slots=True)
class KnownShares:
    """Probabilities of a language's texts, as far as computed rows show them.

    Attributes:
        shares: probability of each listed text, divided by that of all listed texts.
        mass: probability of all texts that the rows show, listed or not.
        gap: upper bound of the total variation distance between `shares` and the true shares.
    """

    shares: Mapping[bytes, float]
    mass: float
    gap: float


def list_known_shares(rows: Rows, drawn: Sequence[bytes], limits: TextLimits) -> KnownShares:
    """Computes the shares of a language's texts from rows.

    Args:
        rows: the rows.
        drawn: texts that are listed in any case.
        limits: limits of the texts. Only likely texts and `drawn` are checked. Any other text
            counts as allowed if fewer than `limits.limit` tokens come before the token that ends
            it.
    """
    each = list(rows.values())
    ended = math.fsum(row.beginning.mass * float(row.ends.sum()) for row in each)
    live = math.fsum(row.beginning.mass * float(row.live.sum()) for row in each)
    computed = math.fsum(row.beginning.mass for row in each if row.beginning.tokens)
    short = [row for row in each if len(row.beginning.tokens) < limits.limit]
    mass = math.fsum(row.beginning.mass * float(row.ends.sum()) for row in short)
    masses = {text: _find_mass(each, text) for text in {*_likely_texts(each, ended), *drawn}}
    for text in [text for text in masses if not limits.is_allowed(text)]:
        refused = masses.pop(text)
        ended -= refused
        mass -= refused
    likely = sorted(masses, key=lambda text: (-masses[text], text))[:_MAX_LISTED]
    listed = {text: masses[text] for text in masses if text in {*likely, *drawn}}
    listed = dict(sorted(listed.items(), key=lambda item: (-item[1], item[0])))
    known = math.fsum(listed.values())
    rest = max(ended - known, 0.0) + max(live - computed, 0.0)
    return KnownShares(
        {text: found / known if known else 0.0 for text, found in listed.items()},
        max(mass, known),
        rest / (rest + known),
    )


def _likely_texts(rows: Sequence[MassRow], total: float) -> set[bytes]:
    found: set[bytes] = set()
    for row in rows:
        likely = np.flatnonzero(row.beginning.mass * row.ends > _MIN_SHARE * total)
        if len(likely):
            ends = list(row.outcomes.ends)
            found.update(row.beginning.text_with(ends[index]) for index in likely)
    return found


def _find_mass(rows: Sequence[MassRow], text: bytes) -> float:
    """Returns the probability of a text, summed over its spellings in the rows."""
    found = []
    for row in rows:
        before = row.beginning.text
        end: bytes | int
        if text.startswith(before):
            end = text[len(before) :] or 0
        elif before.startswith(text):
            end = len(text) - len(before)
        else:
            continue
        number = row.outcomes.ends.get(end)
        if number is not None:
            found.append(row.beginning.mass * float(row.ends[number - FIRST_END]))
    return math.fsum(found)
