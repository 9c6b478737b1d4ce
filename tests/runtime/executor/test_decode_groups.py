"""Decoding rows are computed together with those of about their length, and see what they see
alone.
"""

import numpy as np
import pytest
import torch

from sglang_lite.runtime.executor.cpu_inputs import build_cpu_inputs
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference.attention import attention
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from tests.runtime.executor.records import step

HEADS, KV_HEADS, DIM = 6, 2, 16
DICE = np.random.default_rng(0)
LENGTHS = {
    "one long among short ones": [5, 6, 1800, 7, *[9] * 57],
    "two long ones": [1900, 4, 1700, 4, 4],
    "all alike": [700] * 8,
    "two": [3, 1500],
    "drawn": DICE.integers(1, 1900, 40).tolist(),
    "one": [900],
}

PARTS = {
    tuple(LENGTHS["all alike"]): 1,
    tuple(LENGTHS["one long among short ones"]): 2,
    tuple(LENGTHS["one"]): 1,
}


def planned(lengths, page_size, new=1, **options):
    """The inputs of a step in which each row decodes, or has so many new tokens; and how many token
    slots there are.
    """
    table = SlotTable(len(lengths), 2000, page_size)
    pages = -(-2000 // page_size)
    order = np.random.default_rng(1).permutation(len(lengths) * pages)
    table.pages[:, :pages] = order.reshape(len(lengths), pages)
    ends = np.array(lengths, dtype=np.int32)
    record, known = step(table, ends - new, ends)
    return build_cpu_inputs(record, known, np.zeros(len(lengths), dtype=np.int32), **options), len(
        order
    ) * page_size


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize(("dtype", "kept", "limit"), [
    (torch.float32, torch.float32, 1e-5), (torch.bfloat16, torch.bfloat16, 1e-2), (torch.float32, torch.bfloat16, 1e-2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_rows_see_together_what_they_see_alone(lengths, dtype, kept, limit, options):
    """Products in 8 bits have activations in float32, beside keys and values in bfloat16."""
    torch.manual_seed(0)
    together, slots = planned(lengths, 16)
    alone, _ = planned(lengths, 16, one_by_one=True)
    assert not alone.plan.decode
    k, v = (torch.randn(KV_HEADS, slots, DIM).to(kept) for _ in range(2))
    q = torch.randn(len(lengths), HEADS, DIM).to(dtype)
    seen, expected = (
        attention(q, KVCache((k,), (v,)), 0, inputs.plan, AttentionRules(0.25, **options)).float()
        for inputs in (together, alone)
    )
    assert (seen - expected).norm(dim=(1, 2)).le(limit * expected.norm(dim=(1, 2))).all()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_little_is_read_for_nothing(lengths, page_size):
    plan = planned(lengths, page_size)[0].plan
    read = sum(group.rows.read_at.numel() for group in plan.decode) + sum(
        row.length for row in plan.extends
    )
    parts = len(plan.decode) + len(plan.extends)
    assert sum(lengths) <= read <= sum(lengths) + 512 * parts
    assert parts <= PARTS.get(tuple(lengths), 20)
    rows = [np.arange(len(lengths))[group.tokens] for group in plan.decode]
    rows += [np.arange(row.start, row.end) for row in plan.extends]
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))


NEW = {
    "short prompts beside decoding rows": ([30, 40, 700, 2, 3, 9], [1, 1, 1, 2, 3, 5]),
    "short prompts beside a stream": ([700, 2, 2, 2], [1, 2, 2, 2]),
    "short prompts alone": ([2, 2, 3], [2, 2, 3]),
    "beside a long prompt": ([20, 900, 4, 40], [1, 600, 2, 3]),
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("lengths", "new"), NEW.values(), ids=NEW)
def test_rows_of_few_new_tokens_are_computed_like_decoding_rows(lengths, new, page_size):
    torch.manual_seed(0)
    new = np.array(new, dtype=np.int32)
    together, slots = planned(lengths, page_size, new)
    alone, _ = planned(lengths, page_size, new, one_by_one=True)
    k, v = (torch.randn(KV_HEADS, slots, DIM) for _ in range(2))
    q = torch.randn(int(new.sum()), HEADS, DIM)
    seen, expected = (
        attention(q, KVCache((k,), (v,)), 0, each.plan, AttentionRules(0.25))
        for each in (together, alone)
    )
    assert (seen - expected).norm(dim=(1, 2)).le(1e-5 * expected.norm(dim=(1, 2))).all()
    by_itself = {int(row.end - row.start) for row in together.plan.extends}
    assert by_itself <= {1, 600}  # a long row


def test_a_row_of_few_new_tokens_without_others_is_computed_by_itself():
    (row,) = planned([5], 1, np.array([5], dtype=np.int32))[0].plan.extends
    assert (row.start, row.end) == (0, 5)
