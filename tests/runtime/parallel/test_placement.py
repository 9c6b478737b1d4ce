"""Every placement of experts is whole, and evens out what groups of ranks compute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.runtime.parallel.layout import Parallel
from sglang_lite.runtime.parallel.placement import (
    TURNS,
    ExpertPlacement,
    balance_experts,
    rows_of_heaviest_group,
)


@st.composite
def layers(draw):
    """Rows of each expert, number of slots, and number of groups of ranks."""
    ep, each = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    count = draw(st.integers(each, ep * each))
    loads = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    return loads, ep * each, ep


@given(layers())
def test_every_expert_has_a_slot_and_every_group_as_many(layer):
    loads, slots, ep = layer
    placed = balance_experts(loads, slots, ep)
    assert len(placed) == slots
    assert set(placed) == set(range(len(loads)))


@given(layers())
def test_no_group_has_twice_the_rows_that_one_must_have(layer):
    loads, slots, ep = layer
    placed = balance_experts(loads, slots, ep)
    copies = [placed.count(expert) for expert in range(len(loads))]
    least = max(sum(loads) / ep, *(load / copy for load, copy in zip(loads, copies)), 0)
    assert rows_of_heaviest_group(loads, placed, ep) <= 2 * least + 1e-6


def test_the_experts_that_are_chosen_most_get_the_copies():
    loads = [10, 90, 10, 10, 10, 80, 10, 10]
    placed = balance_experts(loads, 12, 4)
    assert {expert: placed.count(expert) for expert in (1, 5)} == {1: 3, 5: 3}
    assert rows_of_heaviest_group(loads, placed, 4) < 0.8 * rows_of_heaviest_group(
        loads, balance_experts([1] * 8, 12, 4), 4
    )


def test_several_machines_keep_the_groups_of_experts_that_tokens_choose_together():
    loads = [5, 6, 7, 8, 1, 1, 1, 1]
    placed = balance_experts(loads, 8, 4, groups=4, nodes=2)
    nodes = [{expert // 2 for expert in placed[half * 4 : half * 4 + 4]} for half in range(2)]
    assert all(len(groups) == 2 for groups in nodes)
    assert nodes[0] | nodes[1] == {0, 1, 2, 3}


@pytest.mark.parametrize("tp", [4, 8])
@given(layer=layers())
def test_each_row_finds_each_expert_in_one_group_at_its_place(tp, layer):
    loads, slots, ep = layer
    ep, slots = 4, -(-slots // 4) * 4
    if len(loads) > slots:
        return
    placement = ExpertPlacement(((), balance_experts(loads, slots, ep)))
    ranks = [Parallel(tp=tp, ep=ep, rank=rank) for rank in range(tp)]
    tables = [placement.local_ids(1, len(loads), rank) for rank in ranks]
    for turn in range(TURNS):
        for expert in range(len(loads)):
            having = [
                rank.rank for rank, table in zip(ranks, tables) if table[turn][expert] < slots // ep
            ]
            assert having == list(range(having[0], having[0] + tp // ep))
            assert {
                placement.experts_of_rank(1, ranks[r])[tables[r][turn][expert]] for r in having
            } == {expert}


def test_copies_are_chosen_equally_often():
    placement = ExpertPlacement((balance_experts([9, 1, 1, 1, 1, 1], 8, 2),))
    tables = [placement.local_ids(0, 6, Parallel(tp=2, ep=2, rank=rank)) for rank in range(2)]
    assert [sum(turn[0] < 4 for turn in table) for table in tables] == [TURNS // 2] * 2
