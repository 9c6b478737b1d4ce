"""Attention from the QKV product gives what its two halves give one after the other."""

from dataclasses import replace

import pytest
import torch

from sglang_lite.runtime.attention import triton as attention_by_triton
from sglang_lite.runtime.attention.base import AttentionRequirements
from sglang_lite.runtime.attention.triton import TritonAttention
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, RotaryPositions
from sglang_lite.runtime.kernels.decode_attention import decode_attention
from sglang_lite.runtime.kernels.eight_bit_rows import Scales
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.rope_attention import rope_attention
from sglang_lite.runtime.kernels.rope_store import rope_store
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE, OPTIONS, Rows, close, normal, options_of

pytestmark = needs_kernels


@pytest.mark.sampled(6)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "rope_dim"),
    [
        ([1], (4, 2), 16, 16),
        ([150], (4, 2), 16, 8),
        ([1, 4, 64, 65, 130], (6, 2), 16, 16),
        ([70, 3], (17, 1), 24, 24),
    ],
    ids=str,
)
@pytest.mark.parametrize("eight", [False, True])
def test_rope_store_and_decode_attention_are_one(lengths, heads, dim, rope_dim, options, eight):
    torch.manual_seed(len(lengths))
    rows = Rows(lengths, heads, dim)
    count, width = len(lengths), (heads[0] + 2 * heads[1]) * dim
    options = options_of(options, heads[0])
    keys, values, factors, scales = rows.cache.k[0], rows.cache.v[0], None, None
    if eight:
        keys, values = keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
        by = 2.0 ** torch.arange(heads[1], device=DEVICE) / 4
        factors, scales = (
            KVScales((by,), (by,)),
            Scales(torch.rand(count, device=DEVICE), torch.rand(width, device=DEVICE)),
        )
    cache, other = (KVCache((keys.clone(),), (values.clone(),), factors) for _ in range(2))
    plan = rows.plan(count, list(range(count)), [n - 1 for n in lengths])
    qkv, tables = (
        normal(count, width),
        (normal(max(lengths), rope_dim), normal(max(lengths), rope_dim)),
    )
    norms = normal(dim), normal(dim)
    q_norm, k_norm = norms if dim == 16 else (None, None)
    work = rows.work(plan)
    out, expected = (
        torch.full((count, heads[0], dim), float("nan"), device=DEVICE) for _ in range(2)
    )
    for _ in range(2):  # the counters are left as they were found
        rope_attention(
            qkv,
            q_norm,
            k_norm,
            1e-5,
            tables,
            cache,
            0,
            out,
            plan=plan,
            work=work,
            scales=scales,
            rules=AttentionRules(0.3, **options),
        )
    q = rope_store(qkv, q_norm, k_norm, 1e-5, tables, plan, other, 0, scales)
    decode_attention(q, other, 0, plan, rows.work(plan), expected, AttentionRules(0.3, **options))
    near = torch.bfloat16 if eight else torch.float32
    close(out, expected, near)
    close(cache.k[0].float(), other.k[0].float(), near)
    close(cache.v[0].float(), other.v[0].float(), near)


def test_three_positions_rotate_as_their_elements_of_the_tables_would():
    torch.manual_seed(0)
    lengths, heads, dim, rope_dim = [1, 4, 64, 65, 130], (6, 2), 16, 8
    rows, count = Rows(lengths, heads, dim), len(lengths)
    caches = [KVCache((rows.cache.k[0].clone(),), (rows.cache.v[0].clone(),)) for _ in range(4)]
    plan = rows.plan(count, list(range(count)), [n - 1 for n in lengths])
    at = torch.randint(max(lengths), (3, count), dtype=torch.int32, device=DEVICE)
    axes = torch.tensor([0, 2, 1, 1, 2, 0, 0, 1], dtype=torch.int32, device=DEVICE)
    tables = normal(max(lengths), rope_dim), normal(max(lengths), rope_dim)
    # with the right rows at the positions
    own = torch.empty_like(tables[0]), torch.empty_like(tables[1])
    for row, length in enumerate(lengths):
        for to, of in zip(own, tables):
            to[length - 1] = torch.stack([of[at[axes[d], row], d] for d in range(rope_dim)])
    qkv = normal(count, (heads[0] + 2 * heads[1]) * dim)
    threefold = replace(plan, rotary=RotaryPositions(at, axes))
    out, expected = (torch.empty((count, heads[0], dim), device=DEVICE) for _ in range(2))
    for each, to, cache, rope in (
        (threefold, out, caches[0], tables),
        (plan, expected, caches[1], own),
    ):
        rope_attention(
            qkv,
            None,
            None,
            1e-5,
            rope,
            cache,
            0,
            to,
            plan=each,
            work=rows.work(plan),
            rules=AttentionRules(0.3),
        )
    close(out, expected)
    stored = rope_store(qkv.clone(), None, None, 1e-5, tables, threefold, caches[2], 0)
    close(stored, rope_store(qkv.clone(), None, None, 1e-5, own, plan, caches[3], 0))
    for cache in caches[1:]:
        close(caches[0].k[0], cache.k[0])


@pytest.mark.parametrize("length", [200, 600])
def test_one_row_of_8_bits_is_taken_from_its_product(monkeypatch, length):
    monkeypatch.setattr(attention_by_triton, "MAX_HEADS", 4)
    torch.manual_seed(length)
    heads, dim = (8, 1), 32
    rows = Rows([length], heads, dim)
    keys, values = (side[0].to(torch.float8_e4m3fn) for side in (rows.cache.k, rows.cache.v))
    factors = KVScales(*((torch.full((1,), by, device=DEVICE),) for by in (0.5, 2.0)))
    cache, other = (KVCache((keys.clone(),), (values.clone(),), factors) for _ in range(2))
    plan = replace(
        rows.plan(1, [0], [length - 1]),
        ids=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        separate=True,
    )
    requirements = AttentionRequirements(
        heads=heads[0], kv_heads=1, head_dim=dim, compute=torch.float16, cache=torch.float8_e4m3fn, device=DEVICE,
        max_rows=1, max_chunks=1,
    )  # fmt: skip
    qkv = normal(1, (heads[0] + 2) * dim).half()
    tables = normal(length, dim).half(), normal(length, dim).half()
    out, expected = (
        torch.full((1, heads[0], dim), float("nan"), device=DEVICE).half() for _ in range(2)
    )
    step = TritonAttention(requirements).plan_step(plan)
    assert step.from_product is not None
    for _ in range(2):
        step.from_product(
            qkv, None, None, 1e-5, tables, cache, 0, out, scales=None, rules=AttentionRules(0.3)
        )
    q = rope_store(qkv, None, None, 1e-5, tables, plan, other, 0)
    decode_attention(q, other, 0, plan, rows.work(plan), expected, AttentionRules(0.3))
    close(out.float(), expected.float(), torch.float16)
    assert torch.equal(cache.k[0].float(), other.k[0].float())
