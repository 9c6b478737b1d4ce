"""Draws of the next tokens from logits.

A row's draw depends on its logits, its parameters, its seed and its position, never on the other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.protocol import ModelError, ProgramError, SglError, TokenLogprob
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.request import not_finite
from sglang_lite.runtime.resolved_params import LogitProcessor, ResolvedParams
from sglang_lite.runtime.uniforms import uniforms


class SamplingTable:
    """The parameters every draw needs, by slot, so that a plain batch is a few tensor operations.

    Args:
        slots: how many.
    """

    def __init__(self, slots: int) -> None:
        self.greedy = np.ones(slots, dtype=bool)
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_p = np.ones(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self.min_p = np.zeros(slots, dtype=np.float32)
        self.seed = np.zeros(slots, dtype=np.uint64)

    def set(self, slot: int, params: ResolvedParams, seed: int) -> None:
        self.greedy[slot] = params.greedy
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = max(params.top_k, 0)
        self.min_p[slot] = params.min_p
        self.seed[slot] = seed % 2**64


@dataclass(frozen=True, slots=True)
class DrawAdjustments:
    """Requirements of one row's draw beyond the sampling table.

    Attributes:
        params: penalties, biases and what to report.
        tokens: ids so far, prompt and output.
        prompt_len: how many of them are the prompt.
        banned: ids that may not be drawn now.
        processor: the caller's own.
    """

    params: ResolvedParams
    tokens: Ints
    prompt_len: int
    banned: tuple[int, ...] = ()
    processor: LogitProcessor | None = None


@dataclass(frozen=True, slots=True)
class Masks:
    """Allowed tokens of a step's rows.

    Attributes:
        words: allowed tokens as the bits of int32 words [M, ceil(V / 32)]; the loop's to change in the next step.
        rows: int32 [R]: which of them each row has, -1 for none.
    """

    words: NDArray[np.int32]
    rows: Ints


@dataclass(frozen=True, slots=True)
class Sampled:
    """The drawn ids, by row the log-probabilities where they were asked for, and why a row has no valid token.

    `waited`: seconds that the device had nothing to do before the draws, where that was measured.
    """

    tokens: Sequence[int]
    logprobs: Mapping[int, TokenLogprob]
    errors: Mapping[int, SglError] = field(default_factory=dict)
    waited: float | None = None

    def read(self) -> Sampled:
        """Self: tokens drawn on the CPU are there at once."""
        return self


def sample(
    logits: torch.Tensor,
    table: SamplingTable,
    slots: Ints,
    positions: Ints,
    special: Mapping[int, DrawAdjustments],
    masks: Masks | None = None,
    *,
    original_logprobs: bool = False,
) -> Sampled:
    """Draws one token a row.

    Args:
        logits: float32 [R, V]; changed in place.
        slots, positions: of the rows [R].
        special: by row.
        masks: where some rows have one.
        original_logprobs: log-probabilities are those of `logits` as they come, else those that `_draw` filters.
    """
    reported = [i for i, row in special.items() if row.params.return_logprob]
    logprobs = {i: logits[i].log_softmax(-1) for i in reported if original_logprobs}
    errors: dict[int, SglError] = {}
    for i, row in special.items():
        try:
            adjust_logits(logits[i], row)
        except SglError as error:
            errors[i] = error
    masked = () if masks is None else (masks.rows >= 0).nonzero()[0].tolist()
    if masks is not None:
        for i in masked:
            allowed = np.unpackbits(masks.words[masks.rows[i]].view(np.uint8), bitorder="little")[: logits.shape[1]]
            logits[i].masked_fill_(torch.from_numpy(allowed) == 0, float("-inf"))
    logprobs = logprobs or {i: draw_logprobs(logits[i], special[i].params) for i in reported}
    picked = logits.argmax(-1)
    highest = logits.gather(1, picked.unsqueeze(1)).squeeze(1)  # NaN, where a row has one
    for i in (~highest.isfinite()).nonzero()[:, 0].tolist():
        if float(highest[i]) != float("-inf"):
            errors.setdefault(i, not_finite(int(positions[i])))
        elif i not in masked:  # a grammar says better why nothing can follow
            errors.setdefault(i, ModelError(f"no token can follow at position {positions[i]}: all logits are -inf."))
    drawn = ~table.greedy[slots]
    if drawn.any():
        rows = torch.from_numpy(drawn)
        picked[rows] = _draw(logits[rows], table, slots[drawn], positions[drawn])
    tokens: list[int] = picked.tolist()
    return Sampled(tokens, {i: token_logprob(logprobs[i], tokens[i], special[i].params) for i in reported}, errors)


def draw_logprobs(logits: torch.Tensor, params: ResolvedParams) -> torch.Tensor:
    """The log-probabilities [V] that a token is drawn with before top-k, top-p and min-p, from logits [V] that have
    everything else but the temperature. Greedy rows have temperature 1, and what is ruled out has the smallest number
    there is: as SGLang."""
    scaled = logits if params.greedy else logits / params.temperature
    return scaled.log_softmax(-1).clamp_min_(torch.finfo(logits.dtype).min)


def token_logprob(logprobs: torch.Tensor, token: int, params: ResolvedParams) -> TokenLogprob:
    """The log-probability of `token` and of the alternatives asked for; `logprobs` is one row [V]."""
    top: tuple[tuple[float, int, str | None], ...] = ()
    if params.top_logprobs_num:
        values, ids = logprobs.topk(min(params.top_logprobs_num, len(logprobs)))
        top = tuple((value, i, None) for value, i in zip(values.tolist(), ids.tolist()))
    chosen = tuple((float(logprobs[i]), i, None) for i in params.token_ids_logprob)
    return TokenLogprob(float(logprobs[token]), token, top=top, ids=chosen)


def adjust_logits(logits: torch.Tensor, row: DrawAdjustments) -> None:
    """Applies everything of `row` but its mask to its logits [V], on any device.

    Raises:
        ProgramError: the caller's processor failed.
    """
    if row.params.penalised:
        _penalise(logits, row)
    if row.params.logit_bias:
        ids, biases = zip(*row.params.logit_bias)
        logits[list(ids)] += torch.tensor(biases, device=logits.device)
    if row.processor is not None:
        logits.copy_(_processed(row.processor, row.tokens.tolist(), logits.float().cpu().clone()))
    if row.banned:
        logits[list(row.banned)] = float("-inf")


def _processed(processor: LogitProcessor, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    try:
        result = torch.as_tensor(processor(tokens, logits), dtype=torch.float32)
    except Exception as error:  # the caller's code
        raise ProgramError(f"logit_processor failed: {error!r}") from error
    if result.shape != logits.shape:
        raise ProgramError(f"logit_processor returned {list(result.shape)} numbers, not {list(logits.shape)}.")
    if not result.max().isfinite():
        raise ProgramError("logit_processor returned NaN, inf or nothing but -inf.")
    return result


def _penalise(logits: torch.Tensor, row: DrawAdjustments) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(row.tokens).astype(np.int64)).to(logits.device)
        scores = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / factor, scores * factor)
    output = row.tokens[row.prompt_len :]
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(output, return_counts=True)
        penalty = params.frequency_penalty * counts + params.presence_penalty
        at = torch.from_numpy(ids.astype(np.int64)).to(logits.device)
        logits[at] -= torch.from_numpy(penalty).float().to(logits.device)


def _draw(logits: torch.Tensor, table: SamplingTable, slots: Ints, positions: Ints) -> torch.Tensor:
    """Inverse-transform sampling with one uniform number a row; filters in SGLang's order: top-k, top-p, min-p.

    Tokens stand in the order of their ids, whether other rows are filtered or not: a draw does not depend on company.
    """
    probs = torch.softmax(logits / torch.from_numpy(table.temperature[slots]).unsqueeze(1), -1)
    top_k, top_p, min_p = table.top_k[slots], table.top_p[slots], table.min_p[slots]
    if top_k.any() or (top_p < 1).any() or min_p.any():
        by_id = probs
        probs, order = by_id.sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(probs.shape[1])
        k = torch.from_numpy(np.where(top_k > 0, top_k, probs.shape[1])).unsqueeze(1)
        p = torch.from_numpy(np.where(top_p < 1, top_p, np.float32(2))).unsqueeze(1)
        before = probs.cumsum(-1) - probs
        dropped = (ranks >= k) | (before > p) | (probs < probs[:, :1] * torch.from_numpy(min_p).unsqueeze(1))
        probs = by_id.masked_fill(torch.zeros_like(dropped).scatter_(1, order, dropped), 0.0)
    mass = probs.double().cumsum(-1)
    target = torch.from_numpy(uniforms(table.seed[slots], positions)) * mass[:, -1]
    picked = torch.searchsorted(mass, target.unsqueeze(1), right=True).clamp_(max=probs.shape[1] - 1)
    return picked.squeeze(1)
