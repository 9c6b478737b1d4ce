"""Launch parameters of kernels as plain functions of `DeviceProperties`. Measured on an H200."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

from sglang_lite.runtime.kernels.device_properties import DeviceProperties
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

Kernel = Literal["decode", "prefill", "prefix"]

_MIN_TILE = 16  # minimum number of queries, or of tokens in a block, that matrix units take
_THREADS = 32  # threads of a warp
_OWN_REGISTERS = 255  # maximum number of registers of a thread
# Matrices up to this many elements get smaller tiles, which keep more multiprocessors busy.
_SMALL = 1 << 23
_MIN_STAGES = 3  # fewer tiles in flight don't hide the latency of memory


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch parameters of an attention kernel.

    Attributes:
        queries: queries of a program.
        tokens: tokens whose keys and values a program reads in one iteration.
        warps: warps of a program.
        stages: blocks of tokens that are being loaded or computed at the same time.
        exclusive: True if a program of "decode" has a multiprocessor to itself.
    """

    queries: int
    tokens: int
    warps: int
    stages: int
    exclusive: bool = False

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments for a Triton kernel."""
        return {"BLOCK_N": self.tokens, "num_warps": self.warps, "num_stages": self.stages}


@functools.cache
def choose_attention_launch(
    properties: DeviceProperties,
    kernel: Kernel,
    *,
    dim: int,
    item: int,
    cached: int,
    queries: int,
    rows: int = 0,
    heads: int = 1,
    shared: bool = False,
    product: bool = False,
) -> Launch | None:
    """Returns the launch parameters of an attention kernel on a GPU, or None if the kernel doesn't
    fit the GPU.

    Args:
        properties: properties of the GPU that the kernel runs on.
        kernel: "decode", "prefill" or "prefix".
        dim: elements of a head.
        item: bytes of an element of queries.
        cached: bytes of an element of keys and values.
        queries: queries of a program: a power of two of at least 16, or at least 8 for "decode".
            "prefill" reduces them if they don't fit.
        rows: number of decoded rows, for "decode".
        heads: number of KV heads, for "decode".
        shared: whether rows share prefixes and have little text after them, for "decode".
        product: whether the kernel takes rows from their QKV product, for "decode".
    """
    fastest = _fastest_launch(
        properties,
        kernel,
        dim=dim,
        item=item,
        cached=cached,
        queries=queries,
        rows=rows,
        heads=heads,
        shared=shared,
        product=product,
    )
    dim = padded_head_size(dim)
    for launch in _smaller_launches(fastest, divisible=kernel == "prefill"):
        if (
            _shared_memory(launch, dim, item) <= properties.shared_memory
            and _registers(launch) <= properties.registers
        ):
            return launch
    return None


@functools.cache
def latent_launch(
    properties: DeviceProperties, *, size: int, item: int, queries: int
) -> Launch | None:
    """Returns the launch parameters of a latent attention kernel, or None if the kernel doesn't fit
    the GPU.

    On an H200, 64 tokens in 2 stages would be a tenth slower for many long rows of 16 heads and a
    quarter faster for few. But ptxas 12.8, which Triton 3.6 includes, miscompiles the products of
    the last block: they leave out tokens from the 17th on, or read outside of shared memory. The
    PTX is correct, and with DISABLE_PTXAS_OPT=1 so are the results.

    Args:
        properties: properties of the GPU that the kernel runs on.
        size: elements of a latent and its rotary part.
        item: bytes of an element.
        queries: queries of a program, reduced if they don't fit.
    """
    if item == 4:
        fastest = Launch(_MIN_TILE, 16, 4, 2)
    elif not properties.has_tma:  # operands are in registers, too: larger tiles overflow them
        fastest = Launch(min(queries, 32), 32, 8, 2)
    else:
        fastest = Launch(queries, 32, 4, 3) if queries < 64 else Launch(queries, 32, 8, 3)
    for launch in _smaller_launches(fastest, divisible=True):
        weights = 256 * launch.queries  # and all else whose layout changes between products
        if (
            _shared_memory(launch, size, item, planes=1) + weights <= properties.shared_memory
            and _registers(launch) <= properties.registers
        ):
            return launch
    return None


def padded_head_size(dim: int) -> int:
    """Returns the size to which kernels pad a head of `dim` elements."""
    power: int = round_up_to_power_of_2(dim)
    return max(_MIN_TILE, power)


def _fastest_launch(
    properties: DeviceProperties,
    kernel: Kernel,
    *,
    dim: int,
    item: int,
    cached: int,
    queries: int,
    rows: int,
    heads: int,
    shared: bool,
    product: bool,
) -> Launch:
    """Returns the launch parameters that were fastest on an H200. They may not fit the GPU."""
    if item == 4:  # float32 products don't use matrix units, and are unrolled
        return Launch(_MIN_TILE if kernel == "prefill" else queries, 16, 4, 2)
    wide = dim > 128  # the launches for smaller heads overflow registers
    if kernel == "prefill":
        if wide:
            return Launch(queries, 32, 4 if queries <= 16 else 8, 2)
        return Launch(queries, 128, 8, 2) if queries == 128 else Launch(queries, 64, 4, 3)
    if kernel == "prefix":
        return Launch(queries, 32, 8, 2) if wide else Launch(queries, 64, 4, 3)
    # With four warps and more, products of more queries would use warp groups, some of which Triton
    # 3.6 computes wrongly.
    few_queries = queries <= 8
    if wide:
        return Launch(queries, 32, 4 if few_queries else 2, 2)
    if cached == 1:
        few = few_queries and 8 * rows * heads <= properties.multiprocessors and not shared
        return Launch(queries, 256, 8, 1, exclusive=True) if few else Launch(queries, 32, 1, 3)
    if shared:  # fits next to the prefix's programs
        return Launch(queries, 16, 1, 3)
    programs = rows * heads * 132 // properties.multiprocessors
    if 384 <= programs < 1024 or (product and rows == 1):
        return Launch(queries, 64, 4 if few_queries and not product else 2, 2)
    # Small programs, several of which fit a multiprocessor: while one waits, others work.
    return Launch(queries, 32, 1, 3)


def _smaller_launches(launch: Launch, *, divisible: bool) -> list[Launch]:
    """Returns a launch and variants of it with smaller tiles, fastest first."""
    queries = launch.queries
    tokens = launch.tokens
    tried = [launch]
    while tokens > _MIN_TILE:
        tokens //= 2
        tried.append(replace(launch, tokens=tokens))
    tried.append(replace(launch, tokens=tokens, stages=1))
    while divisible and queries > _MIN_TILE:
        queries //= 2
        tried.append(replace(launch, queries=queries, tokens=tokens, stages=1))
    return tried


def _shared_memory(launch: Launch, dim: int, item: int, planes: int = 2) -> int:
    """Returns an upper bound on the shared memory that a launch needs, in bytes.
    tests/runtime/kernels/test_compiled.py checks it against compiled kernels.
    """
    return (planes * launch.stages * launch.tokens + launch.queries) * dim * item


def _registers(launch: Launch) -> int:
    return _OWN_REGISTERS * _THREADS * launch.warps


@functools.cache
def tile_stages(
    properties: DeviceProperties, rows: int, outputs: int, inputs: int, item: int, max_stages: int
) -> int:
    """Returns the number of tiles that a program of a matmul can load ahead, at least one.

    Args:
        properties: properties of the GPU that the kernel runs on.
        rows: activation rows in a tile.
        outputs: weight rows in a tile, of all matrices together.
        inputs: columns of a tile.
        item: bytes of an element.
        max_stages: largest number that is worthwhile.
    """
    return max(1, min(max_stages, properties.shared_memory // ((rows + outputs) * inputs * item)))


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Tile of the matmul of a few rows with a large matrix.

    Attributes:
        outputs: rows of the matrix.
        inputs: columns of it.
        stages: number of tiles that a program loads ahead.
    """

    outputs: int
    inputs: int
    stages: int


