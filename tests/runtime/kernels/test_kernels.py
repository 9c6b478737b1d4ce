"""Every kernel against its torch twin: under Triton's interpreter without a GPU, on the GPU with
one.
"""

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sglang_lite.runtime.executor.prefix_groups import MAX_CHUNKS, split_shared_prefixes
from sglang_lite.runtime.kernels import sampling as sampling_kernel
from sglang_lite.runtime.kernels.activation import apply_gated, apply_gated_eight
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionPlan,
    AttentionRules,
    DecodeWork,
    DevicePlan,
    ExtendRow,
    Partials,
    SharedPrefixes,
)
from sglang_lite.runtime.kernels.decode_attention import decode_attention, split_work
from sglang_lite.runtime.kernels.eight_bit_rows import FLOAT8, Scales
from sglang_lite.runtime.kernels.eight_bits import quantise_rows
from sglang_lite.runtime.kernels.embed import embed
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales, scale_by_kv_head
from sglang_lite.runtime.kernels.kv_copy import KVCopy
from sglang_lite.runtime.kernels.norm import add_norm, add_norm_eight, norm, norm_eight
from sglang_lite.runtime.kernels.page_table import update_pages
from sglang_lite.runtime.kernels.prefill_attention import prefill_attention
from sglang_lite.runtime.kernels.prefix_attention import prefix_attention
from sglang_lite.runtime.kernels.reference.attention import attention
from sglang_lite.runtime.kernels.reference.kv_copy import copy_kv
from sglang_lite.runtime.kernels.rope_store import rope_store
from sglang_lite.runtime.kernels.sampling import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    DeviceSampling,
    TokenMasks,
    draw,
    draw_part,
    pick_winner,
)
from tests.runtime.kernels import needs_kernels

pytestmark = needs_kernels
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# the interpreter takes a thousand times as long: it gets fewer rows, and smaller blocks
GPU = DEVICE.type == "cuda"
PAGE = 4


def close(a, b, dtype=torch.float32):
    limit = 2e-5 if dtype == torch.float32 else 2e-2
    assert torch.isfinite(a).all()
    assert (a.float() - b.float()).norm() <= limit * b.float().norm() + 1e-6, (a - b).abs().max()


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


