"""Multiplies rows by matrices of 4-bit integers on Hopper GPUs. One warp copies words and rows
ahead in bulk (TMA). Two warp groups decode 64 rows of the matrix each, and use the decoded numbers
directly from registers in asynchronous matmuls.

While a slice of columns is multiplied, the next one is decoded. A matrix is decoded once for up to
256 rows, and the first words are copied before the preceding kernels have finished. Moves N * K / 2
bytes and the scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sglang_lite.runtime.kernels.activation import apply_activation
from sglang_lite.runtime.kernels.descriptors import tensor_descriptor
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.packed_products import (
    count_column_blocks,
    scales_of,
    weight_kernel_constants,
    zeros_of,
)
from sglang_lite.runtime.kernels.packed_weight import SLICES, PackedWeight
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.prefill_attention_hopper import sync
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

MAX_ROWS = 256
_FEW = 64  # rows up to which `packed_products` is as fast, but for groups of 32
_OUTPUTS = gl.constexpr(64)  # rows of the matrix of a warp group
# the name changed with Triton 3.7
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _words(place, block, stride, SLICE: gl.constexpr, GROUP: gl.constexpr):
    """Loads the words of `PackedWeight.scales` for the four slices of a block. Slices of the same
    group get the same word.
    """
    first = gl.load(place + block * 4 * SLICE // GROUP * stride)
    second, third, fourth = first, first, first
    if GROUP <= 2 * SLICE:
        third = gl.load(place + (block * 4 + 2) * SLICE // GROUP * stride)
        fourth = third
    if GROUP == SLICE:
        second = gl.load(place + (block * 4 + 1) * stride)
        fourth = gl.load(place + (block * 4 + 3) * stride)
    return first, second, third, fourth


@gluon.jit
def _twice(x):
    """Rounds float32 x [N] to bfloat16, and returns it in both halves of int32."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _factors(word, ZERO: gl.constexpr, HALF: gl.constexpr):
    """Unpacks zero points and scales from words of `PackedWeight.scales`. Returns both as pairs of
    equal bfloat16 numbers, multiplied by the powers of 2 that `_numbers` expects.
    """
    scale = scales_of(word, ZERO, HALF)
    if ZERO < 0:
        zero = zeros_of(word)
    else:
        zero = gl.full_like(scale, ZERO)
    return _twice(zero * -(2.0**-6)), _twice(scale * 2.0**6)


@gluon.jit
def _all_factors(words, ZERO: gl.constexpr, HALF: gl.constexpr):
    """Returns the `_factors` of a block's four slices."""
    first, second = _factors(words[0], ZERO, HALF), _factors(words[1], ZERO, HALF)
    return first, second, _factors(words[2], ZERO, HALF), _factors(words[3], ZERO, HALF)


