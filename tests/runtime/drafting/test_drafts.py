"""Requests with drafts, right or wrong, get what they get without: ids, log-probabilities, reasons,
usage.
"""

import os
import random
from typing import Any

import pytest

from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import (
    Choices,
    Delta,
    Generation,
    Number,
    ParameterError,
    Regex,
    SamplingParams,
)
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.drafting.draft import DraftWriter
from sglang_lite.runtime.drafting.drafting import TAIL
from sglang_lite.runtime.drafting.guess import Guess
from sglang_lite.runtime.scheduler.drafted_rows import DraftedRows
from sglang_lite.runtime.structured_output.base import LoneMatcher
from tests.runtime.core.test_equivalence import requests
from tests.runtime.scripted import Guesses, SteppedEngine, ended
from tests.runtime.structured_output.test_distribution import byte_model

COUNT = int(os.environ.get("SGLANG_LITE_REQUESTS", "60"))  # more of them: CONTRIBUTING.md


class Oracle:
    """A drafter that knows the answers.

    Args:
        answers: token ids by prompt and seed.
        kind: "right", "wrong", "random" (right half of the time), "changing" (right for some steps,
            then wrong).
    """

    name = "prompt"

    def __init__(self, answers, kind):
        self.answers, self.kind, self.dice, self.calls = answers, kind, random.Random(7), 0

    def can_draft(self, request):
        return True

    def make_guesser(self, request, known, chance):
        answer = self.answers.get((tuple(known[: request.prompt_len].tolist()), request.seed), [])
        start, seen = len(known) - request.prompt_len, min(len(known), TAIL)
        self.calls += 1
        right = {"right": 1.0, "wrong": 0.0, "random": 0.7, "changing": float(self.calls // 5 % 2)}[
            self.kind
        ]

        def guess(text, state):
            at = start + len(text) - seen
            token = answer[at] if at < len(answer) else 1
            return Guess(token if self.dice.random() < right else (token + 3) % 256, 0)

        return guess

    def learn_tokens(self, request, text, start):
        pass


OBJECT = {
    "type": "object", "required": ["name", "size", "sold"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 6}, "size": {"enum": ["small", "smaller", "big"]},
        "sold": {"type": "boolean"},
    },
}  # fmt: skip
SOURCE = 'One day a "small" dog met\na smaller one, and one day they went home.'
CONSTRAINTS = (
    Choices(("abcabc", "abdabd", "bcd")), Regex("(abc[a-e]{1,4} ){1,6}"), json_schema(OBJECT), Number("float"),
    json_schema({"type": "array", "items": {"enum": ["one", "two", "three"]}, "uniqueItems": True, "maxItems": 3}),
    json_schema({"type": "object", "additionalProperties": {"enum": ["one", "two"]}, "maxProperties": 3}),
    json_schema({"type": "array", "items": {"type": "string", "x-quote": SOURCE}, "minItems": 2}),
)  # fmt: skip


def asked(count=COUNT):
    """Prompts and parameters of many kinds, and what else is asked."""
    dice = random.Random(11)
    found = []
    for i, (prompt, params) in enumerate(requests(count)):
        more: dict[str, Any] = {}
        values = {name: getattr(params, name) for name in ("min_tokens", "temperature", "stop")}
        values |= {"max_tokens": 3 * params.max_tokens, "seed": i, "n": 1}
        kind = i % 10
        if kind == 1:
            values |= {"frequency_penalty": 0.5, "presence_penalty": 0.3}
        elif kind == 2:
            values |= {"repetition_penalty": 1.3, "logit_bias": ((5, 2.0),)}
        elif kind == 3:
            values |= {
                "return_logprob": True,
                "top_logprobs_num": 2,
                "logprob_start_len": dice.choice([-1, 0]),
            }
        elif kind == 4:
            values |= {"n": 2, "ignore_eos": True}
        elif kind > 4:
            more["constraint"] = CONSTRAINTS[i % len(CONSTRAINTS)]
            values |= {"max_tokens": dice.choice([45, 60, 90]), "stop": (), "min_tokens": 0}
            values |= {
                "return_logprob": kind == 5,
                "confidence": kind == 6,
                "frequency_penalty": float(kind == 7),
            }
        more["stream"] = i % 4 == 0
        found.append((prompt, SamplingParams(**values), more))
    return found


ASKED = asked()


def outcomes(*, turns=None, plain=False, **settings):
    """What each request gives, and the engine."""
    engine = SteppedEngine(model=byte_model(), context_length=160, **settings)
    if plain:
        engine.scheduler.drafts = None
    if turns is not None:
        engine.scheduler.drafts = DraftedRows(
            engine.store, engine.scheduler.queues, engine.scheduler.drafts.drafting, turns
        )
    for constraint in CONSTRAINTS:
        engine.compile_grammar(constraint)
    started = [engine.start(prompt, params, **more)[1] for prompt, params, more in ASKED]
    engine.drain()
    engine.check_empty()
    found = [
        [outcome(events, i) for i in range(params.n)]
        for events, (_, params, _) in zip(started, ASKED)
    ]
    return found, engine


