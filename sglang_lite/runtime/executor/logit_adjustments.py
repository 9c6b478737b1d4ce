"""Adjusts logits before a draw: penalties, biases, the caller's processors, and tokens that may not
be drawn.

All rows of a step are adjusted together, on any device: 256 penalised rows take no more operations
than one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_lite.protocol import ProgramError, SglError
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.logit_processors import LogitProcessor, LogitReader
from sglang_lite.runtime.requests.resolved_params import ResolvedParams
from sglang_lite.runtime.tokens.virtual_ids import without_virtual_ids


@dataclass(frozen=True, slots=True)
class DrawAdjustments:
    """Adjustments of one row's draw that the sampling table doesn't cover.

    Attributes:
        params: penalties, biases and log-probabilities to report.
        tokens: ids of the prompt and the output so far.
        prompt_len: number of prompt tokens.
        banned: ids that may not be drawn.
        processor: caller's logit processor, or a reader of the logits, or None.
        avoided: ids that are drawn only if a mask leaves no other.
    """

    params: ResolvedParams
    tokens: Ints
    prompt_len: int
    banned: tuple[int, ...] = ()
    processor: LogitProcessor | LogitReader | None = None
    avoided: tuple[int, ...] = ()


def adjust_logits(
    logits: torch.Tensor, adjustments: Mapping[int, DrawAdjustments]
) -> dict[int, SglError]:
    """Applies adjustments to float32 logits [R, V] in place. Returns the errors of logit processors
    by row.

    Args:
        logits: contiguous.
        adjustments: adjustments by row.
    """
    errors: dict[int, SglError] = {}
    if not adjustments:
        return errors
    rows = list(adjustments.items())
    _divide_repeated(logits, [(i, row) for i, row in rows if row.params.repetition_penalty != 1.0])
    _subtract_counted(
        logits,
        [
            (i, row)
            for i, row in rows
            if row.params.frequency_penalty or row.params.presence_penalty
        ],
    )
    biased = [(i, row.params.logit_bias) for i, row in rows if row.params.logit_bias]
    if biased:
        at = _flat_positions(logits, [(i, [token for token, _ in biases]) for i, biases in biased])
        added = [bias for _, biases in biased for _, bias in biases]
        logits.view(-1)[at] += torch.tensor(added, dtype=torch.float32, device=logits.device)
    _avoid_tokens(logits, rows)
    for i, row in rows:
        if row.processor is not None and not isinstance(row.processor, LogitReader):
            try:
                logits[i] = _call_processor(
                    row.processor, row.tokens.tolist(), logits[i].cpu().clone()
                ).to(logits.device)
            except SglError as error:
                errors[i] = error
    _read_logits(logits, rows)
    banned = [(i, row.banned) for i, row in rows if row.banned]
    if banned:
        logits.view(-1)[_flat_positions(logits, banned)] = float("-inf")
    return errors


def _avoid_tokens(logits: torch.Tensor, rows: Sequence[tuple[int, DrawAdjustments]]) -> None:
    """Makes tokens so unlikely that they are drawn only if a mask leaves no other: those that a row
    avoids, and those that are not among its allowed ones.
    """
    for i, row in rows:
        if row.params.allowed_token_ids:
            allowed = torch.tensor(row.params.allowed_token_ids, device=logits.device)
            kept = logits[i, allowed]
            logits[i] -= _AVOIDED
            logits[i, allowed] = kept
    avoided = [(i, row.avoided) for i, row in rows if row.avoided]
    if avoided:
        logits.view(-1)[_flat_positions(logits, avoided)] -= _AVOIDED


_AVOIDED = 1e5  # more than logits and biases can add up to


def _read_logits(logits: torch.Tensor, rows: Sequence[tuple[int, DrawAdjustments]]) -> None:
    """Calls the logit readers among the processors. Readers of the same group read their rows
    together.
    """
    groups: dict[Hashable, list[tuple[int, LogitReader]]] = {}
    for i, row in rows:
        if isinstance(row.processor, LogitReader):
            groups.setdefault(row.processor.group, []).append((i, row.processor))
    for group in groups.values():
        at, readers = zip(*group, strict=True)
        readers[0].read_together(logits[list(at)], readers)


def _flat_positions(
    logits: torch.Tensor, ids: Sequence[tuple[int, Sequence[int] | Ints]]
) -> torch.Tensor:
    """Returns the positions of token ids in the flattened logits, int64 [number of ids]. They are
    on the device of the logits.

    Args:
        logits: logits [R, V].
        ids: row and its token ids, for some rows.
    """
    flat = [np.asarray(each, dtype=np.int64) + i * logits.shape[1] for i, each in ids]
    return torch.from_numpy(np.concatenate(flat)).to(logits.device)


def _repeat_per_token(
    values: Sequence[float], tokens: Sequence[Ints], like: torch.Tensor
) -> torch.Tensor:
    """Repeats each row's float64 value once for each of the row's tokens."""
    return torch.from_numpy(
        np.repeat(np.array(values, dtype=np.float64), [len(each) for each in tokens])
    ).to(like.device)


def _divide_repeated(logits: torch.Tensor, rows: Sequence[tuple[int, DrawAdjustments]]) -> None:
    """Applies the repetition penalty to tokens in the prompt or output: divides positive logits and
    multiplies others (Keskar et al., arXiv:1909.05858). A token that occurs several times is
    penalised only once.
    """
    if not rows:
        return
    tokens = [without_virtual_ids(row.tokens, logits.shape[1]) for _, row in rows]
    at = _flat_positions(logits, [(i, each) for (i, _), each in zip(rows, tokens)])
    factor = _repeat_per_token(
        [row.params.repetition_penalty for _, row in rows], tokens, at
    ).float()
    scores = logits.view(-1)[at]
    logits.view(-1)[at] = torch.where(scores > 0, scores / factor, scores * factor)


def _subtract_counted(logits: torch.Tensor, rows: Sequence[tuple[int, DrawAdjustments]]) -> None:
    """Subtracts the frequency penalty once for each occurrence of a token in the output, and the
    presence penalty once per token.
    """
    outputs = [(i, row.tokens[row.prompt_len :]) for i, row in rows]
    if not any(len(output) for _, output in outputs):
        return
    at = _flat_positions(logits, outputs)
    tokens = [output for _, output in outputs]
    ordered = at.sort().values
    count = torch.searchsorted(ordered, at, right=True) - torch.searchsorted(ordered, at)
    frequency = _repeat_per_token([row.params.frequency_penalty for _, row in rows], tokens, at)
    presence = _repeat_per_token([row.params.presence_penalty for _, row in rows], tokens, at)
    logits.view(-1)[at] = logits.view(-1)[at] - (frequency * count + presence).float()


def _call_processor(
    processor: LogitProcessor, tokens: list[int], logits: torch.Tensor
) -> torch.Tensor:
    try:
        result = torch.as_tensor(processor(tokens, logits), dtype=torch.float32)
    except Exception as error:  # code of the caller may raise anything
        raise ProgramError(f"logit_processor failed: {error!r}") from error
    if result.shape != logits.shape:
        raise ProgramError(
            f"logit_processor returned {list(result.shape)} numbers, not {list(logits.shape)}."
        )
    if not result.max().isfinite():
        raise ProgramError("logit_processor returned NaN, inf or nothing but -inf.")
    return result
