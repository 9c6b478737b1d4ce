"""Prefill attention for Hopper GPUs, against its twin on one. test_compiled.py compiles it without
any.
"""

import pytest
import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules
from tests.runtime.kernels import needs_hopper
from tests.runtime.kernels.test_kernels import DEVICE, Rows, close, normal

hopper = pytest.importorskip(
    "sglang_lite.runtime.kernels.prefill_attention_hopper", reason="Triton is too old"
)
PAGE = 16


@needs_hopper
@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),  # each is compiled, which takes seconds
    [
        ((4, 2), 128, torch.bfloat16),
        ((8, 1), 128, torch.float16),
        ((3, 3), 64, torch.bfloat16),
        ((8, 2), 256, torch.bfloat16),
        ((4, 4), 256, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("start", "count"),
    [(0, 1), (0, 129), (5, 300), (128, 128), (130, 1000), (1000, 70), (127, 1), (255, 257)],
)
def test_prefill_attends_to_the_pages_before_it(start, count, heads, dim, dtype):
    end = start + count
    rows = Rows([end, 200], heads, dim, dtype, page=PAGE)
    q = normal(2 + count, heads[0] + 4, dim, dtype=dtype)[:, : heads[0]]
    blocks = [(2 + at, min(128, count - at), 0, start + at) for at in range(0, count, 128)] + [
        (0, 2, 1, 198)
    ]
    plan = rows.plan(0, [1] * 2 + [0] * count, [198, 199, *range(start, end)], blocks, 128)
    expected = rows.twin(q, [(0, 2, 1, 200), (2, count, 0, end)], scale=0.1)
    there = torch.zeros(rows.cache.k[0].shape[1], dtype=torch.bool, device=DEVICE)
    for row, length in enumerate((end, 200)):
        there[rows.read_at(row, length)] = True
    for side in (rows.cache.k[0], rows.cache.v[0]):
        side[:, ~there] = float("nan")  # pages of others, and what is behind the end of a page
    assert hopper.supports(q, rows.cache, plan)
    out = torch.full((2 + count, heads[0], dim), float("nan"), device=DEVICE, dtype=dtype)
    hopper.prefill_attention_hopper(q, rows.cache, 0, plan, out, AttentionRules(0.1))
    close(out, expected, dtype)
