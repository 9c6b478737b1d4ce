"""Limit of a step's tokens beside a stream, so that whoever reads it does not wait long for the next token."""

from __future__ import annotations

TARGET_S = 0.08  # that a step beside a stream should take at most: what comes between two steps is not in it
_TIMES_ALONE = 2  # as long as a step of the streams alone it may take, where these are slow by themselves
_FORGET = 1.02  # times as long, at each step, the shortest one of streams alone is taken to be
_FIRST = 32  # tokens: about so long on two cores, with a model of 135M parameters
_LEAST = 8  # tokens beside streams, so that others get on however many these are


class StepPace:
    """Bound of the tokens of a step in which a row decodes that is streamed. It follows how long such steps have taken:
    one that was too long lowers it in proportion, one that used it up in less raises it so, at most to twice as many.

    Args:
        most: tokens in any step.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._bound = min(_FIRST, most)
        self._alone_s = 0.0  # of a step of streams alone, a short one of late; 0: there was none

    def room(self, streams: int) -> int:
        """Tokens that the next step may compute beside so many streams: of prompts, and of rows that nobody watches."""
        return min(max(self._bound - streams, _LEAST), max(self._most - streams, 0))

    def took(self, tokens: int, seconds: float, *, streams: int) -> None:
        """Learns from a step of so many tokens, `streams` of which are streams' own."""
        if tokens == streams:
            self._alone_s = min(seconds, self._alone_s * _FORGET) if self._alone_s else seconds
            return
        fit = tokens * self._target / max(seconds, 1e-6)
        if seconds > self._target:
            self._bound = max(_LEAST, min(self._bound, int(fit)))
        elif tokens >= self._bound:
            self._bound = int(min(fit, 2 * self._bound, self._most))

    def left(self, seconds: float) -> float:
        """Seconds that a step may still take, so many after its beginning."""
        return max(self._target - seconds, 0.0)

    @property
    def _target(self) -> float:
        return max(TARGET_S, _TIMES_ALONE * self._alone_s)
