"""Ranks give the tokens of one process, whatever is scheduled: forks, samples, retraction, cache
hits, drafts, constraints, requests that end early.
"""

import os
import random
from typing import Any

import pytest

from sglang_lite.program.nodes import Fork, Gen, Join, Program, Text
from sglang_lite.protocol import (
    Generation,
    Played,
    ProgramResult,
    Regex,
    RequestAbortedError,
    SamplingParams,
)
from sglang_lite.runtime.parallel.layout import Parallel
from tests.engine.collector import Collector
from tests.runtime.models.test_families import engine
from tests.runtime.models.tiny import VOCAB
from tests.runtime.parallel.test_cuts import folder_of
from tests.runtime.parallel.threads import engine_of_ranks

REQUESTS = int(os.environ.get("SGLANG_LITE_REQUESTS", "30"))
# So small a cache that requests give way to one another.
SETTINGS: dict[str, Any] = dict(
    dtype="float32", max_running=6, max_total_tokens=160, context_length=96, step_tokens=24, page_size=4,
    speculation="prompt",
)  # fmt: skip


def tokens_of(running, seed):
    """What random requests give, in order; None for one that was ended."""
    draw = random.Random(seed)
    stems = [[draw.randrange(2, VOCAB) for _ in range(draw.randrange(1, 40))] for _ in range(4)]
    sinks = []
    for i in range(REQUESTS):
        stem = draw.choice(stems)
        prompt = stem[: draw.randrange(1, len(stem) + 1)] + [
            draw.randrange(2, VOCAB) for _ in range(draw.choice([0, 5]))
        ]
        params = SamplingParams(
            max_tokens=draw.choice([0, 3, 20]), temperature=draw.choice([0, 1.0]), top_p=draw.choice([1.0, 0.8]), seed=i,
            n=draw.choice([1, 1, 3]), repetition_penalty=draw.choice([1.0, 1.2]), ignore_eos=True,
        )  # fmt: skip
        kind = draw.choice(["plain", "plain", "constraint", "ended", "program"])
        sinks.append(Collector(1 if kind == "program" else params.n))
        if kind == "program":
            one = SamplingParams(max_tokens=6, temperature=1.0, seed=i)
            nodes = (
                Text("ab"),
                Gen("x", one),
                Fork(((Gen("l", one),), (Text("c"), Gen("r", one)))),
                Join(),
                Gen("y", one),
            )
            running.run_program("abc" * draw.randrange(1, 5), Program(nodes), sink=sinks[-1])
        else:
            constraint = Regex("(ab|cd)+e") if kind == "constraint" else None
            ticket = running.submit(
                prompt, params, constraint, sink=sinks[-1], stream=kind == "ended"
            )
            if kind == "ended":
                sinks[-1].begun()
                ticket.abort()
    return [
        None if any(isinstance(e, RequestAbortedError) for e in sink.ends()) else told(sink)
        for sink in sinks
    ]


def told(sink):
    events = [event.event if isinstance(event, Played) else event for event in sink.events]
    found = [event.token_ids if isinstance(event, Generation) else event.text for event in events
             if isinstance(event, Generation | ProgramResult)]  # fmt: skip
    return sorted(found, key=str)


@pytest.mark.parametrize(("name", "layout"), [
    ("smollm2", {"tp": 2}), ("qwen2-moe", {"tp": 2}), ("deepseek-v2", {"tp": 2}), ("qwen3-moe", {"tp": 2, "ep": 2}),
    ("smollm2", {"pp": 2}), ("deepseek-v2", {"pp": 2}), ("qwen3", {"tp": 2, "pp": 2}),
    ("olmoe", {"tp": 2, "ep": 2, "pp": 2}),
], ids=str)  # fmt: skip
@pytest.mark.sampled(8)
def test_random_requests_get_the_same_tokens(name, layout, tmp_path):
    folder = folder_of(name, tmp_path / "model")
    with engine(folder, **SETTINGS) as whole:
        expected = tokens_of(whole, 0)
        assert whole.stats()["prompt_tokens_cached"]
    with engine_of_ranks(folder, Parallel(**layout), tmp_path / "meeting", **SETTINGS) as ranks:
        found = tokens_of(ranks, 0)
        assert ranks.stats()["drafters"]
    both = [(a, b) for a, b in zip(found, expected) if a is not None and b is not None]
    assert [a for a, _ in both] == [b for _, b in both]
    assert len(both) > len(found) / 2
