"""Draws the next tokens from logits.

A draw depends on its row's logits, mask, parameters, seed and position, never on other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from sglang_lite.protocol import ModelError, SglError, TokenLogprob
from sglang_lite.runtime.executor.logit_adjustments import DrawAdjustments, adjust_logits
from sglang_lite.runtime.executor.step_record import SAMPLING
from sglang_lite.runtime.kernels.race import draw_tokens
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import not_finite_error
from sglang_lite.runtime.requests.resolved_params import ResolvedParams

_CANDIDATES = 4096  # tokens that top-p sorts first
_TINY = 1e-30  # probability below which a sum in float32 is not exact


class SamplingTable:
    """Sampling parameters by slot, stored in arrays. A batch without adjustments is drawn with only
    a few tensor operations.

    Args:
        slots: number of slots, all of which are greedy at first.

    Attributes:
        rows: SAMPLING [slots].
    """

    def __init__(self, slots: int) -> None:
        self.rows: NDArray[np.void] = np.zeros(slots, dtype=SAMPLING)
        self.rows["top_p"] = 1

    def set_parameters(self, slots: Ints, rows: NDArray[np.void]) -> None:
        """Sets the parameters, SAMPLING [S], of slots [S]."""
        self.rows[slots] = rows

    def mask_of_sampled_slots(self, slots: Ints) -> NDArray[np.bool_]:
        """Returns bool [S], True for slots whose tokens are sampled, not chosen greedily."""
        return np.asarray(self.rows["temperature"][slots] > 0)

    def has_filter(self, slots: Ints) -> NDArray[np.bool_]:
        """Returns bool [S], True for slots with a filter. Greedy slots may have one, which has no
        effect.
        """
        rows = self.rows[slots]
        return np.asarray((rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0))


@dataclass(frozen=True, slots=True)
class Masks:
    """Token masks of a step's rows.

    Attributes:
        words: int32 [M, ceil(V / 32)], with a bit for each allowed token. The step loop overwrites
            it in the next step.
        rows: int32 [R], index of each row's mask, -1 for none.
    """

    words: NDArray[np.int32]
    rows: Ints

    def allowed_tokens(self, row: int, vocab_size: int) -> NDArray[np.bool_]:
        """Returns the allowed tokens, bool [vocab_size], of a row that has a mask."""
        bits = np.unpackbits(
            self.words[self.rows[row]].view(np.uint8), count=vocab_size, bitorder="little"
        )
        return bits.view(np.bool_)


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws of the next tokens of some rows of a step. A row with drafts has several draws.

    Attributes:
        rows: indices [R] of rows of the step.
        adjustments: adjustments of draws that the sampling table doesn't cover, by index into
            `rows`. None on ranks other than 0 if rank 0 has some, since it draws then.
        masks: token masks of the rows that have a grammar; None if no row has one.
        scored: bool [R], True for rows whose scores are reported, as in `SampledTokens`; None for
            no row.
        behind: number [R] of the row's tokens after the one whose logits are drawn from; None for 0
            in every row.
    """

    rows: NDArray[np.int64]
    adjustments: dict[int, DrawAdjustments] | None = field(default_factory=dict)
    masks: Masks | None = None
    scored: NDArray[np.bool_] | None = None
    behind: Ints | None = None

    @property
    def reports_scores(self) -> bool:
        """True if the scores of any row are reported."""
        return self.scored is not None and bool(self.scored.any())


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Drawn tokens of some rows.

    Attributes:
        tokens: id of each row's token.
        logprobs: requested log-probabilities, by row.
        errors: reason why a row has no valid token, by row.
        waited: seconds that the device was idle before the draws; None if not measured.
        scores: float32 [2, R], log-probability of each row's token and of all its allowed tokens,
            as in `TokenScores`; None if none were requested. Rows without a request have arbitrary
            values.
    """

    tokens: Sequence[int]
    logprobs: Mapping[int, TokenLogprob]
    errors: Mapping[int, SglError] = field(default_factory=dict)
    waited: float | None = None
    scores: NDArray[np.float32] | None = None

    @property
    def ready(self) -> bool:
        return True

    def wait_for_tokens(self) -> SampledTokens:
        """Returns `self`, since tokens drawn on the CPU are available immediately."""
        return self


def sample(
    logits: torch.Tensor,
    table: SamplingTable,
    slots: Ints,
    positions: Ints,
    adjustments: Mapping[int, DrawAdjustments],
    masks: Masks | None = None,
    scored: NDArray[np.bool_] | None = None,
    *,
    original_logprobs: bool = False,
) -> SampledTokens:
    """Draws one token for each row.

    Args:
        logits: float32 [R, V]; modified in place.
        table: sampling parameters by slot.
        slots, positions: slot and position of the drawn token of each row [R].
        adjustments: adjustments that the sampling table doesn't cover, by row.
        masks: token masks of the rows; None if no row has one.
        scored: bool [R], True for rows whose scores are reported; None for no row.
        original_logprobs: whether log-probabilities are those of `logits` as passed, not of the
            adjusted logits.
    """
    reported = [i for i, row in adjustments.items() if row.params.return_logprob]
    logprobs = {i: logits[i].log_softmax(-1) for i in reported} if original_logprobs else {}
    scores = (
        None
        if scored is None or not scored.any()
        else _Scores(logits, scored.nonzero()[0].tolist(), adjustments, masks)
    )
    errors = adjust_logits(logits, adjustments)
    masked = () if masks is None else (masks.rows >= 0).nonzero()[0].tolist()
    if masks is not None:
        for i in masked:
            others = ~masks.allowed_tokens(i, logits.shape[1])
            logits[i].masked_fill_(torch.from_numpy(others), float("-inf"))
    logprobs = logprobs or {
        i: compute_draw_logprobs(logits[i], adjustments[i].params) for i in reported
    }
    picked = logits.argmax(-1)
    highest = logits.gather(1, picked.unsqueeze(1)).squeeze(1)  # NaN if the row contains one
    for i in (~highest.isfinite()).nonzero()[:, 0].tolist():
        if float(highest[i]) != float("-inf"):
            errors.setdefault(i, not_finite_error(int(positions[i])))
        elif i not in masked:  # otherwise the grammar's error explains it better
            errors.setdefault(
                i,
                ModelError(f"no token can follow at position {positions[i]}: all logits are -inf."),
            )
    drawn = table.mask_of_sampled_slots(slots).nonzero()[0]
    if len(drawn):
        params = table.rows[slots[drawn]]
        for i in table.has_filter(slots[drawn]).nonzero()[0].tolist():
            _filter_logits(logits[drawn[i]], params[i])
        picked[torch.from_numpy(drawn)] = torch.from_numpy(
            draw_tokens(logits, drawn, params["temperature"], params["seed"], positions[drawn])
        )
    tokens: list[int] = picked.tolist()
    return SampledTokens(
        tokens,
        {i: token_logprob(logprobs[i], tokens[i], adjustments[i].params) for i in reported},
        errors,
        scores=None if scores is None else scores.scores_of(picked),
    )


class _Scores:
    """Log-probabilities to report for some rows' draws. Computed row by row, so that a row stays in
    the core's cache.

    Args:
        logits: float32 [R, V], not adjusted yet.
        rows: indices of the rows.
        adjustments, masks: as for `sample`.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        rows: list[int],
        adjustments: Mapping[int, DrawAdjustments],
        masks: Masks | None,
    ) -> None:
        self._logits = logits
        # A mask leaves the logits of the allowed tokens as they are; other adjustments need a copy.
        self._copies = {i: logits[i].clone() for i in rows if _changes_logits(adjustments.get(i))}
        self._totals, self._allowed = np.zeros((2, len(logits)), dtype=np.float32)
        found = torch.empty(logits.shape[1])
        probs = found.numpy()
        for i in rows:
            torch.softmax(logits[i], -1, out=found)
            self._totals[i] = float(logits[i].amax()) - np.log(probs.max())
            if masks is not None and masks.rows[i] >= 0:
                allowed = masks.allowed_tokens(i, len(probs))
                # faster than selecting the allowed ones
                mass = np.dot(probs, allowed.astype(np.float32))
                self._allowed[i] = (
                    np.log(min(mass, 1)) if mass > _TINY else self._log_of_tiny_mass(i, allowed)
                )

    def _log_of_tiny_mass(self, row: int, allowed: NDArray[np.bool_]) -> float:
        """Returns the log-probability of all tokens that a row's mask allows, taken together. Works
        even if each of them is too improbable for float32. `allowed` is the mask, bool [V].
        """
        return float(self._logits[row, torch.from_numpy(allowed)].logsumexp(0)) - float(
            self._totals[row]
        )

    def scores_of(self, tokens: torch.Tensor) -> NDArray[np.float32]:
        """Returns the scores of drawn tokens [R], as in `SampledTokens`."""
        own: NDArray[np.float32] = self._logits.gather(1, tokens.unsqueeze(1)).squeeze(1).numpy()
        for i, logits in self._copies.items():
            own[i] = logits[tokens[i]]
        return np.stack([own - self._totals, self._allowed])


