"""Products of few rows with matrices of 4-bit numbers, which are read once and decoded in registers.

A matrix [N, K] in groups of G columns moves N * K / 2 + N * K / G * (2 to 5) bytes. The numbers meet the rows as they
are; each slice's sums are multiplied by its scales. The twin decodes the matrix and multiplies
(reference/packed_products.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import apply_activation
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.packed_weight import NUMBERS, PackedWeight
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, power_of_2

MAX_ROWS = 64  # above this, decoding the matrix and cuBLAS are faster
SPLIT_OUTPUTS = 8192  # most outputs of a matrix whose sums are split
_PARTS = 4
_OUTPUTS = 64  # of a program
_ROW_OUTPUTS, _ROW_WORDS, _ROW_WARPS = 8, 128, 4  # of a program for a single row


@triton.jit
def _numbers(words, zero, table, J: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """Numbers that bits 4 J … 4 J + 3 of words stand for; `zero`, a number or a tensor of `dtype`, is subtracted from
    integers."""
    nibble = (words >> 4 * J) & 15
    if KIND == "integers" and dtype == tl.bfloat16:
        # The mantissa of 128 + number: a sum instead of a conversion, which takes eight times as long. So below.
        found = (nibble | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - (zero + 128.0)
    elif KIND == "integers" and dtype == tl.float16:
        found = (nibble | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - (zero + 1024.0)
    elif KIND == "integers":
        found = (nibble | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608.0)
    elif KIND == "e2m1":
        # Exponent and mantissa in those of a float32 that is 2**126 times too small.
        bits = ((nibble & 7) << 22) | ((nibble & 8) << 28)
        found = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        found = tl.load(table + nibble)
    return found.to(dtype)


@triton.jit
def _zero_of(zeros, at, mask, ZERO: tl.constexpr, dtype: tl.constexpr):
    """Numbers that stand for 0, as `_numbers` takes them."""
    if ZERO < 0:
        found = tl.load(zeros + at, mask=mask, other=0).to(dtype)
    else:
        found = tl.zeros(at.shape, dtype) + ZERO
    return found


@cached_launch
@triton.jit(do_not_specialize=["M"])
def _packed_rows(
    x, words, scales, zeros, table, bias, y, M, N, K, BLOCKS,
    KIND: tl.constexpr, ZERO: tl.constexpr, SLICE: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if EARLY:
        start_next(PDL)
    wait(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, SLICE)
    groups = BLOCKS * 8 * SLICE // GROUP
    if BLOCKS * 8 * SLICE % GROUP > 0:
        groups += 1
    place = words + n.to(tl.int64)[:, None] * (BLOCKS * SLICE) + i[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(tl.program_id(1), BLOCKS, PARTS):
        packed = tl.load(place + block * SLICE, mask=(n < N)[:, None], other=0)
        for j in tl.static_range(8):
            at = block * 8 + j
            k = at * SLICE + i
            rows = tl.load(x + m[None, :] * K + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0.0)
            of_group = n * groups + at * SLICE // GROUP
            zero = _zero_of(zeros, of_group, n < N, ZERO, x.dtype.element_ty)[:, None]
            numbers = _numbers(packed, zero, table, j, KIND, x.dtype.element_ty)
            sums = tl.dot(numbers, rows, input_precision="ieee")
            acc += sums * tl.load(scales + of_group, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if not EARLY:
        start_next(PDL)  # not earlier, as not all programs fit the GPU at once
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    y += tl.program_id(1) * M * N
    tl.store(y + m[None, :] * N + n[:, None], acc.to(y.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@cached_launch
@triton.jit
def _packed_row(
    x, words, scales, zeros, table, bias, y, N, K, WORDS,
    KIND: tl.constexpr, ZERO: tl.constexpr, SLICE: tl.constexpr, GROUP: tl.constexpr,
    TOGETHER: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    word = tl.arange(0, BLOCK_W)
    groups = WORDS * 8 // GROUP
    if WORDS * 8 % GROUP > 0:
        groups += 1
    place, ups = words + n * WORDS + word[None, :], N.to(tl.int64)
    mask = (n < N) & (word < WORDS)[None, :]
    packed = tl.load(place, mask=mask, other=0, eviction_policy="evict_first")  # no kernel writes weights
    up_packed = packed
    if GATE != "":
        up_packed = tl.load(place + ups * WORDS, mask=mask, other=0, eviction_policy="evict_first")
    acc = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
    wait(PDL)
    for at in range(0, WORDS, BLOCK_W):
        later = at + BLOCK_W
        mask = (n < N) & (later + word < WORDS)[None, :]
        next_packed = tl.load(place + later, mask=mask, other=0, eviction_policy="evict_first")
        next_up = next_packed
        if GATE != "":
            next_up = tl.load(place + ups * WORDS + later, mask=mask, other=0, eviction_policy="evict_first")
        block = (at + word) // SLICE
        inside = (at + word) < WORDS
        within = (n < N) & inside[None, :]
        for first in tl.static_range(0, 8, TOGETHER):  # slices of a group
            of_group = n * groups + ((block * 8 + first) * SLICE // GROUP)[None, :]
            zero = _zero_of(zeros, of_group, within, ZERO, tl.float32)
            part = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
            if GATE != "":
                up_zero = _zero_of(zeros, ups * groups + of_group, within, ZERO, tl.float32)
                up_part = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
            for j in tl.static_range(first, first + TOGETHER):
                k = (block * 8 + j) * SLICE + (at + word) % SLICE
                value = tl.load(x + k, mask=inside & (k < K), other=0.0).to(tl.float32)[None, :]
                part += _numbers(packed, zero, table, j, KIND, tl.float32) * value
                if GATE != "":
                    up_part += _numbers(up_packed, up_zero, table, j, KIND, tl.float32) * value
            acc += part * tl.load(scales + of_group, mask=within, other=0.0).to(tl.float32)
            if GATE != "":
                up += up_part * tl.load(scales + ups * groups + of_group, mask=within, other=0.0).to(tl.float32)
        packed, up_packed = next_packed, next_up
    start_next(PDL)  # not earlier: waiting programs would block those yet to start
    m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias + m, mask=m < N, other=0.0).to(tl.float32)
    if GATE != "":
        other = tl.sum(up, 1)
        if BIAS:
            other += tl.load(bias + N + m, mask=m < N, other=0.0).to(tl.float32)
        total = apply_activation(total, GATE) * other
    tl.store(y + m, total.to(y.dtype.element_ty), mask=m < N)


@cached_launch
@triton.jit
def _decode_packed(
    words, scales, zeros, table, out, N, K, BLOCKS,
    KIND: tl.constexpr, ZERO: tl.constexpr, SLICE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait(PDL)  # what is written may still be read
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    i, block = tl.arange(0, SLICE), tl.program_id(1)
    groups = BLOCKS * 8 * SLICE // GROUP
    if BLOCKS * 8 * SLICE % GROUP > 0:
        groups += 1
    packed = tl.load(words + n[:, None] * (BLOCKS * SLICE) + block * SLICE + i[None, :], mask=(n < N)[:, None], other=0)
    for j in tl.static_range(8):
        at = block * 8 + j
        of_group = n * groups + at * SLICE // GROUP
        zero = _zero_of(zeros, of_group, n < N, ZERO, tl.float32)[:, None]
        value = _numbers(packed, zero, table, j, KIND, tl.float32)
        value *= tl.load(scales + of_group, mask=n < N, other=0.0).to(tl.float32)[:, None]
        k = at * SLICE + i
        tl.store(
            out + n[:, None] * K + k[None, :], value.to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :]
        )


def packed_row(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, gate: str = "") -> torch.Tensor:
    """Returns x [1, K] times a packed matrix transposed, plus bias, as [1, N].

    Args:
        x: [1, K].
        weight: [N, K]; with `gate` [2 N, K], gates first.
        bias: [N], with `gate` [2 N]; or None.
        gate: activation of a gated pair ("silu", "gelu", "gelu_tanh"): the result is act(gates) * ups; or "".
    """
    rows, inputs = weight.shape
    outputs, words = rows // 2 if gate else rows, weight.words.shape[1]
    together = weight.group // weight.slice
    y = x.new_empty((1, outputs))
    block_n = _ROW_OUTPUTS // 2 if gate else _ROW_OUTPUTS
    _packed_row[(cdiv(outputs, block_n),)](
        x, weight.words, weight.scales, weight.zeros, weight.table, bias, y, outputs, inputs, words,
        KIND=weight.kind, ZERO=weight.zero if weight.zeros is None else -1, SLICE=weight.slice, GROUP=weight.group,
        TOGETHER=together if together in (2, 4, 8) else 1, BIAS=bias is not None, GATE=gate,
        BLOCK_N=block_n, BLOCK_W=min(_ROW_WORDS, power_of_2(words)), num_warps=_ROW_WARPS, **pdl_options(x.device),
    )  # fmt: skip
    return y


def packed_rows(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns x [M, K] times a packed matrix [N, K] transposed, plus bias [N], as [M, N]."""
    y = x.new_empty((len(x), weight.shape[0]))
    _launch(x, weight, bias, y, parts=1)
    return y


