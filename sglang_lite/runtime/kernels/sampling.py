"""Samples the next tokens from logits on the device: one pass over the logits, and for filtered
rows a few more in the L2 cache.

Draws are an exponential race (equivalent to the Gumbel-max trick): the token with the largest logit
/ temperature - log(E) wins, where E is an exponential variable of (seed, position, token). Nothing
is normalised or sorted, and a draw depends only on its own row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

BLOCK = 4096  # logits that a program of the first pass reads
# codes stored instead of a token
NOT_FINITE = -1
NOTHING_ALLOWED = -2


class TokenMasks(NamedTuple):
    """Masks of the tokens that rows may draw, in memory that kernels can read.

    Attributes:
        words: int32 [masks, words], a bit for each allowed token.
        rows: int32 [R], index of each row's mask, -1 for none.
    """

    words: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """Sampling parameters by slot, on the device.

    Attributes:
        temperature: float32, 0 for greedy.
        top_p, min_p: float32; 1 and 0 disable the filters.
        top_k: int32, 0 disables the filter.
        sequential: int32, 1 if top-p is applied to what top-k has kept, 0 if it is applied to all
            tokens.
        seed: int64.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    sequential: torch.Tensor
    seed: torch.Tensor

    @staticmethod
    def allocate(slots: int, device: torch.device) -> DeviceSampling:
        def filled_tensor(value: float) -> torch.Tensor:
            return torch.full((slots,), value, device=device)

        return DeviceSampling(
            filled_tensor(0.0),
            filled_tensor(1.0),
            filled_tensor(0.0),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
        )


