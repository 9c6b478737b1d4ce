"""Jump-forward: what a grammar forces is appended as a whole, and nothing else changes."""

import json
import os
from collections import Counter
from concurrent.futures import Future

import numpy as np
import pytest

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.program.nodes import Gen, Program, Text
from sglang_lite.protocol import Choices, Delta, Prompt, Regex, SamplingParams, Span
from sglang_lite.runtime.structured_output.base import LoneMatcher
from sglang_lite.runtime.structured_output.request_matcher import RequestMatcher
from tests.runtime.core.test_equivalence import requests
from tests.runtime.scripted import VOCAB, SteppedEngine, ended

FIELDS = {
    "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "city": {"enum": ["Paris", "London", "Rome"]}, "active": {"type": "boolean"}, "colour": {"enum": ["red", "green"]},
    "score": {"type": "number", "minimum": 0, "maximum": 10}, "married": {"type": "boolean"},
    "employed": {"type": "boolean"}, "kind": {"enum": ["first", "second"]}, "level": {"enum": [1, 2, 3]},
    "insured": {"type": "boolean"}, "retired": {"type": "boolean"},
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}
SAMPLES = int(os.environ.get("SGLANG_LITE_SAMPLES", "60"))


def greedy(**more):
    return SamplingParams(**{"temperature": 0, "max_tokens": 200, **more})


@pytest.fixture(scope="module")
def engine(small_engine):
    return small_engine


@pytest.fixture(scope="module")
def off(small_file):
    with sgl.Engine(small_file, dtype="float32", jump_forward="off", in_process=True) as engine:
        yield engine


def steps_of(engine, *asked):
    before = engine.stats()["steps"]
    return engine.complete(*asked), engine.stats()["steps"] - before


def test_an_object_of_twelve_fields_takes_half_the_steps(engine, off):
    asked = ("A person, as JSON: ", greedy(), json_schema(SCHEMA))
    slow, many = steps_of(off, *asked)
    fast, few = steps_of(engine, *asked)
    assert json.loads(fast.text) == json.loads(slow.text)
    assert fast.finish_reason == "stop"
    assert fast.usage.forced_tokens > 40
    assert slow.usage.forced_tokens == 0
    assert few <= 0.55 * many


def test_all_of_a_text_can_be_forced(engine):
    whole = "hello world and everyone"
    generation = engine.complete("Say: ", greedy(), Choices((whole,)))
    assert (generation.text, generation.finish_reason) == (whole, "stop")
    stopped = engine.complete("Say: ", greedy(stop=("world",)), Choices((whole,)))
    assert (stopped.text, stopped.finish_reason, stopped.matched) == ("hello ", "stop", "world")


def test_streams_and_samples_carry_forced_text(engine):
    events, done = [], Future()

    def sink(event):
        events.append(event)
        if not isinstance(event, Delta):
            done.set_result(event)

    engine.submit("A person: ", greedy(), json_schema(SCHEMA), sink=sink, stream=True)
    generation = done.result(timeout=60)
    assert "".join(e.text for e in events[:-1]) == generation.text
    assert [i for e in events[:-1] for i in e.token_ids] == [*generation.token_ids]

    futures = [Future() for _ in range(3)]
    params = SamplingParams(temperature=1, seed=1, max_tokens=200, n=3)
    engine.submit(
        "A person: ", params, json_schema(SCHEMA), sink=lambda g: futures[g.index].set_result(g)
    )
    for future in futures:
        assert set(json.loads(future.result(timeout=60).text)) == set(FIELDS)


def test_what_looks_at_every_draw_goes_without(engine):
    constraint = Regex("abcdefgh[0-9]")
    for params, more in (
        (greedy(return_logprob=True), {}),
        (greedy(), {"logit_processor": lambda ids, logits: logits}),
    ):
        future = Future()
        engine.submit("x", params, constraint, sink=future.set_result, **more)
        generation = future.result(timeout=60)
        assert generation.usage.forced_tokens == 0
        assert generation.text.startswith("abcdefgh")


