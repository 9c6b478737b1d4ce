"""Attention of the few queries of one token, one block of tokens at a time: like `softmax`, but
with transposed matmuls.

Matrix units need at least sixteen rows, but only eight columns. So queries are columns here, which
halves the work and the registers of a group of up to eight heads: a multiprocessor fits more
programs, and while some wait, others work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_lite.runtime.kernels.sizes import round_up_to_power_of_2

_MIN_COLUMNS = 8


def columns(group: int) -> int:
    """Returns the number of columns that a program needs for `group` queries: a power of two of at
    least 8.
    """
    return max(_MIN_COLUMNS, round_up_to_power_of_2(group))


@triton.jit
def clamped_page_of(pages, token, end, PAGE: tl.constexpr):
    """Returns the pages of tokens [N]; tokens from `end` on get the page of token `end` - 1, so
    that reads there yield finite numbers.
    """
    return tl.load(pages + tl.maximum(tl.minimum(token, end - 1), 0) // PAGE)


@triton.jit
def load_few(
    k,
    v,
    page,
    token,
    valid,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Loads the keys [N, BLOCK_D] and values [BLOCK_D, N] of a block of tokens.

    Args:
        k, v: keys and values of the KV head.
        page, token: page and position of each token [N].
        valid: bool [N], tokens that may be read; used only if MASKED.
    """
    d = tl.arange(0, BLOCK_D)
    offset = (page.to(tl.int64) * PAGE + token % PAGE) * DIM
    at_keys = k + offset[:, None] + d[None, :]
    at_values = v + offset[None, :] + d[:, None]
    if MASKED:
        keys = tl.load(at_keys, mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
        values = tl.load(at_values, mask=valid[None, :] & (d < DIM)[:, None], other=0.0)
    elif DIM < BLOCK_D:
        keys = tl.load(at_keys, mask=(d < DIM)[None, :], other=0.0)
        values = tl.load(at_values, mask=(d < DIM)[:, None], other=0.0)
    else:  # a mask that is always true costs a tenth
        keys = tl.load(at_keys)
        values = tl.load(at_values)
    return keys, values


@triton.jit
def add_few(
    queries,
    keys,
    values,
    token,
    visible,
    m,
    total,
    acc,
    scale,
    softcap,
    slopes,
    SOFTCAP: tl.constexpr,
):
    """Adds a block of N tokens to the running results of Q queries.

    Args:
        queries: [BLOCK_D, Q].
        keys, values: [N, BLOCK_D] and [BLOCK_D, N], from `load_few`.
        token: position of each token [N].
        visible: bool [N], tokens that count.
        m, total, acc: highest score [Q], sum of weights [Q] and weighted values [BLOCK_D, Q].
        slopes: float32 [Q], which queries' scores grow by with the token's position, or None.

    Returns:
        Updated m, total and acc.
    """
    scores = tl.dot(keys.to(queries.dtype), queries, input_precision="ieee")
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores * scale / softcap) - 1.0)
        scale = 1.0
    if slopes is not None:
        scores = scores * scale + token[:, None] * slopes[None, :]
        scale = 1.0
    scale *= 1.4426950408889634
    scores = tl.where(visible[:, None], scores, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, 0) * scale)
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # no token counted so far
    shrink = tl.exp2(m - shift)
    weights = tl.exp2(scores * scale - shift[None, :])
    total = total * shrink + tl.sum(weights, 0)
    acc = acc * shrink[None, :] + tl.dot(
        values.to(queries.dtype), weights.to(queries.dtype), input_precision="ieee"
    )
    return highest, total, acc


@triton.jit
def attend_few(
    queries,
    k,
    v,
    pages,
    page,
    start,
    end,
    m,
    total,
    acc,
    scale,
    softcap,
    slopes,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the tokens from `start` to `end` to the running results of the queries, as `add_few`.

    Args:
        pages: pages of the sequence.
        page: [BLOCK_N], `clamped_page_of` of the first block.
    """
    n = tl.arange(0, BLOCK_N)
    for at in range(start, end, BLOCK_N):
        next_page = clamped_page_of(pages, at + BLOCK_N + n, end, PAGE)
        keys, values = load_few(
            k, v, page, tl.minimum(at + n, end - 1), None, DIM, PAGE, False, BLOCK_D
        )
        m, total, acc = add_few(
            queries,
            keys,
            values,
            at + n,
            at + n < end,
            m,
            total,
            acc,
            scale,
            softcap,
            slopes,
            SOFTCAP,
        )
        page = next_page
    return m, total, acc
