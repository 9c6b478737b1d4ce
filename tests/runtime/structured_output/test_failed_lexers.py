"""A mask that takes too much work fails its own request, with the reason; requests that share its
lexer go on.
"""

import numpy as np
import pytest

from sglang_lite import Engine
from sglang_lite.constraints import byte_matcher
from sglang_lite.constraints.byte_matcher import ByteMatcher
from sglang_lite.protocol import ConstraintError, Regex, SamplingParams
from sglang_lite.runtime.structured_output.base import next_mask
from tests.constraints.test_generation import random_model
from tests.engine.collector import Collector

# Texts that begin with "x" take much work, and the others little.
MIXED = Regex(r"(?:[0-9]{1,4} ){12}[0-9]|x(?:\S+\s+){0,99}\S+")
REASON = "a pattern takes too much work"


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(byte_matcher, "STEP_FUEL", 1_000)
    with Engine.of(random_model(), max_running=16) as engine:
        yield engine


def written(grammar, engine, text):
    """A matcher behind a text, all of whose masks are asked for."""
    matcher = grammar.matcher()
    for token in engine.tokenizer.encode(text):
        next_mask(matcher)
        assert matcher.accept(token)
    return matcher


def fail(grammar, engine):
    """Fails the lexer of a new text."""
    heavy = written(grammar, engine, "x")
    assert not next_mask(heavy).any()
    assert REASON in heavy.error
    return heavy


def test_texts_of_a_lexer_that_fails_go_on(engine):
    grammar = engine.compile_grammar(MIXED)
    text = "12 345 6 7"
    before = [written(grammar, engine, text[:end]) for end in range(len(text))]
    expected = [next_mask(each) for each in before]
    token = engine.tokenizer.encode(text[3])[0]
    accepting = [written(grammar, engine, text[:3]) for _ in range(2)]
    heavy = fail(grammar, engine)
    assert not any(heavy.accept(token) for token in range(engine.vocab_size))
    for matcher in accepting:  # with no look at a mask before
        assert matcher.accept(token)
        assert np.array_equal(next_mask(matcher), expected[4])
    for end, mask in enumerate(expected):
        assert np.array_equal(next_mask(written(grammar, engine, text[:end])), mask)
    fail(grammar, engine)


def test_requests_beside_some_that_fail_are_as_alone(engine):
    heavy = engine.tokenizer.encode("x")

    def drawn(seeds, failing):
        sinks = [Collector() for _ in seeds]
        for seed, sink in zip(seeds, sinks):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=40)
            begun = {"output_ids": heavy} if seed in failing else {}
            engine.submit("12", params, MIXED, sink=sink, **begun)
        return [sink.end() for sink in sinks]

    light = [seed for seed in range(24) if seed % 3]
    together = drawn(range(24), failing=range(0, 24, 3))
    alone = [drawn([seed], failing=())[0].text for seed in light]
    assert [together[seed].text for seed in light] == alone
    for each in together[::3]:
        assert isinstance(each, ConstraintError)
        assert REASON in str(each)


def test_texts_of_a_block_go_on_after_one_that_fails(monkeypatch):
    monkeypatch.setattr(byte_matcher, "STEP_FUEL", 600)
    with pytest.raises(ConstraintError, match=REASON):
        ByteMatcher(MIXED).push("x" + " word" * 50)
    matcher = ByteMatcher(MIXED)
    matcher.push("12 345 6 7 8 9 10 11 12 13 14 15 1")
    matcher.check_complete()