def _changes_logits(adjustments: DrawAdjustments | None) -> bool:
    """Returns True if anything besides a mask changes a row's logits."""
    return adjustments is not None and not (
        adjustments.params.plain and adjustments.processor is None
    )


def compute_draw_logprobs(logits: torch.Tensor, params: ResolvedParams) -> torch.Tensor:
    """Returns the log-probabilities [V] of a draw before top-k, top-p and min-p.

    As in SGLang, greedy rows have temperature 1, and an excluded token has the lowest finite number
    instead of -inf.

    Args:
        logits: logits [V] with penalties, biases and masks applied, but not the temperature.
        params: parameters of the request.
    """
    scaled = logits if params.greedy else logits / params.temperature
    return log_softmax(scaled).clamp_min_(torch.finfo(logits.dtype).min)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Returns the log-probabilities of float32 logits [..., V].

    On a GPU, the order of torch's sum depends on whether a row begins at a multiple of 16 bytes.
    Rows are therefore padded to a multiple of 16 bytes.
    """
    missing = -logits.shape[-1] % 4
    if not missing or not logits.is_cuda:
        return logits.log_softmax(-1)
    return F.pad(logits, (0, missing), value=float("-inf")).log_softmax(-1)[..., :-missing]


def token_logprob(logprobs: torch.Tensor, token: int, params: ResolvedParams) -> TokenLogprob:
    """Returns the log-probability of `token` with the requested alternatives.

    Args:
        logprobs: log-probabilities [V] of the row.
        token: id of the drawn token.
        params: parameters of the request, which select the alternatives.
    """
    top: tuple[tuple[float, int, str | None], ...] = ()
    if params.top_logprobs_num:
        values, ids = logprobs.topk(min(params.top_logprobs_num, len(logprobs)))
        top = tuple((value, i, None) for value, i in zip(values.tolist(), ids.tolist()))
    chosen = tuple((float(logprobs[i]), i, None) for i in params.token_ids_logprob)
    return TokenLogprob(float(logprobs[token]), token, top=top, ids=chosen)


def _filter_logits(logits: torch.Tensor, row: np.void) -> None:
    """Sets, in place, the logits [V] of the tokens that a row's filters drop to -inf."""
    probs = torch.softmax(logits / float(row["temperature"]), -1)
    _filter_probabilities(probs.numpy(), row)
    logits.masked_fill_(probs == 0, float("-inf"))


