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
    in float32 if they are, and in TF32, which has the mantissa of float16, if they are float16.
    """
    if dtype == torch.float32 or properties_of(device) == INTERPRETER:
        return "ieee"
    return "bf16" if dtype == torch.bfloat16 else "tf32"


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

    The blocks of 16 on the diagonal are inverted by forward substitution, all at the same time.
    From the inverses X of neighbouring blocks follows that of the block of twice their size:
    X - X a' X, where a' is the part of a below them. Powers of a would be fewer products, but
    they overflow where keys are alike.
    """
    n: tl.constexpr = 64
    small: tl.constexpr = 16
    blocks: tl.constexpr = n // small
    i = tl.arange(0, n)
    of = tl.arange(0, blocks)
    inner = tl.arange(0, small)
    diagonal = of[:, None, None, None] == of[None, None, :, None]
    a4 = tl.reshape(a, (blocks, small, blocks, small))
    lower = tl.sum(tl.where(diagonal, a4, 0.0), 2)  # [block, row, column]
    eye = (inner[:, None] == inner[None, :]).to(tl.float32)
    x = tl.broadcast_to(eye[None, :, :], (blocks, small, small))
    for row in range(1, small):
        here = (inner == row)[None, :, None]
        coefficients = tl.sum(tl.where(here, lower, 0.0), 1)  # [block, column]
        known = tl.sum(coefficients[:, :, None] * x, 1)
        x = tl.where(here, x - known[:, None, :], x)
    wide = tl.broadcast_to(tl.expand_dims(x, 2), (blocks, small, blocks, small))
    inverse = tl.reshape(tl.where(diagonal, wide, 0.0), (n, n))
    for level in tl.static_range(1, 3):
        size: tl.constexpr = small << level
        same = (i[:, None] // size) == (i[None, :] // size)
        apart = (i[:, None] // (size // 2)) != (i[None, :] // (size // 2))
        below = tl.where(same & apart, a, 0.0)
        change = tl.dot(below, inverse, input_precision="ieee")
        inverse -= tl.dot(inverse, change, input_precision="ieee")
    return inverse
