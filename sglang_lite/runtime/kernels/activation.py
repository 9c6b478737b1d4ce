"""The gated activation of the MLP: act(gate) * up in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.fp8 import Fp8Rows, Scales, store_fp8
from sglang_lite.runtime.kernels.pdl import overlapped, start_next, wait


@triton.jit
def activated(x, KIND: tl.constexpr):
    """The activation of that name, of float32."""
    if KIND == "silu":
        x = x * tl.sigmoid(x)
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * tl.sigmoid(2.0 * inner)  # 0.5 (1 + tanh(y)) is sigmoid(2 y)
    else:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit
def gated_pair(gate, up, alpha, limit, KIND: tl.constexpr):
    """act(gate) * up, of float32. "clamped" (gpt-oss): gate * sigmoid(alpha * gate) * (up + 1), of gates of at most
    `limit`, and of the others between -limit and limit."""
    if KIND == "clamped":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        gate = gate * tl.sigmoid(alpha * gate)
    else:
        gate = activated(gate, KIND)
    return gate * up


@triton.jit
def _gated(
    gate_up, row_scales, scales, out, out_scales, size,
    SCALED: tl.constexpr, EIGHT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        own = tl.load(row_scales + row)
        gate *= own * tl.load(scales + at, mask=inside, other=0.0)
        up *= own * tl.load(scales + size + at, mask=inside, other=0.0)
    # Rounded before the product, as two operations would.
    gate = activated(gate, KIND).to(gate_up.dtype.element_ty).to(tl.float32)
    if EIGHT:
        store_fp8(gate * up, row, at, size, out, out_scales)
    else:
        tl.store(out + row * size + at, (gate * up).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: torch.Tensor, activation: str, scales: Scales | None = None) -> torch.Tensor:
    """act(gate) * up of gate_up [T, 2 I], gates first; moves 3 T I elements.

    Args:
        activation: "silu", "gelu" or "gelu_tanh".
        scales: of gate_up.
    """
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    _gated[(rows, triton.cdiv(size, block))](
        gate_up, scales and scales.rows, scales and scales.columns, out, None, size,
        SCALED=scales is not None, EIGHT=False, KIND=activation, BLOCK=block, num_warps=4, **overlapped(out.device),
    )  # fmt: skip
    return out


def gated_fp8(gate_up: torch.Tensor, activation: str, scales: Scales | None) -> Fp8Rows:
    """`gated` in 8 bits: a program has a whole row."""
    size = gate_up.shape[1] // 2
    eight = Fp8Rows.empty(gate_up, size)
    block = triton.next_power_of_2(size)
    _gated[(len(gate_up), 1)](
        gate_up, scales and scales.rows, scales and scales.columns, eight.values, eight.scales, size,
        SCALED=scales is not None, EIGHT=True, KIND=activation,
        BLOCK=block, num_warps=min(max(block // 512, 1), 16), **overlapped(gate_up.device),
    )  # fmt: skip
    return eight
