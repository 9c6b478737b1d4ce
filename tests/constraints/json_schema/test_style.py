"""Blanks and the spelling of whole numbers in what is generated."""

import json

import pytest

from sglang_lite.constraints.json_schema.write_value import value_text
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import ConstraintError
from tests.constraints.engine import accepts, compiled

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "array", "items": {"type": ["string", "object"]}},
    },
    "additionalProperties": False,
}
VALUE = {"a": 1, "b": ["x, y", {}, {"c": []}]}
USUAL, COMPACT, INDENTED = (
    json.dumps(VALUE),
    json.dumps(VALUE, separators=(",", ":")),
    json.dumps(VALUE, indent=2),
)
ODD = '{ "a":1\n,\t"b" : [\r"x, y" ,{} , {"c": [ ]}]}'


@pytest.mark.parametrize(
    ("whitespace", "kept"),
    [
        ("json", {USUAL}),
        ("compact", {COMPACT}),
        ("free", {USUAL, COMPACT, INDENTED, ODD}),
        (" ?", {USUAL, COMPACT}),
        (r"\n *|", {COMPACT}),
        (r"(?:\n *)?| ", {USUAL, COMPACT, INDENTED}),
    ],
)
def test_whitespace(whitespace, kept):
    constraint = json_schema(SCHEMA, whitespace=whitespace)
    grammar, _ = compiled(constraint)
    assert {text for text in (USUAL, COMPACT, INDENTED, ODD) if accepts(grammar, text)} == kept
    assert accepts(grammar, value_text(constraint, VALUE))


def test_blanks_that_have_to_stand_everywhere():
    constraint = json_schema(SCHEMA, whitespace="\n")
    grammar, _ = compiled(constraint)
    text = value_text(constraint, {"a": 1, "b": ["c"]})
    assert text == '{\n"a"\n:\n1\n,\n"b"\n:\n[\n"c"\n]\n}'
    assert accepts(grammar, text)
    assert not accepts(grammar, json.dumps({"a": 1}))


@pytest.mark.parametrize(
    ("whitespace", "problem"),
    [
        ("x", "more than blanks"),
        ('[ "]*', "more than blanks"),
        ("\u00a0", "more than blanks"),
        ("", "allows no blanks"),
        ("(?!)", "allows no text"),
        ("(", "missing"),
    ],
)
def test_a_pattern_for_something_else_is_refused(whitespace, problem):
    with pytest.raises(ConstraintError, match=problem) as caught:
        json_schema(SCHEMA, whitespace=whitespace)
    assert "\n" not in caught.value.message


def test_blanks_said_twice_are_refused():
    with pytest.raises(ConstraintError, match="both set the separators"):
        json_schema(SCHEMA, whitespace="compact", separators=(",", ": "))
    with pytest.raises(ConstraintError, match="order"):
        json_schema(SCHEMA, order="random")  # type: ignore[arg-type]  # as it would be at run time
    with pytest.raises(ConstraintError, match="integers"):
        json_schema(SCHEMA, integers=1)  # type: ignore[arg-type]  # likewise


def test_whole_numbers_may_have_a_fraction_of_zeros():
    schema = {
        "items": {"anyOf": [{"type": "integer", "minimum": 3}, {"enum": [1, 1.5]}]},
        "type": "array",
    }
    usual, decimal = (
        compiled(json_schema(schema, integers=how))[0] for how in ("whole", "decimal")
    )
    for text in ("[3, 1, 1.5, 40]", "[]"):
        assert accepts(usual, text)
        assert accepts(decimal, text)
    assert accepts(decimal, "[3.0, 1.0, 1.5, 40.00]")
    for text in ("[3.0]", "[1.0]"):
        assert not accepts(usual, text)
    for text in ("[3.1]", "[2.0]", "[3.]", "[1.50]"):
        assert not accepts(decimal, text)
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer"}
    # no whole number in draft 4
    assert not accepts(compiled(json_schema(old, integers="decimal"))[0], "1.0")