class Rows:
    """Sequences in random pages of a cache that is full of other numbers."""

    def __init__(self, lengths, heads=(4, 2), dim=16, dtype=torch.float32, shared=0, page=PAGE):
        self.lengths, self.page, self.dtype = lengths, page, dtype
        self.heads, self.kv_heads = heads
        per_row = [-(-n // page) for n in lengths]
        total = sum(per_row) + 1
        order = torch.randperm(total).tolist()
        most = max(per_row) + 1
        self.table = torch.zeros((len(lengths) + 1, most), dtype=torch.int32)
        for i, count in enumerate(per_row):
            self.table[i, :count] = torch.tensor(
                [order.pop() for _ in range(count)], dtype=torch.int32
            )
            self.table[i, : shared // page] = self.table[0, : shared // page]
        self.table[-1] = order.pop()
        self.cache = KVCache(
            (normal(self.kv_heads, total * page, dim, dtype=dtype),),
            (normal(self.kv_heads, total * page, dim, dtype=dtype),),
        )
        self.dim = dim

    def read_at(self, row, end):
        at = torch.arange(end)
        return (self.table[row][at // self.page] * self.page + at % self.page).to(DEVICE).long()

    def plan(self, decoding, slots, positions, blocks=(), block_size=16, shared=None):
        return DevicePlan(
            ids=torch.zeros(len(slots), dtype=torch.int32, device=DEVICE),
            slots=torch.tensor(slots, dtype=torch.int32, device=DEVICE),
            positions=torch.tensor(positions, dtype=torch.int32, device=DEVICE),
            last_tokens=torch.zeros(len(self.table), dtype=torch.int32, device=DEVICE),
            page_table=self.table.to(DEVICE),
            page_size=self.page,
            decoding=decoding,
            shared=shared,
            blocks=torch.tensor(blocks, dtype=torch.int32, device=DEVICE).view(-1, 4),
            block_size=block_size,
        )

    def work(self, plan):
        """The plan's decoding, cut into items of 16 tokens at least."""
        rows = plan.decoding
        items = 2 * rows + 8
        count, prefix = items * self.heads, rows * MAX_CHUNKS * self.heads
        work = DecodeWork(
            items=torch.full((items, 4), 99, dtype=torch.int32, device=DEVICE),
            rows=torch.zeros((rows, 2), dtype=torch.int32, device=DEVICE),
            partials=Partials(
                torch.full((count, self.dim), float("nan"), device=DEVICE), torch.full((count, 2), float("nan"), device=DEVICE),
                torch.zeros((rows, self.kv_heads), dtype=torch.int32, device=DEVICE),
                torch.full((prefix, self.dim), float("nan"), device=DEVICE),
                torch.full((prefix, 2), float("nan"), device=DEVICE),
            ),
        )  # fmt: skip
        split_work(
            plan.positions[:rows], plan.slots, plan.shared, work.items, work.rows, min_tokens=16
        )
        return work

    def twin(self, q, rows, **options):
        """`rows`: (first token in the batch, count, slot, end of the sequence)."""
        extends = tuple(ExtendRow(f, f + c, self.read_at(s, e)) for f, c, s, e in rows)
        with sdpa_kernel(SDPBackend.MATH):
            return attention(
                q,
                self.cache,
                0,
                AttentionPlan(torch.zeros(0), (), extends),
                AttentionRules(**options),
            )


def in_eight_bits(rows, q, *, scaled):
    """The rows' cache in 8 bits, the queries as it takes them in place of q, and q. The rows' own
    cache becomes what the numbers stand for.
    """
    eight = [side[0].to(torch.float8_e4m3fn) for side in (rows.cache.k, rows.cache.v)]
    asked, scales = q.clone(), None
    if scaled:
        heads = torch.arange(rows.kv_heads, device=DEVICE)
        scales = KVScales((2.0 ** (2 * heads - 1),), (2.0 ** (12 * heads - 9),))
        q.copy_(scale_by_kv_head(q, scales.k[0]))
    sides = (scales.k, scales.v) if scales else (torch.ones(1, rows.kv_heads, device=DEVICE),) * 2
    rows.cache = KVCache(*((x.float() * by[0].view(-1, 1, 1),) for x, by in zip(eight, sides)))  # type: ignore[arg-type]  # keys and values
    k, v = ((x,) for x in eight)
    return KVCache(k, v, scales), asked


def close_by_head(a, b):
    """Of results over 8 bits: queries and weights are in float16 there, and heads as large as their
    scales.
    """
    assert ((a - b).norm(dim=(0, 2)) < 2e-3 * b.norm(dim=(0, 2))).all()


OPTIONS = [
    {},
    {"softcap": 5.0},
    {"window": 7},
    {"window": 7, "chunked": True},
    {"slopes": 0.3},
]


def options_of(options, heads):
    """Options of `AttentionRules`, with a slope for each head up to the one given."""
    if "slopes" not in options:
        return options
    slopes = torch.linspace(0.01, options["slopes"], heads, device=DEVICE)
    return options | {"slopes": slopes}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("lengths", "heads", "dim"),
    [
        ([1], (4, 2), 16),
        ([300], (4, 2), 16),
        ([1, 4, 5, 64, 65, 200], (6, 2), 16),
        ([130, 3], (1, 1), 24),
        ([70], (20, 1), 16),
        ([290], (12, 1), 128),  # whose five pieces are merged two by two
    ],
    ids=str,
)
def test_decoding_reads_every_row_once(lengths, heads, dim, options):
    options = options_of(options, heads[0])
    rows = Rows(lengths, heads, dim)
    plan = rows.plan(len(lengths), list(range(len(lengths))), [n - 1 for n in lengths])
    q = normal(len(lengths), heads[0] + 2, dim)[:, : heads[0]]  # as it lies in the QKV product
    out = torch.full((len(lengths), heads[0], dim), float("nan"), device=DEVICE)
    work = rows.work(plan)
    for _ in range(2):  # the counters are left as they were found
        out.fill_(float("nan"))
        decode_attention(q, rows.cache, 0, plan, work, out, AttentionRules(0.3, **options))
        close(
            out, rows.twin(q, [(i, 1, i, n) for i, n in enumerate(lengths)], scale=0.3, **options)
        )


@pytest.mark.parametrize("round_up", [False, True])
def test_work_is_cut_by_tokens(round_up):
    positions = torch.tensor([0, 999, 63, 64, 4000], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([7, 0, 3, 3, 9], dtype=torch.int32, device=DEVICE)
    for items in (6, 7, 30, 300):
        work = torch.zeros((items, 4), dtype=torch.int32, device=DEVICE)
        row_work = torch.zeros((5, 2), dtype=torch.int32, device=DEVICE)
        split_work(positions, slots, None, work, row_work, min_tokens=64, round_up=round_up)
        covered: dict[int, list[tuple[int, int]]] = {}
        for row, start, end, slot in work.tolist():
            if row >= 0:
                assert slot == slots[row]
                covered.setdefault(row, []).append((start, end))
        for row, position in enumerate(positions.tolist()):
            first, count = row_work[row].tolist()
            pieces = covered[row]
            assert work[first : first + count, 0].tolist() == [row] * count
            assert len(pieces) == count
            assert [start for start, _ in pieces] == [0] + [end for _, end in pieces[:-1]]
            assert pieces[-1][1] == position + 1
        longest = max(end - start for pieces in covered.values() for start, end in pieces)
        share = max(64, -(-5131 // (items - 5)))
        assert longest <= (-(-share // 64) * 64 if round_up else 1.5 * share + 64)


@pytest.mark.parametrize("scaled", [None, False, True])  # None: no 8 bits
def test_a_prefix_is_read_once_for_all_that_share_it(scaled):
    lengths, shared = [150, 131, 129, 200, 40, 260], 128
    rows = Rows(lengths, (4, 2), 16, shared=0)
    for i in (1, 2, 3):
        rows.table[i, : shared // PAGE] = rows.table[0, : shared // PAGE]
    table = rows.table[:6].numpy()
    held = np.array([n // PAGE for n in lengths], dtype=np.int32)
    import sglang_lite.runtime.executor.prefix_groups as module

    worth, module.MIN_SAVED_TOKENS = module.MIN_SAVED_TOKENS, 1
    try:
        found = split_shared_prefixes(
            table,
            held,
            np.arange(6, dtype=np.int32),
            PAGE,
            rows_per_block=2,
            max_items=40,
            target_chunks=9,
        )
    finally:
        module.MIN_SAVED_TOKENS = worth
    assert found is not None
    assert found.lengths.tolist() == [128, 128, 128, 128, 0, 0]
    lengths_of, chunks, order = (
        torch.from_numpy(np.resize(a, 6)).to(DEVICE)
        for a in (found.lengths, found.chunks, found.order)
    )
    prefixes = SharedPrefixes(
        lengths_of,
        chunks,
        order,
        torch.from_numpy(np.concatenate((found.items, np.zeros((3, 6), dtype=np.int32)))).to(
            DEVICE
        ),
        MAX_CHUNKS,
    )
    plan = rows.plan(6, list(range(6)), [n - 1 for n in lengths], shared=prefixes)
    q = normal(6, 4, 16)
    cache, asked = (rows.cache, q) if scaled is None else in_eight_bits(rows, q, scaled=scaled)
    out = torch.full((6, 4, 16), float("nan"), device=DEVICE)
    work = rows.work(plan)
    for options in ({}, {"softcap": 4.0}, options_of({"slopes": 0.3}, 4)):
        prefix_attention(q, cache, 0, plan, work, AttentionRules(0.3, **options))
        decode_attention(q, cache, 0, plan, work, out, AttentionRules(0.3, **options))
        expected = rows.twin(
            asked, [(i, 1, i, n) for i, n in enumerate(lengths)], scale=0.3, **options
        )
        (close if scaled is None else close_by_head)(out, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("start", "count", "heads"),
    [
        (0, 1, (6, 2)),
        (0, 5, (6, 2)),
        (3, 16, (6, 2)),
        (0, 65, (3, 1)),
        (130, 40, (3, 1)),
        (64, 64, (3, 1)),
    ],
)
def test_prefill_attends_to_the_pages_before_it(start, count, heads, options):
    options = options_of(options, heads[0])
    rows = Rows([start + count, 9], heads, 24)
    size = 16
    blocks = [(2 + at, min(size, count - at), 0, start + at) for at in range(0, count, size)] + [
        (0, 2, 1, 7)
    ]
    plan = rows.plan(0, [1] * 2 + [0] * count, [7, 8, *range(start, start + count)], blocks, size)
    q = normal(2 + count, heads[0] + 4, 24)[:, : heads[0]]
    out = torch.full((2 + count, heads[0], 24), float("nan"), device=DEVICE)
    prefill_attention(q, rows.cache, 0, plan, out, AttentionRules(0.3, **options))
    close(out, rows.twin(q, [(0, 2, 1, 9), (2, count, 0, start + count)], scale=0.3, **options))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rope_dim", [16, 8])
@pytest.mark.parametrize("scaled", [False, True])
def test_queries_and_keys_are_turned_and_stored(norm, rope_dim, scaled):
    from sglang_lite.runtime.models.layers.rope import rotate

    heads, kv_heads, dim = 6, 2, 16
    rows = Rows([9, 30], (heads, kv_heads), dim)
    slots, positions = [0, 1, 1], [8, 27, 28]
    plan = rows.plan(0, slots, positions)
    qkv = normal(3, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(64, rope_dim // 2, device=DEVICE)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    weights = (
        (torch.rand(dim, device=DEVICE), torch.rand(dim, device=DEVICE)) if norm else (None, None)
    )
    split = qkv.clone().view(3, -1, dim)
    q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
    if norm:
        q = torch.nn.functional.rms_norm(q, (dim,), weights[0], 1e-5)
        k = torch.nn.functional.rms_norm(k, (dim,), weights[1], 1e-5)
    at = torch.tensor(positions, device=DEVICE)
    q, k = (rotate(x, cos[at].unsqueeze(1), sin[at].unsqueeze(1)) for x in (q, k))
    if scaled:
        by = torch.tensor([[4.0, 2.0**-20], [2.0**-11, 64.0]], device=DEVICE)  # of keys, of values
        rows.cache = KVCache(rows.cache.k, rows.cache.v, KVScales((by[0],), (by[1],)))
        q = q * by[0].repeat_interleave(heads // kv_heads).unsqueeze(1)
        k, v = k / by[0].unsqueeze(1), v / by[1].unsqueeze(1)
    before = rows.cache.k[0].clone()
    close(rope_store(qkv, weights[0], weights[1], 1e-5, (cos, sin), plan, rows.cache, 0), q)
    stored = torch.stack([rows.read_at(s, p + 1)[-1] for s, p in zip(slots, positions)])
    close(rows.cache.k[0][:, stored].transpose(0, 1), k)
    close(rows.cache.v[0][:, stored].transpose(0, 1), v)
    others = torch.ones(before.shape[1], dtype=torch.bool, device=DEVICE).index_fill_(
        0, stored, False
    )
    assert torch.equal(rows.cache.k[0][:, others], before[:, others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [24, 576])
def test_norms(size, dtype):
    x, residual, weight = (
        normal(5, size, dtype=dtype),
        normal(5, size, dtype=dtype),
        normal(size, dtype=dtype),
    )
    twin = torch.nn.functional.rms_norm
    close(norm(x, weight, 1e-5), twin(x, (size,), weight, 1e-5), dtype)
    total = x + residual
    close(add_norm(x, residual, weight, 1e-5), twin(total, (size,), weight, 1e-5), dtype)
    close(residual, total, dtype)  # the interpreter cuts off where it should round


@pytest.mark.parametrize("kind", [FLOAT8, torch.int8])
def test_scales_of_a_product_are_applied_by_its_reader(kind):
    def scaled(columns):
        y, scales = (
            normal(3, columns),
            Scales(torch.rand(3, device=DEVICE), torch.rand(columns, device=DEVICE)),
        )
        return y, scales, y * scales.rows.unsqueeze(1) * scales.columns

    weight, residual = normal(64), normal(3, 64)
    y, scales, product = scaled(64)
    close(norm(y, weight, 1e-5, scales), norm(product, weight, 1e-5))
    total = residual.clone()
    close(add_norm(y, residual, weight, 1e-5, scales), add_norm(product, total, weight, 1e-5))
    close(residual, total)
    y, scales, product = scaled(2 * 40)
    close(apply_gated(y, "silu", scales), apply_gated(product, "silu"))
    total = residual.clone()
    for eight, plain in (
        (norm_eight(y := normal(3, 64), weight, 1e-5, kind), norm(y, weight, 1e-5)),
        (add_norm_eight(y, residual, weight, 1e-5, None, kind), add_norm(y, total, weight, 1e-5)),
        (apply_gated_eight(y, "silu", None, kind), apply_gated(y, "silu")),
    ):
        assert eight.rows == 3
        twin = quantise_rows(plain, kind)
        close(eight.scales[:3], twin.scales[:3])
        back, exact = (e.values[:3].float() * e.scales[:3].unsqueeze(1) for e in (eight, twin))
        assert (back - exact).norm() <= 0.01 * exact.norm()  # a value may round the other way
    ours, twins = Rows([9, 30]), Rows([9, 30])
    twins.table = ours.table
    angles = torch.rand(64, 16, device=DEVICE)
    y, scales, product = scaled(8 * 16)
    for norms in ((None, None), (normal(16), normal(16))):
        queries = [
            rope_store(
                x.clone(),
                norms[0],
                norms[1],
                1e-5,
                (angles, angles),
                rows.plan(0, [0, 1, 1], [8, 27, 28]),
                rows.cache,
                0,
                s,
            )
            for x, rows, s in ((y, ours, scales), (product, twins, None))
        ]
        close(*queries)
        stored = torch.cat((ours.read_at(0, 9)[-1:], ours.read_at(1, 29)[-2:]))
        for a, b in zip((ours.cache.k, ours.cache.v), (twins.cache.k, twins.cache.v)):
            close(a[0][:, stored], b[0][:, stored])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("count", [3, 40 if GPU else 12])
def test_attention_over_keys_and_values_in_eight_bits(count, scaled):
    lengths = [90, 1, 64, *range(65, 65 + count - 3)]
    rows = Rows(lengths)
    q, out = normal(count, 4, 16), torch.empty((count, 4, 16), device=DEVICE)
    eight, asked = in_eight_bits(rows, q, scaled=scaled)
    plan = rows.plan(count, list(range(count)), [n - 1 for n in lengths])
    decode_attention(q, eight, 0, plan, rows.work(plan), out, AttentionRules(0.3))
    close_by_head(out, rows.twin(asked, [(i, 1, i, n) for i, n in enumerate(lengths)], scale=0.3))
    blocks = [(0, 3, 0, 87)]
    prefill_attention(
        q[:3], eight, 0, rows.plan(0, [0] * 3, [87, 88, 89], blocks, 16), out, AttentionRules(0.3)
    )
    close_by_head(out[:3], rows.twin(asked[:3], [(0, 3, 0, 90)], scale=0.3))


def test_keys_and_values_are_stored_in_eight_bits():
    """Numbers that have no more digits come out as they went in, from the least to the largest."""
    rows = Rows([9, 30], (2, 2), 16)
    by = torch.tensor([[8.0, 2.0**-16], [2.0**-11, 64.0]], device=DEVICE)
    scales = KVScales((by[0],), (by[1],))
    eight = [
        torch.zeros(rows.cache.k[0].shape, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)
    ]
    cache = KVCache((eight[0],), (eight[1],), scales)
    # not NaN; token, side, head, element
    codes = torch.arange(2 * 2 * 2 * 16, device=DEVICE).view(2, 2, 2, 16) * 2
    codes[(codes & 127) < 8] = 0  # Triton's interpreter rounds what is subnormal
    numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    qkv = torch.cat((normal(2, 2, 16), (numbers.float() * by.unsqueeze(2)).view(2, 4, 16)), 1).view(
        2, -1
    )
    still = torch.ones((64, 16), device=DEVICE), torch.zeros((64, 16), device=DEVICE)
    rope_store(qkv, None, None, 1e-5, still, rows.plan(0, [0, 1], [8, 28]), cache, 0)
    for token, (slot, position) in enumerate([(0, 8), (1, 28)]):
        at = rows.read_at(slot, position + 1)[-1]
        for side, stored in enumerate((cache.k, cache.v)):
            assert torch.equal(
                stored[0][:, at].view(torch.uint8), numbers[token, side].view(torch.uint8)
            )
    if GPU:  # the interpreter makes something else of what is too large
        rope_store(
            torch.full_like(qkv, 1e9),
            None,
            None,
            1e-5,
            still,
            rows.plan(0, [0, 1], [8, 28]),
            cache,
            0,
        )
        assert all(
            (side[0][:, rows.read_at(0, 9)[-1]].float() == 448).all() for side in (cache.k, cache.v)
        )


def apply_activation(x, kind):
    gate, up = x.chunk(2, -1)
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    return (
        torch.nn.functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up
    )


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gates(kind):
    x = normal(3, 2 * 1500)
    close(apply_gated(x, kind), apply_activation(x, kind))


def test_tokens_that_were_drawn_are_embedded():
    rows = Rows([4, 4])
    plan = rows.plan(2, [1, 0, 1], [0, 0, 0])
    plan.ids.copy_(torch.tensor([-1, 7, -1]))
    plan.last_tokens.copy_(torch.tensor([5, 3, 0]))
    table = normal(10, 24)
    assert torch.equal(embed(plan, table, 1.0), table[[3, 7, 3]])


def test_pages_are_copied_in_all_layers():
    cache = KVCache(
        tuple(normal(2, 12, 6) for _ in range(3)), tuple(normal(2, 12, 6) for _ in range(3))
    )
    twin = KVCache(tuple(k.clone() for k in cache.k), tuple(v.clone() for v in cache.v))
    source, target = torch.tensor([1, 2, 7], device=DEVICE), torch.tensor([9, 10, 0], device=DEVICE)
    KVCopy(cache)(source, target)
    copy_kv(twin, source, target)
    assert all(torch.equal(a, b) for a, b in zip((*cache.k, *cache.v), (*twin.k, *twin.v)))


def test_page_table_changes():
    table = torch.zeros((3, 5), dtype=torch.int32, device=DEVICE)
    update_pages(
        table,
        torch.tensor([1, 14], dtype=torch.int32, device=DEVICE),
        torch.tensor([7, 8], dtype=torch.int32, device=DEVICE),
    )
    assert table.view(-1).tolist() == [0, 7, *[0] * 12, 8]


# -------------------------------------------------------------------------------------------- draws


def sampling(rows, **parameters):
    table = DeviceSampling.allocate(rows, DEVICE)
    for name, value in parameters.items():
        getattr(table, name).copy_(torch.as_tensor(value))
    return table


def drawn(logits, table, positions=None, **options):
    rows = len(logits)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    if positions is None:
        positions = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    last = torch.full((rows,), -9, dtype=torch.int32, device=DEVICE)
    tokens = torch.full((rows,), -9, dtype=torch.int32, device=DEVICE)
    draw(logits, slots, positions, table, last, tokens, **options)
    assert last.tolist() == [max(t, 0) for t in tokens.tolist()]
    return tokens


@pytest.fixture
def block(monkeypatch):
    """Number of logits that a program reads."""
    if not GPU:
        monkeypatch.setattr("sglang_lite.runtime.kernels.sampling.BLOCK", 64)
    return sampling_kernel.BLOCK


@pytest.mark.parametrize("ranks", [2, 3])
def test_draws_by_parts_of_the_vocabulary_are_those_of_whole_logits(block, ranks):
    """Rows of all kinds: greedy and drawn, with masks, without any allowed token, and broken in one
    part.
    """
    size, rows = 5 * block + 7, 8
    logits = normal(rows, size) * 3
    logits[5, 3], logits[6, 4 * block] = float("nan"), float("inf")
    masks = torch.randint(-(2**31), 2**31, (3, -(-size // 32)), device=DEVICE).int()
    masks[2] = 0
    mask_rows = torch.tensor([0, 1, -1, -1, 2, -1, 0, 1], dtype=torch.int32, device=DEVICE)
    table = sampling(
        rows, temperature=[0.0, 0.7, 1.0, 1.3, 1.0, 1.0, 0.0, 0.2], seed=[*range(7), 2**40 + 3]
    )
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    blocks = -(-6 // ranks)
    for softcap, of in ((None, None), (20.0, TokenMasks(masks, mask_rows))):
        whole = drawn(logits, table, softcap=softcap, masks=of)
        found = []
        for first in range(0, ranks * blocks, blocks):
            part = logits[:, first * block : (first + blocks) * block]
            words = of and TokenMasks(masks[:, first * block // 32 :], of.rows)
            found.append(
                draw_part(part, slots, slots, table, first, blocks, masks=words, softcap=softcap)
            )
        last, tokens = (torch.full((rows,), -9, dtype=torch.int32, device=DEVICE) for _ in range(2))
        pick_winner(torch.stack(found), blocks, slots, table, last, tokens)
        assert tokens.tolist() == whole.tolist()
        assert last.tolist() == [max(token, 0) for token in tokens.tolist()]


@pytest.mark.parametrize("size", [33, 4096, 9001])
def test_greedy_takes_the_largest(size):
    logits = normal(3, size)
    logits[2, -1] = 99
    assert drawn(logits, sampling(3)).tolist() == logits.argmax(-1).tolist()


def test_masks_and_broken_rows():
    logits = normal(5, 70)
    logits[1, 40] = float("nan")
    logits[2] = float("-inf")
    logits[3, 5] = float("inf")
    masks = torch.zeros((1, 3), dtype=torch.int32, device=DEVICE)
    masks[0, 2] = 1 << 3  # token 67
    rows = torch.tensor([0, -1, -1, -1, -1], dtype=torch.int32, device=DEVICE)
    tokens = drawn(logits, sampling(5), masks=TokenMasks(masks, rows)).tolist()
    assert tokens == [67, NOT_FINITE, NOTHING_ALLOWED, NOT_FINITE, int(logits[4].argmax())]


def kept(logits, temperature, top_k, top_p, min_p, sequential=False):
    """The tokens that filters leave, by sorting."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = probs.argsort(descending=True)
    before = probs[order].cumsum(0) - probs[order]
    ranks = torch.arange(len(probs), device=probs.device)
    total = probs[order][:top_k].sum() if sequential and top_k else 1.0
    keep = (before <= top_p * total) & (probs[order] >= probs.max() * min_p)
    if top_k:
        keep &= ranks < top_k
    return {int(t) for t in order[keep]}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "filters",
    [
        (0, 1.0, 0.0),
        (3, 1.0, 0.0),
        (0, 0.6, 0.0),
        (0, 1.0, 0.3),
        (8, 0.8, 0.05),
        (4, 0.7, 0.05, True),
    ],
    ids=str,
)
def test_draws_follow_the_probabilities_that_filters_leave(block, filters):
    (top_k, top_p, min_p), sequential = filters[:3], len(filters) > 3
    count = 4000 if GPU else 20 if top_k or top_p < 1 else 50  # each row of those is read 32 times
    size, temperature = 20, 0.7
    one = normal(size) * 2
    logits = one.repeat(count, 1)
    table = sampling(
        count, temperature=[temperature] * count, top_k=[top_k] * count, top_p=[top_p] * count, min_p=[min_p] * count,
        sequential=[int(sequential)] * count, seed=list(range(count)),
    )  # fmt: skip
    tokens = drawn(logits, table).cpu()
    allowed = kept(one, temperature, *filters)
    assert set(tokens.tolist()) <= allowed
    probs = torch.softmax(one.double() / temperature, -1).cpu()
    mask = torch.tensor([t in allowed for t in range(size)])
    expected = probs.where(mask, 0.0) / probs[mask].sum() * count
    seen = torch.bincount(tokens, minlength=size).double()
    likely = expected > 5
    chi2 = float(((seen - expected)[likely] ** 2 / expected[likely]).sum())
    degrees = int(likely.sum())
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5 + 5


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "filters", [(3, 0.75, 0.0), (4, 0.6, 0.05), (0, 0.75, 0.0), (3, 1.0, 0.0)], ids=str
)
def test_both_orders_leave_what_their_definitions_leave(block, filters):
    """In plain Python, of five tokens; the fourth is in another block. Each token that is left is
    drawn.
    """
    (top_k, top_p, min_p), rows = filters, 40
    shares = {3: 0.4, block + 1: 0.3, 0: 0.2, 7: 0.06, 5: 0.04}
    one = torch.full((block + 2,), float("-inf"), device=DEVICE)
    one[list(shares)] = torch.tensor([*shares.values()], device=DEVICE).log()
    for sequential in (0, 1):
        most = top_p * (sum(sorted(shares.values())[-top_k:]) if sequential and top_k else 1)
        left, before = set(), 0.0
        for token in [*shares][: top_k or 5]:
            left |= {token} if before <= most and shares[token] >= min_p * 0.4 else set()
            before += shares[token]
        table = sampling(
            rows, temperature=[1.0] * rows, top_k=[top_k] * rows, top_p=[top_p] * rows, min_p=[min_p] * rows,
            sequential=[sequential] * rows, seed=list(range(rows)),
        )  # fmt: skip
        found = {int(token) for token in drawn(one.repeat(rows, 1), table)}
        assert found <= left
        assert len(left) > 4 or found == left


def test_a_draw_depends_on_seed_and_position_alone():
    logits = normal(1, 5000).repeat(6, 1)
    table = sampling(6, temperature=[1.0] * 6, seed=[7, 7, 7, 8, 2**40 + 7, 7])
    positions = torch.tensor([3, 3, 4, 3, 3, 3], dtype=torch.int32, device=DEVICE)
    tokens = drawn(logits, table, positions).tolist()
    assert tokens[0] == tokens[1] == tokens[5]
    assert len(set(tokens)) > 2
    alone = drawn(logits[:1], sampling(1, temperature=[1.0], seed=[7]), positions[:1]).tolist()
    assert alone == tokens[:1]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("own", "neighbour"),
    [
        ({}, {"top_k": 3}),
        ({}, {"top_p": 0.5}),
        ({}, {"min_p": 0.2}),
        ({"min_p": 0.01}, {"top_p": 0.5}),
    ],
    ids=str,
)
def test_a_draw_does_not_depend_on_a_neighbours_filters(block, own, neighbour):
    """Every second row is a neighbour, with filters or without."""
    # a filter may leave what was drawn, but not of eight
    rows, none = 16, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    torch.manual_seed(0)
    logits = normal(rows, block + block // 4)

    def first(**filters):
        by_row = [{**none, **(filters if i % 2 else own)} for i in range(rows)]
        parameters = {name: [row[name] for row in by_row] for name in none}
        return drawn(
            logits, sampling(rows, temperature=[1.0] * rows, seed=list(range(rows)), **parameters)
        ).tolist()

    alone, beside = first(), first(**neighbour)
    assert beside[::2] == alone[::2]
    assert beside[1::2] != alone[1::2]
