"""Every kernel launched on tensors without memory: what `variants.intercept_launches` can compile
for a GPU that is not there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sglang_lite.runtime.kernels.activation import (
    apply_gated,
    apply_gated_eight,
    apply_ungated,
    apply_ungated_eight,
)
from sglang_lite.runtime.kernels.all_reduce import (
    Peers,
    gather_ranks,
    rank_memory_shape,
    reduce_scatter,
    sum_ranks,
)
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionRules,
    DecodeWork,
    DevicePlan,
    Partials,
    SharedPrefixes,
)
from sglang_lite.runtime.kernels.blocks import BlockCopy
from sglang_lite.runtime.kernels.decode_attention import decode_attention, split_work
from sglang_lite.runtime.kernels.delta_gates import delta_rates, gate_heads
from sglang_lite.runtime.kernels.delta_scan import delta_scan
from sglang_lite.runtime.kernels.device_properties import DeviceProperties, properties_of
from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.eight_bits import quantise_rows
from sglang_lite.runtime.kernels.embed import add_features, embed
from sglang_lite.runtime.kernels.experts import ExpertMatrices, apply_experts
from sglang_lite.runtime.kernels.experts_order import experts_order
from sglang_lite.runtime.kernels.experts_packed import MAX_BLOCK, packed_down, packed_gate_up
from sglang_lite.runtime.kernels.experts_packed_few import packed_down_few, packed_gate_up_few
from sglang_lite.runtime.kernels.experts_route import experts_route
from sglang_lite.runtime.kernels.experts_tiled import block_rows
from sglang_lite.runtime.kernels.gemv import SmallBatchLinear, linear_single_row
from sglang_lite.runtime.kernels.hopper import hopper_kernels
from sglang_lite.runtime.kernels.int8_product import int8_linear, int8_parts, int8_reduction_splits
from sglang_lite.runtime.kernels.invariant_attention import (
    InvariantWork,
    invariant_attention,
    plan_pieces,
)
from sglang_lite.runtime.kernels.invariant_product import invariant_linear, invariant_parts
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.kv_copy import KVCopy
from sglang_lite.runtime.kernels.kv_store import kv_store
from sglang_lite.runtime.kernels.latent_attention import (
    latent_decode,
    latent_prefill,
    latent_prefix,
)
from sglang_lite.runtime.kernels.latent_store import latent_store
from sglang_lite.runtime.kernels.lora import lora_add, lora_add_and_gate, lora_rows
from sglang_lite.runtime.kernels.lora_few import expand, expand_and_gate, join_ranks, shrink
from sglang_lite.runtime.kernels.lora_own import own_expand, own_ranks, own_shrink
from sglang_lite.runtime.kernels.lora_weights import LoraStep, LoraWeights
from sglang_lite.runtime.kernels.mamba1_scan import mamba1_scan
from sglang_lite.runtime.kernels.mamba2_scan import mamba2_scan
from sglang_lite.runtime.kernels.mlstm_scan import mlstm_scan
from sglang_lite.runtime.kernels.norm import add_norm, add_norm_eight, norm, norm_eight
from sglang_lite.runtime.kernels.packed_products import (
    add_parts,
    decode_weight,
    max_packed_rows,
    packed_rows,
)
from sglang_lite.runtime.kernels.packed_row import packed_row
from sglang_lite.runtime.kernels.packed_weight import pack_weight
from sglang_lite.runtime.kernels.page_table import update_pages
from sglang_lite.runtime.kernels.prefill_attention import prefill_attention
from sglang_lite.runtime.kernels.prefix_attention import prefix_attention
from sglang_lite.runtime.kernels.rope_attention import rope_attention
from sglang_lite.runtime.kernels.rope_store import rope_store
from sglang_lite.runtime.kernels.rotate import rotate
from sglang_lite.runtime.kernels.sampling import (
    BLOCK,
    DeviceSampling,
    TokenMasks,
    draw,
    draw_part,
    pick_winner,
    token_scores,
)
from sglang_lite.runtime.kernels.short_conv import short_conv
from sglang_lite.runtime.kernels.state_conv import state_conv
from sglang_lite.runtime.kernels.state_rows import StateRows
from sglang_lite.runtime.kernels.tiled import MAX_ROWS, can_tile, linear_by_tiles, linear_split_k
from sglang_lite.runtime.kernels.two_shot import PartPeers, sum_parts
from sglang_lite.runtime.kernels.wkv_scan import wkv_scan

DEVICE = torch.device("meta")
PAGE, KV_HEADS, GROUP = 16, 2, 4
BFLOAT16, FLOAT16, FLOAT32, FLOAT8 = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
)
# Of queries, and of keys and values.
FORMATS = {
    "float32": (FLOAT32, FLOAT32), "bfloat16": (BFLOAT16, BFLOAT16), "float16": (FLOAT16, FLOAT16),
    "bfloat16 fp8": (BFLOAT16, FLOAT8), "float16 fp8": (FLOAT16, FLOAT8),
}  # fmt: skip
HEADS = (64, 80, 96, 128, 256)
GPUS = (
    DeviceProperties("A100", 166_912, 1 << 16, 108, (8, 0)),
    DeviceProperties("A10", 101_376, 1 << 16, 72, (8, 6)),
    DeviceProperties("RTX 4090", 101_376, 1 << 16, 128, (8, 9)),
    DeviceProperties("H200", 232_448, 1 << 16, 132, (9, 0)),
)


def formats_of(properties: DeviceProperties) -> list[str]:
    """Formats that the engine takes on a GPU."""
    return [name for name in FORMATS if "fp8" not in name or properties.capability >= (8, 9)]


def empty(*shape: int, dtype: torch.dtype = FLOAT32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def ints(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


class Attention:
    """Arguments of the kernels around attention."""

    def __init__(self, dim: int, compute: torch.dtype, cache: torch.dtype) -> None:
        self.heads, self.dim, self.compute = KV_HEADS * GROUP, dim, compute
        keys, values = (empty(KV_HEADS, 64 * PAGE, dim, dtype=cache) for _ in range(2))
        scales = KVScales((empty(KV_HEADS),), (empty(KV_HEADS),)) if cache == FLOAT8 else None
        self.cache = KVCache((keys,), (values,), scales)

    def plan(
        self, tokens: int, decoding: int, *, shared: bool = False, block: int = 16
    ) -> DevicePlan:
        prefixes = (
            SharedPrefixes(ints(decoding), ints(decoding), ints(decoding), ints(64, 6), 16)
            if shared
            else None
        )
        blocks = ints(0 if decoding else 3, 4)
        return DevicePlan(
            ints(tokens),
            ints(tokens),
            ints(tokens),
            ints(9),
            ints(9, 64),
            PAGE,
            decoding,
            prefixes,
            blocks,
            block,
        )

    def work(self, rows: int) -> DecodeWork:
        items, parts = rows + 132, (rows + 132) * self.heads
        shared = rows * 16 * self.heads
        partials = Partials(
            empty(parts, self.dim),
            empty(parts, 2),
            ints(rows, KV_HEADS),
            empty(shared, self.dim),
            empty(shared, 2),
        )
        return DecodeWork(ints(items, 4), ints(rows, 2), partials)

    def q(self, tokens: int) -> torch.Tensor:
        return empty(tokens, self.heads + 2 * KV_HEADS, self.dim, dtype=self.compute)[
            :, : self.heads
        ]

    def out(self, tokens: int) -> torch.Tensor:
        return empty(tokens, self.heads, self.dim, dtype=self.compute)

    def decode(
        self,
        rows: int,
        *,
        shared: bool = False,
        softcap: float | None = None,
        window: int | None = None,
        chunked: bool = False,
        sloped: bool = False,
    ) -> None:
        plan, work = self.plan(rows, rows, shared=shared), self.work(rows)
        split_work(plan.positions, plan.slots, plan.shared, work.items, work.rows, min_tokens=64)
        decode_attention(
            self.q(rows),
            self.cache,
            0,
            plan,
            work,
            self.out(rows),
            AttentionRules(
                0.1, softcap=softcap, window=window, chunked=chunked, slopes=self.slopes(sloped)
            ),
        )

    def slopes(self, sloped: bool) -> torch.Tensor | None:
        return empty(self.heads) if sloped else None

    def rope_decode(
        self, rows: int, *, softcap: float | None = None, window: int | None = None
    ) -> None:
        norms = empty(self.dim, dtype=self.compute), empty(self.dim, dtype=self.compute)
        rope_attention(
            empty(rows, (self.heads + 2 * KV_HEADS) * self.dim, dtype=self.compute), *norms, 1e-5,
            (empty(64, self.dim), empty(64, self.dim)), self.cache, 0, self.out(rows), plan=self.plan(rows, rows),
            work=self.work(rows), rules=AttentionRules(0.1, softcap=softcap, window=window),
        )  # fmt: skip

    def prefix(self, softcap: float | None = None) -> None:
        prefix_attention(
            self.q(8),
            self.cache,
            0,
            self.plan(8, 8, shared=True),
            self.work(8),
            AttentionRules(0.1, softcap=softcap),
        )

    def prefill(
        self,
        block: int,
        *,
        softcap: float | None = None,
        window: int | None = None,
        chunked: bool = False,
        sloped: bool = False,
    ) -> None:
        plan = self.plan(3 * block, 0, block=block)
        prefill_attention(
            self.q(3 * block),
            self.cache,
            0,
            plan,
            self.out(3 * block),
            AttentionRules(
                0.1, softcap=softcap, window=window, chunked=chunked, slopes=self.slopes(sloped)
            ),
        )

    def invariant(self, rows: int, block: int = 0) -> None:
        """Of decoding rows, which share prefixes, or of blocks."""
        plan = self.plan(rows or 3 * block, rows, shared=bool(rows), block=block)
        parts = rows * 32 * self.heads
        work = InvariantWork(
            ints(rows + 132, 4),
            ints(rows),
            empty(parts, self.dim),
            empty(parts, 2),
            ints(rows, KV_HEADS),
            32,
        )
        if rows:
            plan_pieces(plan, work)
        out = self.out(len(plan.ids))
        invariant_attention(
            self.q(len(plan.ids)), self.cache, 0, plan, work, out, AttentionRules(0.1)
        )

    def store(self) -> None:
        qkv = empty(8, (self.heads + 2 * KV_HEADS) * self.dim, dtype=self.compute)
        tables = empty(64, self.dim), empty(64, self.dim)
        norms = empty(self.dim, dtype=self.compute), empty(self.dim, dtype=self.compute)
        rope_store(qkv, *norms, 1e-5, tables, self.plan(8, 8), self.cache, 0)

    def rotate_store(self) -> None:
        q, k = (
            empty(1, 8, n * KV_HEADS, self.dim, dtype=self.compute).transpose(1, 2)
            for n in (GROUP, 1)
        )
        kv_store(
            k[0].transpose(0, 1), k[0].transpose(0, 1), empty(8, dtype=torch.int64), self.cache, 0
        )
        rotate(q, k, *(empty(1, 8, self.dim, dtype=self.compute) for _ in range(2)))

    def copy(self) -> None:
        at = empty(8, dtype=torch.int64)
        KVCopy(self.cache)(at, at)
        planes = self.cache.planes
        memory = empty(
            4 * PAGE * sum(p.shape[0] * p.shape[2] * p.itemsize for p in planes), dtype=torch.uint8
        )
        for to_host in (True, False):
            BlockCopy(planes, memory, PAGE)(ints(4), ints(4), to_host=to_host)


ATTENTION: dict[str, Callable[[Attention], None]] = {
    "decode 1": lambda of: of.decode(1),
    "decode 8": lambda of: of.decode(8, shared=True),
    "decode 256": lambda of: of.decode(256),
    "decode 512": lambda of: of.decode(512),
    "decode product 1": lambda of: of.rope_decode(1),
    "decode product 512": lambda of: of.rope_decode(512),
    "decode product capped": lambda of: of.rope_decode(8, softcap=50.0, window=64),
    "decode capped": lambda of: of.decode(8, softcap=50.0, window=64),
    "decode chunked": lambda of: of.decode(8, window=64, chunked=True),
    "decode sloped": lambda of: of.decode(8, sloped=True),
    "prefix": lambda of: of.prefix(),
    "prefill 16": lambda of: of.prefill(16),
    "prefill 64": lambda of: of.prefill(64),
    "prefill 128": lambda of: of.prefill(128),
    "prefill capped": lambda of: of.prefill(128, softcap=50.0, window=64),
    "prefill chunked": lambda of: of.prefill(128, window=64, chunked=True),
    "prefill sloped": lambda of: of.prefill(128, sloped=True),
    "invariant 1": lambda of: of.invariant(1),
    "invariant 256": lambda of: of.invariant(256),
    "invariant prefill": lambda of: of.invariant(0, 128),
    "store": lambda of: of.store(),
    "rotate, store": lambda of: of.rotate_store(),
    "copy": lambda of: of.copy(),
}


def products(dtype: torch.dtype) -> None:
    """Matrices of about Qwen3-0.6B's and Llama-8B's sizes, as a layer multiplies with them."""
    for outputs, inputs in ((2048, 1024), (28_672, 4096), (4096, 14_336)):
        weight, few = empty(outputs, inputs, dtype=dtype), SmallBatchLinear(DEVICE)
        row = empty(1, inputs, dtype=dtype)
        linear_single_row(
            row, weight, None, residual=row, norm=empty(inputs, dtype=dtype), eps=1e-5, gate="silu"
        )
        linear_single_row(row, weight, empty(outputs, dtype=dtype))
        for rows in (8, 32):
            few(empty(rows, inputs, dtype=dtype), weight, None)
        if can_tile(weight):
            for rows in (16, 64):
                linear_by_tiles(empty(rows, inputs, dtype=dtype), weight, None)
                linear_by_tiles(empty(rows, inputs, dtype=dtype), weight, None, "silu")
            linear_split_k(empty(64, inputs, dtype=dtype), weight, 4)


def invariant_products(dtype: torch.dtype) -> None:
    for outputs, inputs in ((2048, 1024), (28_672, 4096), (4096, 14_336)):
        weight = empty(outputs, inputs, dtype=dtype)
        for rows in (1, 64, 128, 2048):
            x = empty(rows, inputs, dtype=dtype)
            invariant_linear(x, weight, None)
            invariant_linear(x, weight, None, "silu")
            invariant_parts(x, weight)


def products_fp8(dtype: torch.dtype) -> None:
    """Launches around products of 8-bit weights."""
    weight, x = empty(28_672, 4096, dtype=FLOAT8), empty(8, 4096, dtype=dtype)
    linear_single_row(
        x[:1],
        weight,
        None,
        scales=empty(28_672),
        residual=x[:1],
        norm=empty(4096, dtype=dtype),
        gate="silu",
    )
    quantise_rows(x, FLOAT8)
    norm_eight(x, empty(4096, dtype=dtype), 1e-5, FLOAT8)
    add_norm_eight(x, x, empty(4096, dtype=dtype), 1e-5, None, FLOAT8)
    apply_gated_eight(empty(8, 28_672, dtype=dtype), "silu", None, FLOAT8)


def products_int8(dtype: torch.dtype) -> None:
    """Products of 8-bit integers, and the launches around them."""
    for outputs, inputs in ((2048, 1024), (28_672, 4096), (4096, 14_336)):
        weight, scales = empty(outputs, inputs, dtype=torch.int8), empty(outputs)
        for rows in (1, 64, 128, 2048):
            int8_linear(
                EightBitRows.allocate_eight_bit(empty(rows, 1), inputs, torch.int8),
                weight,
                scales,
                None,
                dtype,
            )
        if (parts := int8_reduction_splits(weight)) > 1:
            int8_parts(
                EightBitRows.allocate_eight_bit(empty(64, 1), inputs, torch.int8),
                weight,
                scales,
                parts,
            )
    x = empty(8, 4096, dtype=dtype)
    quantise_rows(x, torch.int8)
    norm_eight(x, empty(4096, dtype=dtype), 1e-5, torch.int8)
    add_norm_eight(x, x, empty(4096, dtype=dtype), 1e-5, None, torch.int8)
    apply_gated_eight(empty(8, 28_672, dtype=dtype), "silu", None, torch.int8)


def packed_products(dtype: torch.dtype) -> None:
    """Products of 4-bit weights of Llama-8B's sizes, in every format."""
    for kind, group, zeros in (
        ("integers", 128, False),
        ("integers", 32, True),
        ("e2m1", 16, False),
        ("table", 64, False),
    ):
        outputs, inputs = 28_672, 4096
        scales = empty(outputs, inputs // group, dtype=FLOAT16)
        weight = pack_weight(
            empty(outputs, inputs, dtype=torch.uint8), scales,
            zeros=empty(outputs, inputs // group, dtype=torch.uint8) if zeros else None, zero=8 * (kind == "integers"), kind=kind, table=empty(16) if kind == "table" else None,  # type: ignore[arg-type]  # one of the kinds
        )  # fmt: skip
        for rows in (8, 64):
            packed_rows(empty(rows, inputs, dtype=dtype), weight, None)
            packed_rows(empty(rows, inputs, dtype=dtype), weight, None, "silu")
        packed_rows(empty(16, inputs, dtype=dtype), weight, empty(outputs, dtype=dtype))
        parts = packed_rows(empty(32, inputs, dtype=dtype), weight, None, parts=4)
        add_parts(parts, dtype)
        decode_weight(weight, dtype)
        if weight.table is None:
            row = empty(1, inputs, dtype=dtype)
            packed_row(row, weight, None)
            packed_row(row, weight, None, residual=row, norm=row[0], eps=1e-5, gate="silu")
        packed_rows(
            empty(max_packed_rows(DEVICE, dtype), inputs, dtype=dtype), weight, None, "silu"
        )


def packed_experts(dtype: torch.dtype) -> None:
    """Experts in 4 bits of Qwen3-30B-A3B's sizes, and of gpt-oss's."""
    for inputs, width, group, kind in ((2048, 768, 128, "integers"), (2880, 2880, 32, "e2m1")):
        gate_up, down = (
            pack_weight(
                empty(4 * outputs, columns, dtype=torch.uint8), empty(4 * outputs, columns // group, dtype=FLOAT16),
                zeros=empty(4 * outputs, columns // group, dtype=torch.uint8) if kind == "integers" else None, kind=kind,  # type: ignore[arg-type]  # one of the kinds
            )
            for outputs, columns in ((2 * width, inputs), (inputs, width))
        )  # fmt: skip
        for rows in (8, 2000):
            ids = empty(rows, 2, dtype=torch.int32)
            blocks = experts_order(ids, 4, min(block_rows(rows, 2, 4), MAX_BLOCK))
            hidden = packed_gate_up(empty(rows, inputs, dtype=dtype), gate_up, 4, blocks, 2, "silu")
            packed_down(hidden, down, 4, blocks, empty(rows, 2))
        ids = empty(2, 8, dtype=torch.int32)
        hidden = packed_gate_up_few(empty(2, inputs, dtype=dtype), gate_up, 4, ids, "silu")
        packed_down_few(hidden, down, 4, ids, empty(2, 8))


def layer_norms(dtype: torch.dtype) -> None:
    """Launches of models that have layer norms, and feed-forwards without a gate."""
    x, weight = empty(8, 4096, dtype=dtype), empty(2, 4096, dtype=dtype)
    norm(x, weight, 1e-5)
    add_norm(x, x, weight, 1e-5)
    apply_ungated(empty(8, 16_384, dtype=dtype), "relu2")


def layer_norms_fp8(dtype: torch.dtype) -> None:
    """`layer_norms` around products of 8-bit weights."""
    x, weight = empty(8, 4096, dtype=dtype), empty(2, 4096, dtype=dtype)
    norm_eight(x, weight, 1e-5, FLOAT8)
    add_norm_eight(x, x, weight, 1e-5, Scales(empty(8), empty(4096)), FLOAT8)
    apply_ungated_eight(
        empty(8, 16_384, dtype=dtype), "relu2", Scales(empty(8), empty(16_384)), FLOAT8
    )


def experts(dtype: torch.dtype, weights: torch.dtype | None = None) -> None:
    """Of about Qwen3-30B-A3B's size."""
    count, top, hidden, inner = 128, 8, 2048, 768
    eight = weights == FLOAT8
    matrices = ExpertMatrices(
        empty(count, 2 * inner, hidden, dtype=weights or dtype), empty(count, hidden, inner, dtype=weights or dtype),
        gate_up_scales=empty(count, 2 * inner // 128, hidden // 128) if eight else None,
        down_scales=empty(count, hidden // 128, inner // 128) if eight else None,
    )  # fmt: skip
    for tokens in (4, 16, 512, 2048):  # by pairs, and in blocks of 16, 64 and 128 rows
        ids, shares = experts_route(empty(tokens, count, dtype=dtype), top)
        apply_experts(empty(tokens, hidden, dtype=dtype), ids, shares, matrices, "silu")
    few = empty(4, count, dtype=dtype)
    ids, shares = experts_route(few, top, local_ids=empty(1, count, dtype=torch.int32))
    apply_experts(
        empty(4, hidden, dtype=dtype), ids, shares, replace(matrices, of=2 * count), "silu"
    )


def around(dtype: torch.dtype) -> None:
    """Launches around products and attention."""
    plan = Attention(128, dtype, dtype).plan(8, 8)
    x = embed(plan, empty(32_000, 4096, dtype=dtype), 1.0)
    add_features(plan, empty(64, 2 * 4096, dtype=dtype), 1, x)
    add_norm(x, x, empty(4096, dtype=dtype), 1e-5)
    add_norm(empty(4, 8, 4096), x, empty(4096, dtype=dtype), 1e-5)
    ranks = Peers.for_rank(
        0, (0, 0), empty(*rank_memory_shape(2, 4096 * dtype.itemsize), dtype=torch.int64)
    )
    add_norm(x, x, empty(4096, dtype=dtype), 1e-5, None, ranks)
    sum_ranks(x[:1], ranks)
    for count in (1, 64, 512):
        sum_parts(empty(count, 4096, dtype=dtype), PartPeers.for_rank(0, (0, 0), empty(1)))
    gather_ranks(x, ranks)
    reduce_scatter(x[:2], ranks)
    apply_gated(empty(8, 28_672, dtype=dtype), "silu")
    update_pages(plan.page_table, ints(4), ints(4))
    logits, rows, masks = empty(8, 152_064, dtype=dtype), ints(8), ints(8, 152_064 // 32)
    sampling = DeviceSampling.allocate(9, DEVICE)
    draw(
        logits,
        rows,
        rows,
        sampling,
        plan.last_tokens,
        rows,
        masks=TokenMasks(masks, rows),
        softcap=30.0,
    )
    part = draw_part(
        logits[:, : 4 * BLOCK],
        rows,
        rows,
        sampling,
        4,
        4,
        masks=TokenMasks(masks[:, BLOCK // 8 :], rows),
        softcap=30.0,
    )
    pick_winner(part.expand(4, *part.shape), 4, rows, sampling, plan.last_tokens, rows)
    token_scores(logits, rows, empty(2, 8), masks=TokenMasks(masks, rows), softcap=30.0)


def latents(dtype: torch.dtype, cached: torch.dtype | None = None) -> None:
    """Latent attention of DeepSeek's sizes, of a model with few heads and of one with many."""
    rank, rope_dim = 512, 64
    plane = empty(1, 64 * PAGE, rank + rope_dim, dtype=cached or dtype)
    scales = KVScales((empty(2),), (empty(1),)) if cached else None
    cache, tables = KVCache((plane,), (plane,), scales), (empty(64, rope_dim), empty(64, rope_dim))
    of = Attention(rank + rope_dim, dtype, dtype)
    for heads in (16, 128):
        plan = of.plan(8, 8)
        q, out = (empty(8, heads, rank + rope_dim, dtype=dtype) for _ in range(2))
        product, norm = empty(8, 3648, dtype=dtype), empty(rank, dtype=dtype)
        latent_store(
            product,
            empty(8, heads, rope_dim, dtype=dtype),
            q[..., rank:],
            norm,
            1e-6,
            tables,
            plan,
            cache,
            0,
        )
        prefixes = empty(8 * 16 * heads, rank), empty(8 * 16 * heads, 2)
        partials = Partials(empty(140 * heads, rank), empty(140 * heads, 2), ints(9, 8), *prefixes)
        work = DecodeWork(ints(140, 4), ints(8, 2), partials)
        latent_decode(q, cache, 0, plan, work, out, rank=rank, scale=0.1)
        latent_prefill(q, cache, 0, of.plan(8, 0), out, rank=rank, scale=0.1)
        if heads == 16 and properties_of(DEVICE).has_tma:  # others are not shared
            plan = of.plan(8, 8, shared=True)
            latent_prefix(q, cache, 0, plan, work, rank=rank, scale=0.1)
            latent_decode(q, cache, 0, plan, work, out, rank=rank, scale=0.1)
    hopper = hopper_kernels(properties_of(DEVICE), "prefill_attention_hopper")
    if (
        hopper is not None
        and hopper.supports_uncached(of.plan(8, 0, block=128), dtype, 128, rope_dim, 128)
        and not cached
    ):
        keys, values = empty(16, 8, 128, dtype=dtype), empty(16, 8, 128, dtype=dtype)
        hopper.uncached_attention_hopper(
            empty(8, 16, 192, dtype=dtype), keys, empty(8, rank + rope_dim, dtype=dtype), values,
            of.plan(8, 0, block=128), empty(8, 16, 128, dtype=dtype), scale=0.1,
        )  # fmt: skip


def convolutions(dtype: torch.dtype) -> None:
    """A short convolution of LFM2-1.2B's size."""
    plane = empty(1, 64 * PAGE, 2048, dtype=dtype)
    plan = Attention(64, dtype, dtype).plan(8, 8)
    product = empty(8, 3 * 2048, dtype=dtype)
    short_conv(product, empty(4, 2048), plan, KVCache((plane,), (plane,)), 0)


# Rows of one token, and longer ones.
STATE_ROWS = StateRows(ints(9), ints(8), ints(8), 1), StateRows(ints(9), ints(8), ints(8), 64)


def delta_rules(dtype: torch.dtype) -> None:
    """Of the sizes of Qwen3.5-35B-A3B and OLMo Hybrid, and with a decay for each channel of Kimi
    Linear's.
    """
    for key_heads, heads, dk, dv, decays in (
        (16, 32, 128, 128, ()),
        (30, 30, 96, 192, ()),
        (32, 32, 128, 128, (128,)),
    ):
        for rows in STATE_ROWS:
            channels = 2 * key_heads * dk + heads * dv
            inputs = empty(64, channels, dtype=dtype)
            x = state_conv(inputs, empty(5, channels), empty(8, 3, channels, dtype=dtype), rows)
            q, k = (part.unflatten(1, (key_heads, dk)) for part in x.split(key_heads * dk, 1)[:2])
            v = x[:, 2 * key_heads * dk :].unflatten(1, (heads, dv))
            states = empty(8, heads, dk, dv)
            delta_scan(q, k, v, empty(64, heads, *decays), empty(64, heads), states, rows)
        columns = empty(64, 2 * heads, dtype=dtype)
        delta_rates(columns[:, :heads], columns[:, heads:], empty(heads), empty(heads), 1.0)
        z = empty(64, heads * dv + 8, dtype=dtype)[:, : heads * dv]
        gate_heads(empty(64, heads, dv, dtype=dtype), z, empty(dv, dtype=dtype), 1e-6)


def state_spaces(dtype: torch.dtype) -> None:
    """Of the sizes of Nemotron-H-8B, Falcon-H1-7B (Mamba 2) and MiniMax-Text-01 (lightning
    attention), and of Jamba (Mamba) and RecurrentGemma-2B, whose inputs are in float32.
    """
    for rows in STATE_ROWS:
        for heads, p, groups, n in ((128, 64, 8, 128), (24, 128, 1, 256), (64, 128, 64, 128)):
            x, b = empty(64, heads, p, dtype=dtype), empty(64, groups, n, dtype=dtype)
            of_heads = empty(heads), empty(heads)
            mamba2_scan(x, b, b, empty(64, heads), *of_heads, empty(8, heads, p, n), rows)
        x, b = empty(64, 8192, dtype=dtype), empty(64, 16, dtype=dtype)
        a, d = empty(8192, 16), empty(8192)
        mamba1_scan(x, b, b, empty(64, 8192), a, d, empty(8, 8192, 16), rows)
        x, b, d = empty(64, 2560), empty(64, 1), empty(2560)
        mamba1_scan(x, b, b, x, empty(2560, 1), d, empty(8, 2560, 1), rows)


def time_mixing(dtype: torch.dtype) -> None:
    """Of the size of RWKV-4-7B, whose tails have the inputs of two blocks."""
    for rows in STATE_ROWS:
        x = empty(64, 4096, dtype=dtype)
        tails = empty(8, 1, 8192, dtype=dtype)
        state_conv(x, empty(3, 4096), tails[:, :, :4096], rows, activation=False)
        wkv_scan(x, x, x, empty(4096), empty(4096), empty(8, 3, 4096), rows)


def matrix_memories(dtype: torch.dtype) -> None:
    """Of the size of xLSTM-7B."""
    for rows in STATE_ROWS:
        product = empty(64, 12_304, dtype=dtype)
        q, k = (part.unflatten(1, (8, 256)) for part in product.split(2048, 1)[:2])
        v = product[:, 4096:8192].unflatten(1, (8, 512))
        gate = empty(64, 8)
        states = empty(8, 8, 256 * 512 + 32 * 257)
        mlstm_scan(q, k, v, gate, gate, states, rows, eps=1e-6)


def adapters(dtype: torch.dtype) -> None:
    """Products of adapters of Llama-8B's size, of a few tokens and of many."""
    step = LoraStep(ints(9), ints(8, 4), ints(8), ())
    for outputs, inputs in (
        ((4096, 1024, 1024), 4096),
        ((14_336, 14_336), 4096),
        ((4096,), 14_336),
    ):
        split, size = len(outputs) * 8 * inputs, len(outputs) * 8 * inputs + 8 * sum(outputs)
        pages = empty(32, size, dtype=dtype)
        a, b = pages[:, :split].view(32, len(outputs), 8, inputs), pages[:, split:].view(32, 8, -1)
        weights = LoraWeights(a, b, outputs)
        for tokens in (1, 64, 512):
            x, product = (
                empty(tokens, inputs, dtype=dtype),
                empty(tokens, sum(outputs), dtype=dtype),
            )
            rows = lora_rows(step, ints(tokens))
            lora_add(x, weights, rows, product)
            if len(outputs) == 2:
                lora_add_and_gate(x, weights, rows, product, "silu")
            if len(outputs) == 1:
                lora_add(x, weights, rows, product.float())
            weight = empty(sum(outputs), inputs, dtype=dtype)
            if tokens <= MAX_ROWS and can_tile(weight):
                low = shrink(x, weights, join_ranks(step, ints(tokens)))
                linear_by_tiles(x, weight, None, "silu" if len(outputs) == 2 else "", shrunk=low)
                linear_split_k(x, weight, 2, low)
                expand(low, product)
                own = own_shrink(x, weights, own_ranks(step, ints(tokens)))
                linear_by_tiles(x, weight, None, shrunk=own)
                linear_split_k(x, weight, 2, own)
                own_expand(own, product)
                if len(outputs) == 2:
                    expand_and_gate(low, product, "silu")
                    own_expand(own, product, "silu")


OTHERS: dict[str, Callable[[torch.dtype], None]] = {
    "products": products,
    "products invariant": invariant_products,
    "products fp8": products_fp8,
    "products int8": products_int8,
    "products packed": packed_products,
    "experts packed": packed_experts,
    "layer norms": layer_norms,
    "layer norms fp8": layer_norms_fp8,
    "experts": experts,
    "experts fp8": lambda dtype: experts(dtype, FLOAT8),
    "around": around,
    "adapters": adapters,
    "convolutions": convolutions,
    "delta rules": delta_rules,
    "state spaces": state_spaces,
    "time mixing": time_mixing,
    "matrix memories": matrix_memories,
    "latents": latents,
    "latents fp8": lambda dtype: latents(dtype, FLOAT8),
}


@dataclass(frozen=True)
class Case:
    """A kernel, or several that belong together, with one format on a GPU.

    Attributes:
        head: its size; 0 for kernels that know none.
    """

    properties: DeviceProperties
    head: int
    format: str
    kernel: str

    def launch(self) -> None:
        compute, cache = FORMATS[self.format]
        if self.head:
            ATTENTION[self.kernel](Attention(self.head, compute, cache))
        else:
            OTHERS[self.kernel](compute)

    @property
    def most_spilled(self) -> int:
        """Bytes that a thread may spill. float32, whose products are unrolled, overflows the
        registers that a thread can have on any GPU. Triton 3.6 spills more than 3.9 in latent
        attention over 8 bits.
        """
        return 6144 if self.format == "float32" else 1600

    def __str__(self) -> str:
        return f"{self.properties.name}, {self.head or '-'}, {self.format}, {self.kernel}"


def cases() -> list[Case]:
    """Every case that the engine can come to."""
    found = []
    for properties in GPUS:
        for name in formats_of(properties):
            found += [
                Case(properties, head, name, kernel) for head in HEADS for kernel in ATTENTION
                if ("capped" not in kernel or head == 256)
                and (head == 128 or not kernel.endswith(("chunked", "sloped")))
                and (
                    "invariant" not in kernel or (properties.capability == (9, 0) and name in ("bfloat16", "float16"))
                )
            ]  # fmt: skip
            if "fp8" not in name:
                eight = name == "bfloat16" and properties.capability >= (8, 9)
                found += [
                    Case(properties, 0, name, kernel) for kernel in OTHERS
                    if ("fp8" not in kernel or eight) and (kernel not in ("products packed", "products int8", "experts packed") or name != "float32")
                    and ("invariant" not in kernel or (properties.capability == (9, 0) and name != "float32"))
                ]  # fmt: skip
    return found
