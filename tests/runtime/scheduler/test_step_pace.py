"""Steps beside a stream are short: counted in tokens."""

import math
from collections import Counter

import numpy as np
import pytest

from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.core.engine_part import EnginePart
from sglang_lite.runtime.media.media_rows import MediaRows
from sglang_lite.runtime.requests.request_media import RequestMedia
from sglang_lite.runtime.scheduler.step_pace import TARGET_S, StepPace
from tests.runtime.scripted import SteppedEngine

LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest.fixture
def untimed(monkeypatch):
    """Bounds stay as they are at first, whatever time a step takes."""
    monkeypatch.setattr(StepPace, "adapt_to_step", lambda *_, **__: None)


def planned(engine):
    """A list that gets the batch of each step to come."""
    plan, batches = engine.scheduler.plan_batch, []
    engine.scheduler.plan_batch = lambda: batches.append(plan()) or batches[-1]  # type: ignore[method-assign]  # to see it
    return batches


def steps_with_a_prompt(*, stream, before=1, count=1):
    """Tokens of a prompt of 200 in the first steps after it has come, beside decoding rows."""
    engine = SteppedEngine(max_running=64, max_total_tokens=16_384)
    for i in range(before):
        engine.start([1 + i % 20, 2, 3], LONG, stream=stream)
    while len(engine.scheduler.queues.decoding) < before:
        engine.step()
    engine.start([4] * 200, LONG)
    batches = planned(engine)
    for _ in range(count):
        engine.step()
    assert [batch.decoding for batch in batches] == [before] * count
    return [batch.tokens - before for batch in batches]


def test_a_prompt_beside_a_stream_is_computed_in_pieces():
    assert steps_with_a_prompt(stream=True) == [31]


class ImagesWithoutEncoder(EnginePart):
    def join_scheduler(self, store, queues, capacity):
        self.resource = self.replacer = MediaRows(store.table)


def test_an_image_that_is_seen_as_a_whole_is_computed_as_a_whole_beside_a_stream(untimed):
    engine = SteppedEngine(max_running=64, max_total_tokens=16_384, parts=[ImagesWithoutEncoder()])
    engine.start([1, 2, 3], LONG, stream=True)
    while not engine.scheduler.queues.decoding:
        engine.step()
    limits = np.arange(1, 151, dtype=np.int32)
    limits[20:80], limits[90:150] = 80, 150
    media, add = (
        RequestMedia((), np.empty(0, dtype=np.int32), limits=limits),
        engine.scheduler.accept_request,
    )

    def add_with_images(request):
        request.media = media
        add(request)

    engine.scheduler.accept_request = add_with_images  # type: ignore[method-assign] # between submitting and planning
    engine.start([4] * 200, LONG)
    batches = planned(engine)
    for _ in range(5):
        engine.step()
    assert [batch.tokens - batch.decoding for batch in batches] == [20, 60, 10, 60, 31]


def test_a_prompt_beside_many_streams_gets_on(untimed):
    assert steps_with_a_prompt(stream=True, before=60, count=3) == [8] * 3


def test_prompts_and_rows_that_nobody_watches_share_what_is_left(untimed):
    engine = SteppedEngine(max_running=64, max_total_tokens=16_384)
    engine.start([1, 2, 3], LONG, stream=True)
    for i in range(50):
        engine.start([1 + i % 20, 2, 3], LONG)
    while len(engine.scheduler.queues.decoding) < 51:
        engine.step()
    engine.start([4] * 200, LONG)
    batches = planned(engine)
    for _ in range(3):
        engine.step()
    assert [(batch.decoding, batch.tokens) for batch in batches] == [
        (32, 32),
        (16, 32),
        (16, 32),
    ]  # it is admitted in the first


def test_rows_that_nobody_watches_take_turns_beside_a_stream(untimed):
    engine = SteppedEngine(max_running=64, max_total_tokens=16_384)
    events = [engine.start([1, 2, 3], LONG, stream=True)[1]]
    events += [engine.start([1 + i % 20, 2, 3], LONG)[1] for i in range(50)]
    while len(engine.scheduler.queues.decoding) < 51:
        engine.step()
    batches = planned(engine)
    for _ in range(8):
        engine.step()
    assert [len(batch.requests) for batch in batches] == [32] * 8
    counts = Counter(request.id for batch in batches for request in batch.requests)
    assert counts.pop(batches[0].requests[0].id) == 8
    assert len(counts) == 50
    assert set(counts.values()) <= {4, 5}  # 8 x 31 of them, 50 in turn
    engine.drain()
    assert [len(each[-1].token_ids) for each in events] == [LONG.max_tokens] * 51


def test_a_prompt_beside_what_nobody_watches_is_computed_as_a_whole():
    assert steps_with_a_prompt(stream=False) == [200]


@pytest.mark.parametrize(
    ("seconds", "bound"), [(TARGET_S * 4, 9), (TARGET_S * 0.8, 40), (TARGET_S * 0.3, 64)]
)
def test_the_bound_follows_how_long_steps_take(seconds, bound):
    pace = StepPace(512)
    pace.adapt_to_step(32, seconds, streams=1)
    assert pace.tokens_besides_streams(1) == bound - 1


def test_others_get_on_however_many_streams_there_are():
    pace = StepPace(512)
    assert [pace.tokens_besides_streams(streams) for streams in (1, 20, 30, 90, 508)] == [
        31,
        12,
        8,
        8,
        4,
    ]


def test_a_model_whose_stream_is_slow_by_itself_is_given_more_time():
    pace = StepPace(512)
    for seconds in (10, 11, 90, 12):  # a slow step now and then says nothing
        pace.adapt_to_step(1, seconds * TARGET_S, streams=1)
    assert pace.remaining_pace_s(0) == pytest.approx(20 * TARGET_S, rel=0.1)
    pace.adapt_to_step(32, 10.5 * TARGET_S, streams=1)  # 31 tokens more take little
    assert pace.tokens_besides_streams(0) > 60
    pace.adapt_to_step(1, TARGET_S / 4, streams=1)
    assert pace.remaining_pace_s(0) == TARGET_S


def test_the_bound_has_its_own():
    pace = StepPace(100)
    for _ in range(10):
        pace.adapt_to_step(100, 0.0, streams=1)
    assert pace.tokens_besides_streams(0) == 100
    for _ in range(10):
        pace.adapt_to_step(100, 10.0, streams=1)
    assert pace.tokens_besides_streams(0) == 8


def test_a_step_that_did_not_use_its_bound_does_not_raise_it():
    pace = StepPace(512)
    pace.adapt_to_step(31, 0.0, streams=1)
    assert pace.tokens_besides_streams(0) == 32


@pytest.mark.parametrize(
    ("stream", "left"), [(True, pytest.approx(TARGET_S / 4)), (False, math.inf)]
)
def test_what_follows_a_forward_has_the_rest_of_the_time_beside_a_stream(stream, left):
    engine = SteppedEngine(max_running=64, max_total_tokens=16_384)
    engine.start([1, 2, 3], LONG, stream=stream)
    while not engine.scheduler.queues.decoding:
        engine.step()
    batch = engine.scheduler.plan_batch()
    assert batch is not None
    assert engine.scheduler.remaining_step_s(batch, TARGET_S * 0.75) == left
    assert engine.scheduler.remaining_step_s(batch, TARGET_S * 2) == (0 if stream else left)
