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


def count_columns(precision: str, device: torch.device) -> int:
    """Returns how many columns of a state a program takes, whose products have a precision of
    `dot_precision`. On Hopper these are 128 bytes of operands: Triton 3.6 computes products with
    fewer wrongly there, or reads beyond shared memory, if their second operand was computed by the
    program.
    """
    most = 64 if precision == "bf16" else 32
    return most if properties_of(device).capability[0] == 9 else most // 2


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
def multiply(x, y, PRECISION: tl.constexpr):
    """Returns x @ y of two blocks in float32."""
    if PRECISION == "bf16":
        product = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16))
    else:
        product = tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision=PRECISION)
    return product


@triton.jit
def decay_between(total):
    """Returns exp(total[i] - total[j]) for i >= j, and else 0, of sums of decays [n] in float64."""
    i = tl.arange(0, total.shape[0])
    between = (total[:, None] - total[None, :]).to(tl.float32)
    return tl.exp(tl.where(i[:, None] >= i[None, :], between, -float("inf")))


@triton.jit
def invert_unit_triangle(a, PRECISION: tl.constexpr):
    """Returns the inverse of I + a, for a [64, 64] that is 0 on and above the diagonal.

    Blocks on the diagonal are inverted, of 2 rows, then of 4, and so on. From the inverses X of two
    neighbouring blocks follows that of the block of twice their size: X - X b X, where b is the
    part of a between them. The sum of the powers of -a takes as many products, but loses all digits
    where keys are alike. Blocks of up to 16 rows are a batch [4, 16, 16], whose products take a
    fraction of the time.
    """
    i = tl.arange(0, 16)
    b = tl.arange(0, 4)
    same = b[:, None, None, None] == b[None, None, :, None]
    small = tl.sum(tl.where(same, tl.reshape(a, (4, 16, 4, 16)), 0.0), 2)
    pair = (i[:, None] // 2) == (i[None, :] // 2)
    eye = (i[:, None] == i[None, :]).to(tl.float32)
    inverse = eye[None, :, :] - tl.where(pair[None, :, :], small, 0.0)
    for level in tl.static_range(2, 5):
        between = small * lies_between(16, 1 << level)[None, :, :]
        inverse -= multiply_inverse(
            inverse, multiply_inverse(between, inverse, PRECISION), PRECISION
        )
    inverse = tl.where(same, inverse[:, :, None, :], 0.0).reshape((64, 64))
    for level in tl.static_range(5, 7):
        between = a * lies_between(64, 1 << level)
        inverse -= multiply_inverse(
            inverse, multiply_inverse(between, inverse, PRECISION), PRECISION
        )
    return inverse


@triton.jit
def lies_between(COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Returns 1 at the places [COUNT, COUNT] that lie in a block of SIZE on the diagonal, but in
    none of half that size, and else 0.
    """
    i = tl.arange(0, COUNT)
    block = i // SIZE
    half = i // (SIZE // 2)
    between = (block[:, None] == block[None, :]) & (half[:, None] != half[None, :])
    return between.to(tl.float32)


@triton.jit
def multiply_inverse(x, y, PRECISION: tl.constexpr):
    """Returns x @ y as precisely as an inverse needs that is used in products of PRECISION."""
    return tl.dot(x, y, input_precision="tf32" if PRECISION == "bf16" else "tf32x3")
