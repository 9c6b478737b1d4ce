"""Multiplies rows by matrices of 4-bit numbers, which are read once and decoded in registers.

A matrix [N, K] in groups of G columns moves N * K / 2 + N * K / G * 4 bytes. A shift, a mask and a
subtraction decode two numbers at a time, and the tensor cores use them directly from the registers.
A group's sums are multiplied by its scales. The torch reference decodes the matrix and multiplies
(reference/packed_products.py).
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import apply_activation
from sglang_lite.runtime.kernels.device_properties import INTERPRETER, properties_of
from sglang_lite.runtime.kernels.hopper import hopper_kernels
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.packed_weight import NUMBERS, SLICES, PackedWeight
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

_FEW = 64  # maximum number of rows that one program multiplies all of
_MANY = 256  # maximum number of rows at all; above, decoding the matrix and cuBLAS are faster
# outputs of a program
_OUTPUTS = 64
_OUTPUTS_MANY = 256
SCRATCH = 1 << 15  # bytes of shared memory in which code books' numbers change their layout


@triton.constexpr_function
def _numbers_factor(kind: str, dtype: tl.dtype) -> float:
    """Returns the factor by which the results of `_numbers` are scaled."""
    return {"bf16": 2.0**-6, "fp16": 2.0**-9}.get(dtype.name, 1.0) if kind == "integers" else 1.0


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    """Splits int32 [N, W] into its 16-bit halves, as [N, 2 W]. Takes no instructions."""
    low = (pairs & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(low, high), (pairs.shape[0], 2 * pairs.shape[1]))


@triton.jit
def _numbers(
    words, word, table, J: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr
):
    """Unpacks slice J of a block: returns its numbers [N, 2 W] in `dtype`, multiplied by
    `_numbers_factor`. Zero points are subtracted from integers: ZERO or, if that is negative, those
    in the upper 16 bits of `word` [N].
    """
    if KIND == "integers" and dtype != tl.float32:
        # The last eight bits of a 16-bit number are linear, as its least exponents are: as they are
        # they stand for a number that is too small, which the multiplication mends that subtracts
        # zeros. So two take two instructions.
        small = _halves((words >> 8 * (J // 2)) & (0x000F000F << 4 * (J % 2)), dtype)
        up: tl.constexpr = (2.0**127 if dtype == tl.bfloat16 else 2.0**15) / 16.0 ** (J % 2)
        factor: tl.constexpr = _numbers_factor(KIND, dtype)
        if ZERO < 0:
            found = tl.fma(
                small, tl.full(small.shape, up, dtype), zeros_of(word).to(dtype)[:, None] * -factor
            )
        else:
            found = tl.fma(
                small, tl.full(small.shape, up, dtype), tl.full(small.shape, -ZERO * factor, dtype)
            )
    # sign, exponent and mantissa where a 16-bit number has them
    elif KIND == "e2m1" and dtype != tl.float32:
        pairs = words >> 4 * J
        wide: tl.constexpr = 6 if dtype == tl.bfloat16 else 9
        small = _halves(((pairs & 0x00070007) << wide) | ((pairs & 0x00080008) << 12), dtype)
        found = small * (2.0**126 if dtype == tl.bfloat16 else 2.0**14)
    else:
        pairs = words >> 4 * J
        numbers = tl.reshape(
            tl.join(pairs & 15, pairs >> 16 & 15), (words.shape[0], 2 * words.shape[1])
        )
        if KIND == "e2m1":
            bits = ((numbers & 7) << 22) | ((numbers & 8) << 28)
            found = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
        elif KIND == "table":
            found = tl.load(table + numbers).to(dtype)
        elif ZERO < 0:
            found = numbers.to(dtype) - zeros_of(word).to(dtype)[:, None]
        else:
            found = numbers.to(dtype) - ZERO
    return found


@triton.jit
def scales_of(word, ZERO: tl.constexpr, HALF: tl.constexpr):
    """Unpacks the scales from words of `PackedWeight.scales`, as float32. HALF is the name of their
    16-bit dtype if the words also contain zero points.
    """
    if ZERO < 0:
        low = (word & 0xFFFF).to(tl.int16)
        return low.to(tl.bfloat16 if HALF == "bfloat16" else tl.float16, bitcast=True).to(
            tl.float32
        )
    else:
        return word


@triton.jit
def zeros_of(word):
    """Unpacks the zero points from the upper 16 bits of words, as float32."""
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def packed_sums(
    rows,
    valid,
    words,
    scales,
    table,
    n,
    stride,
    K,
    BLOCKS,
    first,
    every,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    HALF: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    SPAN: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Multiplies rows by rows n [N] of a packed matrix. Returns the products [N, M] as float32.

    Args:
        rows: pointers [M] to the first input of each row, in DTYPE.
        valid: whether there is such a row [M].
        stride: rows of the matrix.
        first, every: first step of a block's columns, and how many steps further the next one is.
    """
    place = (
        words + n.to(tl.int64)[:, None] * (BLOCKS * (SLICE // 2)) + tl.arange(0, SPAN // 2)[None, :]
    )
    STEPS: tl.constexpr = SLICE // SPAN  # of a block
    acc = tl.zeros((n.shape[0], rows.shape[0]), tl.float32)
    for step in range(first, BLOCKS * STEPS, every):
        packed = tl.load(place + step * (SPAN // 2))
        block = step // STEPS
        k = step % STEPS * SPAN + tl.arange(0, SPAN)
        for slice in tl.static_range(0, 4, TOGETHER):  # slices of a group
            # 32 bits, as Triton fetches no less ahead.
            word = tl.load(scales + (block * 4 + slice) * SLICE // GROUP * stride + n)
            scale = scales_of(word, ZERO, HALF) / _numbers_factor(KIND, DTYPE)
            sums = acc
            if not SCALED:
                sums = tl.zeros((n.shape[0], rows.shape[0]), tl.float32)
            for j in tl.static_range(slice, slice + TOGETHER):
                at = (block * 4 + j) * SLICE + k
                mask = valid[None, :]
                if not WHOLE:
                    mask &= (at < K)[:, None]
                inputs = tl.load(rows[None, :] + at[:, None], mask=mask, other=0.0)
                numbers = _numbers(packed, word, table, j, KIND, ZERO, DTYPE)
                if SCALED:
                    numbers *= scale.to(numbers.dtype)[:, None]
                sums = tl.dot(numbers, inputs, sums, input_precision="ieee")
            if SCALED:
                acc = sums
            else:
                acc += sums * scale[:, None]
    return acc


@cached_launch
@triton.jit(do_not_specialize=["M", "BLOCKS"])
def _packed_rows(
    x,
    words,
    scales,
    table,
    bias,
    y,
    M,
    N,
    K,
    BLOCKS,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    HALF: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    SPAN: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if EARLY:
        start_next(PDL)
    wait(PDL)
    OUTPUTS: tl.constexpr = BLOCK_N if GATE == "" else BLOCK_N // 2
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, BLOCK_N)
    # without masks: what is too much is not stored
    n = tl.minimum(tl.program_id(0) * OUTPUTS + row % OUTPUTS, N - 1)
    stride = N
    if GATE != "":
        n += row // OUTPUTS * N  # gates, then as many ups
        stride = 2 * N
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = packed_sums(
        x + m * K,
        m < M,
        words,
        scales,
        table,
        n,
        stride,
        K,
        BLOCKS,
        tl.program_id(1),
        tl.num_programs(1),
        KIND,
        ZERO,
        HALF,
        SLICE,
        GROUP,
        TOGETHER,
        SPAN,
        SCALED,
        WHOLE,
        x.dtype.element_ty,
    )
    if not EARLY:
        start_next(PDL)  # not earlier, as not all programs fit the GPU at once
    if BIAS:
        acc += tl.load(bias + n).to(tl.float32)[:, None]
    out = acc.to(y.dtype.element_ty)
    if GATE != "":
        # Rounded as separate operations would.
        gate, up = tl.split(tl.permute(tl.reshape(out, (2, OUTPUTS, BLOCK_M)), (1, 2, 0)))
        gate = apply_activation(gate.to(tl.float32), GATE).to(out.dtype).to(tl.float32)
        out = (gate * up.to(tl.float32)).to(out.dtype)
    y += tl.program_id(1) * M * N
    mask = (outputs < N)[:, None] & (m < M)[None, :]
    tl.store(y + m[None, :] * N + outputs[:, None], out, mask=mask)


@cached_launch
@triton.jit
def _add_parts(sums, y, size, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + part * size + at, mask=at < size, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < size)


@cached_launch
@triton.jit
def _decode_packed(
    words,
    scales,
    table,
    out,
    N,
    K,
    BLOCKS,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    HALF: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)  # what is written may still be read
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(rows, N - 1).to(tl.int64)
    k, block = tl.arange(0, SLICE), tl.program_id(1)
    word = block * (SLICE // 2) + tl.arange(0, SLICE // 2)
    packed = tl.load(words + n[:, None] * (BLOCKS * (SLICE // 2)) + word[None, :])
    # That holds numbers exactly, also without zeros that are between two.
    dtype: tl.constexpr = tl.float32 if KIND == "table" or ZERO < 0 else out.dtype.element_ty
    for j in tl.static_range(4):
        word = tl.load(scales + (block * 4 + j) * SLICE // GROUP * N + n)
        value = _numbers(packed, word, table, j, KIND, ZERO, dtype).to(tl.float32)
        value *= (scales_of(word, ZERO, HALF) / _numbers_factor(KIND, dtype))[:, None]
        at = (block * 4 + j) * SLICE + k
        mask = (rows < N)[:, None] & (at < K)[None, :]
        tl.store(out + n[:, None] * K + at[None, :], value.to(out.dtype.element_ty), mask=mask)


def packed_rows(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    gate: str = "",
    *,
    parts: int = 1,
) -> torch.Tensor:
    """Returns x [M, K] times a packed matrix [N, K] transposed, plus bias [N], as [M, N].

    Args:
        x: [M, K].
        weight: [N, K]; with `gate` [2 N, K], gates first.
        bias: [N], with `gate` [2 N]; or None.
        gate: activation of a gated pair ("silu", "gelu", "gelu_tanh"): the result is act(gates) *
            ups; or "".
        parts: number of parts that sums are split into. With several, for which bias and gate must
            be left out, the result is float32 [parts, M, N], which the caller must add up.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0] // 2 if gate else weight.shape[0]
    assert parts == 1 or (bias is None and not gate)
    if (hopper := hopper_packed_module(weight, rows, x.dtype)) is not None:
        product: torch.Tensor = hopper.packed_rows_hopper(x, weight, bias, gate, parts=parts)
        return product
    y = (
        x.new_empty((rows, outputs))
        if parts == 1
        else x.new_empty((parts, rows, outputs), dtype=torch.float32)
    )
    properties = properties_of(x.device)
    many = _FEW < rows <= max_packed_rows(x.device, x.dtype)
    if many:
        block_m = 128
        block_n = _OUTPUTS_MANY
        span = min(weight.slice, 32)
        warps = 8
    else:
        tma = properties.has_tma
        block_m = min(_FEW if tma else 32, max(8 if tma else 16, round_up_to_power_of_2(rows)))
        block_n = _OUTPUTS
        span = weight.slice
        warps = 4
    grid = cdiv(outputs, block_n // 2 if gate else block_n), parts, cdiv(rows, block_m)
    # bytes of words, and of rows
    stage = span * (block_n * 2 + SLICES * block_m * x.element_size())
    scratch = 8 * SCRATCH if many and weight.table is not None else SCRATCH
    _packed_rows[grid](
        x,
        weight.words,
        weight.scales,
        weight.table,
        bias,
        y,
        rows,
        outputs,
        inputs,
        count_column_blocks(weight),
        **weight_kernel_constants(weight),
        TOGETHER=math.gcd(weight.group // weight.slice, SLICES),
        SPAN=span,
        SCALED=many,
        WHOLE=inputs % (SLICES * weight.slice) == 0,
        BIAS=bias is not None,
        GATE=gate,
        EARLY=math.prod(grid) <= properties.multiprocessors,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=warps,
        num_stages=max(1, min(3, (properties.shared_memory - scratch) // stage)),
        **pdl_options(x.device),
    )
    return y


def add_parts(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Adds up the partial sums [P, M, N] of a matmul. Returns [M, N] in the given dtype."""
    y = parts.new_empty(parts.shape[1:], dtype=dtype)
    _add_parts[(cdiv(y.numel(), 1024),)](
        parts, y, y.numel(), PARTS=len(parts), BLOCK=1024, num_warps=4, **pdl_options(y.device)
    )
    return y


def max_packed_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Returns the maximum number of rows for which `packed_rows` is faster than decoding the matrix
    first. The limit is lower for float16: the kernel for many rows rounds scales to the dtype of
    the rows, and float16 lacks their range.
    """
    properties = properties_of(device)
    # which the interpreter can't compute in
    many = torch.float32 if properties == INTERPRETER else torch.bfloat16
    return _MANY if properties.has_tma and dtype == many else _FEW


def hopper_packed_module(weight: PackedWeight, rows: int, dtype: torch.dtype) -> ModuleType | None:
    """Returns the module of the Hopper kernel if it supports this many rows of this dtype, else
    None.
    """
    hopper = hopper_kernels(properties_of(weight.words.device), "packed_products_hopper")
    return hopper if hopper is not None and hopper.supports(weight, rows, dtype) else None


def parts_of(weight: PackedWeight, rows: int, dtype: torch.dtype) -> int:
    """Returns how many parts to split the reduction into, so that there are enough programs to keep
    a GPU busy.
    """
    if (hopper := hopper_packed_module(weight, rows, dtype)) is not None:
        parts: int = hopper.parts_of(weight, rows)
        return parts
    programs = cdiv(weight.shape[0], _OUTPUTS)
    wanted = 4 if rows <= 16 else 2
    if rows > _FEW:
        programs = cdiv(weight.shape[0], _OUTPUTS_MANY) * cdiv(rows, 128)
        wanted = 1
    most = wanted * properties_of(weight.words.device).multiprocessors // programs
    return next(
        parts
        for parts in (8, 4, 2, 1)
        if parts <= max(1, min(most, count_column_blocks(weight) // 2))
    )


def decode_weight(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values [N, K] of a packed matrix, rounded to a dtype. Moves 2.5 N K bytes in 16
    bits.
    """
    outputs, inputs = weight.shape
    blocks = count_column_blocks(weight)
    out = torch.empty((outputs, inputs), dtype=dtype, device=weight.words.device)
    _decode_packed[(cdiv(outputs, 32), blocks)](
        weight.words,
        weight.scales,
        weight.table,
        out,
        outputs,
        inputs,
        blocks,
        **weight_kernel_constants(weight),
        BLOCK_N=32,
        num_warps=4,
        **pdl_options(out.device),
    )
    return out


def count_column_blocks(weight: PackedWeight) -> int:
    """Returns how many blocks the columns of a matrix are divided into."""
    return weight.words.shape[1] // (SLICES * weight.slice // NUMBERS)


def weight_kernel_constants(weight: PackedWeight) -> dict[str, object]:
    """Returns the kernel constants that depend on the matrix."""
    own = weight.half is not None
    return {
        "KIND": weight.kind,
        "ZERO": -1 if own else weight.zero,
        "HALF": str(weight.half).removeprefix("torch."),
        "SLICE": weight.slice,
        "GROUP": weight.group,
    }
