"""Weighted averages of values in RWKV (arXiv:2305.13048), for rows of any length. For each channel,

    out = sigmoid(r) (e^p A + e^(first + k) v) / (e^p B + e^(first + k))
    p' = max(p + rate, k);  A <- e^(p + rate - p') A + e^(k - p') v;  B likewise with v = 1

Only numbers that are at most 0 are exponentiated, relative to the largest, so nothing overflows. A
program goes through a row's tokens one by one, with the states of some channels in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2
from sglang_lite.runtime.kernels.state_rows import StateRows

_BLOCK = 32  # channels of a program


@cached_launch
@triton.jit
def _scan(
    k,
    v,
    r,
    rate,
    first,
    states,
    offsets,
    read,
    write,
    out,
    k_stride,
    v_stride,
    r_stride,
    state_stride,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    source = tl.load(read + row).to(tl.int64)
    target = tl.load(write + row).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < C
    old = states + tl.maximum(source, 0) * state_stride + i
    has = inside & (source >= 0)
    total = tl.load(old, mask=has, other=0.0).to(tl.float32)
    weight = tl.load(old + C, mask=has, other=0.0).to(tl.float32)
    peak = tl.load(old + 2 * C, mask=has, other=0.0).to(tl.float32)
    peak = tl.where(weight == 0.0, -1e38, peak)  # B is at least 1 unless a state is empty
    decay = tl.load(rate + i, mask=inside, other=0.0)
    bonus = tl.load(first + i, mask=inside, other=0.0)
    token = begin.to(tl.int64)
    for _ in range(begin, end):
        key = tl.load(k + token * k_stride + i, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_stride + i, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(r + token * r_stride + i, mask=inside, other=0.0).to(tl.float32)
        top = tl.maximum(peak, key + bonus)
        kept = tl.exp(peak - top)
        new = tl.exp(key + bonus - top)
        result = (kept * total + new * value) / (kept * weight + new) * tl.sigmoid(gate)
        tl.store(out + token * C + i, result.to(out.dtype.element_ty), mask=inside)
        top = tl.maximum(peak + decay, key)
        kept = tl.exp(peak + decay - top)
        new = tl.exp(key - top)
        total = kept * total + new * value
        weight = kept * weight + new
        peak = top
        token += 1
    place = states + tl.maximum(target, 0) * state_stride + i
    has = inside & (target >= 0)
    tl.store(place, total, mask=has)
    tl.store(place + C, weight, mask=has)
    tl.store(place + 2 * C, peak, mask=has)


def wkv_scan(
    k: torch.Tensor,
    v: torch.Tensor,
    r: torch.Tensor,
    rate: torch.Tensor,
    first: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Averages the values of each row, in float32, and applies the gate to the averages.

    Args:
        k, v, r: keys, values and logits of the gate [T, C], whose channels are contiguous.
        rate: float32 [C], negative.
        first: float32 [C], bonus of the current token.
        states: pool [S, 3, C] of A, B and p, float32 (written). A state of zeros is empty.
        rows: rows of the step.

    Returns:
        Outputs [T, C], in the data type of `v`. Moves 6 C numbers of states for each row, and 4 C
        elements for each token.
    """
    tokens, channels = v.shape
    out = v.new_empty((tokens, channels))
    block = min(_BLOCK, round_up_to_power_of_2(channels))
    _scan[(len(rows.read), cdiv(channels, block))](
        k,
        v,
        r,
        rate,
        first,
        states,
        rows.offsets,
        rows.read,
        rows.write,
        out,
        k.stride(0),
        v.stride(0),
        r.stride(0),
        states.stride(0),
        C=channels,
        BLOCK=block,
        num_warps=1,
        **pdl_options(v.device),
    )
    return out
