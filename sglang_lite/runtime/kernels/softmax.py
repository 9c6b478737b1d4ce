"""Common code of the attention kernels: attention over one block of tokens at a time, with a
running softmax (Milakov and Gimelshein, arXiv:1805.02867). Scores are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_of(pages, token, end, PAGE: tl.constexpr):
    """Loads the pages of tokens [N]; 0 from `end` on. Called one block ahead, so that loads of keys
    need not wait for it.
    """
    return tl.load(pages + token // PAGE, mask=token < end, other=0)


@triton.jit
def first_visible(position, window, WINDOW: tl.constexpr):
    """Returns the first token that a query sees: within a window if WINDOW is 1, in its own chunk
    if WINDOW is 2.
    """
    first = position + 1 - window
    if WINDOW == 2:
        first = position // window * window
    return first


@triton.jit
def attend_block(
    queries,
    k,
    v,
    page,
    token,
    valid,
    visible,
    m,
    total,
    acc,
    scale,
    softcap,
    slopes,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds a block of N tokens to the running results of M queries.

    Args:
        queries: [M, BLOCK_D].
        k, v: keys and values of the KV head.
        page, token: page and position of each token [N].
        valid: bool [N], tokens that may be read; used only if MASKED.
        visible: bool [M, N] or [1, N], tokens that each query sees; used only if MASKED.
        m, total, acc: highest score [M], sum of weights [M] and weighted values [M, BLOCK_D].
        slopes: float32 [M], which queries' scores grow by with the token's position, or None.

    Returns:
        Updated m, total and acc.
    """
    d = tl.arange(0, BLOCK_D)
    offset = (page.to(tl.int64) * PAGE + token % PAGE) * DIM
    at_keys = k + offset[None, :] + d[:, None]
    at_values = v + offset[:, None] + d[None, :]
    if MASKED:
        keys = tl.load(at_keys, mask=valid[None, :] & (d < DIM)[:, None], other=0.0)
        values = tl.load(at_values, mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
    elif DIM < BLOCK_D:
        keys = tl.load(at_keys, mask=(d < DIM)[:, None], other=0.0)
        values = tl.load(at_values, mask=(d < DIM)[None, :], other=0.0)
    else:  # a mask that is always true costs a tenth
        keys = tl.load(at_keys)
        values = tl.load(at_values)
    scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee")
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores * scale / softcap) - 1.0)
        scale = 1.0
    if slopes is not None:
        scores = scores * scale + slopes[:, None] * token[None, :]
        scale = 1.0
    scale *= 1.4426950408889634
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, 1) * scale)
    shift = highest
    if MASKED:  # a query may not have seen any token yet
        shift = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(m - shift)
    weights = tl.exp2(scores * scale - shift[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(
        weights.to(queries.dtype), values.to(queries.dtype), input_precision="ieee"
    )
    return highest, total, acc


@triton.jit
def attend_tokens(
    queries,
    k,
    v,
    pages,
    page,
    start,
    end,
    scale,
    softcap,
    slopes,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes the attention of M queries over the tokens from `start` to `end`, all of which they
    see.

    Args:
        queries, k, v, slopes: as for `attend_block`.
        pages: pages of the sequence.
        page: [BLOCK_N], `page_of` the first block.

    Returns:
        m, total and acc, as in `attend_block`.
    """
    m = tl.full((queries.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((queries.shape[0],), tl.float32)
    acc = tl.zeros((queries.shape[0], BLOCK_D), tl.float32)
    n = tl.arange(0, BLOCK_N)
    clear = start + tl.maximum(end - start, 0) // BLOCK_N * BLOCK_N
    for at in range(start, clear, BLOCK_N):
        next_page = page_of(pages, at + BLOCK_N + n, end, PAGE)
        m, total, acc = attend_block(
            queries,
            k,
            v,
            page,
            at + n,
            None,
            None,
            m,
            total,
            acc,
            scale,
            softcap,
            slopes,
            DIM,
            PAGE,
            False,
            SOFTCAP,
            BLOCK_D,
        )
        page = next_page
    if clear < end:
        valid = clear + n < end
        m, total, acc = attend_block(
            queries,
            k,
            v,
            page,
            clear + n,
            valid,
            valid[None, :],
            m,
            total,
            acc,
            scale,
            softcap,
            slopes,
            DIM,
            PAGE,
            True,
            SOFTCAP,
            BLOCK_D,
        )
    return m, total, acc
