"""Rotary embedding of queries and keys as in transformers: x cos + turn(x) sin, with turn((a, b)) =
(-b, a).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

_HEADS = 8  # heads of a program


@cached_launch
@triton.jit
def _rotate(
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    q_head,
    q_token,
    k_head,
    k_token,
    cos_token,
    sin_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    half: tl.constexpr = DIM // 2
    pair = tl.where(d < half, d + half, d - half)
    inside = d < DIM
    c = tl.load(cos + token * cos_token + d, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_token + d, mask=inside, other=0.0).to(tl.float32)
    of_q = (head < HEADS) & inside
    of_k = (head >= HEADS) & (head < HEADS + KV_HEADS) & inside
    kv = head - HEADS
    q_row, k_row = q + token * q_token + head * q_head, k + token * k_token + kv * k_head
    x = tl.load(q_row + d, mask=of_q, other=0.0) + tl.load(k_row + d, mask=of_k, other=0.0)
    y = tl.load(q_row + pair, mask=of_q, other=0.0) + tl.load(k_row + pair, mask=of_k, other=0.0)
    x = x.to(tl.float32) * c + tl.where(d < half, -s, s) * y.to(tl.float32)
    tl.store(q_out + (token * HEADS + head) * DIM + d, x.to(q_out.dtype.element_ty), mask=of_q)
    tl.store(k_out + (token * KV_HEADS + kv) * DIM + d, x.to(k_out.dtype.element_ty), mask=of_k)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns queries [1, heads, T, dim] and keys [1, kv_heads, T, dim] rotated by cos and sin [1,
    T, dim]; the last dimension of each argument is contiguous. Results are stored token by token.
    Moves 2 T (heads + kv_heads + 1) dim elements.
    """
    _, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    q_out, k_out = (
        torch.empty((1, tokens, n, dim), dtype=q.dtype, device=q.device) for n in (heads, kv_heads)
    )
    block = min(_HEADS, round_up_to_power_of_2(heads + kv_heads))
    _rotate[(tokens, cdiv(heads + kv_heads, block))](
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        q.stride(1),
        q.stride(2),
        k.stride(1),
        k.stride(2),
        cos.stride(1),
        sin.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_H=block,
        BLOCK_D=round_up_to_power_of_2(dim),
        num_warps=2,
        **pdl_options(q.device),
    )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
