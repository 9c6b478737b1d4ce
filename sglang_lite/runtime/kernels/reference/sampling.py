"""Torch twin of `kernels.sampling`, with the same random numbers and thus the same tokens."""

from __future__ import annotations

import math

import torch

from sglang_lite.runtime.kernels.sampling import (
    BLOCK,
    NOT_FINITE,
    NOTHING_ALLOWED,
    DeviceSampling,
    TokenMasks,
)


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
    for row, slot in enumerate(slots.tolist()):
        x = _mask_logits(_cap_logits(logits[row], softcap), row, masks)
        tokens[row] = _draw(x, int(positions[row]), sampling, slot)
        last_tokens[slot] = max(int(tokens[row]), 0)


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
    rows = len(logits)
    space = blocks * BLOCK
    found = torch.empty((4, -(-rows * blocks // 4) * 4), device=logits.device)
    best, token, highest, bad = found[:, : rows * blocks].view(4, rows, blocks)
    for row, slot in enumerate(slots.tolist()):
        x = _mask_logits(_cap_logits(logits[row], softcap), row, masks)
        x = torch.nn.functional.pad(x, (0, space - len(x)), value=-math.inf)
        temperature = float(sampling.temperature[slot])
        scores = x
        if temperature > 0:
            every = x.new_empty((first + blocks) * BLOCK)
            noise = _exponentials(int(sampling.seed[slot]), int(positions[row]) + 1, every)[
                first * BLOCK :
            ]
            scores = x / temperature - noise.log()
        best[row], at = scores.view(blocks, BLOCK).max(1)
        token[row] = (
            (at + torch.arange(first, first + blocks, device=at.device) * BLOCK)
            .int()
            .view(torch.float32)
        )
        highest[row] = x.view(blocks, BLOCK).amax(1)
        bad[row] = (
            (x.isnan() | (x == math.inf)).view(blocks, BLOCK).any(1).int().view(torch.float32)
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
    found = parts[:, :, : len(slots) * blocks].view(len(parts), 4, len(slots), blocks)
    best, token, highest, bad = found.permute(1, 2, 0, 3).flatten(2)
    winners = token.contiguous().view(torch.int32).gather(1, best.argmax(1, keepdim=True))[:, 0]
    winners[(highest == -math.inf).all(1)] = NOTHING_ALLOWED
    winners[bad.contiguous().view(torch.int32).any(1)] = NOT_FINITE
    tokens.copy_(winners)
    last_tokens[slots.long()] = winners.clamp(min=0)


def token_scores(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    *,
    masks: TokenMasks | None = None,
    softcap: float | None = None,
) -> None:
    for row, token in enumerate(tokens.tolist()):
        x = _cap_logits(logits[row], softcap)
        allowed = _mask_logits(x, row, masks)
        scores[0, row] = x[max(token, 0)] - x.logsumexp(0)
        scores[1, row] = allowed.logsumexp(0) - x.logsumexp(0)


def _cap_logits(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    x = logits.float()
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def _mask_logits(x: torch.Tensor, row: int, masks: TokenMasks | None) -> torch.Tensor:
    if masks is None or masks.rows[row] < 0:
        return x
    token = torch.arange(len(x), device=x.device)
    allowed = masks.words[masks.rows[row]][token // 32] >> (token % 32) & 1
    return x.masked_fill(allowed == 0, -math.inf)


def _draw(x: torch.Tensor, position: int, sampling: DeviceSampling, slot: int) -> int:
    if bool((x.isnan() | (x == math.inf)).any()):
        return NOT_FINITE
    if bool((x == -math.inf).all()):
        return NOTHING_ALLOWED
    temperature = float(sampling.temperature[slot])
    if temperature == 0:
        return int(x.argmax())
    x = _filter_logits(
        x,
        temperature,
        int(sampling.top_k[slot]),
        float(sampling.top_p[slot]),
        float(sampling.min_p[slot]),
        sequential=bool(sampling.sequential[slot]),
    )
    return int(
        (x / temperature - _exponentials(int(sampling.seed[slot]), position + 1, x).log()).argmax()
    )


def _filter_logits(
    x: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, *, sequential: bool
) -> torch.Tensor:
    """Returns logits x [V], with -inf for tokens that a filter drops. Each filter considers all
    tokens, except that top-p considers only those kept by top-k if `sequential`.
    """
    weights = torch.exp((x - x.max()) / temperature)
    kept = weights >= min_p
    if top_k > 0 or top_p < 1:
        ordered, order = x.sort(descending=True)
        above = torch.searchsorted(-ordered, -x)  # number of larger logits
        # mass of larger logits
        before = torch.nn.functional.pad(weights[order].cumsum(0), (1, 0))[above]
        largest = above < top_k if top_k > 0 else torch.ones_like(kept)
        total = weights[largest].sum() if sequential else weights.sum()
        kept &= largest & (before <= top_p * total)
    return x.masked_fill(~kept, -math.inf)


def _exponentials(seed: int, position: int, like: torch.Tensor) -> torch.Tensor:
    """Returns an exponential random variable for each token, float32 [V]. Each Philox counter
    yields the variables of four tokens, which are a quarter of a block apart.
    """
    token = torch.arange(len(like), device=like.device)
    quarter = BLOCK // 4
    counter = token // BLOCK * quarter + token % quarter
    numbers = torch.stack(_philox(seed, counter, position))
    bits = numbers.gather(0, (token % BLOCK // quarter).unsqueeze(0)).squeeze(0)
    u = (bits.float() + 0.5) / 2**32
    return torch.where(u < 1e-3, u * (1 + 0.5 * u), -torch.log(1 - u.clamp_max(0.99999994)))


def _philox(seed: int, counter: torch.Tensor, position: int) -> tuple[torch.Tensor, ...]:
    """Returns four 32-bit random numbers for each counter, int64 [N] (Philox4x32-10: Salmon et al.,
    SC 2011).
    """
    mask = 0xFFFFFFFF
    a = 0xD2511F53
    b = 0xCD9E8D57
    k0 = seed & mask
    k1 = seed >> 32 & mask
    c0 = counter
    c1 = torch.full_like(counter, position)
    c2 = counter * 0
    c3 = counter * 0
    for _ in range(10):
        c0, c1, c2, c3 = (
            _high_half(b, c2) ^ c1 ^ k0,
            b * c2 & mask,
            _high_half(a, c0) ^ c3 ^ k1,
            a * c0 & mask,
        )
        k0 = k0 + 0x9E3779B9 & mask
        k1 = k1 + 0xBB67AE85 & mask
    return c0, c1, c2, c3


def _high_half(a: int, b: torch.Tensor) -> torch.Tensor:
    """Returns the upper 32 bits of products of 32-bit numbers."""
    return a * (b >> 16) + (a * (b & 0xFFFF) >> 16) >> 16