@gluon.jit
def _numbers(words, factors, J: gl.constexpr, OPERAND: gl.constexpr):
    """Unpacks the values of slice J of a block as an operand, two at a time. Masked integers are
    read as bfloat16 numbers that are too small by a constant power of 2. The multiplication that
    subtracts the zero points corrects this.
    """
    zero, scale = factors
    pairs = (words >> 8 * (J // 2)) & (0x000F000F << 4 * (J % 2))
    UP: gl.constexpr = ["0x7F007F00", "0x7D007D00"][J % 2]  # 2**127, and 2**123
    values = gl.inline_asm_elementwise(
        "{ .reg .b32 up, q; mov.b32 up, "
        + UP
        + "; fma.rn.bf16x2 q, $1, up, $2; mul.rn.bf16x2 $0, q, $3; }",
        "=r,r,r,r",
        [pairs, zero[:, None], scale[:, None]],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    low = (values & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (values >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    both = gl.reshape(gl.join(low, high), [words.shape[0], 2 * words.shape[1]])
    return gl.convert_layout(both, OPERAND, assert_trivial=True)


@gluon.jit
def _operands(words, factors, STEP: gl.constexpr, PER: gl.constexpr, OPERAND: gl.constexpr):
    """Returns the `_numbers` of the PER slices, one or two, that one step of a block multiplies."""
    first = _numbers(words, factors[STEP * PER], STEP * PER, OPERAND)
    second = first
    if PER == 2:
        second = _numbers(words, factors[STEP * PER + 1], STEP * PER + 1, OPERAND)
    return first, second


@gluon.jit
def _rows(N, WARPS: gl.constexpr, GATE: gl.constexpr):
    """Returns the first row of the matrix that warp group WARPS (0 or 1) multiplies, the first
    output that it computes, and the number of rows of the matrix. With GATE, group 0 multiplies
    gates, and group 1 the ups that belong to them.
    """
    if GATE == "":
        output = (gl.program_id(0) * 2 + WARPS) * _OUTPUTS
        row, count = output, N
    else:
        output = gl.program_id(0) * _OUTPUTS
        row, count = output + WARPS * N, 2 * N
    return row, output, count


@gluon.jit
def _blocks(BLOCKS):
    """Returns how many blocks of columns a program computes. The programs take blocks in turn."""
    return (BLOCKS - gl.program_id(1) + gl.num_programs(1) - 1) // gl.num_programs(1)


@gluon.jit
def _multiply(
    scales,
    bias,
    y,
    M,
    N,
    BLOCKS,
    words,
    x_buffers,
    words_ready,
    words_free,
    x_ready,
    x_free,
    ups,
    ups_ready,
    WARPS: gl.constexpr,
    ZERO: gl.constexpr,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    BIAS: gl.constexpr,
    GATE: gl.constexpr,
):
    """Runs a computing warp group."""
    WORD_STAGES: gl.constexpr = words_ready.shape[0]
    X_STAGES: gl.constexpr = x_ready.shape[0]
    PER: gl.constexpr = x_buffers.shape[0] // X_STAGES  # slices of a step
    STEPS: gl.constexpr = 4 // PER  # of a block
    ROWS: gl.constexpr = x_buffers.shape[1]
    SLICE: gl.constexpr = x_buffers.shape[2]
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=2)
    # a word for two numbers
    PAIRS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=1)

    row, output, stride = _rows(N, WARPS, GATE)
    part, parts, count = gl.program_id(1), gl.num_programs(1), _blocks(BLOCKS)
    last = part + (count - 1) * parts
    place = scales + gl.minimum(
        row + gl.arange(0, _OUTPUTS, layout=gl.SliceLayout(1, PAIRS)), stride - 1
    )
    factors = _all_factors(_words(place, part, stride, SLICE, GROUP), ZERO, HALF)
    ahead = _words(place, gl.minimum(part + parts, last), stride, SLICE, GROUP)
    acc = gl.zeros([_OUTPUTS, ROWS], gl.float32, layout=PRODUCT)
    mbarrier.wait(words_ready.index(0), 0)
    packed = words.index(WARPS).load(PAIRS)
    mbarrier.arrive(words_free.index(0), count=1)
    numbers = _operands(packed, factors, 0, PER, OPERAND)
    for i in range(count):
        later = _words(place, gl.minimum(part + (i + 2) * parts, last), stride, SLICE, GROUP)
        for step in gl.static_range(STEPS):
            fetch = STEPS * i + step
            mbarrier.wait(x_ready.index(fetch % X_STAGES), fetch // X_STAGES & 1)
            for j in gl.static_range(PER):
                x = x_buffers.index(fetch % X_STAGES * PER + j)
                acc = warpgroup_mma(numbers[j], x.permute((1, 0)), acc, is_async=True)
            if step < STEPS - 1:
                following = _operands(packed, factors, step + 1, PER, OPERAND)
            else:  # of the next block; behind the last one what is there already
                block = gl.minimum(i + 1, count - 1)
                mbarrier.wait(words_ready.index(block % WORD_STAGES), block // WORD_STAGES & 1)
                packed = words.index(block % WORD_STAGES * 2 + WARPS).load(PAIRS)
                mbarrier.arrive(words_free.index(block % WORD_STAGES), count=1)
                factors = _all_factors(ahead, ZERO, HALF)
                following = _operands(packed, factors, 0, PER, OPERAND)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(x_free.index(fetch % X_STAGES), count=1)
            numbers = following
        ahead = later
    n = gl.arange(0, _OUTPUTS, layout=gl.SliceLayout(1, PRODUCT))
    if BIAS:
        acc += gl.load(bias + gl.minimum(row + n, stride - 1)).to(gl.float32)[:, None]
    out = acc.to(y.dtype.element_ty)
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, PRODUCT))
    to = y + part * M * N + m[None, :] * N + (output + n)[:, None]
    mask = (output + n < N)[:, None] & (m < M)[None, :]
    if GATE == "":
        gl.store(to, out, mask=mask)
    elif WARPS == 1:
        ups.store(out)
        mbarrier.arrive(ups_ready, count=1)
    else:
        mbarrier.wait(ups_ready, 0)
        up = ups.load(PRODUCT)
        # Rounded as separate operations would.
        gate = apply_activation(out.to(gl.float32), GATE).to(out.dtype).to(gl.float32)
        gl.store(to, (gate * up.to(gl.float32)).to(out.dtype), mask=mask)


@gluon.jit
def _copy_words(from_words, N, i, words, ready, GATE: gl.constexpr):
    """Starts copies of the words of a program's i-th block."""
    STAGES: gl.constexpr = ready.shape[0]
    WORDS: gl.constexpr = words.shape[2]
    stage, block = i % STAGES, gl.program_id(1) + i * gl.num_programs(1)
    mbarrier.expect(ready.index(stage), 2 * _OUTPUTS * WORDS * 4)
    for group in gl.static_range(2):
        row, _, _ = _rows(N, group, GATE)
        _load(from_words, [row, block * WORDS], ready.index(stage), words.index(2 * stage + group))


@gluon.jit
def _copy(
    from_words,
    from_x,
    N,
    BLOCKS,
    words,
    x_buffers,
    words_ready,
    words_free,
    x_ready,
    x_free,
    GATE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Runs the copying warp."""
    WORD_STAGES: gl.constexpr = words_ready.shape[0]
    X_STAGES: gl.constexpr = x_ready.shape[0]
    PER: gl.constexpr = x_buffers.shape[0] // X_STAGES
    ROWS: gl.constexpr = x_buffers.shape[1]
    SLICE: gl.constexpr = x_buffers.shape[2]
    count = _blocks(BLOCKS)
    for i in range(gl.minimum(count, WORD_STAGES)):  # no kernel writes weights
        _copy_words(from_words, N, i, words, words_ready, GATE)
    wait(PDL)
    for i in range(count):
        block = gl.program_id(1) + i * gl.num_programs(1)
        for step in gl.static_range(4 // PER):
            fetch = 4 // PER * i + step
            ready = x_ready.index(fetch % X_STAGES)
            mbarrier.wait(x_free.index(fetch % X_STAGES), (fetch // X_STAGES & 1) ^ 1)
            mbarrier.expect(ready, PER * ROWS * SLICE * 2)
            for j in gl.static_range(PER):
                column = (block * 4 + step * PER + j) * SLICE
                _load(from_x, [0, column], ready, x_buffers.index(fetch % X_STAGES * PER + j))
        if i + WORD_STAGES < count:
            mbarrier.wait(words_free.index(i % WORD_STAGES), i // WORD_STAGES & 1)
            _copy_words(from_words, N, i + WORD_STAGES, words, words_ready, GATE)


@cached_launch
@gluon.jit(do_not_specialize=["M", "BLOCKS"])
def _packed_products(
    from_x,
    from_words,
    scales,
    bias,
    y,
    M,
    N,
    BLOCKS,
    ZERO: gl.constexpr,
    HALF: gl.constexpr,
    SLICE: gl.constexpr,
    GROUP: gl.constexpr,
    BIAS: gl.constexpr,
    GATE: gl.constexpr,
    EARLY: gl.constexpr,
    ROWS: gl.constexpr,
    WORD_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    PER: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    OF_WORDS: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=2 * SLICE, element_bitwidth=32, rank=2
    )
    OF_ROWS: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=2 * SLICE, element_bitwidth=16, rank=2
    )
    OF_UPS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0, 1])
    words = gl.allocate_shared_memory(gl.int32, [2 * WORD_STAGES, _OUTPUTS, SLICE // 2], OF_WORDS)
    x_buffers = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES * PER, ROWS, SLICE], OF_ROWS)
    ups = gl.allocate_shared_memory(gl.bfloat16, [_OUTPUTS, ROWS if GATE != "" else 1], OF_UPS)
    words_ready = gl.allocate_shared_memory(gl.int64, [WORD_STAGES, 1], mbarrier.MBarrierLayout())
    words_free = gl.allocate_shared_memory(gl.int64, [WORD_STAGES, 1], mbarrier.MBarrierLayout())
    x_ready = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    ups_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(WORD_STAGES):
        mbarrier.init(words_ready.index(i), count=1)
        mbarrier.init(words_free.index(i), count=2)  # both groups arrive
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_ready.index(i), count=1)
        mbarrier.init(x_free.index(i), count=2)
    mbarrier.init(ups_ready, count=1)
    fence_async_shared()
    sync()
    if EARLY:
        start_next(PDL)
    gl.warp_specialize([
        (_multiply, (scales, bias, y, M, N, BLOCKS, words, x_buffers, words_ready, words_free, x_ready, x_free,
                     ups, ups_ready, 0, ZERO, HALF, GROUP, BIAS, GATE)),
        (_multiply, (scales, bias, y, M, N, BLOCKS, words, x_buffers, words_ready, words_free, x_ready, x_free,
                     ups, ups_ready, 1, ZERO, HALF, GROUP, BIAS, GATE)),
        (_copy, (from_words, from_x, N, BLOCKS, words, x_buffers, words_ready, words_free, x_ready, x_free,
                 GATE, PDL)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


def supports(weight: PackedWeight, rows: int, dtype: torch.dtype) -> bool:
    """Returns whether the kernel supports a matrix, and is the fastest for this many rows of a
    dtype.
    """
    slices = weight.group // weight.slice  # of a group
    groups = slices in (1, 2) or slices % SLICES == 0
    able = (
        groups
        and weight.kind == "integers"
        and weight.slice in (32, 64)
        and dtype == torch.bfloat16
    )
    return able and (1 if weight.group == 32 else _FEW) < rows <= MAX_ROWS


def parts_of(weight: PackedWeight, rows: int) -> int:
    """Returns how many parts to split the reduction into, like the function of the same name in
    `packed_products`.
    """
    programs = cdiv(weight.shape[0], 2 * _OUTPUTS.value)
    most = (
        _hopper_launch_for_rows(rows).programs
        * properties_of(weight.words.device).multiprocessors
        // programs
    )
    return next(
        parts
        for parts in (8, 4, 2, 1)
        if parts <= max(1, min(most, count_column_blocks(weight) // 2))
    )


@dataclass(frozen=True, slots=True)
class _Launch:
    """Launch parameters of `packed_rows_hopper`.

    Attributes:
        words: blocks whose words are copied ahead.
        rows: blocks of x that are copied ahead.
        together: slices of columns, 1 or 2, that are copied, decoded and multiplied together.
        registers: registers of a multiplying thread.
        limit: maximum registers of a thread at launch, before warps get their own; or None.
        programs: programs that a multiprocessor has room for.
    """

    words: int
    rows: int
    together: int
    registers: int = 240
    limit: int | None = None
    programs: int = 1


def _hopper_launch_for_rows(rows: int) -> _Launch:
    """Returns the launch parameters for this many rows. Measured on an H200."""
    if rows <= 32:
        return _Launch(words=4, rows=4, together=2, registers=104, limit=80, programs=2)
    return (
        _Launch(words=4, rows=4, together=2)
        if rows <= 128
        else _Launch(words=3, rows=4, together=1)
    )


def packed_rows_hopper(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    gate: str = "",
    *,
    parts: int = 1,
) -> torch.Tensor:
    """Computes `packed_rows` for up to MAX_ROWS rows, with the same arguments and result. Scales
    are rounded to bfloat16.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0] // 2 if gate else weight.shape[0]
    assert parts == 1 or (bias is None and not gate)
    y = (
        x.new_empty((rows, outputs))
        if parts == 1
        else x.new_empty((parts, rows, outputs), dtype=torch.float32)
    )
    launch = _hopper_launch_for_rows(rows)
    tile = max(8, round_up_to_power_of_2(rows))
    size = weight.slice
    of_words, of_rows = (
        gl.NVMMASharedLayout(swizzle_byte_width=2 * size, element_bitwidth=bits, rank=2)
        for bits in (32, 16)
    )
    grid = cdiv(outputs, _OUTPUTS.value if gate else 2 * _OUTPUTS.value), parts
    _packed_products[grid](
        tensor_descriptor(x, inputs, (tile, size), of_rows),
        tensor_descriptor(
            weight.words, weight.words.shape[1], (_OUTPUTS.value, size // 2), of_words
        ),
        weight.scales,
        bias,
        y,
        rows,
        outputs,
        count_column_blocks(weight),
        **{
            name: value for name, value in weight_kernel_constants(weight).items() if name != "KIND"
        },
        BIAS=bias is not None,
        GATE=gate,
        EARLY=math.prod(grid) <= launch.programs * properties_of(x.device).multiprocessors,
        ROWS=tile,
        WORD_STAGES=launch.words,
        X_STAGES=launch.rows,
        PER=launch.together,
        REGISTERS=launch.registers,
        num_warps=4,
        **({} if launch.limit is None else {"maxnreg": launch.limit}),
        **pdl_options(x.device),
    )
    return y
