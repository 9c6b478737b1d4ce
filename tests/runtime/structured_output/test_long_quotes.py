"""Quotes from long documents are followed in the documents: llguidance, which compiles short ones,
is the oracle.
"""

import json
import random
from typing import Annotated

import numpy as np
import pytest
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.constraints.json_schema.any_strings import widen_quotes_to_strings
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.python_types.value_type import value_type
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Lark
from sglang_lite.runtime.structured_output import llguidance
from sglang_lite.runtime.structured_output.base import next_mask
from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine
from sglang_lite.runtime.structured_output.quotes import QuoteGrammar
from sglang_lite.runtime.structured_output.vocabulary import list_allowed_tokens

DOCUMENTS = [
    'The cat said "no",\r\nthen\tleft\\went.\n\nOr "not"? The cat is the cat. “Quoted”, "x": {"y"}',
    "Eat at the cafe\u0301, caf\u00e9; \u65e5\u672c\u8a9e\u3002 \U0001f600\U0001f601 a\x00b\x7f the end",
    "aaaa aa a aaa",
    " \n x \u2028 y \x1f",
]
first = Annotated[str, sgl.quote(DOCUMENTS[0])]
either = Annotated[str, sgl.quote(*DOCUMENTS[:2])]


QUOTE = {"type": "string", "x-quote": DOCUMENTS[0]}


class Answer(BaseModel):
    why: str
    claims: list[first]
    both: either | None
    more: dict[str, Annotated[str, sgl.quote(DOCUMENTS[1], by="chars")]]


CONSTRAINTS = {
    **{
        f"document {i}": value_type(Annotated[str, sgl.quote(each)]).constraint
        for i, each in enumerate(DOCUMENTS)
    },
    "nested": value_type(Answer).constraint,
    "or others": value_type(
        first | int | None | list[Annotated[str, sgl.quote(DOCUMENTS[2])]]
    ).constraint,
    "kinds": json_schema(
        {
            "oneOf": [
                {"properties": {"kind": {"const": "a"}, "of": QUOTE}, "required": ["kind", "of"]},
                {
                    "properties": {"kind": {"const": "ab"}, "of": {"type": "string"}},
                    "required": ["kind", "of"],
                },
            ],
        }
    ),
}


@pytest.fixture(scope="module")
def made(engine):
    return LlguidanceEngine(engine.tokenizer, engine.vocab_size, sorted(engine.tokenizer.eos_ids))


def both(made, constraint, monkeypatch):
    """Grammar that follows the documents, and llguidance's, with masks of all tokens."""
    monkeypatch.setattr(llguidance, "LONG_SOURCES", 0)
    ours = made.compile(constraint)
    monkeypatch.setattr(llguidance, "LONG_SOURCES", 1_000_000)
    return ours, made.compile(constraint).as_combinable()


@pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_masks_are_those_of_the_whole_grammar(made, constraint, monkeypatch):
    ours, whole = both(made, constraint, monkeypatch)
    assert isinstance(ours.as_combinable(), QuoteGrammar)
    dice = random.Random(1)
    for _ in range(6):
        matcher, oracle = ours.as_combinable().matcher(), whole.matcher()
        for _ in range(60):
            if oracle.finished:
                break
            mask = next_mask(matcher)
            assert np.array_equal(mask, next_mask(oracle))
            twin = matcher.copy()
            token = dice.choice(list_allowed_tokens(mask))
            assert matcher.accept(token)
            assert oracle.accept(token)
            assert twin is not None
            assert np.array_equal(next_mask(twin), mask)
            assert matcher.complete == oracle.complete
        assert matcher.finished == oracle.finished


def test_text_outside_of_the_documents_is_refused(made, monkeypatch):
    grammar, _ = both(made, CONSTRAINTS["document 0"], monkeypatch)
    text = json.dumps("cat is the")
    matcher = grammar.matcher()
    assert matcher.accept_text(text.encode())
    assert matcher.complete
    matcher = grammar.matcher()
    assert not matcher.accept_text(b'"cat is a')
    assert "in none of the documents" in matcher.error
    endings = grammar.endings()
    assert endings.advance_state(endings.start, b'"The cat sa') is not None
    assert endings.advance_state(endings.start, b'"The cat is a') is None


@pytest.mark.parametrize(
    "schema",
    [
        {"x-quote": {"sources": ["one two three"], "min_words": 2}},
        {"x-quote": "one two three", "maxLength": 5},
        {"x-quote": "one two three", "not": {"const": "one two"}},
        {"anyOf": [{"x-quote": "one two"}, {"const": "not found"}]},
        {"not": {"x-quote": "one two"}},
    ],
)
def test_quotes_with_other_demands_are_left_to_the_engine(schema):
    assert (
        widen_quotes_to_strings(language_for_constraint(json_schema({"type": "string", **schema})))
        is None
    )


@pytest.mark.parametrize(
    "other", [{"type": "string"}, {"type": "string", "pattern": "^o"}, {"const": "one"}]
)
def test_texts_that_need_no_quote_are_left_to_the_engine(other):
    """After a string that is none, the alternative with the quote would still seem possible."""
    options = [
        {"properties": {"a": {"type": "string", "x-quote": "one two"}}, "required": ["a"]},
        {"properties": {"a": other, "b": {"type": "null"}}, "required": ["a", "b"]},
    ]
    schema = {
        "type": "object",
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
        "anyOf": options,
    }
    assert widen_quotes_to_strings(language_for_constraint(json_schema(schema))) is None


def test_substrings_of_grammars_are_left_to_the_engine():
    assert (
        widen_quotes_to_strings(
            language_for_constraint(Lark('start: "<" X ">"\nX: %regex {"substring_words": "a b"}'))
        )
        is None
    )