@triton.jit
def _load(logits, at, inside, mask_row, has_mask, softcap, SOFTCAP: tl.constexpr):
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    if SOFTCAP:
        x = tl.where(inside, softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0), x)
    if has_mask:
        word = tl.load(mask_row + at // 32, mask=inside, other=0)
        x = tl.where((word >> (at % 32)) & 1 != 0, x, float("-inf"))
    return x


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """Computes the logarithm to base 2. With FAST, takes one instruction instead of about twenty,
    and is accurate to 2^-22.
    """
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def _race(x, temperature, seed, position, block, BLOCK: tl.constexpr, FAST: tl.constexpr):
    """Returns logit / temperature - log(E) for a block of logits. Four tokens, a quarter of a block
    apart, share one call of Philox.
    """
    quarter: tl.constexpr = BLOCK // 4
    n = tl.arange(0, quarter)[None, :]
    zero = (n * 0).to(tl.uint32)
    place = (n + block * quarter).to(tl.uint32)
    a, b, c, d = tl.philox(seed, place, zero + position.to(tl.uint32), zero, zero)
    which = tl.arange(0, 4)[:, None]
    bits = tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))
    u = (bits.to(tl.uint32).to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    # -log(1 - u), as a series for small u, for which the logarithm would be inaccurate.
    series = u * (1.0 + u * (0.5 + u * 0.33333333))
    e = tl.where(u < 0.02, series, -0.69314718 * _log2(1.0 - tl.minimum(u, 0.99999994), FAST))
    return x * (1.0 / temperature) - 0.69314718 * tl.reshape(_log2(e, FAST), [BLOCK])


@cached_launch
@triton.jit(do_not_specialize=["words", "blocks", "first"])
def _scan(
    logits,
    row_stride,
    slots,
    positions,
    temperatures,
    seeds,
    masks,
    mask_rows,
    words,
    size,
    softcap,
    block_best,
    block_at,
    block_max,
    block_bad,
    blocks,
    first,
    SOFTCAP: tl.constexpr,
    MASKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(slots + row)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    has_mask = False
    mask_row = masks
    if MASKS:
        index = tl.load(mask_rows + row)
        has_mask = index >= 0
        mask_row = masks + index.to(tl.int64) * words
    x = _load(
        logits + row.to(tl.int64) * row_stride, at, inside, mask_row, has_mask, softcap, SOFTCAP
    )
    bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    temperature = tl.load(temperatures + slot)
    highest, where = tl.max(x, 0, return_indices=True)
    best = highest
    if temperature > 0:
        score = _race(
            x,
            temperature,
            tl.load(seeds + slot),
            tl.load(positions + row) + 1,
            first + block,
            BLOCK,
            FAST,
        )
        best, where = tl.max(score, 0, return_indices=True)
    out = row * blocks + block
    tl.store(block_best + out, best)
    tl.store(block_at + out, (first + block) * BLOCK + where)
    tl.store(block_max + out, highest)
    tl.store(block_bad + out, bad)


@triton.jit
def _key(x):
    """Maps float32 to an integer of the same order, in 64 bits, so that differences fit."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _unkey(key):
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _mass_from(
    logits,
    lowest,
    temperature,
    highest,
    mask_row,
    has_mask,
    size,
    softcap,
    blocks,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the mass of the logits from `lowest` on, as a multiple of the highest one's."""
    at = tl.arange(0, BLOCK)
    total = tl.full((), 0.0, tl.float32)
    for block in range(0, blocks):
        x = _load(
            logits,
            block * BLOCK + at,
            block * BLOCK + at < size,
            mask_row,
            has_mask,
            softcap,
            SOFTCAP,
        )
        total += tl.sum(tl.where(x >= lowest, tl.exp((x - highest) / temperature), 0.0), 0)
    return total


@triton.jit
def _lowest_kept(
    logits,
    top_k,
    most,
    temperature,
    highest,
    mask_row,
    has_mask,
    size,
    softcap,
    blocks,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the lowest logit that fewer than `top_k` logits are above (any number if it is 0),
    with a mass of at most `most`. Finds it by bisection over all float32 values, between one that
    is surely kept and one too low to matter.
    """
    at = tl.arange(0, BLOCK)
    high = _key(highest)
    low = _key(tl.maximum(highest - 100.0 * temperature, -3.0e38))
    while high - low > 1:
        middle = low + (high - low) // 2
        limit = _unkey(middle)
        above = 0
        mass = 0.0
        for block in range(0, blocks):
            x = _load(
                logits,
                block * BLOCK + at,
                block * BLOCK + at < size,
                mask_row,
                has_mask,
                softcap,
                SOFTCAP,
            )
            more = x > limit
            above += tl.sum(more.to(tl.int32), 0)
            mass += tl.sum(tl.where(more, tl.exp((x - highest) / temperature), 0.0), 0)
        enough = ((top_k > 0) & (above >= top_k)) | (mass > most)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return _unkey(high)


@triton.jit
def _draw_filtered(
    logits,
    row,
    seed,
    position,
    temperature,
    top_k,
    top_p,
    min_p,
    sequential,
    highest,
    masks,
    mask_rows,
    words,
    size,
    softcap,
    blocks,
    SOFTCAP: tl.constexpr,
    MASKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    """Returns the token that a row draws among those that its filters leave."""
    token = tl.full((), 0, tl.int32)
    has_mask = False
    mask_row = masks
    if MASKS:
        index = tl.load(mask_rows + row)
        has_mask = index >= 0
        mask_row = masks + index.to(tl.int64) * words
    at = tl.arange(0, BLOCK)
    floor = tl.full((), float("-inf"), tl.float32)
    if min_p > 0:
        floor = highest + tl.log(min_p) * temperature
    if (top_k > 0) | (top_p < 1.0):
        lowest = tl.full((), float("-inf"), tl.float32)
        if sequential & (top_k > 0) & (top_p < 1.0):
            lowest = _lowest_kept(
                logits,
                top_k,
                float("inf"),
                temperature,
                highest,
                mask_row,
                has_mask,
                size,
                softcap,
                blocks,
                SOFTCAP,
                BLOCK,
            )
        most = top_p * _mass_from(
            logits,
            lowest,
            temperature,
            highest,
            mask_row,
            has_mask,
            size,
            softcap,
            blocks,
            SOFTCAP,
            BLOCK,
        )
        floor = tl.maximum(floor, lowest)
        both = _lowest_kept(
            logits,
            top_k,
            most,
            temperature,
            highest,
            mask_row,
            has_mask,
            size,
            softcap,
            blocks,
            SOFTCAP,
            BLOCK,
        )
        floor = tl.maximum(floor, both)
    best = tl.full((), float("-inf"), tl.float32)
    for block in range(0, blocks):
        x = _load(
            logits,
            block * BLOCK + at,
            block * BLOCK + at < size,
            mask_row,
            has_mask,
            softcap,
            SOFTCAP,
        )
        x = tl.where(x >= floor, x, float("-inf"))
        score = _race(x, temperature, seed, position, block, BLOCK, FAST)
        block_score, where = tl.max(score, 0, return_indices=True)
        if block_score > best:
            best = block_score
            token = block * BLOCK + where
    return token


@cached_launch
@triton.jit(do_not_specialize=["words", "blocks", "part_blocks", "part_stride"])
def _pick(
    logits,
    row_stride,
    slots,
    positions,
    temperatures,
    seeds,
    top_ks,
    top_ps,
    min_ps,
    sequentials,
    masks,
    mask_rows,
    words,
    size,
    softcap,
    block_best,
    block_at,
    block_max,
    block_bad,
    blocks,
    part_blocks,
    part_stride,
    last_tokens,
    tokens,
    SOFTCAP: tl.constexpr,
    MASKS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    FAST: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    b = tl.arange(0, BLOCKS)
    valid = b < blocks
    place = b // part_blocks * part_stride + row * part_blocks + b % part_blocks
    _, winner = tl.max(
        tl.load(block_best + place, mask=valid, other=float("-inf")), 0, return_indices=True
    )
    token = tl.load(
        block_at + winner // part_blocks * part_stride + row * part_blocks + winner % part_blocks
    )
    highest = tl.max(tl.load(block_max + place, mask=valid, other=float("-inf")), 0)
    bad = tl.max(tl.load(block_bad + place, mask=valid, other=0), 0)
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    min_p = tl.load(min_ps + slot)
    filtered = (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    if bad > 0:
        token = -1
    elif highest == float("-inf"):
        token = -2
    elif filtered:  # noqa: SIM102 # with a condition that is not constant, all would be compiled
        if WHOLE:
            token = _draw_filtered(
                logits + row.to(tl.int64) * row_stride,
                row,
                tl.load(seeds + slot),
                tl.load(positions + row) + 1,
                temperature,
                top_k,
                top_p,
                min_p,
                tl.load(sequentials + slot) > 0,
                highest,
                masks,
                mask_rows,
                words,
                size,
                softcap,
                blocks,
                SOFTCAP,
                MASKS,
                BLOCK,
                FAST,
            )
    tl.store(tokens + row, token)
    tl.store(last_tokens + slot, tl.maximum(token, 0))


def draw(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampling: DeviceSampling,
    last_tokens: torch.Tensor,
    tokens: torch.Tensor,
    *,
    masks: TokenMasks | None = None,
    softcap: float | None = None,
) -> None:
    """Draws one token for each row.

    Args:
        logits: [R, V], of any floating-point type.
        slots, positions: int32 [R], slot of each row and position of the token before the drawn
            one.
        sampling: sampling parameters by slot.
        last_tokens: int32 [slots] (written), last drawn token of each slot; 0 if there was no valid
            one. If a slot has several draws, as after drafts, any of them.
        tokens: int32 [R] (written), the token, NOT_FINITE or NOTHING_ALLOWED.
        masks: masks of the rows, or None.
        softcap: if given, logits become softcap * tanh(logits / softcap).

    Filters are those of `executor.sampler`: keep the k largest logits, those with at most `top_p`
    of the mass before them (of all tokens' mass, or of the k largest ones' if the row is
    sequential), and those with at least `min_p` of the largest probability. All logits equal to the
    lowest kept one are kept, too.
    """
    rows, size = logits.shape
    blocks = cdiv(size, BLOCK)
    found = draw_part(logits, slots, positions, sampling, 0, blocks, masks=masks, softcap=softcap)
    words, mask_rows = masks or (tokens, None)
    _pick[(rows,)](
        logits,
        logits.stride(0),
        slots,
        positions,
        sampling.temperature,
        sampling.seed,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.sequential,
        words,
        mask_rows,
        words.stride(0) if masks else 0,
        size,
        softcap or 0.0,
        *_unpack_draw_part(found),
        blocks,
        blocks,
        0,
        last_tokens,
        tokens,
        SOFTCAP=softcap is not None,
        MASKS=masks is not None,
        WHOLE=True,
        BLOCK=BLOCK,
        BLOCKS=round_up_to_power_of_2(blocks),
        FAST=_is_gpu(logits),
        num_warps=16,
    )


def draw_part(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampling: DeviceSampling,
    first: int,
    blocks: int,
    *,
    masks: TokenMasks | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Finds each row's best tokens in one part of the vocabulary, as input for `pick_winner`.
    Returns float32 [4, N]: scores, token ids (as bits), highest logits, and flags for logits that
    are not finite (as bits).

    Args:
        logits: [R, P] of the tokens from number `first` * BLOCK on.
        slots, positions, sampling, softcap: as for `draw`.
        first: number of blocks before this part.
        blocks: number of blocks of the largest part.
        masks: as for `draw`, with the words of only these tokens.
    """
    rows, size = logits.shape
    # aligned, so that Triton compiles one version for all numbers of rows
    capacity = -(-rows * blocks // 4) * 4
    found = torch.empty((4, capacity), dtype=torch.float32, device=logits.device)
    words, mask_rows = masks or (slots, None)
    _scan[(rows, blocks)](
        logits,
        logits.stride(0),
        slots,
        positions,
        sampling.temperature,
        sampling.seed,
        words,
        mask_rows,
        words.stride(0) if masks else 0,
        size,
        softcap or 0.0,
        *_unpack_draw_part(found),
        blocks,
        first,
        SOFTCAP=softcap is not None,
        MASKS=masks is not None,
        BLOCK=BLOCK,
        FAST=_is_gpu(logits),
        num_warps=4,
    )
    return found


def pick_winner(
    parts: torch.Tensor,
    blocks: int,
    slots: torch.Tensor,
    sampling: DeviceSampling,
    last_tokens: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Draws a token for each row from the results of `draw_part`: the same tokens as `draw` would
    from all logits. Rows must not have filters.

    Args:
        parts: float32 [parts, 4, N], results of `draw_part` for each part.
        blocks: as for `draw_part`.
        slots, sampling, last_tokens, tokens: as for `draw`.
    """
    all_blocks = len(parts) * blocks
    _pick[(len(slots),)](
        parts,
        0,
        slots,
        slots,
        sampling.temperature,
        sampling.seed,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.sequential,
        tokens,
        None,
        0,
        0,
        0.0,
        *_unpack_draw_part(parts[0]),
        all_blocks,
        blocks,
        parts.stride(0),
        last_tokens,
        tokens,
        SOFTCAP=False,
        MASKS=False,
        WHOLE=False,
        BLOCK=BLOCK,
        BLOCKS=round_up_to_power_of_2(all_blocks),
        FAST=_is_gpu(parts),
        num_warps=1,
    )


def _unpack_draw_part(found: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the scores, tokens, highest logits and non-finite flags in the result of `draw_part`."""
    best, at, highest, bad = found.unbind(0)
    return best, at.view(torch.int32), highest, bad.view(torch.int32)


def _is_gpu(tensor: torch.Tensor) -> bool:
    """Returns False for tensors of Triton's interpreter, which doesn't support inline assembly."""
    return tensor.device.type != "cpu"


@triton.jit
def _add_up(x, highest, total):
    """Adds logits to a sum of exponentials, which is relative to the highest logit so far."""
    top = tl.maximum(highest, tl.max(x, 0))
    return top, total * tl.exp(highest - top) + tl.sum(tl.exp(x - top), 0)


@cached_launch
@triton.jit(do_not_specialize=["words", "rows"])
def _score(
    logits,
    row_stride,
    tokens,
    masks,
    mask_rows,
    words,
    size,
    softcap,
    scores,
    rows,
    SOFTCAP: tl.constexpr,
    MASKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    has_mask = False
    mask_row = masks
    if MASKS:
        index = tl.load(mask_rows + row)
        has_mask = index >= 0
        mask_row = masks + index.to(tl.int64) * words
    at = tl.arange(0, BLOCK)
    # Finite at first, so that blocks of nothing but -inf add 0.
    highest = tl.full((), -1.0e30, tl.float32)
    highest_allowed = tl.full((), -1.0e30, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    allowed = tl.full((), 0.0, tl.float32)
    for start in range(0, size, BLOCK):
        x = _load(logits, start + at, start + at < size, mask_row, False, softcap, SOFTCAP)
        highest, total = _add_up(x, highest, total)
        if has_mask:
            x = _load(logits, start + at, start + at < size, mask_row, True, softcap, SOFTCAP)
            highest_allowed, allowed = _add_up(x, highest_allowed, allowed)
    whole = highest + tl.log(total)
    mass = tl.full((), 0.0, tl.float32)
    if has_mask:
        mass = highest_allowed + tl.log(allowed) - whole
    own = tl.load(logits + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)
    if SOFTCAP:
        own = softcap * (2.0 * tl.sigmoid(2.0 * own / softcap) - 1.0)
    tl.store(scores + row, own - whole)
    tl.store(scores + rows + row, mass)


def token_scores(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    *,
    masks: TokenMasks | None = None,
    softcap: float | None = None,
) -> None:
    """Computes the log-probabilities of the tokens that `draw` has drawn, from logits without
    adjustments.

    Args:
        logits: [R, V], of any floating-point type.
        tokens: int32 [R], as `draw` has written them.
        scores: float32 [2, R] (written), log-probability of each row's token, and of all tokens
            that its mask allows: 0 without a mask.
        masks, softcap: as for `draw`.
    """
    rows, size = logits.shape
    words, mask_rows = masks or (tokens, None)
    _score[(rows,)](
        logits,
        logits.stride(0),
        tokens,
        words,
        mask_rows,
        words.shape[1] if masks else 0,
        size,
        softcap or 0.0,
        scores,
        rows,
        SOFTCAP=softcap is not None,
        MASKS=masks is not None,
        BLOCK=BLOCK,
        num_warps=16,
    )