def test_programs_go_on_after_forced_text(engine):
    @sgl.function
    def program(s):
        s += "The word is "
        s += sgl.gen("word", choices=["elephant in the room"], temperature=0)
        s += ", and then "
        s += sgl.gen("digits", regex="number [0-9]{3} of all", temperature=0)
        s += "."

    state = program.run(backend=engine)
    assert state["word"] == "elephant in the room"
    assert state.text() == f"The word is elephant in the room, and then {state['digits']}."


def test_a_program_goes_on_in_the_slot_of_a_generation_that_ended_within_forced_text(engine):
    ends = Gen("a", greedy(stop=(" ended",)), Regex("[ab] and this is how it ended in the end"))
    program = Program((ends, Text(" went on. "), Gen("b", greedy(max_tokens=5))))
    result, played = engine.play("Once upon a time", program)
    first, second = (p.event for p in played)
    assert first.text[1:] == " and this is how it"
    assert first.usage.forced_tokens > 2
    spans = (Span("Once upon a time"), *first.spans, Span(" went on. "))
    assert second.text == engine.complete(Prompt(spans), greedy(max_tokens=5)).text
    assert result.text == first.text + " went on. " + second.text


class ForcingEngine:
    name, vocab_size = "forcing", VOCAB

    def masks(self, matchers):
        return [matcher.mask() for matcher in matchers]


