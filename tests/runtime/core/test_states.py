"""Models whose layers sum up the past: prefixes are reused where a state is kept, and every answer
is that of the whole text.
"""

import random

import pytest

from sglang_lite.protocol import SamplingParams
from tests.runtime.core.test_equivalence import requests
from tests.runtime.scripted import Guesses, SteppedEngine, answer, ended, loaded


def check(seed, *, rows=20):
    """Random requests to a scripted model whose states must sum up what is in the cache."""
    draw = random.Random(seed)
    engine = SteppedEngine(
        model=loaded(states=True), overlap=draw.random() < 0.5, max_running=4,
        step_tokens=draw.choice([4, 16, 1000]), page_size=draw.choice([1, 2, 4, 16]), prefix_cache=draw.random() < 0.8,
        context_length=96, max_total_tokens=draw.choice([128, 256, 640]), retract_every=draw.choice([0, 0, 3]),
        policy=draw.choice(["lpm", "fcfs"]), drafter=draw.choice([None, None, Guesses(0.8)]),
        max_mamba_cache_size=draw.choice([4, 6, 40]), mamba_track_interval=draw.choice([0, 0, 10]),
    )  # fmt: skip
    asked = requests(rows, seed)
    events = [engine.start(prompt, params)[1] for prompt, params in asked]
    engine.drain()
    for found, (prompt, params) in zip(events, asked):
        result = ended(found)
        assert (list(result.token_ids), result.finish_reason) == answer(prompt, params, params.seed)
    engine.check_empty()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(24))
def test_every_schedule_sums_up_what_is_in_the_cache(seed):
    check(seed)


def ask(engine, prompt, tokens=4):
    _, events = engine.start(prompt, SamplingParams(max_tokens=tokens, temperature=0))
    engine.drain()
    return ended(events)
