"""Generations that wind down: each ends at the first place where a limit may cut it, and is marked.

The oracle is the output without a limit: as draws depend only on logits, mask, seed and position,
one that winds down begins with its tokens.
"""

from concurrent.futures import Future
from itertools import count
from queue import Queue

import pytest

from sglang_lite import Engine
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.program.nodes import Fork, Gen, Select, Text
from sglang_lite.protocol import Played, ProgramResult, Regex, SamplingParams
from sglang_lite.runtime.kv_cache.check import check_cache
from tests.constraints.test_generation import random_model
from tests.runtime.requests.test_cut import OPEN, PERSON, UNLIMITED, check_cut
from tests.runtime.scripted import FreeDrafts

LONG = 400
CONFIGS = [
    {},
    {"jump_forward": "off"},
    {"overlap": False},
    {"max_running": 1},
    {"speculation": "again", "draft_tokens": 3},
]


@pytest.fixture(params=CONFIGS, ids=str)
def engine(request):
    with Engine.of(random_model(), max_total_tokens=16384, **request.param) as engine:
        if engine.core.scheduler.drafts is not None:
            engine.core.scheduler.drafts.drafting.cost = FreeDrafts()
        yield engine
        loop = engine.core.loop
        running = loop.inbox.call_and_wait(lambda: list(loop.scheduler.queues.running()))
        assert running == []


def answer(engine, constraint, *, winds_down=False, **params):
    """A generation; it may wind down from the start."""
    done, settings = (
        Future(),
        SamplingParams(**{"max_tokens": UNLIMITED, "temperature": 1.0, **params}),
    )
    ticket = engine.submit("x", settings, constraint, sink=done.set_result)
    if winds_down:
        ticket.wind_down()
    return done.result(timeout=60)


def test_text_ends_with_its_next_token(engine):
    free = answer(engine, None, ignore_eos=True, max_tokens=LONG, seed=1)
    found = answer(engine, None, winds_down=True, ignore_eos=True, max_tokens=LONG, seed=1)
    assert (found.finish_reason, len(free.token_ids)) == ("length", LONG)
    assert 1 <= len(found.token_ids) < LONG
    assert found.token_ids == free.token_ids[: len(found.token_ids)]
    assert free.text.startswith(found.text)


def take_one_token(engine):
    """Submits requests that wind down from the start, and checks that each has one token."""
    settings = SamplingParams(max_tokens=LONG, temperature=1.0, ignore_eos=True, n=2)
    answers = [Queue() for _ in range(20)]
    for each in answers:
        engine.submit("x", settings, sink=each.put, winds_down=True)
    for each in answers:
        for _ in range(2):  # samples
            found = each.get(timeout=60)
            assert (found.finish_reason, len(found.token_ids)) == ("length", 1)


def test_text_that_is_submitted_to_wind_down_has_one_token(engine):
    take_one_token(engine)


def test_the_process_of_an_engine_is_told_with_the_submission(folders):
    with Engine(folders[0], dtype="float32", max_total_tokens=1024, threads=1) as engine:
        take_one_token(engine)


@pytest.mark.parametrize("schema", [OPEN, PERSON], ids=["a list", "a person"])
def test_json_ends_where_brackets_close_it(engine, schema):
    ended = 0
    for seed in range(12):
        free = answer(engine, json_schema(schema), seed=seed)
        found = answer(engine, json_schema(schema), winds_down=True, seed=seed)
        limit = found.usage.completion_tokens
        how = check_cut(json_schema(schema), limit, found, free)
        assert how != "as cut" or limit == UNLIMITED
        ended += how == "closed"
    assert ended >= 4


def test_a_request_whose_constraint_still_compiles_winds_down_as_json(engine, monkeypatch):
    """It is told so before the engine knows that brackets may close it."""
    compiler, compiling = engine.core.compiler, Future()
    grammar = compiler.compile_in_background(json_schema(PERSON)).result(60)
    monkeypatch.setattr(compiler, "compile_in_background", lambda constraint: compiling)
    done = Future()
    settings = SamplingParams(max_tokens=UNLIMITED, temperature=1.0, seed=3)
    engine.submit("x", settings, json_schema(PERSON), sink=done.set_result).wind_down()
    engine.core.loop.inbox.call_and_wait(lambda: None)
    compiling.set_result(grammar)
    parse_json(json_schema(PERSON), done.result(60).text)


def test_what_does_not_close_goes_on_to_its_end(engine):
    free = answer(engine, Regex("[a-f]{40}"), seed=1)
    found = answer(engine, Regex("[a-f]{40}"), winds_down=True, seed=1)
    assert (found.token_ids, found.finish_reason) == (free.token_ids, free.finish_reason)


class Told:
    """Events of a program."""

    def __init__(self):
        self.played, self.end = {}, Future()

    def __call__(self, event):
        if isinstance(event, Played):
            self.played[event.name] = event.event
        else:
            self.end.set_result(event)


def long_text(name, seed=1):
    return Gen(name, SamplingParams(max_tokens=LONG, ignore_eos=True, temperature=1.0, seed=seed))


def test_all_generations_of_a_program_that_winds_down_get_their_shortest_answers(engine):
    told, schema = Told(), json_schema(OPEN)
    program = engine.open_program(sink=told)
    program.wind_down()
    values = [
        Gen(f"v{seed}", SamplingParams(max_tokens=UNLIMITED, temperature=1.0, seed=seed), schema)
        for seed in range(3)
    ]
    program.extend(
        (), [Text("x"), long_text("a"), Text(" y "), long_text("b"), long_text("c"), *values]
    )
    program.extend(
        (),
        [Select("choice", ("ab", "cd")), Fork(((long_text("d"), Text("z")), (long_text("e", 2),)))],
    )
    program.close()
    assert isinstance(told.end.result(timeout=60), ProgramResult)
    for name in "abcde":
        assert (told.played[name].finish_reason, told.played[name].usage.completion_tokens) == (
            "length",
            1,
        )
    for gen in values:
        assert told.played[gen.name].usage.completion_tokens < UNLIMITED
        parse_json(schema, told.played[gen.name].text)


def test_a_program_winds_down_while_it_is_played(engine):
    for prompt in map(str, range(8)):
        told = Told()
        program = engine.open_program(sink=told, stream=True)
        program.extend(
            (), [Text(prompt), long_text("a"), Text(" y "), long_text("b"), long_text("c")]
        )
        program.wind_down()
        program.close()
        assert isinstance(told.end.result(timeout=60), ProgramResult)
        for name in "abc":
            assert told.played[name].finish_reason == "length"
            assert told.played[name].usage.completion_tokens < LONG


def test_requests_wind_down_wherever_they_are(engine):
    """Waiting, computing their prompts, drawing, or in a slot that another one has left."""
    found, numbers = [Future() for _ in range(40)], count()
    tickets = [
        engine.submit(
            "x" * (1 + 37 * next(numbers) % 200),
            SamplingParams(max_tokens=LONG, ignore_eos=True, temperature=1.0, n=1),
            sink=each.set_result,
        )
        for each in found
    ]
    for ticket in tickets[::-1]:
        ticket.wind_down()
    for each in found:
        assert each.result(timeout=60).finish_reason == "length"
        assert len(each.result().token_ids) < LONG
    loop = engine.core.loop
    loop.inbox.call_and_wait(lambda: check_cache(loop.scheduler.store, []))
