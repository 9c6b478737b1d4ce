"""Routing: from a router's logits to each token's experts and their weights.

    score = softmax(logits) or sigmoid(logits)             in float32, over all experts
    choice = score + correction                            of the experts in the best groups
    ids = the `top_k` largest of choice                    the first of equal ones
    weight = scale * score[ids] (/ sum of score[ids], if normalised)

A softmax over only the chosen experts' logits is the same as the normalised one. A group's rank is
the sum of its best choices (one in DeepSeek-V2, arXiv:2405.04434; two in V3, arXiv:2412.19437).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import round_up_to_power_of_2

LOWEST = tl.constexpr(-0x80000000)  # lower than any result of `_ordered`


@triton.jit
def _ordered(x):
    """Maps float32 numbers to integers in the same order. (-0.0 would become less than 0.0, but is
    never a choice.) A warp finds the largest of 32 integers with one instruction. The largest of 32
    numbers and its place would take ten exchanges.
    """
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _first_largest(values, place):
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, place, 0x7FFFFFFF), 0)


@cached_launch
@triton.jit
def _route(
    logits,
    correction,
    local_ids,
    counts,
    ids,
    weights,
    scale,
    PARTS: tl.constexpr,
    TURNS: tl.constexpr,
    COUNTED: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    member = tl.arange(0, BLOCK_S)
    valid = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    expert = group[:, None] * SIZE + member[None, :]
    x = tl.load(logits + row * (GROUPS * SIZE) + expert, mask=valid, other=float("-inf")).to(
        tl.float32
    )
    for part in tl.static_range(1, PARTS):
        later = logits + (part * tl.num_programs(0) + row) * (GROUPS * SIZE)
        x += tl.load(later + expert, mask=valid, other=0.0).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(x)
    else:
        x = tl.where(x == float("inf"), float("nan"), x)  # as subtracting the maximum would make it
        score = tl.exp(x - tl.max(tl.max(x, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    choice = score
    if CORRECTED:
        choice += tl.load(correction + expert, mask=valid, other=0.0).to(tl.float32)
    bad = tl.max(tl.max((valid & (choice != choice)).to(tl.int32), 1), 0) > 0
    # Only experts that can't be chosen get -inf, so an expert is always found.
    choice = tl.where(valid, tl.maximum(choice, -1.0e30), float("-inf"))
    if KEPT < GROUPS:
        best, at = tl.max(choice, 1, return_indices=True)
        rank = best
        for _ in tl.static_range(GROUP_TOP - 1):
            others = tl.where(member[None, :] == at[:, None], float("-inf"), choice)
            best, at = tl.max(others, 1, return_indices=True)
            rank += best
        rank = _ordered(rank)
        for _ in tl.static_range(KEPT):
            _, chosen = _first_largest(rank, group)
            rank = tl.where(group == chosen, LOWEST, rank)
        choice = tl.where((rank == LOWEST)[:, None], choice, float("-inf"))
    # Flattens groups to one row, in the order of experts.
    choice = _ordered(tl.reshape(choice, [BLOCK_G * BLOCK_S]))
    score = tl.reshape(score, [BLOCK_G * BLOCK_S])
    place = tl.arange(0, BLOCK_G * BLOCK_S)
    k = tl.arange(0, BLOCK_K)
    own_ids = k
    own_weights = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range(TOP):
        best, at = _first_largest(choice, place)
        if CORRECTED:
            weight = tl.sum(tl.where(place == at, score, 0.0), 0)
        else:  # a score is no less than 0, and its bits are the number
            weight = best.to(tl.float32, bitcast=True)
        own_ids = tl.where(k == i, at // BLOCK_S * SIZE + at % BLOCK_S, own_ids)
        own_weights = tl.where(k == i, weight, own_weights)
        choice = tl.where(place == at, LOWEST, choice)
    if NORMALISE:
        own_weights = own_weights / (tl.sum(own_weights, 0) + 1e-20)
    own_ids = tl.where(bad, k, own_ids)
    own_weights = tl.where(bad, float("nan"), own_weights * scale)
    if COUNTED:
        tl.atomic_add(counts + own_ids, 1, mask=k < TOP, sem="relaxed")
    if TURNS > 0:
        own_ids = tl.load(
            local_ids + row % TURNS * (GROUPS * SIZE) + own_ids, mask=k < TOP, other=0
        )
    tl.store(ids + row * TOP + k, own_ids, mask=k < TOP)
    tl.store(weights + row * TOP + k, own_weights, mask=k < TOP)


def experts_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    correction: torch.Tensor | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    group_top: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
    local_ids: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the experts of each token and their weights. Reads T E elements, writes 2 T top_k.

    Args:
        logits: [T, E], contiguous, of any floating-point type; or parts [P, T, E] that add up to
            them.
        top_k: experts of a token; at most the number of experts in the kept groups.
        scoring: function from logits to scores, "softmax" or "sigmoid".
        correction: [E], added to scores for the choice of experts, but not for weights; or None.
        groups: number of groups of experts, all of the same size and contiguous.
        kept_groups: number of groups that a token chooses from.
        group_top: how many of a group's best choices are summed to rank the group.
        normalise: whether to divide weights by their sum.
        scale: factor of all weights.
        local_ids: int32 [turns, E], the id to return for each expert if this rank holds only some
            of them. Since experts may have copies, there may be several rows: token t uses row
            t % turns. None to return the experts' own ids.
        counts: int32 [E], to which the number of rows that chose each expert is added; or None.

    Returns:
        Ids and weights, int32 and float32 [T, top_k], largest choice first. A row with a score of
        NaN gets the first experts, and NaN as weights.
    """
    tokens, experts = logits.shape[-2:]
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    size = experts // groups
    block = round_up_to_power_of_2(groups) * round_up_to_power_of_2(size)
    _route[(tokens,)](
        logits,
        correction,
        local_ids,
        counts,
        ids,
        weights,
        scale,
        PARTS=len(logits) if logits.dim() == 3 else 1,
        TURNS=0 if local_ids is None else len(local_ids),
        COUNTED=counts is not None,
        SIGMOID=scoring == "sigmoid",
        CORRECTED=correction is not None,
        NORMALISE=normalise,
        TOP=top_k,
        GROUPS=groups,
        KEPT=kept_groups,
        GROUP_TOP=group_top,
        SIZE=size,
        BLOCK_G=round_up_to_power_of_2(groups),
        BLOCK_S=round_up_to_power_of_2(size),
        BLOCK_K=round_up_to_power_of_2(top_k),
        num_warps=min(max(block // 256, 1), 8),
        **pdl_options(logits.device),
    )
    return ids, weights
