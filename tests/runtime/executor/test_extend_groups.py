"""Rows that begin in the same pages are read once on a CPU, too, and see what they see alone."""

import numpy as np
import pytest
import torch

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.executor import cpu_runner
from sglang_lite.runtime.executor.cpu_inputs import build_cpu_inputs
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionPlan,
    AttentionRules,
    ExtendGroup,
    ExtendRow,
)
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.reference.attention import attention
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from tests.engine.conftest import SETTINGS
from tests.runtime.executor.records import step

SHARED, HEADS, KV_HEADS, DIM = 700, 6, 2, 16


def rows_of(new_and_own, shared_as_slice):
    """Rows of so many new tokens, behind so many others of their own, behind what all share."""
    rows, at, free = [], 0, SHARED
    for new, own in new_and_own:
        read_at = torch.cat([torch.arange(SHARED), torch.arange(free, free + own + new)])
        whole = shared_as_slice and free == SHARED
        rows.append(ExtendRow(at, at + new, slice(0, SHARED + own + new) if whole else read_at))
        at, free = at + new, free + own + new
    return tuple(rows), at, free


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 20.0}])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float8_e4m3fn, 1e-2)]
)
def test_rows_see_together_what_they_see_alone(dtype, limit, options):
    torch.manual_seed(0)
    new_and_own = [(4, 9), (1, 0), (2, 30), (1, 3), (17, 0), (1, 60), (9, 5), (3, 1)]
    rows, tokens, slots = rows_of(new_and_own, shared_as_slice=True)
    k, v = (torch.randn(KV_HEADS, slots, DIM).to(dtype) for _ in range(2))
    scales = (
        KVScales((torch.tensor([0.5, 2.0]),), (torch.tensor([4.0, 0.25]),))
        if dtype.itemsize == 1
        else None
    )
    cache = KVCache((k,), (v,), scales)
    q = torch.randn(tokens, HEADS, DIM).to(torch.bfloat16 if dtype.itemsize == 1 else dtype)
    group = ExtendGroup.from_rows((rows[0], *rows[2:]), SHARED)  # the other is no part of it
    together, alone = (
        attention(
            q,
            cache,
            0,
            AttentionPlan(torch.zeros(0), (), rows, groups),
            AttentionRules(0.25, **options),
        ).float()
        for groups in ((group,), ())
    )
    assert (together - alone).norm() <= limit * alone.norm()
    assert together[rows[1].start].equal(alone[rows[1].start])
    # what the group can't be asked: its rows of one token are decoding rows then, and the others
    # alone
    if options:
        several = torch.cat(
            [torch.arange(row.start, row.end) for row in rows if row.end - row.start > 1]
        )
        assert together[several].equal(alone[several])


@pytest.mark.parametrize("by_products", [True, False])
@pytest.mark.parametrize(
    ("new", "length", "kv_heads"), [(300, 300, 2), (300, 701, 2), (129, 600, 6), (70, 1500, 1)]
)
def test_a_long_row_sees_what_it_sees_in_single_precision(
    monkeypatch, new, length, kv_heads, by_products
):
    """Whatever the processor at hand has: products are taken in blocks of 64 to 384 tokens here."""
    faster = "sglang_lite.runtime.kernels.reference.attention.products_are_faster"
    monkeypatch.setattr(faster, lambda q: by_products and q.dtype == torch.bfloat16)
    torch.manual_seed(0)
    at = torch.randperm(2000)[:length]
    plan = AttentionPlan(torch.zeros(0), (), (ExtendRow(0, new, at),))
    k, v = (torch.randn(kv_heads, 2000, DIM).bfloat16() for _ in range(2))
    q = torch.randn(new, HEADS, DIM).bfloat16()
    seen = attention(q, KVCache((k,), (v,)), 0, plan, AttentionRules(0.25)).float()
    expected = attention(
        q.float(), KVCache((k.float(),), (v.float(),)), 0, plan, AttentionRules(0.25)
    )
    assert (seen - expected).norm(dim=(1, 2)).le(1e-2 * expected.norm(dim=(1, 2))).all()


def planned(table, lengths, new, singles=0, **options):
    """Inputs of a step in which each row has so many new tokens."""
    ends = np.array(lengths, dtype=np.int32)
    record, pages = step(table, ends - new, ends, singles)
    return build_cpu_inputs(record, pages, np.zeros(len(ends), dtype=np.int32), **options)


