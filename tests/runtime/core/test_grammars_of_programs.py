"""Grammars over several nodes of a program, as the engine plays them."""

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.constraints.matching import matches
from sglang_lite.program.nodes import Gen, GrammarBegin, GrammarEnd, Program, Select, Text
from sglang_lite.protocol import (
    Continuation,
    Generation,
    Regex,
    SamplingParams,
    Selection,
)
from tests.constraints.test_generation import random_model

WORDS = Regex("([ab]{1,3}, ){0,6}end[.]")
GREEDY = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture(scope="module")
def tiny():
    """An engine of a model with random logits and 284 tokens."""
    with Engine.of(random_model()) as engine:
        yield engine


def play(engine, *segments):
    result, played = engine.play("x", Program(segments))
    return result.text, [p.event for p in played if isinstance(p.event, Generation | Selection)]


def test_segments_of_a_program_are_held_to_a_grammar(tiny):
    text, (first, picked, last) = play(
        tiny, Text("free"), GrammarBegin(WORDS), Text("a, "), Gen("x", GREEDY, Regex("[ab]")),
        Select("y", (", ", "c", "b, ")), Gen("z", GREEDY), GrammarEnd(), Text("free"),
    )  # fmt: skip
    assert [score.text for score in picked.scores] == [", ", "b, "]
    assert text.startswith("freea, " + first.text)
    assert matches(WORDS, text.removeprefix("free").removesuffix("free"))
    assert last.text.endswith("end.")


def test_text_alone_is_not_held_to_a_grammar_by_the_engine(tiny):
    """The author of a text has walked it: the language does, special tokens included."""
    assert play(tiny, GrammarBegin(WORDS), Text("nonsense"), GrammarEnd()) == ("nonsense", [])


def test_a_program_may_begin_inside_a_grammar(tiny):
    text, _ = play(tiny, GrammarBegin(WORDS, "a"), Text(", "), Gen("x", GREEDY))
    assert matches(WORDS, "a" + text)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((Text("c"), Gen("x")), "no text of the grammar begins with 'c'"),
        (
            (Text("a, "), Gen("x", GREEDY, Regex("[ab]")), GrammarEnd()),
            "not complete at its end, after 'a, [ab]'",
        ),
        (
            (Text("a, "), Select("x", ("c", "d"))),
            "the grammar allows none of the choices here: 'c', 'd'",
        ),
    ],
)
def test_a_program_that_leaves_its_grammar_fails(tiny, segments, message):
    with pytest.raises(sgl.ConstraintError, match=message):
        play(tiny, GrammarBegin(WORDS), *segments)
    assert tiny.stats()["running"] == tiny.stats()["waiting"] == 0


def test_what_goes_on_in_a_grammar_is_no_part_of_another(tiny):
    with pytest.raises(sgl.ConstraintError, match="can't be compiled by itself"):
        tiny.complete("x", GREEDY, sgl.grammar.InOrder((Continuation(WORDS, "a"), Regex("b"))))
