"""LoRA matmuls for few tokens. The ranks of all adapters are joined side by side, and each token is
multiplied by all of them.

    shrink, for each part p:    hidden[p, t, r] = A[r, p] x[t]  if rank r is of t's adapter, else 0
    expand:                     out[t, n] += sum over r of hidden[part of n, t, r] B[r, n]

Every matrix is read once, R (parts * K + N) elements for R ranks in total. All tokens are
multiplied by all ranks, as they wait for memory anyway, so tokens need not be sorted.

The model's own linear layer reads the same inputs. `shrink` lets the next kernel start as soon as
the inputs are available. A kernel that only waits at its end, like those of `tiled`, runs
concurrently with it, and expands when its own sums are done.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import apply_activation
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.launch_config import tile_stages
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.lora_weights import MAX_PARTS, RANKS, LoraStep, LoraWeights
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

BLOCK_R = 32  # ranks that are multiplied together
STAGES = 5  # tiles of B that a product loads ahead
_BLOCK_K = 64
_BLOCK_N = 128
_STAGES = 4
_SPLIT = 512  # fewest inputs of a split
_MAX_SPLITS = 16
_PARTIALS = 1 << 23  # most numbers of sums of splits


@dataclass(frozen=True, slots=True)
class JoinedRanks:
    """Ranks of all adapters that a step's tokens have, one adapter after another.

    Attributes:
        of_token: int32 [T], adapter of each token; a number that no adapter has if the token has
            none.
        pages: int32 [P], pages of these adapters.
        owners: int32 [P], adapter of each page.
        used: int32 [1], number of pages.
        counters: int32, zeros before and after each `shrink`.
    """

    of_token: torch.Tensor
    pages: torch.Tensor
    owners: torch.Tensor
    used: torch.Tensor
    counters: torch.Tensor

    @property
    def tiles(self) -> int:
        """Number of tiles of BLOCK_R ranks if all pages are used."""
        return cdiv(len(self.pages) * RANKS, BLOCK_R)


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Tokens' inputs after multiplication by A, still to be multiplied by B.

    Attributes:
        hidden: [parts, T, ranks], in the type of the inputs; undefined beyond the tile of the last
            rank in use.
        weights: matrices of the adapters.
        ranks: adapters of the tokens.
    """

    hidden: torch.Tensor
    weights: LoraWeights
    ranks: JoinedRanks


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _join(
    of_slot,
    slots,
    pages,
    ranks,
    of_token,
    joined,
    owners,
    used,
    counters,
    T,
    ADAPTERS: tl.constexpr,
    PAGES: tl.constexpr,
    RANKS: tl.constexpr,
    COUNTERS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    token, adapter = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_A)
    slot = tl.load(slots + token, mask=token < T, other=0)
    own = tl.load(of_slot + slot, mask=token < T, other=ADAPTERS)
    own = tl.where((own >= 0) & (own < ADAPTERS), own, ADAPTERS)
    tl.store(of_token + token, own, mask=token < T)
    present = (tl.histogram(own, BLOCK_A) > 0) & (adapter < ADAPTERS)
    count = tl.load(ranks + adapter, mask=present, other=0) // RANKS
    first = tl.cumsum(count, 0) - count
    for page in range(PAGES):
        valid = page < count
        number = tl.load(pages + adapter * PAGES + page, mask=valid, other=0)
        tl.store(joined + first + page, number, mask=valid)
        tl.store(owners + first + page, adapter, mask=valid)
    tl.store(used, tl.sum(count))
    for at in range(0, COUNTERS, BLOCK_T):
        tl.store(counters + at + token, 0, mask=at + token < COUNTERS)


