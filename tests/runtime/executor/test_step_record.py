"""Records of steps have all that a runner needs: executed again elsewhere, they give the same
tokens.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from sglang_lite.protocol import Choices, SamplingParams
from sglang_lite.runtime.executor import make_runner
from sglang_lite.runtime.executor.step_record import append_step, read_steps
from tests.runtime.scripted import Guesses, SteppedEngine, loaded


class Watched:
    """A runner that keeps what it is asked for, and the tokens and scores that it gave."""

    def __init__(self, runner):
        self.runner, self.allocate_masks = runner, runner.allocate_masks
        self.records, self.draws, self.scored = [], [], []

    def forward(self, record):
        forward = self.runner.forward(record)
        self.records.append(record)
        self.scored.append({row: each.wait_for_logprobs() for row, each in forward.scored.items()})
        return forward

    def sample(self, forward, draws):
        masks = draws.masks
        kept = None if masks is None else type(masks)(masks.words.copy(), masks.rows.copy())
        drawn = self.runner.sample(forward, draws)
        self.draws.append((replace(draws, masks=kept, scored=None), drawn.wait_for_tokens().tokens))
        return drawn


def run(**config):
    """Runs random requests, some of them retracted or cut short; returns the engine and its watched
    runner.
    """
    engine = SteppedEngine(
        max_running=4, context_length=128, max_total_tokens=512, retract_every=5, **config
    )
    watched = Watched(engine.loop.runner)
    engine.loop.runner = watched  # type: ignore[assignment]  # a runner around it
    dice = random.Random(3)
    for i in range(30):
        prompt = "abc" * dice.randrange(1, 9) + dice.choice("abcde")
        params = SamplingParams(
            temperature=dice.choice([0, 1.0]), top_p=dice.choice([1.0, 0.7]), seed=i, max_tokens=dice.randrange(9),
            return_logprob=i % 5 == 0, logprob_start_len=0 if i % 10 == 0 else -1,
        )  # fmt: skip
        engine.start(
            prompt, params, **({"constraint": Choices(("ab", "ba"))} if i % 7 == 3 else {})
        )
        if dice.random() < 0.7:
            engine.step()
    engine.drain()
    return engine, watched


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("drafter", [None, Guesses(0.8)])
def test_records_from_a_file_give_the_same_tokens_on_a_fresh_runner(tmp_path, page_size, drafter):
    engine, watched = run(page_size=page_size, overlap=False, drafter=drafter)
    for each in (engine.core.capacity, *watched.records):
        append_step(tmp_path / "steps", each)
    capacity, records = read_steps(tmp_path / "steps")
    assert capacity == engine.core.capacity
    again = Watched(make_runner(loaded().model, engine.core.capacity, engine.core.config))
    for record, (draws, tokens) in zip(records, watched.draws, strict=True):
        assert again.sample(again.forward(record), draws).tokens == tokens
    assert again.scored == watched.scored
    assert any(watched.scored)


def test_a_record_has_only_the_pages_that_have_changed():
    _, watched = run(page_size=4, overlap=False)
    decoded = [record for record in watched.records if record.singles == len(record.slots)]
    assert sum(len(record.pages) for record in decoded) < sum(
        len(record.slots) for record in decoded
    )
    assert all(
        len(np.unique(record.page_indices)) == len(record.pages) for record in watched.records
    )
