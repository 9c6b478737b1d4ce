"""Where chunks of prompts end, and what they cost."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.runtime.scheduler.prompt_chunks import chunk_cost, chunk_end


def scored_from(position):
    return SimpleNamespace(score_from=position)


@given(st.data())
def test_a_chunk_is_the_longest_that_the_budget_allows(data):
    """A chunk costs no more than one token above the budget, and the next longer one does not fit."""
    start = data.draw(st.integers(0, 20))
    length = start + data.draw(st.integers(1, 30))
    request = scored_from(data.draw(st.none() | st.integers(0, length)))
    budget = data.draw(st.integers(0, 40))
    end = chunk_end(request, start, length, budget)
    assert start <= end <= length
    costs = {each: chunk_cost(request, start, each) for each in range(start, length + 1)}
    assert costs[end] <= budget + 1
    assert end == length or costs[end + 1] > budget


def cut_at(*positions):
    """A rule that lets no chunk cross one of these positions."""

    def cut(request, start, end, *, first):
        return min((each for each in positions if start < each < end), default=end)

    return cut


@given(st.sets(st.integers(1, 30)), st.sets(st.integers(1, 30)), st.integers(0, 30))
def test_the_smallest_cut_wins_whatever_the_order_of_the_rules(some, others, start):
    request = scored_from(None)
    for cuts in ([cut_at(*some), cut_at(*others)], [cut_at(*others), cut_at(*some)]):
        end = chunk_end(request, start, 40, 40, cuts)
        assert end == min((each for each in some | others if each > start), default=40)


def keep_whole(begin, end_of_block):
    """A rule like that of images whose tokens attend to each other."""

    def cut(request, start, end, *, first):
        if not begin < end < end_of_block:
            return end
        return begin if begin > start else end_of_block if first else start

    return cut


@pytest.mark.parametrize("last_first", [True, False])
def test_a_rule_is_asked_again_at_the_end_that_another_has_chosen(last_first):
    """The cut at 15 is inside the block from 10 to 20, so the chunk ends before the block."""
    cuts = [keep_whole(10, 20), cut_at(15)]
    assert chunk_end(scored_from(None), 0, 30, 30, cuts[::-1] if last_first else cuts) == 10


def test_only_a_first_chunk_is_lengthened_beyond_the_budget():
    cuts = [keep_whole(0, 20)]
    request = scored_from(None)
    assert chunk_end(request, 0, 30, 5, cuts, first=True) == 20
    assert chunk_end(request, 0, 30, 5, cuts, first=False) == 0
