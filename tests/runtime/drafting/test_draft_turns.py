"""Steps take turns with and without drafts: most time goes to the way that is worth more, also
after that changes.
"""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_lite.runtime.drafting.drafting import Drafting, OpenRow, StepCost
from sglang_lite.runtime.drafting.guess import Guess
from sglang_lite.runtime.drafting.turns import Turns
from sglang_lite.runtime.requests.output_builder import DraftProgress
from sglang_lite.runtime.scheduler.drafted_rows import DraftedRows


def times(worth, count, turns, noise=0.0):
    """Seconds of the steps, those that plain steps would take for the same tokens, and the share
    with drafts.
    """
    dice, seconds, plain, drafted = random.Random(0), 0.0, 0.0, 0
    for i in range(count):
        now = worth(i) if turns.drafts else 1.0
        drafted += turns.drafts
        took = 0.005 * (1 + noise * dice.uniform(-1, 1))
        turns.record_timing(took * now, took)
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


def test_steps_of_few_and_of_many_rows_take_turns_apart():
    drafting = Drafting([], 8, 100, frozenset(), jump=False)
    drafting.may_draft = lambda request: True  # type: ignore[method-assign]  # there are no drafters
    queues: Any = SimpleNamespace(decoding=[None] * 64, prefilling=[])
    store: Any = None
    rows, nothing = DraftedRows(store, queues, drafting, Turns), np.zeros(64, dtype=np.int32)
    batch: Any = SimpleNamespace(slots=nothing, started=(), draws=nothing == 0, tokens=64)
    while rows.should_draft:
        rows.record_step(batch, nothing, 0.0)
    queues.decoding = [None] * 2
    assert rows.should_draft


def test_a_step_takes_as_long_as_the_next_larger_one_that_was_measured():
    cost = StepCost()
    cost.use_measured_times({1: 0.004, 64: 0.005, 128: 0.008})
    assert [cost.estimate_seconds(tokens) for tokens in (1, 2, 64, 65, 10_000)] == [
        0.004,
        0.005,
        0.005,
        0.008,
        0.008,
    ]
    assert cost.next_worthwhile_size(10, 10.0, likely=0.01, best=10 / 0.005) == 64
    for _ in range(200):
        for tokens in (10, 60):
            cost.record_step_cost(tokens, 0.005 + 0.001 + 0.00002 * tokens)
    assert cost.estimate_seconds(30) == pytest.approx(0.005 + 0.001 + 0.0006, rel=1e-3)
    assert cost.next_worthwhile_size(30, 15.0, likely=0.05, best=15 / 0.0066) == 64
    # too few to pay for their own time
    assert cost.next_worthwhile_size(30, 15.0, likely=0.04, best=15 / 0.0066) == 0


def test_a_step_has_the_drafts_that_give_the_most_tokens_a_second():
    """A step of up to 16 tokens takes 10 ms, a larger one 15: so eight rows draft eight tokens, the
    likeliest ones.
    """
    rows = [[0.9, 0.5, 0.4] if row < 4 else [0.45, 0.1] for row in range(8)]
    assert written(rows, tokens=8, budget=100) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert written(rows, tokens=8, budget=5) == {0: 2, 1: 1, 2: 1, 3: 1}
    assert sum(written([[0.9] * 6] * 8, tokens=8, budget=100).values()) == 48
    assert not written([[0.4]], tokens=16, budget=100)


def test_only_rows_that_may_get_a_draft_are_asked():
    asked: set[int] = set()
    assert len(written([[0.9, 0.8]] * 60, tokens=60, budget=4, likeliest=0.9, asked=asked)) == 4
    assert len(asked) == 5  # one more, whose guess finds no room


def test_a_row_whose_mask_is_being_made_is_not_asked():
    """Its matcher is in use by another thread."""
    asked: set[int] = set()
    assert (
        written([[0.9]], tokens=1, budget=4, asked=asked, matcher=SimpleNamespace(busy=True)) == {}
    )
    assert not asked


def written(likely, tokens, budget, likeliest=1.0, asked=None, matcher=None):
    """Number of drafted tokens by row of a step that draws as many tokens as it has without drafts.

    Args:
        likely: by row, the chance of each guess that it and all before it are right.
        likeliest: largest chance of a guess.
        asked: set that the rows are added to that are asked for guesses, or None.
        matcher: of each row.
    """

    class Told:
        name = "prompt"

        def can_draft(self, request):
            return True

        def make_guesser(self, request, known, chance):
            chances = likely[request.id]
            if asked is not None:
                asked.add(request.id)

            def guess(text, state):
                at = len(text) - len(known)
                return (
                    Guess(5, chances[at] / (chances[at - 1] if at else 1))
                    if at < len(chances)
                    else None
                )

            return guess

        def learn_tokens(self, request, text, start):
            pass

    drafting = Drafting([Told()], 8, 100, frozenset(), jump=False)
    drafting.hit_rate_of_evidence = lambda drafter, evidence: evidence  # type: ignore[method-assign]  # each is told
    drafting.highest_hit_rate = lambda: likeliest  # type: ignore[method-assign]  # of those told
    drafting.cost.use_measured_times({16: 0.010, 64: 0.015})
    params = SimpleNamespace(speculation=True, scores_tokens=False)
    rows = []
    for i in range(len(likely)):
        output = SimpleNamespace(matcher=matcher, ends=(), draft=DraftProgress())
        request: Any = SimpleNamespace(
            id=i, params=params, processor=None, prompt_len=1, output=output
        )
        rows.append(OpenRow(request, np.ones(1, dtype=np.int32), 100))
    found = drafting.write_drafts(rows, tokens, tokens, budget)
    assert all(each.drawn == tuple(range(1, len(each.tokens) + 1)) for each in found.values())
    return {row: len(each.tokens) for row, each in found.items()}
