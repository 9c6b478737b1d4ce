"""Memory that ends in a step: its rows are tried alone: none but those that fail alone gets another
answer.
"""

import errno
import random
from dataclasses import replace
from mmap import mmap

import pytest
import torch

from sglang_lite import Engine
from sglang_lite.program.nodes import Fork, Gen, Join, Program, Select, Text
from sglang_lite.protocol import (
    Generation,
    ModelError,
    OverloadedError,
    ProgramResult,
    SamplingParams,
)
from sglang_lite.runtime.executor.memory_shortage import is_out_of_memory
from tests.runtime.core.test_equivalence import requests
from tests.runtime.scripted import VOCAB, ScriptedModel, SteppedEngine, answer, ended, loaded

REQUESTS = requests(40, seed=3)
EXPECTED = [answer(prompt, params, params.seed) for prompt, params in REQUESTS]


def now_and_then(engine, seed=0):
    """Somewhere in every third step of several rows, or so."""
    draw = random.Random(seed)

    def fails(record):
        if engine[0].scheduler.isolated or draw.random() > 0.3:
            return None
        return draw.choice(["forward", "sample", "read"])

    return fails


def engine_that(fails, **settings):
    """`fails`: of the list that will have the engine."""
    found = []
    found.append(
        SteppedEngine(
            **{"max_total_tokens": 640, "context_length": 128, "fails": fails(found), **settings}
        )
    )
    return found[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_nothing_is_lost_when_memory_ends_now_and_then(overlap, cached):
    for page, chunk, running in ((1, 9, 8), (4, 100_000, 3), (16, 30, 8)):
        engine = engine_that(
            now_and_then,
            overlap=overlap,
            prefix_cache=cached,
            page_size=page,
            step_tokens=chunk,
            max_running=running,
        )
        started = [
            engine.start(prompt, params, stream=i % 5 == 0)
            for i, (prompt, params) in enumerate(REQUESTS)
        ]
        engine.drain()
        for (_, events), expected in zip(started, EXPECTED):
            result = ended(events)
            assert isinstance(result, Generation), result
            assert (list(result.token_ids), result.finish_reason) == expected
        engine.check_empty()


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_never_fit_together_are_run_one_by_one(overlap):
    """There is room for 40 tokens in a step."""
    engine = engine_that(
        lambda _: lambda record: "forward" if len(record.ids) > 40 else None,
        overlap=overlap, prefix_cache=False, step_tokens=100, max_running=8,
    )  # fmt: skip
    started = [engine.start(prompt, params) for prompt, params in REQUESTS]
    engine.drain()
    failed = 0
    for (_, events), (prompt, params), expected in zip(started, REQUESTS, EXPECTED):
        result = ended(events)
        if len(prompt) > 40:
            assert isinstance(result, OverloadedError)
            failed += 1
        elif len(prompt) + params.max_tokens <= 40:
            assert (list(result.token_ids), result.finish_reason) == expected
    assert 0 < failed < len(REQUESTS)
    engine.check_empty()


def test_what_fails_alone_fails_alone():
    broken = [7] * 9

    def fails(engine):
        def has_it(request, record):
            return request.slot in record.slots and list(request.tokens[:9]) == broken

        return lambda record: (
            "sample"
            if any(has_it(r, record) for r in engine[0].scheduler.queues.running())
            else None
        )

    engine = engine_that(fails, max_running=8)
    started = [engine.start(prompt, params) for prompt, params in REQUESTS[:6]]
    _, events = engine.start(broken, SamplingParams(max_tokens=3))
    started += [engine.start(prompt, params) for prompt, params in REQUESTS[6:]]
    engine.drain()
    error = ended(events)
    assert isinstance(error, OverloadedError)
    assert "CUDA out of memory. Tried to allocate 20.00 GiB." in str(error)
    assert "mem_fraction" in error.hint
    for (_, others), expected in zip(started, EXPECTED):
        assert (list(ended(others).token_ids), ended(others).finish_reason) == expected
    engine.check_empty()


def test_prompt_log_probabilities_are_those_of_enough_memory():
    params = SamplingParams(
        max_tokens=4, temperature=0, return_logprob=True, logprob_start_len=2, top_logprobs_num=2
    )
    asked = [[random.Random(i).randrange(1, VOCAB) for _ in range(60)] for i in range(6)]
    found = []
    for fails in (lambda _: lambda record: None, now_and_then):
        engine = engine_that(fails, step_tokens=50, max_running=4)
        started = [engine.start(prompt, params) for prompt in asked]
        engine.drain()
        found.append([(ended(e).prompt_logprobs, ended(e).output_logprobs) for _, e in started])
    assert found[0] == found[1]
    assert len(found[0][0][0]) == 58


@pytest.mark.parametrize("seed", range(6))
def test_programs_forks_and_selects(seed):
    short = SamplingParams(max_tokens=5, temperature=0)
    branches = tuple((Text(c), Gen("z", short)) for c in "ghi")
    program = Program(
        (
            Gen("x", SamplingParams(max_tokens=3, temperature=0)),
            Select("y", ("cd", "ce", "f")),
            Fork(branches),
            Join(),
            Gen("last", short),
        )
    )
    played = []
    for fails in (lambda _: lambda record: None, lambda found: now_and_then(found, seed)):
        engine = engine_that(fails, max_running=6, page_size=4)
        brought = [[], []]
        for start, events in zip(("ab", "abc"), brought):
            engine.run_program(start, program, sink=events.append)
        engine.drain()
        assert all(isinstance(events[-1], ProgramResult) for events in brought)
        played.append([
            (events[-1].text, sorted((e.path, e.event.text) for e in events[:-1] if isinstance(e.event, Generation)))
            for events in brought
        ])  # fmt: skip
        engine.check_empty()
    assert played[0] == played[1]


def test_an_engine_that_memory_is_too_small_for_says_so():
    class Large(ScriptedModel):
        def allocate_cache(self, slots, window_slots=0, states=0):
            return torch.empty(1 << 50)

    with pytest.raises(
        ModelError, match=r"not enough memory to start: .*can't allocate memory"
    ) as error:
        Engine.of(replace(loaded(), model=Large()))
    assert "max_total_tokens" in error.value.hint


def test_the_words_of_memory_that_ends():
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 50)
    assert is_out_of_memory(real.value)
    assert is_out_of_memory(torch.OutOfMemoryError(""))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("an illegal memory access was encountered"))
    assert not is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(OSError, match="memory") as refused:
        mmap(-1, 1 << 60)
    assert is_out_of_memory(refused.value)
    assert not is_out_of_memory(FileNotFoundError(errno.ENOENT, "no file"))
