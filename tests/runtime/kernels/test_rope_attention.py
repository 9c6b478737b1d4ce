"""Attention from the QKV product gives what its two halves give one after the other."""

import pytest
import torch

from sglang_lite.runtime.kernels.decode_attention import decode_attention
from sglang_lite.runtime.kernels.fp8 import Scales
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.rope_attention import rope_attention
from sglang_lite.runtime.kernels.rope_store import rope_store
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE, OPTIONS, Rows, close, normal

pytestmark = [needs_kernels, pytest.mark.slow]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "turned"),
    [
        ([1], (4, 2), 16, 16),
        ([150], (4, 2), 16, 8),
        ([1, 4, 64, 65, 130], (6, 2), 16, 16),
        ([70, 3], (17, 1), 24, 24),
    ],
    ids=str,
)
@pytest.mark.parametrize("eight", [False, True])
def test_rope_store_and_decode_attention_are_one(lengths, heads, dim, turned, options, eight):
    torch.manual_seed(len(lengths))
    rows = Rows(lengths, heads, dim)
    count, width = len(lengths), (heads[0] + 2 * heads[1]) * dim
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
    qkv, tables = normal(count, width), (normal(max(lengths), turned), normal(max(lengths), turned))
    norms = normal(dim), normal(dim)
    q_norm, k_norm = norms if dim == 16 else (None, None)
    work = rows.work(plan)
    out, expected = (torch.full((count, heads[0], dim), float("nan"), device=DEVICE) for _ in range(2))
    for _ in range(2):  # the counters are left as they were found
        rope_attention(
            qkv, q_norm, k_norm, 1e-5, tables, cache, 0, out, plan=plan, work=work, scales=scales, scale=0.3, **options
        )
    q = rope_store(qkv, q_norm, k_norm, 1e-5, tables, plan, other, 0, scales)
    decode_attention(q, other, 0, plan, rows.work(plan), expected, scale=0.3, **options)
    near = torch.bfloat16 if eight else torch.float32
    close(out, expected, near)
    close(cache.k[0].float(), other.k[0].float(), near)
    close(cache.v[0].float(), other.v[0].float(), near)
