"""Turns of steps with and without drafts, to measure whether drafts pay at all."""

from __future__ import annotations

_SHORT = 4  # minimum number of steps in a turn
_SHARE = 0.01  # share of the time that turns of the slower kind may lose
# longest turn, the first ones without drafts and all others
_FIRST_S = 0.25
_LONGEST_S = 5.0


class Turns:
    """Decides whether steps have drafts, by alternating between turns with and without them.

    Drafts save steps, but a step with them waits until the tokens of the previous one have been
    read. So both kinds of steps are measured in turns. Turns of the faster kind are long enough
    that trying the other kind costs only a hundredth of the time. The first turns without drafts
    are shorter, because the first steps with drafts for a kind of work are slow: for example, the
    masks of its grammars are not cached yet.

    Attributes:
        drafts: whether steps have drafts in this turn.
    """

    def __init__(self) -> None:
        self.drafts = True
        self._worth = {True: 0.0, False: 0.0}  # of the last turn of each kind
        self._turn_s = 0.0  # shortest duration of this turn
        self._longest_s = _FIRST_S  # of a turn without drafts
        self._steps = -1  # of this turn; the first began in the turn before
        self._plain = self._seconds = 0.0

    def record_timing(self, plain: float, seconds: float) -> None:
        """Records a step, and starts the next turn when this one is over.

        Args:
            plain: seconds that its new tokens would take in steps with one token per row.
            seconds: seconds that they took.
        """
        self._steps += 1
        if not self._steps:
            return
        self._plain = self._plain + plain
        self._seconds = self._seconds + seconds
        if self._steps < _SHORT or self._seconds < self._turn_s:
            return
        self._worth[self.drafts] = self._plain / max(self._seconds, 1e-9)
        other = self._worth[not self.drafts]
        # Time lost in this turn if the other kind of step is faster. Its next turn is then long.
        lost = self._seconds - self._plain / other if other else 0.0
        self.drafts = not self.drafts
        self._turn_s = min(max(lost, 0.0) / _SHARE, _LONGEST_S if self.drafts else self._longest_s)
        if not self.drafts and self._turn_s == self._longest_s:
            self._longest_s = min(2 * self._longest_s, _LONGEST_S)
        self._steps = -1
        self._plain = 0.0
        self._seconds = 0.0
