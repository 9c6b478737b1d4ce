"""Structural tags as JSON text, as SGLang and xgrammar write them."""

import json

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.structural_tag import parse
from sglang_lite.protocol import ConstraintError

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
A = {"type": "tag", "begin": "<a>", "content": INTEGER, "end": "</a>"}
LEGACY = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}


def tag(**found):
    return {"type": "structural_tag", "format": found}


@pytest.mark.parametrize(
    ("found", "valid", "invalid"),
    [
        (LEGACY, ["", "a <f=a>3</f> b"], ["<f=b>", "<f=a>x</f>"]),
        (
            tag(type="triggered_tags", triggers=["<f="], tags=[{"type": "tag", "begin": "<f=a>", "content": INTEGER, "end": "</f>"}]),
            ["", "a <f=a>3</f> b"],
            ["<f=b>", "<f=a>x</f>"],
        ),
        (
            tag(type="sequence", elements=[
                {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                {"type": "or", "elements": [INTEGER, {"type": "regex", "pattern": "[a-z]+"}]},
            ]),
            ["<think>hm\n</think>12", "<think></think>abc"],
            ["<think>hm</think>", "<think>a</think>b</think>12", "12"],
        ),
        (tag(type="plus", content={"type": "const_string", "value": "ab"}), ["ab", "abab"], ["", "aba"]),
        (tag(type="star", content={"type": "grammar", "grammar": 'root ::= "x"'}), ["", "xx"], ["y"]),
        (tag(type="optional", content={"type": "any_text", "excludes": ["!"]}), ["", "a\nb"], ["a!b"]),
        (
            tag(type="triggered_tags", triggers=["<"], tags=[A], at_least_one=True, excludes=["!", "?"]),
            ["<a>1</a>", "x <a>1</a><a>2</a> y"],
            ["", "x", "!<a>1</a>", "<a>1</a>?"],
        ),
        (tag(type="triggered_tags", triggers=["<"], tags=[A], stop_after_first=True), ["", "x", "x<a>1</a>"], ["<a>1</a>x"]),
        (
            tag(type="triggered_tags", triggers=["<"], tags=[A], at_least_one=True, stop_after_first=True),
            ["x<a>1</a>"],
            ["", "x", "<a>1</a><a>1</a>"],
        ),
        (
            tag(type="tags_with_separator", tags=[A], separator=", ", at_least_one=True),
            ["<a>1</a>", "<a>1</a>, <a>2</a>"],
            ["", "<a>1</a><a>2</a>", "<a>1</a>, "],
        ),
        (tag(type="tags_with_separator", tags=[A], separator="", stop_after_first=True), ["", "<a>1</a>"], ["<a>1</a>" * 2]),
        (tag(type="any_text", excludes=[], max_chars=None, max_tokens=None), ["", "x"], []),
    ],
)  # fmt: skip
def test_formats(found, valid, invalid):
    constraint = parse(json.dumps(found))
    assert [text for text in valid if not sgl.grammar.matches(constraint, text)] == []
    assert [text for text in invalid if sgl.grammar.matches(constraint, text)] == []


@pytest.mark.parametrize(
    ("found", "pointer"),
    [
        ({}, "/format"),
        (tag(type="token_triggered_tags"), "/format"),
        (tag(type="tag", begin=3, content=INTEGER, end=""), "/format/begin"),
        (
            tag(type="triggered_tags", triggers=["<"], tags=[], at_least_one="no"),
            "/format/at_least_one",
        ),
        (tag(type="triggered_tags", triggers=["<"], tags=[], excludes="no"), "/format/excludes"),
        (tag(type="triggered_tags", triggers=["<"], tags=[], stop=1), "/format/stop"),
        (
            tag(type="sequence", elements=[INTEGER, {"type": "any_text", "max_chars": 3}]),
            "/format/elements/1/max_chars",
        ),
        (tag(type="json_schema", json_schema=True, style="qwen_xml"), "/format/style"),
        ({**LEGACY, "triggers": [1]}, "/triggers"),
        ({**LEGACY, "stop": True}, "/stop"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_pointer(found, pointer):
    with pytest.raises(ConstraintError) as caught:
        parse(json.dumps(found))
    assert caught.value.pointer == pointer


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (tag(type="tag", content=INTEGER, end=""), "'begin' must be a string, but it is missing"),
        (tag(type="tag", begin=[3], content=INTEGER, end=""), "'begin' must be a string, not [3]"),
        (tag(type="sequence", elements={}), "'elements' must be a list, not {}"),
        (
            tag(type="tags_with_separator", tags=["a"], separator=""),
            'an object must be here, not "a"',
        ),
    ],
)
def test_a_refusal_says_what_must_be_there(found, problem):
    with pytest.raises(ConstraintError) as caught:
        parse(json.dumps(found))
    assert problem in caught.value.message


@pytest.mark.parametrize(
    "text", ["{", "[1]", "[" * 100_000, '"x"', '{"structures": 3, "triggers": []}']
)
def test_what_is_none_is_refused(text):
    with pytest.raises(ConstraintError, match="structural_tag"):
        parse(text)


def test_a_format_may_not_nest_without_end():
    found = INTEGER
    for _ in range(60):
        found = {"type": "star", "content": found}
    with pytest.raises(ConstraintError, match="nested too deeply"):
        parse(json.dumps({"format": found}))
