"""Attention over shared prefixes for Hopper GPUs, against its twin on one. test_compiled.py
compiles it without any.
"""

import numpy as np
import pytest
import torch

from sglang_lite.runtime.executor import prefix_groups
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, SharedPrefixes
from sglang_lite.runtime.kernels.decode_attention import decode_attention
from sglang_lite.runtime.kernels.prefix_attention import hopper_prefix_module, prefix_attention
from tests.runtime.kernels import needs_hopper
from tests.runtime.kernels.test_kernels import DEVICE, Rows, close, normal

hopper = pytest.importorskip(
    "sglang_lite.runtime.kernels.prefix_attention_hopper", reason="Triton is too old"
)
pytestmark = needs_hopper
PAGE = 16


@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),
    [((4, 2), 128, torch.bfloat16), ((8, 1), 128, torch.float16), ((3, 3), 64, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize(
    ("groups", "target_chunks"),  # of rows, and the tokens that each group shares
    [([(70, 64)], 1), ([(70, 256)], 40), ([(200, 48), (3, 1040), (2, 16)], 3), ([(2, 2064)], 9)],
    ids=str,
)
def test_prefixes_are_read_once_for_all_rows_that_share_them(
    monkeypatch, groups, target_chunks, heads, dim, dtype
):
    lengths = [5] + [shared + 1 + i % 50 for count, shared in groups for i in range(count)]
    rows = Rows(lengths, heads, dim, dtype, page=PAGE)
    first = 1  # the one before shares nothing
    for count, shared in groups:
        rows.table[first : first + count, : shared // PAGE] = rows.table[
            first, : shared // PAGE
        ].clone()
        first += count
    monkeypatch.setattr(prefix_groups, "MIN_SAVED_TOKENS", 1)
    count, slots = len(lengths), np.arange(len(lengths), dtype=np.int32)
    held = np.array([(n - 1) // PAGE for n in lengths], dtype=np.int32)
    most = hopper.MAX_QUERIES // (heads[0] // heads[1])
    found = prefix_groups.split_shared_prefixes(
        rows.table[:-1].numpy(),
        held,
        slots,
        PAGE,
        rows_per_block=most,
        max_items=count + target_chunks,
        target_chunks=target_chunks,
    )
    assert found is not None
    items = np.zeros((count + target_chunks + 3, 6), dtype=np.int32)
    items[: len(found.items)] = found.items
    order = np.resize(found.order, count)
    lengths_of, chunks, order_of, items_of = (
        torch.from_numpy(x).to(DEVICE) for x in (found.lengths, found.chunks, order, items)
    )
    prefixes = SharedPrefixes(lengths_of, chunks, order_of, items_of, prefix_groups.MAX_CHUNKS)
    plan = rows.plan(count, list(range(count)), [n - 1 for n in lengths], shared=prefixes)
    q = normal(count, heads[0] + 4, dim, dtype=dtype)[:, : heads[0]]
    expected = rows.twin(q, [(i, 1, i, n) for i, n in enumerate(lengths)], scale=0.1)
    there = torch.zeros(rows.cache.k[0].shape[1], dtype=torch.bool, device=DEVICE)
    for row, length in enumerate(lengths):
        there[rows.read_at(row, length)] = True
    for side in (rows.cache.k[0], rows.cache.v[0]):
        side[:, ~there] = float("nan")  # pages of others, and what is behind the end of a page
    work = rows.work(plan)
    assert hopper_prefix_module(hopper.properties_of(DEVICE), dim, dtype, dtype, PAGE, plain=True)
    out = torch.full((count, heads[0], dim), float("nan"), device=DEVICE, dtype=dtype)
    prefix_attention(q, rows.cache, 0, plan, work, AttentionRules(0.1))
    decode_attention(q, rows.cache, 0, plan, work, out, AttentionRules(0.1))
    close(out, expected, dtype)
