"""Steps beside a stream are short: counted in tokens."""

import math

import pytest

from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.scheduler.step_pace import TARGET_S, StepPace
from tests.runtime.scripted import SteppedEngine

LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def steps_with_a_prompt(*, stream, before=1, count=1):
    """Tokens of a prompt of 200 in the first steps after it has come, beside decoding rows."""
    engine = SteppedEngine(max_running=64, max_total_tokens=16_384)
    for i in range(before):
        engine.start([1 + i % 20, 2, 3], LONG, stream=stream)
    while len(engine.scheduler.decoding) < before:
        engine.step()
    engine.start([4] * 200, LONG)
    plan, batches = engine.scheduler.plan, []
    engine.scheduler.plan = lambda: batches.append(plan()) or batches[-1]  # type: ignore[method-assign]  # to see it
    for _ in range(count):
        engine.step()
    assert [batch.decoding for batch in batches] == [before] * count
    return [batch.tokens - before for batch in batches]


def test_a_prompt_beside_a_stream_is_computed_in_pieces():
    assert steps_with_a_prompt(stream=True) == [31]


def test_a_prompt_beside_many_streams_waits_for_some_to_end_and_gets_on(monkeypatch):
    monkeypatch.setattr(StepPace, "took", lambda *_: None)  # whatever the time
    assert steps_with_a_prompt(stream=True, before=60, count=9) == [0] * 8 + [8]


def test_a_prompt_beside_what_nobody_watches_is_computed_as_a_whole():
    assert steps_with_a_prompt(stream=False) == [200]


@pytest.mark.parametrize(("seconds", "room"), [(TARGET_S * 4, 8), (TARGET_S * 0.8, 40), (TARGET_S * 0.3, 64)])
def test_the_bound_follows_how_long_steps_take(seconds, room):
    pace = StepPace(512)
    pace.took(32, seconds)
    assert pace.room(0, prompts=True) == room


def test_prompts_get_eight_tokens_a_step_some_of_them_later():
    pace = StepPace(512)
    assert [pace.room(32, prompts=True) for _ in range(10)] == [0] * 8 + [8] * 2
    assert [pace.room(decoding, prompts=True) for decoding in (12, 31, 31, 31)] == [20, 1, 1, 8]
    assert pace.room(32, prompts=False) == 8  # nobody takes it
    assert [pace.room(30, prompts=True) for _ in range(12)] == [2] * 11 + [8]


def test_the_bound_has_its_own():
    pace = StepPace(100)
    for _ in range(10):
        pace.took(100, 0.0)
    assert pace.room(0, prompts=True) == 100
    assert pace.room(90, prompts=True) == 10  # of all that a step takes
    for _ in range(10):
        pace.took(100, 10.0)
    assert pace.room(0, prompts=True) == 8


def test_a_step_that_did_not_use_its_bound_does_not_raise_it():
    pace = StepPace(512)
    pace.took(31, 0.0)
    assert pace.room(0, prompts=True) == 32


@pytest.mark.parametrize(("stream", "left"), [(True, pytest.approx(TARGET_S / 4)), (False, math.inf)])
def test_what_follows_a_forward_has_the_rest_of_the_time_beside_a_stream(stream, left):
    engine = SteppedEngine(max_running=64, max_total_tokens=16_384)
    engine.start([1, 2, 3], LONG, stream=stream)
    while not engine.scheduler.decoding:
        engine.step()
    batch = engine.scheduler.plan()
    assert batch is not None
    assert engine.scheduler.left(batch, TARGET_S * 0.75) == left
    assert engine.scheduler.left(batch, TARGET_S * 2) == (0 if stream else left)