def _filter_probabilities(probs: NDArray[np.float32], row: np.void) -> None:
    """Zeroes, in place, the probabilities [V] of the tokens that a row's filters drop: top-k first,
    then top-p, then min-p. Among equal probabilities, those with lower ids are kept.

    Top-p counts the probability of all tokens. If the row is sequential, it counts only the tokens
    that top-k has kept.

    Doesn't sort the vocabulary: top-k and top-p only need the least probability that they keep.
    """
    top_k = int(row["top_k"])
    top_p = row["top_p"]
    sequential = bool(row["sequential"])
    lowest = probs.max() * row["min_p"]
    if 0 < top_k < len(probs):
        values = torch.from_numpy(probs).topk(top_k).values.numpy()
        kept = values[
            : _nucleus_size(
                values, top_p, float(values.sum(dtype=np.float64)) if sequential else 1.0
            )
        ]
    elif top_p < 1:
        kept = _keep_top_p(probs, top_p)
    else:
        kept = probs[:0]
    if len(kept):
        ties = (probs == kept[-1]).nonzero()[0]
        probs[ties[np.count_nonzero(kept == kept[-1]) :]] = 0
        lowest = max(lowest, kept[-1])
    probs *= probs >= lowest


def _keep_top_p(probs: NDArray[np.float32], top_p: np.float32) -> NDArray[np.float32]:
    """Returns the probabilities that top-p keeps, in descending order.

    Sorts the few largest first, and more only if the sum of those is less than `top_p`.
    """
    # all others have less than 1 - top_p together
    likely = probs[(probs > (1 - top_p) / len(probs)).nonzero()[0]]
    few = np.partition(likely, -_CANDIDATES)[-_CANDIDATES:] if len(likely) > _CANDIDATES else likely
    for candidates in (few, likely, probs):
        values = -np.sort(-candidates)
        count = _nucleus_size(values, top_p)
        if count < len(values):
            break
    return values[:count]


def _nucleus_size(values: NDArray[np.float32], top_p: np.float32, mass: float = 1.0) -> int:
    """Returns how many of the probabilities `values`, in descending order, top-p keeps. A value is
    kept if the values before it add up to at most `top_p` of the total `mass`.
    """
    if top_p >= 1:
        return len(values)
    over = values.cumsum(dtype=np.float64).astype(np.float32) - values > np.float32(
        float(top_p) * mass
    )
    return int(over.argmax()) if over.any() else len(values)