def outcome(events, index):
    """All of a result but its times, and what depends on the cache."""
    last = [event for event in events if not isinstance(event, Delta)]
    result = next(event for event in last if getattr(event, "index", 0) == index)
    assert isinstance(result, Generation), result
    text = "".join(
        event.text for event in events if isinstance(event, Delta) and event.index == index
    )
    assert text in ("", result.text)
    usage = result.usage
    return (
        result.token_ids, result.text, result.finish_reason, result.matched, result.output_logprobs, result.scores,
        result.prompt_logprobs, usage.completion_tokens, usage.forced_tokens, usage.prompt_tokens,
        {
            name: value
            for name, value in result.meta.items()
            if name not in ("cache_miss", "num_retractions") and not name.startswith("spec_")
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def off():
    found, engine = outcomes(plain=True, max_running=4, max_total_tokens=640)
    answers = {}
    for request in engine.built:
        ids = request.tokens.tolist()
        answers[tuple(ids[: request.prompt_len]), request.seed] = ids[request.prompt_len :]
    return found, answers, engine.loop.steps


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["right", "wrong", "random", "changing"])
@pytest.mark.parametrize(("tokens", "page", "chunk", "retract", "jump", "running"), [
    (8, 1, 7, 0, "safe", 4), (4, 4, 64, 3, "safe", 3), (1, 16, 100_000, 2, "safe", 8), (16, 1, 64, 5, "off", 8),
    (4, 1, 100_000, 0, "off", 2), (8, 4, 7, 3, "safe", 3),
], ids=str)  # fmt: skip
def test_drafts_change_nothing(off, kind, tokens, page, chunk, retract, jump, running):
    expected, answers, _ = off
    found, engine = outcomes(
        drafter=Oracle(answers, kind), draft_tokens=tokens, page_size=page, step_tokens=chunk, retract_every=retract,
        jump_forward=jump, max_running=running, max_total_tokens=320,
    )  # fmt: skip
    for (_, params, more), one, other in zip(ASKED, expected, found):
        if jump == "off":  # which does not count forced text
            one, other = ([(*each[:8], *each[9:10]) for each in both] for both in (one, other))
        assert other == one, (params, more)
    counts = engine.scheduler.drafts.drafting.counts["prompt"]
    assert counts.drafted > 50
    assert (kind == "wrong") == (counts.accepted < counts.drafted / 20)


@pytest.mark.parametrize(
    "settings", [{}, {"page_size": 4, "step_tokens": 7, "retract_every": 3}], ids=str
)
def test_quotes_and_scored_forced_text_are_drafted_without_being_asked(off, settings):
    expected, _, _ = off
    found, engine = outcomes(max_running=4, max_total_tokens=640, **settings)
    assert found == expected
    counts = engine.scheduler.drafts.drafting.counts["grammar"]
    assert counts.accepted > 0.3 * counts.drafted > 0


class ShortTurns:
    """Turns of three steps."""

    steps = 0

    @property
    def drafts(self):
        return self.steps // 3 % 2 == 0

    def record_timing(self, plain, seconds):
        self.steps += 1


def test_turns_without_drafts_change_nothing(off):
    """Where steps are launched before the tokens of those before are read."""
    expected, answers, steps = off
    settings = {"page_size": 4, "max_running": 4, "max_total_tokens": 640}
    found, engine = outcomes(drafter=Oracle(answers, "random"), turns=ShortTurns, **settings)
    assert found == expected
    assert engine.scheduler.drafts.drafting.counts["prompt"].accepted > 100
    assert engine.loop.steps < steps


def test_right_drafts_take_fewer_steps(off):
    _, answers, steps = off
    _, engine = outcomes(drafter=Oracle(answers, "right"), max_running=4, max_total_tokens=640)
    assert engine.loop.steps < 0.4 * steps


def test_right_drafts_of_a_grammar_are_taken_at_once():
    """Also as far as they are right, with what the grammar forces; not where each token has to be
    looked at.
    """

    def taken(kind, **values):
        engine = SteppedEngine(
            drafter=drafter[kind],
            draft_tokens=4,
            model=byte_model(),
            context_length=400,
            max_total_tokens=1600,
        )
        engine.compile_grammar(json_schema(OBJECT))
        params = SamplingParams(**{"max_tokens": 300, "seed": 3, **values})
        started = [
            engine.start([5, 6, 7 + i], params, constraint=json_schema(OBJECT))[1] for i in range(4)
        ]
        engine.drain()
        found = [ended(events) for events in started]
        return found, engine.scheduler.drafts.stats()["draws_taken_at_once"]

    drafter = {"none": None}
    plain, _ = taken("none")
    answers = {((5, 6, 7 + i), 3): each.token_ids for i, each in enumerate(plain)}
    drafter |= {kind: Oracle(answers, kind) for kind in ("right", "random", "wrong")}
    counts = {kind: taken(kind) for kind in ("right", "random", "wrong")}
    assert all(
        [each.token_ids for each in found] == [each.token_ids for each in plain]
        for found, _ in counts.values()
    )
    right = sum(each.meta["spec_accept_token_num"] for each in counts["right"][0])
    assert counts["right"][1] > 0.5 * right > 10
    assert counts["right"][1] > counts["random"][1] > 5
    assert counts["wrong"][1] == 0
    assert taken("right", return_logprob=True)[1] == 0


class Halfway(LoneMatcher):
    """Matcher that forces tokens of which it takes the first `taken` alone, or whose engine fails
    there.
    """

    finished, complete, error = False, False, ""

    def __init__(self, taken, fails=False):
        self.taken, self.fails, self.accepted = taken, fails, []

    def cached_mask(self):
        return None

    def copy(self):
        return Halfway(self.taken, self.fails)

    def accept(self, token):
        self.accepted.append(token)
        if self.fails and len(self.accepted) > self.taken + 1:
            raise RuntimeError("out of fuel")
        return len(self.accepted) <= self.taken + 1

    def find_forced_tokens(self):
        return [7, 8, 9]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_a_guess_whose_forced_text_the_grammar_refuses_is_not_drafted(taken, fails):
    matcher: Any = Halfway(taken, fails)  # as much of a Matcher as is used
    writer = DraftWriter(matcher, 20, jump=True)
    before = writer.state
    assert writer.append_with_forced(5) == ([5, 7, 8, 9] if taken == 3 else [])
    assert writer.tokens == ([5, 7, 8, 9] if taken == 3 else [])
    assert (writer.state == before) == (taken < 3)
    assert writer.build_draft(()).drawn == ((4,) if taken == 3 else ())


def greedy(drafter, **config):
    engine = SteppedEngine(
        drafter=drafter, context_length=128, **{"max_total_tokens": 192, **config}
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    started = [engine.start([5, 6, 7 + i], params)[1] for i in range(3)]
    engine.drain()
    engine.check_empty()
    return [ended(events).token_ids for events in started], engine


def test_a_drafter_that_fails_is_off_and_its_requests_go_on(caplog):
    class Failing(Guesses):
        calls = 0

        def make_guesser(self, request, known, chance):
            self.calls += 1
            if self.calls == 3:
                raise KeyError("lost")
            return super().make_guesser(request, known, chance)

    drafter = Failing(1)
    assert greedy(drafter)[0] == greedy(None)[0]
    assert drafter.calls == 3
    assert "the drafter 'prompt' failed" in caplog.text


# 0 ends a generation, 31 is behind the last one
@pytest.mark.parametrize("token", [-1, 0, 31, 2**40])
def test_tokens_that_can_not_come_are_not_drafted(token):
    class Strange(Guesses):
        def make_guesser(self, request, known, chance):
            guess, seen = super().make_guesser(request, known, chance), min(len(known), TAIL)
            return lambda text, state: (
                guess(text, state) if len(text) < seen + 2 else Guess(token, 0)
            )

    tokens, engine = greedy(Strange(1))
    assert tokens == greedy(None)[0]
    assert (
        engine.scheduler.drafts.drafting.stats()["prompt"]["drafted"] <= 2 * engine.loop.steps * 3
    )


def test_no_page_is_kept_for_a_guess():
    engine = SteppedEngine(
        drafter=Guesses(0.5), draft_tokens=16, max_total_tokens=192, context_length=128
    )
    events = engine.start([5, 6, 7], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[
        1
    ]
    while engine.step():
        for request in engine.scheduler.queues.running():
            table, slot = engine.store.table, request.slot
            assert table.page_count[slot] <= table.length[slot]
    assert len(ended(events).token_ids) == 40
    assert engine.loop.steps < 35


@pytest.mark.parametrize("setting", [
    {"speculation": "eagle"}, {"speculation": ""}, {"speculation": True}, {"speculation": "prompt,prompt"},
    {"draft_tokens": 0}, {"draft_tokens": 17}, {"draft_tokens": True},
    {"draft_context": 0}, {"draft_context": 17}, {"draft_capacity": 0}, {"draft_capacity": 0.5},
], ids=str)  # fmt: skip
def test_what_is_no_speculation_is_refused(setting):
    with pytest.raises(ParameterError) as told:
        EngineConfig.make(**setting)
    assert str(told.value).startswith(next(iter(setting)))
