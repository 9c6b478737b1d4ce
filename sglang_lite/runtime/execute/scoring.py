"""Log-probabilities of prompt tokens."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sglang_lite.protocol import TokenLogprob
from sglang_lite.runtime.cache.table import SlotTable
from sglang_lite.runtime.execute.sampler import describe
from sglang_lite.runtime.schedule.batch import Batch


class GivesLogits(Protocol):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def score(
    model: GivesLogits, table: SlotTable, batch: Batch, last: Any, hidden: torch.Tensor
) -> dict[int, tuple[int, list[TokenLogprob]]]:
    """Scores the prompt tokens that rows asked for and this step's hidden states predict.

    Args:
        last: by row, the index of its last token.
        hidden: [T, hidden_size] of the batch's tokens.

    Returns:
        By row, the position of the first token that was scored, and the log-probabilities.
    """
    wanted = [(i, r) for i, r in enumerate(batch.requests) if r.score_from is not None]
    scored: dict[int, tuple[int, list[TokenLogprob]]] = {}
    for i, request in wanted:
        start, end = int(batch.starts[i]), int(batch.ends[i])
        assert request.score_from is not None
        first = max(request.score_from, start + 1)  # position p is predicted by the state at p - 1
        stop = min(end + 1, request.prompt_len)
        if first >= stop:
            continue
        offset = int(last[i]) + 1 - end  # of position 0 in the flat batch, were it there
        states = hidden[offset + first - 1 : offset + stop - 1]
        logprobs = model.logits(states).log_softmax(-1)
        tokens = table.tokens[batch.slots[i], first:stop].tolist()
        scored[i] = first, [describe(row, token, request.params) for row, token in zip(logprobs, tokens)]
    return scored
