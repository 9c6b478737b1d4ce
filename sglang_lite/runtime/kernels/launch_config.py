"""Launches of kernels, chosen by what the card has: plain functions of a `Card`. Measured on an H200."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

from sglang_lite.runtime.kernels.card import Card
from sglang_lite.runtime.kernels.sizes import power_of_2

Kernel = Literal["decode", "prefill", "prefix"]

_LEAST = 16  # queries, or tokens of a block: matrix units take no fewer
_THREADS = 32  # of a warp
_OWN_REGISTERS = 255  # that a thread can have


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of an attention kernel.

    Attributes:
        queries: of a program.
        tokens: whose keys and values it takes at a time.
        warps: of a program.
        stages: blocks of tokens that are under way.
        alone: of "decode": a program has a multiprocessor for itself.
    """

    queries: int
    tokens: int
    warps: int
    stages: int
    alone: bool = False

    @property
    def options(self) -> dict[str, int]:
        """Keywords of a Triton kernel."""
        return {"BLOCK_N": self.tokens, "num_warps": self.warps, "num_stages": self.stages}


@functools.cache
def attention_launch(
    card: Card, kernel: Kernel, *, dim: int, item: int, cached: int, queries: int, rows: int = 0, heads: int = 1,
    shared: bool = False, product: bool = False,
) -> Launch | None:  # fmt: skip
    """The launch of an attention kernel on a card; None: no program of it finds room there.

    Args:
        dim: of a head.
        item: bytes of an element of queries.
        cached: bytes of an element of keys and values.
        queries: that a program is to have, a power of two of at least 16, or 8 if the kernel is "decode"; fewer where
            there is no room, if it is "prefill".
        rows: of "decode": how many are decoded.
        heads: of "decode": KV heads.
        shared: of "decode": rows share prefixes, and have little text beside those.
        product: of "decode": the kernel takes rows from their product.
    """
    wanted = _fastest(
        card, kernel, dim=dim, item=item, cached=cached, queries=queries, rows=rows, heads=heads, shared=shared,
        product=product,
    )  # fmt: skip
    dim = padded(dim)
    for launch in _smaller(wanted, divisible=kernel == "prefill"):
        if _shared(launch, dim, item) <= card.shared and _registers(launch) <= card.registers:
            return launch
    return None


@functools.cache
def latent_launch(card: Card, *, size: int, item: int, queries: int) -> Launch | None:
    """The launch of a kernel of latent attention; None: no program finds room.

    On an H200 64 tokens in 2 stages are a tenth slower for many long rows of 16 heads and a quarter faster for few. But
    ptxas 12.8, which Triton 3.6 brings, optimises their last block's products wrongly: they leave out tokens from the
    17th on, or read outside of shared memory. The PTX is right: with DISABLE_PTXAS_OPT=1 the results are.

    Args:
        size: of a latent with its turned part.
        item: bytes of an element.
        queries: that a program is to have; fewer where there is no room.
    """
    if item == 4:
        wanted = Launch(_LEAST, 16, 4, 2)
    elif not card.copies:  # nor products whose operands lie in shared memory: registers overflow
        wanted = Launch(min(queries, 32), 32, 8, 2)
    else:
        wanted = Launch(queries, 32, 4, 3) if queries < 64 else Launch(queries, 32, 8, 3)
    for launch in _smaller(wanted, divisible=True):
        weights = 256 * launch.queries  # and whatever else changes its place between two products
        if _shared(launch, size, item, planes=1) + weights <= card.shared and _registers(launch) <= card.registers:
            return launch
    return None


def padded(dim: int) -> int:
    """Size of a head as kernels pad it."""
    power: int = power_of_2(dim)
    return max(_LEAST, power)


def _fastest(
    card: Card, kernel: Kernel, *, dim: int, item: int, cached: int, queries: int, rows: int, heads: int, shared: bool,
    product: bool,
) -> Launch:  # fmt: skip
    """The launch that was fastest on an H200."""
    if item == 4:  # products are not by matrix units, and unrolled
        return Launch(_LEAST if kernel == "prefill" else queries, 16, 4, 2)
    wide = dim > 128  # the others' registers overflow
    if kernel == "prefill":
        if wide:
            return Launch(queries, 32, 4 if queries <= 16 else 8, 2)
        return Launch(queries, 128, 8, 2) if queries == 128 else Launch(queries, 64, 4, 3)
    if kernel == "prefix":
        return Launch(queries, 32, 8, 2) if wide else Launch(queries, 64, 4, 3)
    # By four warps and more, products of more queries would be of warp groups: Triton 3.6 has some of them wrong.
    eight = queries <= 8
    if wide:
        return Launch(queries, 32, 4 if eight else 2, 2)
    if cached == 1:
        few = eight and 8 * rows * heads <= card.multiprocessors and not shared
        return Launch(queries, 256, 8, 1, alone=True) if few else Launch(queries, 32, 1, 3)
    if shared:  # what finds room beside the prefix's programs
        return Launch(queries, 16, 1, 3)
    programs = rows * heads * 132 // card.multiprocessors
    if 384 <= programs < 1024 or (product and rows == 1):
        return Launch(queries, 64, 4 if eight and not product else 2, 2)
    # Small programs, of which a multiprocessor has room for several: while one waits, others work.
    return Launch(queries, 32, 1, 3)


def _smaller(launch: Launch, *, divisible: bool) -> list[Launch]:
    """A launch and those that take less, the fastest first."""
    queries, tokens = launch.queries, launch.tokens
    tried = [launch]
    while tokens > _LEAST:
        tokens //= 2
        tried.append(replace(launch, tokens=tokens))
    tried.append(replace(launch, tokens=tokens, stages=1))
    while divisible and queries > _LEAST:
        queries //= 2
        tried.append(replace(launch, queries=queries, tokens=tokens, stages=1))
    return tried


def _shared(launch: Launch, dim: int, item: int, planes: int = 2) -> int:
    """Bytes of shared memory, at most: tests/runtime/kernels/test_compiled.py holds it against what is compiled."""
    return (planes * launch.stages * launch.tokens + launch.queries) * dim * item


def _registers(launch: Launch) -> int:
    return _OWN_REGISTERS * _THREADS * launch.warps


@functools.cache
def tile_stages(card: Card, rows: int, outputs: int, inputs: int, item: int, most: int) -> int:
    """Tiles that a program of a product can have under way, at least one.

    Args:
        rows: of activations in a tile.
        outputs: of weights in a tile, of all matrices together.
        inputs: columns of both.
        item: bytes of an element.
        most: that are worth it.
    """
    return max(1, min(most, card.shared // ((rows + outputs) * inputs * item)))
