"""Requests, however they are scheduled, get the answer that the model gives."""

import itertools
import os
import random

import pytest

from sglang_lite.protocol import Delta, SamplingParams
from tests.runtime.scripted import VOCAB, SteppedEngine, answer, ended


def requests(count, seed=0):
    """Prompts that share prefixes of many lengths, and parameters of many kinds."""
    draw = random.Random(seed)
    stems = [[draw.randrange(1, VOCAB) for _ in range(draw.randrange(1, 60))] for _ in range(6)]
    found = []
    for i in range(count):
        stem = draw.choice(stems)
        prompt = stem[: draw.randrange(1, len(stem) + 1)] + [
            draw.randrange(1, VOCAB) for _ in range(draw.choice([0, 1, 5, 20]))
        ]
        most = draw.choice([0, 1, 3, 12])
        least = draw.choice([0, 0, min(2, most)])
        stop = tuple(draw.sample("abcdefghijklmnop", draw.choice([0, 0, 0, 2])))
        params = SamplingParams(
            max_tokens=most, min_tokens=least, temperature=draw.choice([0, 1.0]), seed=i, stop=stop
        )
        found.append((prompt, params))
    return found


# more of them: CONTRIBUTING.md
REQUESTS = requests(int(os.environ.get("SGLANG_LITE_REQUESTS", "30")))
EXPECTED = [answer(prompt, params, params.seed) for prompt, params in REQUESTS]

GRID = list(
    itertools.product(
        [False, True],  # overlap
        [7, 64, 100_000],  # tokens in a step
        [1, 4, 16],  # tokens in a page
        [False, True],  # prefix cache
        [0, 3],  # retract every so many steps
        [3, 48],  # requests at once
    )
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_every_schedule_gives_the_same_tokens(overlap, cached):
    for case in GRID:
        if case[0] == overlap and case[3] == cached and case[5] <= case[1]:
            _check(*case)


def _check(overlap, chunk, page, cached, retract, running):
    engine = SteppedEngine(
        overlap=overlap, step_tokens=chunk, page_size=page, prefix_cache=cached, max_running=running,
        retract_every=retract, max_total_tokens=640 if running == 48 else 192, context_length=128,
        policy=["lpm", "fcfs", "priority"][(chunk + page) % 3], eviction=["lru", "lfu", "fifo", "slru"][page % 4],
    )  # fmt: skip
    started = [
        engine.start(prompt, params, stream=i % 5 == 0)
        for i, (prompt, params) in enumerate(REQUESTS)
    ]
    engine.drain()
    for (_, events), (prompt, params), (tokens, reason) in zip(started, REQUESTS, EXPECTED):
        result = ended(events)
        assert (list(result.token_ids), result.finish_reason) == (tokens, reason), (prompt, params)
        streamed = [event for event in events if isinstance(event, Delta)]
        assert "".join(d.text for d in streamed) == (result.text if streamed else "")
    engine.check_empty()
