"""Limits the tokens of steps with streams, so their readers don't wait long for the next token."""

from __future__ import annotations

TARGET_S = 0.08  # target for the duration of a step with streams, without the time between steps
_TIMES_ALONE = 2  # alternative target: this multiple of a streams-only step, if those are slow
_FORGET = 1.02  # growth of the remembered minimum duration of streams-only steps, per step
_FIRST = 32  # tokens; about the target on two cores, with a model of 135M parameters
# tokens besides the streams' own, so other requests advance with any number of streams
_MIN_TOKENS = 8


class StepPace:
    """Limit on the tokens of a step with streams, adapted to the durations of past steps.

    A step that took too long lowers the limit in proportion; a short one that used up the limit
    raises it in proportion, at most to double.

    Args:
        max_tokens: maximum number of tokens in any step.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._limit = min(_FIRST, max_tokens)
        self._streams_only_s = 0.0  # recent minimum duration of a streams-only step; 0 if unknown

    def tokens_besides_streams(self, streams: int) -> int:
        """Returns how many tokens of prompts and other rows the next step may compute besides
        `streams` tokens of streams.
        """
        return min(max(self._limit - streams, _MIN_TOKENS), max(self._max_tokens - streams, 0))

    def adapt_to_step(self, tokens: int, seconds: float, *, streams: int) -> None:
        """Adapts the limit to a step of `tokens` tokens, `streams` of which belong to streams."""
        if tokens == streams:
            self._streams_only_s = (
                min(seconds, self._streams_only_s * _FORGET) if self._streams_only_s else seconds
            )
            return
        fit = tokens * self._target_step_s / max(seconds, 1e-6)
        if seconds > self._target_step_s:
            self._limit = max(_MIN_TOKENS, min(self._limit, int(fit)))
        elif tokens >= self._limit:
            self._limit = int(min(fit, 2 * self._limit, self._max_tokens))

    def remaining_pace_s(self, seconds: float) -> float:
        """Returns how many more seconds a step may take, `seconds` after its start."""
        return max(self._target_step_s - seconds, 0.0)

    @property
    def _target_step_s(self) -> float:
        return max(TARGET_S, _TIMES_ALONE * self._streams_only_s)