@functools.cache
def choose_product_tile(
    properties: DeviceProperties,
    rows: int,
    shape: tuple[int, int],
    *,
    gated: bool,
    beside: bool = False,
) -> ProductTile:
    """Returns the tile that each program of `kernels.tiled` multiplies.

    A multiprocessor that runs one program at a time is idle while a program ends and the next one
    begins. So if there are more programs than multiprocessors, two or three share each of these.

    Args:
        properties: properties of the GPU that the kernel runs on.
        rows: activation rows of a tile.
        shape: shape of the weight; with `gated`, of both matrices together.
        gated: whether a program multiplies both matrices of a gated pair.
        beside: whether adapters' matmuls are added, whose tiles take part of the same memory.
    """
    outputs = outputs_per_program(shape[0] * shape[1])
    matrices, max_stages = (2, 4) if gated else (1, 6)
    stages = tile_stages(properties, rows, matrices * outputs, 128, 2, max_stages - beside)
    whole = ProductTile(outputs, 128, stages)
    sharing = cdiv(cdiv(shape[0] // matrices, outputs), properties.multiprocessors)
    if beside or sharing == 1:
        return whole
    if not gated:
        return replace(whole, stages=min(stages, _MIN_STAGES)) if sharing > 3 else whole
    stages = properties.shared_memory // (sharing * (rows + matrices * outputs) * 64 * 2)
    return ProductTile(outputs, 64, min(stages, max_stages)) if stages >= _MIN_STAGES else whole


def outputs_per_program(elements: int) -> int:
    """Returns how many outputs each program of `kernels.tiled` computes, for a weight of this many
    elements.
    """
    return 32 if elements <= _SMALL else 64
