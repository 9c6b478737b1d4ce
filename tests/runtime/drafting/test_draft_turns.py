"""Steps take turns with and without drafts: most time goes to the way that is worth more, also after that changes."""

import random

import numpy as np
import pytest

from sglang_lite.runtime.drafting.draft import Draft, DraftedGuess
from sglang_lite.runtime.drafting.drafting import Drafting, StepCost
from sglang_lite.runtime.drafting.turns import Turns


def times(worth, count, turns, noise=0.0):
    """Seconds of the steps, those that plain steps would take for the same tokens, and the share with drafts."""
    dice, seconds, plain, drafted = random.Random(0), 0.0, 0.0, 0
    for i in range(count):
        now = worth(i) if turns.drafts else 1.0
        drafted += turns.drafts
        took = 0.005 * (1 + noise * dice.uniform(-1, 1))
        turns.record(took * now, took)
        seconds, plain = seconds + took, plain + took * now
    return seconds, plain, drafted / count


@pytest.mark.parametrize("worth", [0.1, 0.5, 0.9])
def test_drafts_that_do_not_pay_take_hardly_any_time(worth):
    seconds, plain, drafted = times(lambda _: worth, 3000, Turns(), noise=0.1)
    assert plain > 0.98 * seconds
    assert drafted > 0


@pytest.mark.parametrize("worth", [1.3, 3.0])
def test_drafts_that_pay_are_made_nearly_always(worth):
    seconds, plain, drafted = times(lambda _: worth, 3000, Turns(), noise=0.1)
    assert plain > 0.97 * worth * seconds
    assert drafted > 0.9


def test_a_change_is_noticed():
    turns = Turns()
    assert times(lambda _: 0.8, 1000, turns)[2] < 0.2
    assert times(lambda _: 2.0, 4000, turns)[2] > 0.5
    assert times(lambda _: 0.8, 4000, turns)[2] < 0.5


def test_slow_first_steps_with_drafts_are_soon_forgotten():
    turns = Turns()
    times(lambda i: 0.1, 8, turns)
    assert times(lambda _: 2.0, 200, turns)[2] > 0.5


def test_a_step_takes_as_long_as_the_next_larger_one_that_was_measured():
    cost = StepCost()
    cost.set_measured({1: 0.004, 64: 0.005, 128: 0.008})
    assert [cost.seconds(tokens) for tokens in (1, 2, 64, 65, 10_000)] == [0.004, 0.005, 0.005, 0.008, 0.008]
    assert cost.least_chance(10, 10) == 0
    for _ in range(200):
        for tokens in (10, 60):
            cost.record(tokens, 0.005 + 0.001 + 0.00002 * tokens)
    assert cost.seconds(30) == pytest.approx(0.005 + 0.001 + 0.0006, rel=1e-3)
    assert cost.least_chance(30, 15) == pytest.approx(0.00002 * 15 / 0.0066, rel=1e-2)


def test_a_step_has_the_drafts_that_give_the_most_tokens_a_second():
    """A step of up to 16 tokens takes 10 ms, a larger one 15: so eight rows draft eight tokens, the likeliest ones."""
    drafting = Drafting([], 8, 100, frozenset(), jump=False)
    drafting.cost.set_measured({16: 0.010, 64: 0.015})
    drafts = {row: draft([0.9, 0.5, 0.4] if row < 4 else [0.45, 0.1]) for row in range(8)}
    found = drafting.worthwhile(drafts, rows=8, tokens=8, budget=100)
    assert {row: len(each.tokens) for row, each in found.items()} == {0: 2, 1: 2, 2: 2, 3: 2}
    assert all(each.drawn == (1, 2) for each in found.values())
    few = drafting.worthwhile(drafts, rows=8, tokens=8, budget=5)
    assert [len(each.tokens) for each in few.values()] == [2, 1, 1, 1]
    likely = {row: draft([0.9] * 6) for row in range(8)}
    assert sum(len(each.tokens) for each in drafting.worthwhile(likely, rows=8, tokens=8, budget=100).values()) == 48
    assert not drafting.worthwhile({0: draft([0.4])}, rows=16, tokens=16, budget=100)


def draft(likely):
    """Draft of guesses, by the chance of each that it and all before it are right."""
    guesses = tuple(DraftedGuess(i, "prompt", 0, 0.5, chance) for i, chance in enumerate(likely))
    return Draft(np.arange(len(likely), dtype=np.int32), guesses, tuple(range(1, len(likely) + 1)))