@pytest.mark.parametrize("page_size", [1, 16])
def test_groups_are_rows_that_share_enough(page_size):
    table = SlotTable(6, 4000, page_size)
    pages = -(-3000 // page_size)
    for slot in range(6):
        table.pages[slot, :pages] = slot * pages + np.arange(pages)
    shared = 2560 // page_size
    table.pages[2:5, :shared] = table.pages[1, :shared]
    table.pages[5, :10] = table.pages[0, :10]  # too little
    found = planned(table, [2900] * 6, 4)
    (group,) = found.plan.groups
    assert group.length == 2560
    assert [(row.start, row.end) for row in group.rows] == [(4, 8), (8, 12), (12, 16), (16, 20)]
    assert group.rows == found.plan.extends[-4:]
    assert not planned(table, [2900] * 6, 4, one_by_one=True).plan.groups
    assert not planned(table, [2900] * 2, 4).plan.groups


@pytest.mark.parametrize("page_size", [1, 16])
def test_decoding_rows_that_share_enough_are_a_group_and_see_what_they_see_alone(page_size):
    lengths = np.array([2900, 2890, 2700, 2881, 600], dtype=np.int32)
    table = SlotTable(len(lengths), 4000, page_size)
    pages, shared = -(-3000 // page_size), 2560 // page_size
    table.pages[:, :pages] = (
        np.random.default_rng(0).permutation(len(lengths) * pages).reshape(len(lengths), pages)
    )
    table.pages[1:4, :shared] = table.pages[0, :shared]
    found, alone = (
        planned(table, lengths, 1, len(lengths), one_by_one=each).plan for each in (False, True)
    )
    (group,) = found.groups
    assert (group.length, group.tokens.tolist()) == (2560, [0, 1, 2, 3])
    assert not found.decode
    assert sorted(row.start for row in found.extends) == [0, 1, 2, 3, 4]
    torch.manual_seed(0)
    k, v = (torch.randn(KV_HEADS, len(lengths) * pages * page_size, DIM) for _ in range(2))
    q = torch.randn(len(lengths), HEADS, DIM)
    for window in (None, 40):
        seen, expected = (
            attention(q, KVCache((k,), (v,)), 0, plan, AttentionRules(0.25, window=window))
            for plan in (found, alone)
        )
        assert (seen - expected).norm() <= 1e-5 * expected.norm()


def test_rows_of_very_different_sizes_are_no_group():
    """Padding the others to a long one's size would take more than what they share."""
    ends = np.array(
        [400, 900, 401, 402, 403, 404, 405, 406, 407, 408, 409, 410, 411], dtype=np.int32
    )
    starts = ends - 1
    starts[1] = 400  # 500 new tokens
    table = SlotTable(len(ends), 1000, 1)
    table.pages[:, :1000] = np.arange(len(ends) * 1000).reshape(len(ends), 1000)
    table.pages[1:, :390] = table.pages[0, :390]
    (group,) = planned(table, ends, ends - starts).plan.groups
    assert [row.end - row.start for row in group.rows] == [1] * 12
    assert group.own.shape == (12, 21)


def test_choices_about_a_long_text_have_the_scores_they_have_alone(folders, monkeypatch):
    groups = []

    def built(*arguments, **options):
        inputs = build_cpu_inputs(*arguments, **options)
        groups.append(len(inputs.plan.groups))
        return inputs

    monkeypatch.setattr(cpu_runner, "build_cpu_inputs", built)
    settings = {**SETTINGS, "deterministic": False, "max_running": 8, "device": "cpu"}
    with sgl.Engine(folders[0], **settings, in_process=True) as engine:
        prompt, choices = "abcdefg" * 230, ["xyz", "abc", "zzzz", "q1", "hij", "aaa"]
        selection = engine.select(prompt, choices)
        assert any(groups)
        groups.clear()
        for score in selection.scores:
            params = SamplingParams(
                max_tokens=0, return_logprob=True, logprob_start_len=len(prompt)
            )
            alone = engine.complete(prompt + score.text, params).prompt_logprobs
            assert list(score.logprobs) == pytest.approx(
                [entry.logprob for entry in alone], abs=1e-4
            )
        assert not any(groups)