def join_ranks(step: LoraStep, slots: torch.Tensor) -> JoinedRanks:
    """Concatenates the ranks of the adapters in a step. Must be called before the step's first
    kernel that overlaps with others.

    The LoRA kernels may then read the result without waiting for the kernels before them.

    Args:
        step: adapters of the step.
        slots: [T], slot of each token, of a few hundred at most.
    """
    adapters, longest = step.pages.shape
    pages, owners = step.ranks.new_empty((2, min(len(slots), adapters) * longest))
    counters = step.ranks.new_empty(MAX_PARTS * cdiv(len(pages) * RANKS, BLOCK_R))
    of_token = step.ranks.new_empty(len(slots))
    used = step.ranks.new_empty(1)
    _join[(1,)](
        step.of_slot,
        slots,
        step.pages,
        step.ranks,
        of_token,
        pages,
        owners,
        used,
        counters,
        len(slots),
        ADAPTERS=adapters,
        PAGES=longest,
        RANKS=RANKS,
        COUNTERS=len(counters),
        BLOCK_T=max(16, round_up_to_power_of_2(len(slots))),
        BLOCK_A=max(16, round_up_to_power_of_2(adapters + 1)),
        num_warps=4,
        **pdl_options(slots.device),
    )
    return JoinedRanks(of_token, pages, owners, used, counters)


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _shrink(
    x,
    a,
    hidden,
    partials,
    counters,
    of_token,
    pages,
    owners,
    used,
    T,
    K,
    PAGE,
    WIDTH,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    item = tl.program_id(0)
    split, part, tile = item % SPLITS, item // SPLITS % PARTS, item // (SPLITS * PARTS)
    count = tl.load(used) * RANKS
    r, t, k = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    page = tl.load(pages + r // RANKS, mask=r < count, other=0).to(tl.int64)
    owner = tl.load(owners + r // RANKS, mask=r < count, other=-1)
    own = tl.load(of_token + t, mask=t < T, other=-1)
    rows = a + page * PAGE + (part * RANKS + r % RANKS) * K
    wait(PDL)
    start_next(PDL)  # not earlier, as the next kernel may read x without waiting
    if tile * BLOCK_R >= count:
        return
    length = tl.cdiv(K, SPLITS * BLOCK_K) * BLOCK_K
    acc = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    for at in range(split * length, tl.minimum((split + 1) * length, K), BLOCK_K):
        inside = at + k < K
        weights = tl.load(
            rows[:, None] + (at + k)[None, :],
            mask=(r < count)[:, None] & inside[None, :],
            other=0.0,
        )
        values = tl.load(
            x + t[None, :] * K + (at + k)[:, None],
            mask=(t < T)[None, :] & inside[:, None],
            other=0.0,
        )
        acc = tl.dot(weights, values, acc, input_precision="ieee")
    if SPLITS > 1:
        place = (
            partials
            + item * (BLOCK_R * BLOCK_T)
            + tl.arange(0, BLOCK_R)[:, None] * BLOCK_T
            + t[None, :]
        )
        tl.store(place, acc, mask=(r < count)[:, None])
        tl.debug_barrier()  # all threads have stored before one signals
        finished = tl.atomic_add(counters + item // SPLITS, 1, sem="acq_rel")
        if finished < SPLITS - 1:
            return
        tl.store(counters + item // SPLITS, 0)
        place -= split * (BLOCK_R * BLOCK_T)
        acc = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
        for i in range(SPLITS):  # in a fixed order, so that the sum is deterministic
            acc += tl.load(
                place + i * (BLOCK_R * BLOCK_T),
                mask=(r < count)[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
    acc = tl.where(owner[:, None] == own[None, :], acc, 0.0)
    at = (part * T + t)[None, :] * WIDTH + r[:, None]
    tl.store(hidden + at, acc.to(hidden.dtype.element_ty), mask=(t < T)[None, :])


def shrink(x: torch.Tensor, weights: LoraWeights, ranks: JoinedRanks) -> Shrunk:
    """Multiplies inputs by A. The next kernel may start before this one has finished, but not
    before x is available.

    Args:
        x: [T, inputs], contiguous.
        weights: adapters' matrices of a product.
        ranks: adapters of the tokens.
    """
    (tokens, inputs), parts, tiles = x.shape, len(weights.outputs), ranks.tiles
    block = max(16, round_up_to_power_of_2(tokens))
    items = parts * tiles
    splits = min(_MAX_SPLITS, round_up_to_power_of_2(cdiv(inputs, _SPLIT)))
    while splits > 1 and items * splits * BLOCK_R * block > _PARTIALS:
        splits //= 2
    hidden = x.new_empty((parts, tokens, tiles * BLOCK_R))
    item = x.element_size()
    block_k = _BLOCK_K if item < 4 else 16  # float32 products are unrolled
    stages = tile_stages(
        properties_of(x.device), block, BLOCK_R, block_k, item, _STAGES if item < 4 else 2
    )
    partials = torch.empty(items * splits * BLOCK_R * block, dtype=torch.float32, device=x.device)
    _shrink[(items * splits,)](
        x,
        weights.a,
        hidden,
        partials,
        ranks.counters,
        ranks.of_token,
        ranks.pages,
        ranks.owners,
        ranks.used,
        tokens,
        inputs,
        weights.page_size,
        hidden.shape[2],
        PARTS=parts,
        SPLITS=splits,
        RANKS=RANKS,
        BLOCK_T=block,
        BLOCK_R=BLOCK_R,
        BLOCK_K=block_k,
        num_warps=4 if block <= 64 else 8,
        num_stages=stages,
        **pdl_options(x.device),
    )
    return Shrunk(hidden, weights, ranks)


@triton.jit
def outputs_of(tile, N, END0, END1, END2, END3, END4, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the part of a tile of outputs, its outputs [BLOCK_N], and the end of the part. No
    tile has outputs of two parts.
    """
    part, begin, before = 0, 0, 0  # of the part, its first output and its first tile
    end = N if PARTS == 1 else END0
    later = tl.cdiv(END0, BLOCK_N)  # first tile of the next part
    if PARTS > 1:
        part, begin, before, end = _go_on(tile, later, END0, END1, part, begin, before, end)
        later += tl.cdiv(END1 - END0, BLOCK_N)
    if PARTS > 2:
        part, begin, before, end = _go_on(tile, later, END1, END2, part, begin, before, end)
        later += tl.cdiv(END2 - END1, BLOCK_N)
    if PARTS > 3:
        part, begin, before, end = _go_on(tile, later, END2, END3, part, begin, before, end)
        later += tl.cdiv(END3 - END2, BLOCK_N)
    if PARTS > 4:
        part, begin, before, end = _go_on(tile, later, END3, END4, part, begin, before, end)
        later += tl.cdiv(END4 - END3, BLOCK_N)
    if PARTS > 5:
        part, begin, before, end = _go_on(tile, later, END4, N, part, begin, before, end)
    return part, begin + (tile - before) * BLOCK_N + tl.arange(0, BLOCK_N), end


@triton.jit
def _go_on(tile, later, begin_later, end_later, part, begin, before, end):
    """Returns the next part, its first output, its first tile and its end if the tile belongs to
    the next part, which begins at tile `later`. Otherwise returns the given values.
    """
    is_later = tile >= later
    return (
        part + is_later.to(tl.int32),
        tl.where(is_later, begin_later, begin),
        tl.where(is_later, later, before),
        tl.where(is_later, end_later, end),
    )


@triton.jit
def load_b(b, pages, count, first, n, end, N, PAGE, RANKS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Loads B [BLOCK_R, outputs n, which end at `end`] of the `count` ranks from `first` on. N:
    columns of B.
    """
    r = first + tl.arange(0, BLOCK_R)
    page = tl.load(pages + r // RANKS, mask=r < count, other=0).to(tl.int64)
    rows = b + page * PAGE + r % RANKS * N
    return tl.load(
        rows[:, None] + n[None, :], mask=(r < count)[:, None] & (n < end)[None, :], other=0.0
    )


@triton.jit
def load_hidden(hidden, part, t, count, first, T, WIDTH, BLOCK_R: tl.constexpr):
    """Loads the hidden rows [tokens t, BLOCK_R] of the `count` ranks from `first` on."""
    r = first + tl.arange(0, BLOCK_R)
    rows = hidden + (part * T + t) * WIDTH
    return tl.load(
        rows[:, None] + r[None, :], mask=(t < T)[:, None] & (r < count)[None, :], other=0.0
    )


@triton.jit
def accumulate_expansion(
    acc,
    weights,
    hidden,
    b,
    pages,
    count,
    part,
    t,
    n,
    end,
    T,
    N,
    WIDTH,
    PAGE,
    first,
    STEP: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiplies hidden rows by B and adds the products to `acc`, for tokens t and outputs n.
    Covers the ranks from `first` on, whose B has been loaded, and then the tiles that begin every
    STEP ranks after them.
    """
    low = load_hidden(hidden, part, t, count, first, T, WIDTH, BLOCK_R)
    acc = tl.dot(low, weights, acc, input_precision="ieee")
    for at in tl.range(first + STEP, count, STEP, num_stages=STAGES):
        low = load_hidden(hidden, part, t, count, at, T, WIDTH, BLOCK_R)
        weights = load_b(b, pages, count, at, n, end, N, PAGE, RANKS, BLOCK_R)
        acc = tl.dot(low, weights, acc, input_precision="ieee")
    return acc


@triton.jit
def accumulate_expansion_pair(
    gate,
    up,
    weights,
    up_weights,
    hidden,
    b,
    pages,
    count,
    t,
    n,
    T,
    N,
    WIDTH,
    PAGE,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Does the work of `accumulate_expansion` for gates and ups, N of each, which are two parts."""
    gate = tl.dot(
        load_hidden(hidden, 0, t, count, 0, T, WIDTH, BLOCK_R),
        weights,
        gate,
        input_precision="ieee",
    )
    up = tl.dot(
        load_hidden(hidden, 1, t, count, 0, T, WIDTH, BLOCK_R),
        up_weights,
        up,
        input_precision="ieee",
    )
    for at in tl.range(BLOCK_R, count, BLOCK_R, num_stages=STAGES):
        weights = load_b(b, pages, count, at, n, N, 2 * N, PAGE, RANKS, BLOCK_R)
        up_weights = load_b(b + N, pages, count, at, n, N, 2 * N, PAGE, RANKS, BLOCK_R)
        gate = tl.dot(
            load_hidden(hidden, 0, t, count, at, T, WIDTH, BLOCK_R),
            weights,
            gate,
            input_precision="ieee",
        )
        up = tl.dot(
            load_hidden(hidden, 1, t, count, at, T, WIDTH, BLOCK_R),
            up_weights,
            up,
            input_precision="ieee",
        )
    return gate, up


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _expand(
    hidden,
    b,
    product,
    out,
    pages,
    used,
    T,
    N,
    WIDTH,
    PAGE,
    END0,
    END1,
    END2,
    END3,
    END4,
    PARTS: tl.constexpr,
    GATE: tl.constexpr,
    RANKS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    part, n, end = outputs_of(tl.program_id(0), N, END0, END1, END2, END3, END4, PARTS, BLOCK_N)
    t, count = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T), tl.load(used) * RANKS
    inside = (t < T)[:, None] & (n < end)[None, :]
    type = out.dtype.element_ty
    if GATE == "":
        weights = load_b(b, pages, count, 0, n, end, N, PAGE, RANKS, BLOCK_R)
        wait(PDL)
        acc = tl.load(product + t[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
        result = accumulate_expansion(
            acc,
            weights,
            hidden,
            b,
            pages,
            count,
            part,
            t,
            n,
            end,
            T,
            N,
            WIDTH,
            PAGE,
            0,
            BLOCK_R,
            RANKS,
            BLOCK_R,
            STAGES,
        )
    else:
        weights = load_b(b, pages, count, 0, n, N, 2 * N, PAGE, RANKS, BLOCK_R)
        up_weights = load_b(b + N, pages, count, 0, n, N, 2 * N, PAGE, RANKS, BLOCK_R)
        wait(PDL)
        gate = tl.load(product + t[:, None] * (2 * N) + n[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        up = tl.load(product + t[:, None] * (2 * N) + (N + n)[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        gate, up = accumulate_expansion_pair(
            gate,
            up,
            weights,
            up_weights,
            hidden,
            b,
            pages,
            count,
            t,
            n,
            T,
            N,
            WIDTH,
            PAGE,
            RANKS,
            BLOCK_R,
            STAGES,
        )
        # Rounded as separate operations would.
        result = apply_activation(gate.to(type).to(tl.float32), GATE).to(type).to(tl.float32)
        result *= up.to(type).to(tl.float32)
    tl.store(out + t[:, None] * N + n[None, :], result.to(type), mask=inside)


def expand(shrunk: Shrunk, out: torch.Tensor) -> torch.Tensor:
    """Multiplies shrunk inputs by B, adds the result to `out` in place, and returns `out`.

    Args:
        shrunk: shrunk inputs of a product.
        out: [T, outputs], contiguous; may have more precise numbers than the inputs.
    """
    outputs = shrunk.weights.outputs
    _launch(shrunk, out, out, sum(cdiv(each, _BLOCK_N) for each in outputs), len(outputs), "")
    return out


def expand_and_gate(shrunk: Shrunk, product: torch.Tensor, activation: str) -> torch.Tensor:
    """Adds shrunk inputs times B to the output of a linear layer, and returns act(gate) * up [T, N]
    of the sum.

    Args:
        shrunk: shrunk inputs of gates and ups.
        product: [T, 2 N], gates first, contiguous.
        activation: "silu", "gelu" or "gelu_tanh".
    """
    outputs = shrunk.weights.outputs[0]
    out = shrunk.hidden.new_empty((len(product), outputs))
    _launch(shrunk, product, out, cdiv(outputs, _BLOCK_N), 1, activation)
    return out


def _launch(
    shrunk: Shrunk, product: torch.Tensor, out: torch.Tensor, tiles: int, parts: int, gate: str
) -> None:
    (_, tokens, width), weights, ranks = shrunk.hidden.shape, shrunk.weights, shrunk.ranks
    item = shrunk.hidden.element_size()
    matrices = 2 if gate else 1
    # float32 products are unrolled
    block = min(64 if item < 4 else 16, max(16, round_up_to_power_of_2(tokens)))
    stages = tile_stages(
        properties_of(product.device),
        matrices * block,
        matrices * _BLOCK_N,
        BLOCK_R,
        item,
        3 if item < 4 else 1,
    )
    _expand[(tiles, cdiv(tokens, block))](
        shrunk.hidden,
        weights.b,
        product,
        out,
        ranks.pages,
        ranks.used,
        tokens,
        out.shape[1],
        width,
        weights.page_size,
        *weights.ends,
        PARTS=parts,
        GATE=gate,
        RANKS=RANKS,
        STAGES=stages,
        BLOCK_T=block,
        BLOCK_N=_BLOCK_N,
        BLOCK_R=BLOCK_R,
        num_warps=4,
        **pdl_options(product.device),
    )
