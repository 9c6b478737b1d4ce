"""Log-probabilities of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.protocol import TokenLogprob
from sglang_lite.runtime.executor.sampler import log_softmax
from sglang_lite.runtime.executor.step_record import StepRecord
from sglang_lite.runtime.kv_cache.pages import Ints

MAX_LOGITS = 1 << 24  # most logits in memory at once; `kv_pool_size` reserves memory for them
FIRST_ROWS = 64  # rows of the first piece, whose logits reveal the size of the vocabulary


class HasLogits(Protocol):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class CopyToHost(Protocol):
    """Function that starts copying a tensor to the host. Returns the copy, and an event after which
    the copy's data is valid. The event is None if the data is valid already.
    """

    def __call__(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]: ...


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a row's prompt tokens. Their computation has been launched and may still
    be running.

    Attributes:
        first: position of the first token.
        tokens: ids of the tokens.
        requested: ids whose log-probabilities are reported at each position.
        values: float32 [N, 1 + tops + requested], the log-probabilities of the token, of the
            likeliest tokens and of `requested`.
        tops: int64 [N, tops], ids of the likeliest tokens.
        done: event after which both tensors are on the host; None if they already are.
    """

    first: int
    tokens: list[int]
    requested: tuple[int, ...]
    values: torch.Tensor
    tops: torch.Tensor
    done: torch.cuda.Event | None

    def wait_for_logprobs(self) -> list[TokenLogprob]:
        """Waits for the log-probabilities and returns them."""
        if self.done is not None:
            self.done.synchronize()
        count = self.tops.shape[1]
        return [
            TokenLogprob(
                own,
                token,
                top=tuple((value, i, None) for value, i in zip(others, tops)),
                ids=tuple((value, i, None) for value, i in zip(others[count:], self.requested)),
            )
            for token, (own, *others), tops in zip(
                self.tokens, self.values.tolist(), self.tops.tolist()
            )
        ]


def score_prompts(
    model: HasLogits,
    record: StepRecord,
    last: Ints,
    hidden: torch.Tensor,
    fetch: CopyToHost = lambda tensor: (tensor, None),
) -> dict[int, PromptLogprobs]:
    """Computes the log-probabilities of those requested prompt tokens that this step's hidden
    states predict.

    Args:
        model: model whose head computes the logits.
        record: the step.
        last: index of each row's last token among the hidden states [R].
        hidden: hidden states [T, hidden_size] of the step's tokens.
        fetch: function that starts copying a tensor to the host.

    Returns:
        Scored tokens by row, without rows that have none.
    """
    alike: dict[_Reported, dict[int, TokensToScore]] = {}
    for each in record.scores:
        # The state at p - 1 predicts the token at p. The state of position p is at p - offset.
        offset = int(record.ends[each.row]) - int(last[each.row]) - 1
        at = each.first - 1 - offset
        states = hidden[at : at + len(each.tokens)]
        rows = alike.setdefault((each.tops, each.requested), {})
        rows[each.row] = TokensToScore(each.first, each.tokens, states)
    scored: dict[int, PromptLogprobs] = {}
    for (tops, requested), together in alike.items():
        scored.update(
            zip(together, score_rows(model, list(together.values()), tops, requested, fetch))
        )
    return scored


_Reported: TypeAlias = tuple[int, tuple[int, ...]]  # number of likeliest tokens, and requested ids


@dataclass(frozen=True, slots=True)
class TokensToScore:
    """Prompt tokens of a row to score.

    Attributes:
        first: position of the first token.
        tokens: ids [N] of the tokens.
        states: hidden states [N, hidden_size], each of which predicts one of the tokens.
    """

    first: int
    tokens: NDArray[np.int32]
    states: torch.Tensor


def score_rows(
    model: HasLogits,
    rows: Sequence[TokensToScore],
    tops: int,
    requested: tuple[int, ...],
    fetch: CopyToHost,
) -> list[PromptLogprobs]:
    """Scores tokens of rows in pieces, since the logits of thousands of positions take more memory
    than a model.

    A piece has tokens of many rows, because each piece reads the weights of the model's head:
    scoring eighty choices of one or two tokens separately would read them eighty times.

    Args:
        model: model whose head computes the logits.
        rows: tokens to score.
        tops: number of likeliest tokens that are reported at each position.
        requested: ids whose log-probabilities are reported at each position.
        fetch: function that starts copying a tensor to the host.
    """
    states = torch.cat([row.states for row in rows]) if len(rows) > 1 else rows[0].states
    following = _send_ids(np.concatenate([row.tokens for row in rows]), states.device)
    reported = _send_ids(requested, states.device)
    values = list[torch.Tensor]()
    likeliest = list[torch.Tensor]()
    at = 0
    step = FIRST_ROWS
    while at < len(states):
        logprobs = log_softmax(model.logits(states[at : at + step]))
        own = logprobs.gather(1, following[at : at + step].unsqueeze(1))
        top = logprobs.topk(min(tops, logprobs.shape[1]))
        values.append(torch.cat((own, top.values, logprobs[:, reported]), 1))
        likeliest.append(top.indices)
        at = at + step
        step = max(1, MAX_LOGITS // logprobs.shape[1])
        del logprobs  # frees them before the next piece
    host_values, _ = fetch(torch.cat(values))
    ids, done = fetch(torch.cat(likeliest))
    counts = [len(row.tokens) for row in rows]
    parts = zip(rows, torch.split(host_values, counts), torch.split(ids, counts))
    return [
        PromptLogprobs(row.first, row.tokens.tolist(), requested, some, best, done)
        for row, some, best in parts
    ]


def _send_ids(ids: Sequence[int] | NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Returns int64 ids on the device without waiting for the copy."""
    tensor = torch.from_numpy(np.array(ids, dtype=np.int64))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
