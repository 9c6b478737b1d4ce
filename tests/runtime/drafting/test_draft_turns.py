"""Steps take turns with and without drafts: most time goes to the way that is worth more, also after that changes."""

import random

import pytest

from sglang_lite.runtime.drafting.drafting import StepCost
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


def test_measured_times_decide_what_a_token_has_to_be_worth():
    cost = StepCost()
    cost.set_measured({1: 0.004, 64: 0.004, 128: 0.008})
    assert cost.least_chance(10, 10.0) == pytest.approx(0)
    assert cost.least_chance(100, 64.0) == pytest.approx(0.004 / 64 * 64 / 0.00625)
    for _ in range(200):
        for tokens in (10, 60):
            cost.record(tokens, 0.004 + 0.001 + 0.00002 * tokens)
    assert cost.seconds(30) == pytest.approx(0.004 + 0.001 + 0.0006, rel=1e-3)
    assert cost.least_chance(10_000, 1.0) < 1  # beyond what was measured
