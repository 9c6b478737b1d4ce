"""Parts of kernels that carry recurrent states over chunks of a row's tokens.

Chunk i of row r starts at token offsets[r] + i * CHUNK. Programs, and intermediate results, are
numbered by slots: the chunk has slot offsets[r] // CHUNK + r + i. No two chunks share a slot, and
the host, which does not know the offsets, knows how many slots there may be.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.device_properties import INTERPRETER, properties_of
from sglang_lite.runtime.kernels.sizes import cdiv

CHUNK = 64  # tokens


def count_slots(tokens: int, rows: int, chunk: int = CHUNK) -> int:
    """Returns how many slots the chunks of some rows may have."""
    return cdiv(tokens, chunk) + rows - 1


def dot_precision(dtype: torch.dtype, device: torch.device) -> str:
    """Returns how products of matrices are computed, for `multiply`: in bfloat16 if the inputs are,
    in TF32, which has the mantissa of float16, if they are float16, and else in three products of
    TF32, which lose two bits of float32.
    """
    if properties_of(device) == INTERPRETER:  # it multiplies float32 alone
        return "ieee"
    return {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(dtype, "tf32x3")


@triton.jit
def find_chunk(offsets, count, slot, CHUNK: tl.constexpr):
    """Returns the row whose chunk has a slot, the row's first token, the chunk's first token and
    the end of the row's tokens. The chunk is empty if its first token is not before that end.
    """
    row = -1
    for at in range(0, count, 128):
        other = at + tl.arange(0, 128)
        begin = tl.load(offsets + other, mask=other < count, other=0)
        row += tl.sum(((begin // CHUNK + other <= slot) & (other < count)).to(tl.int32), 0)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    return row, begin, begin + (slot - begin // CHUNK - row) * CHUNK, end


@triton.jit
def normalise(x):
    """Returns the rows of x, divided by their L2 norms."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def multiply(x, y, PRECISION: tl.constexpr):
    """Returns x @ y of float32 blocks."""
    if PRECISION == "bf16":
        product = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16))
    else:
        product = tl.dot(x, y, input_precision=PRECISION)
    return product


@triton.jit
def decay_between(total):
    """Returns exp(total[i] - total[j]) for i >= j, and else 0, of sums of decays [n] in float64."""
    i = tl.arange(0, total.shape[0])
    between = (total[:, None] - total[None, :]).to(tl.float32)
    return tl.exp(tl.where(i[:, None] >= i[None, :], between, -float("inf")))


@triton.jit
def invert_unit_triangle(a):
    """Returns the inverse of I + a, for a [64, 64] that is 0 on and above the diagonal.

    Blocks on the diagonal are inverted, of 2 rows, then of 4, and so on. From the inverses X of two
    neighbouring blocks follows that of the block of twice their size: X - X b X, where b is the
    part of a between them. The sum of the powers of -a takes as many products, but loses all digits
    where keys are alike.
    """
    i = tl.arange(0, 64)
    pair = (i[:, None] // 2) == (i[None, :] // 2)
    inverse = (i[:, None] == i[None, :]).to(tl.float32) - tl.where(pair, a, 0.0)
    for level in tl.static_range(2, 7):
        inverse = join_blocks(inverse, a, 1 << level)
    return inverse


@triton.jit
def join_blocks(inverse, a, SIZE: tl.constexpr):
    """Returns the inverses of the blocks of SIZE on the diagonal of I + a, from those of the blocks
    of half that size.
    """
    i = tl.arange(0, 64)
    block = i // SIZE
    half = i // (SIZE // 2)
    between = (block[:, None] == block[None, :]) & (half[:, None] != half[None, :])
    change = tl.dot(tl.where(between, a, 0.0), inverse, input_precision="tf32x3")
    return inverse - tl.dot(inverse, change, input_precision="tf32x3")