def packed_split_k(x: torch.Tensor, weight: PackedWeight, parts: int) -> torch.Tensor:
    """Returns x [M, K] times a packed matrix [N, K] transposed, as partial sums float32 [parts, M, N] that the caller
    must add up."""
    y = torch.empty((parts, len(x), weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, y, parts=parts)
    return y


def parts_of(weight: PackedWeight) -> int:
    """Number of parts that the sums of a product should be split into, so that its programs keep a GPU busy."""
    outputs, inputs = weight.shape
    return _PARTS if outputs <= SPLIT_OUTPUTS and inputs >= 1024 else 1


def decoded(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values [N, K] of a packed matrix, rounded to a dtype. Moves 2.5 N K bytes in 16 bits."""
    outputs, inputs = weight.shape
    blocks = _blocks(weight)
    out = torch.empty((outputs, inputs), dtype=dtype, device=weight.words.device)
    _decode_packed[(cdiv(outputs, 16), blocks)](
        weight.words, weight.scales, weight.zeros, weight.table, out, outputs, inputs, blocks,
        KIND=weight.kind, ZERO=weight.zero if weight.zeros is None else -1, SLICE=weight.slice, GROUP=weight.group,
        BLOCK_N=16, num_warps=4, **pdl_options(out.device),
    )  # fmt: skip
    return out


def _launch(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, y: torch.Tensor, *, parts: int) -> None:
    outputs, inputs = weight.shape
    properties = properties_of(x.device)
    most = MAX_ROWS if properties.has_tma else 32
    block_m = min(most, max(16, power_of_2(len(x))))
    stage = weight.slice * (_OUTPUTS * 4 + NUMBERS * block_m * x.element_size())  # bytes of words, and of rows
    if properties.has_tma:
        stages = 3 if block_m > 32 else 2
    else:
        stages = 2 if 4 * stage <= properties.shared_memory else 1
    programs = cdiv(outputs, _OUTPUTS) * parts * cdiv(len(x), block_m)
    _packed_rows[(cdiv(outputs, _OUTPUTS), parts, cdiv(len(x), block_m))](
        x, weight.words, weight.scales, weight.zeros, weight.table, bias, y, len(x), outputs, inputs, _blocks(weight),
        KIND=weight.kind, ZERO=weight.zero if weight.zeros is None else -1, SLICE=weight.slice, GROUP=weight.group,
        BIAS=bias is not None, PARTS=parts, EARLY=programs <= properties.multiprocessors,
        BLOCK_M=block_m, BLOCK_N=_OUTPUTS, num_warps=4, num_stages=stages,
        **pdl_options(x.device),
    )  # fmt: skip


def _blocks(weight: PackedWeight) -> int:
    return weight.words.shape[1] // weight.slice
