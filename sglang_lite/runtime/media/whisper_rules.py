"""Whisper's decoding rules (arXiv:2212.04356, section 4.5) as a logit processor. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def apply_whisper_rules(
    start: int,
    spoken: int,
    end: int,
    first_time: int,
    latest: int | None,
    never: Sequence[int],
    not_first: Sequence[int],
    tokens: Sequence[int],
    logits: torch.Tensor,
) -> torch.Tensor:
    """Returns the logits of the next token, with -inf for those that may not follow.

    Args:
        start: token that begins a transcript; its last occurrence in `tokens` counts.
        spoken: number of tokens from there on that belong to the prompt.
        end: token that ends a transcript; its id is above those of all text tokens.
        first_time: first timestamp token; all others have higher ids. 0 to write without times.
        latest: latest time at which a transcript may begin, counted in timestamp tokens; None for
            any.
        never, not_first: tokens that are never drawn, and those that are never drawn first.
        tokens: ids of the prompt and the output so far.
        logits: float32 [vocabulary], modified in place.
    """
    drawn = tokens[len(tokens) - 1 - tokens[::-1].index(start) + spoken :]
    none = float("-inf")
    logits[[*never, *(() if drawn else not_first)]] = none
    if not first_time:
        return logits
    logits[first_time - 1] = none  # the token that turns timestamps off
    times = [token for token in drawn if token >= first_time]
    if not drawn:
        logits[:first_time] = none
        if latest is not None:
            logits[first_time + latest + 1 :] = none
    elif drawn[-1] < first_time:
        logits[first_time : times[-1] + 1] = none
    elif len(drawn) < 2 or drawn[-2] >= first_time:  # a segment has begun
        logits[first_time:] = none
    else:  # a segment has ended
        logits[:end] = none
        logits[first_time : times[-1]] = none
    logprobs = logits.log_softmax(-1)
    if logprobs[first_time:].logsumexp(-1) > logprobs[:first_time].max():
        logits[:first_time] = none
    return logits
