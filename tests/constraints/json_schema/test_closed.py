"""Objects without members that nobody named: schemas that are closed, and names that are written
once.
"""

import json

import pytest

import sglang_lite as sgl

g = sgl.grammar
A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
OLD = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (A, ["{}", '{"a": 1}', "[]"], ['{"a": 1, "b": 2}']),
        ({"items": A}, ['[{"a": 1}]'], ['[{"b": 1}]']),
        ({"allOf": [A, B]}, ['{"a": 1, "b": 2}'], ['{"c": 1}']),
        ({"allOf": [A]}, ['{"a": 1}'], ['{"b": 1}']),
        ({"anyOf": [A, B]}, ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 2}', '{"c": 1}']),
        (
            {**A, "anyOf": [B, {"required": ["a"]}]},
            ['{"a": 1, "b": 2}', '{"a": 1}'],
            ['{"a": 1, "c": 2}'],
        ),
        ({"$ref": "#/$defs/x", "$defs": {"x": A}}, ['{"a": 1}'], ['{"b": 1}']),
        (
            {
                "properties": {
                    "x": {"$ref": "#/$defs/A"},
                    "y": {"allOf": [{"$ref": "#/$defs/A"}, B]},
                },
                "$defs": {"A": A},
            },
            ['{"x": {"a": 1}, "y": {"a": 1, "b": 2}}'],
            ['{"x": {"a": 1, "b": 2}}', '{"y": {"c": 1}}', '{"z": 1}'],
        ),
        ({**A, "if": A, "then": B}, ['{"a": 1, "b": 2}'], ['{"a": 1, "c": 2}']),
        ({"properties": {"a": {"$ref": "#"}}}, ['{"a": {"a": {}}}'], ['{"a": {"b": 1}}']),
        ({**A, "additionalProperties": True}, ['{"a": 1, "b": 2}'], []),
        ({**A, "additionalProperties": B}, ['{"c": {"b": 2}}'], ['{"c": {"d": 2}}']),
        ({"patternProperties": {"^x": True}}, ['{"x1": 2}'], ['{"y": 1}']),
        ({"type": "object"}, ['{"a": 1}'], []),
        ({}, ['{"a": 1}'], []),
        (True, ['{"a": 1}'], []),
        ({"not": A}, ['{"a": "x"}', '{"a": "x", "b": 1}'], ['{"a": 1, "b": 2}']),
        ({**A, "$schema": OLD}, ['{"a": 1}'], ['{"b": 1}']),
    ],
)
def test_a_closed_schema_has_the_members_it_names(schema, valid, invalid):
    constraint = g.json_schema(schema, closed=True)
    assert [text for text in valid if not g.matches(constraint, text)] == []
    assert [text for text in invalid if g.matches(constraint, text)] == []


def test_a_draft_that_can_not_say_it_is_told():
    with pytest.raises(sgl.ConstraintError, match=r"closed: .* draft"):
        g.json_schema({"$schema": OLD, "allOf": [A, B]}, closed=True)


def test_a_schema_is_closed_wherever_it_is_given():
    constraint = g.json_schema(A, closed=True)
    assert sgl.gen("x", json_schema=constraint).node.constraint == constraint
    assert sgl.gen("x", constraint=constraint).node.constraint == constraint
    # and so for backends that take schemas
    assert json.loads(constraint.schema)["additionalProperties"] is False
    open_schema = sgl.gen("x", json_schema=A).node.constraint.schema
    assert "additionalProperties" not in json.loads(open_schema)  # type: ignore[arg-type]  # a schema


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        (A, [""]),
        (dict[str, int], [""]),
        (
            g.json_schema({"type": "object", "properties": {"x": {"type": "object"}}}, closed=True),
            ["/properties/x", ""],
        ),
        (
            {
                "propertyNames": {"enum": ["a", "b"]},
                "type": "object",
                "additionalProperties": {"type": "null"},
            },
            [],
        ),
        (list[int], []),
    ],
    ids=str,
)
def test_check_says_where_names_are_not_listed(schema, places):
    assert [pointer for pointer, why in g.check(schema).checked if "once" in why] == places


@pytest.mark.parametrize(
    "source", [{"type": "object"}, dict[str, int], dict[str, dict[str, int]]], ids=str
)
def test_a_name_that_is_written_twice_is_refused(source):
    text = (
        '{"a": 1, "b": 2, "a": 3}'
        if source != dict[str, dict[str, int]]
        else '{"x": {"a": 1, "a": 2}}'
    )
    assert not g.matches(source, text)
    with pytest.raises(sgl.ValueValidationError, match="the name 'a' is written twice"):
        g.validate(source, text)
