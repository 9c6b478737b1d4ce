"""Limit of a step's tokens beside a stream, so that whoever reads it does not wait long for the next token."""

from __future__ import annotations

TARGET_S = 0.08  # that a step beside a stream should take at most: what comes between two steps is not in it
_FIRST = 32  # tokens: about so long on two cores, with a model of 135M parameters
_LEAST = 8  # tokens of prompts a step, on average, so that they get on beside many decoding rows
_MOST_OWED = 64  # tokens of these that may come later: rows that end meanwhile make room


class StepPace:
    """Bound of the tokens of a step in which a row decodes that is streamed. It follows how long such steps have taken:
    one that was too long lowers it in proportion, one that used it up in less raises it so, at most to twice as many.

    Args:
        most: tokens in any step.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._bound = min(_FIRST, most)
        self._owed = 0  # tokens that prompts had less than `_LEAST` a step

    def room(self, decoding: int, *, prompts: bool) -> int:
        """Tokens of prompts that the next step may take beside so many decoding rows.

        Args:
            prompts: there are any. To be called once a step.
        """
        least = _LEAST if self._owed >= _MOST_OWED else 0
        room = max(self._bound - decoding, least)
        self._owed = max(self._owed + _LEAST - room, 0) if prompts else 0
        return min(room, max(self._most - decoding, 0))

    def took(self, tokens: int, seconds: float) -> None:
        """Learns from a step with tokens of prompts beside a stream."""
        fit = tokens * TARGET_S / max(seconds, 1e-6)
        if seconds > TARGET_S:
            self._bound = max(_LEAST, min(self._bound, int(fit)))
        elif tokens >= self._bound:
            self._bound = int(min(fit, 2 * self._bound, self._most))

    def left(self, seconds: float) -> float:
        """Seconds that a step may still take, so many after its beginning."""
        return max(TARGET_S - seconds, 0.0)