class Forcing(LoneMatcher):
    """After some tokens, the next ones are given."""

    engine = ForcingEngine()
    finished, complete, error = False, True, ""

    def __init__(self):
        self.given, self.kept = [], None

    def mask(self):
        mask = np.full((VOCAB + 31) // 32, 0 if self.given else -1, np.int32)
        if self.given:
            mask[self.given[0] // 32] = 1 << (self.given[0] % 32)
        return mask

    def cached_mask(self):
        return self.kept

    def set_mask(self, mask):
        self.kept = mask

    def accept(self, token):
        self.kept = None
        if self.given:
            return token == self.given.pop(0)
        if token % 5 == 2:
            self.given = [1 + (token * 7 + 3 * k) % (VOCAB - 1) for k in range(token % 4 + 1)]
        return True

    def find_forced_tokens(self):
        return list(self.given)

    def accept_text(self, _):
        return False


def test_an_engine_that_fails_ends_its_request_alone(caplog):
    class Failing(Forcing):  # of the same engine, which fills all rows at once
        error = "out of fuel"

        def mask(self):
            raise RuntimeError(self.error)

        def accept(self, token):
            return False

    engine = SteppedEngine(max_total_tokens=192, context_length=128)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    started = [engine.start([5, 6, 7 + i], params) for i in range(3)]
    for request, kind in zip(engine.built, (Forcing, Failing, Forcing)):
        request.output.matcher = RequestMatcher(kind())
    engine.drain()
    first, broken, last = (ended(events) for _, events in started)
    assert isinstance(broken, sgl.ConstraintError)
    assert len(first.token_ids) == len(last.token_ids) == 6
    assert "out of fuel" in caplog.text
    engine.check_empty()


@pytest.mark.parametrize("broken", ["accept", "forced"])
@pytest.mark.parametrize("at", [0, 3])
def test_an_engine_that_crashes_ends_its_request_alone(broken, at):
    class Crashing(Forcing):
        calls = 0

        def accept(self, token):
            return self.crash("accept") or super().accept(token)

        def find_forced_tokens(self):
            return self.crash("forced") or super().find_forced_tokens()

        def crash(self, name):
            self.calls += name == broken
            if self.calls > at:
                raise ValueError("out of luck")

    engine = SteppedEngine(max_total_tokens=192, context_length=128)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    started = [engine.start([5, 6, 7 + i], params) for i in range(2)]
    for request, kind in zip(engine.built, (Forcing, Crashing)):
        request.output.matcher = RequestMatcher(kind())
    engine.drain()
    fine, crashed = (ended(events) for _, events in started)
    assert len(fine.token_ids) == 24
    assert isinstance(crashed, sgl.ConstraintError)
    assert "forcing failed: ValueError('out of luck')" in str(crashed)
    engine.check_empty()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("overlap", "page", "chunk", "retract"), [
    (True, 1, 7, 0), (True, 4, 64, 3), (False, 16, 7, 3), (True, 16, 100_000, 2), (False, 1, 64, 0),
], ids=str)  # fmt: skip
def test_every_schedule_gives_what_token_by_token_gives(overlap, page, chunk, retract):
    """With a model whose answer is known, under retraction, the cache checked after every step."""
    asked = requests(60)

    def outcomes(**settings):
        engine = SteppedEngine(max_total_tokens=192, context_length=128, max_running=3, **settings)
        started = []
        for i, (prompt, params) in enumerate(asked):
            started.append(engine.start(prompt, params, stream=i % 3 == 0))
            engine.built[-1].output.matcher = RequestMatcher(Forcing())
        engine.drain()
        engine.check_empty()
        ends = [ended(events) for _, events in started]
        return [(end.token_ids, end.text, end.finish_reason) for end in ends], sum(
            e.usage.forced_tokens for e in ends
        )

    expected, none = outcomes(jump_forward="off")
    jumped, many = outcomes(
        jump_forward="safe",
        overlap=overlap,
        page_size=page,
        step_tokens=chunk,
        retract_every=retract,
    )
    assert jumped == expected
    assert none == 0
    assert many > 20


@pytest.mark.parametrize("constraint", [
    json_schema({"type": "object", "properties": {"size": {"enum": ["small", "medium", "large", "huge"]}},
                 "required": ["size"], "additionalProperties": False}),
    Regex("The digit is [0-9], is it not\\?"),
], ids=["enum", "digit"])  # fmt: skip
def test_values_are_drawn_as_often_as_without(engine, off, constraint):
    """A chi-square test of homogeneity on SAMPLES draws each. The seeds are fixed, so it gives the
    same every time.
    """
    counts = []
    for seed, one in ((1, engine), (2, off)):
        futures = [Future() for _ in range(SAMPLES)]
        for i, future in enumerate(futures):
            params = SamplingParams(temperature=1, seed=seed * 1_000_000 + i, max_tokens=40)
            one.submit("The answer: ", params, constraint, sink=future.set_result)
        counts.append(Counter(future.result(timeout=300).text for future in futures))
    values = [v for v in counts[0] | counts[1] if counts[0][v] + counts[1][v] >= 10]
    assert len(values) > 1
    chi2 = 0.0
    for value in values:
        expected = (counts[0][value] + counts[1][value]) / 2
        chi2 += sum((count[value] - expected) ** 2 / expected for count in counts)
    # p = 0.01
    critical = {
        1: 6.63,
        2: 9.21,
        3: 11.34,
        4: 13.28,
        5: 15.09,
        6: 16.81,
        7: 18.48,
        8: 20.09,
        9: 21.67,
    }
    assert chi2 < critical[len(values) - 1]


def test_rows_in_the_same_state_share_a_mask(monkeypatch):
    engine = SteppedEngine(overlap=True, max_total_tokens=512, context_length=128)
    masks = [np.array([each], np.int32) for each in (0b110, -2)]

    class Fixed(Forcing):
        def __init__(self, mask):
            super().__init__()
            self.allowed = mask

        def cached_mask(self):
            return self.allowed

        def accept(self, _):
            return True

    sample, sent = engine.loop.runner.sample, []

    def watched(forward, draws):
        sent.append((draws.masks.words.tolist(), draws.masks.rows.tolist()))
        return sample(forward, draws)

    monkeypatch.setattr(engine.loop.runner, "sample", watched)
    started = [engine.start([3, 4 + i], greedy(max_tokens=6, ignore_eos=True)) for i in range(5)]
    for request, which in zip(engine.built[:4], (0, 1, 0, 0)):
        request.output.matcher = RequestMatcher(Fixed(masks[which]))
    engine.drain()
    assert ([[0b110], [-2]], [0, 1, 0, 0, -1]) in sent
    assert {token for i in (0, 2, 3) for token in ended(started[i][1]).token_ids} <= {1, 2}
