"""References out of a schema: to resources that are given, and to the drafts' own schemas."""

import json

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import ConstraintError
from tests.constraints.engine import accepts, compiled

POINT = {
    "type": "object",
    "properties": {"x": {"$ref": "number.json"}},
    "required": ["x"],
    "additionalProperties": False,
}
RESOURCES = {
    "https://example.com/point.json": POINT,
    "https://example.com/number.json": {"type": "number", "minimum": 0},
}
DRAFTS = [
    "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
]  # fmt: skip


def test_resources_are_followed_by_masks_and_checks():
    constraint = json_schema(
        {"items": {"$ref": "https://example.com/point.json"}, "type": "array"}, resources=RESOURCES
    )
    grammar, _ = compiled(constraint)
    assert accepts(grammar, '[{"x": 1}]')
    for text in ('[{"x": -1}]', "[{}]", '[{"x": 1, "y": 2}]'):
        assert not accepts(grammar, text)
        assert not sgl.grammar.matches(constraint, text)


def test_a_resource_is_found_where_it_is_given_whatever_it_calls_itself():
    resources = {
        "https://a.org/x.json": {
            "$id": "https://b.org/y.json",
            "$ref": "#/$defs/z",
            "$defs": {"z": {"const": 1}},
        }
    }
    constraint = json_schema({"$ref": "https://a.org/x.json"}, resources=resources)
    assert sgl.grammar.matches(constraint, "1")
    assert not sgl.grammar.matches(constraint, "2")


@pytest.mark.parametrize(
    ("schema", "resources", "problem"),
    [
        ({}, {"point.json": {}}, "no absolute URI"),
        ({}, {"https://a.org/x#y": {}}, "no absolute URI"),
        ({}, {"https://a.org/x": 1}, "must be an object or a boolean"),
        ({}, {"https://a.org/x": {"minimum": "1"}}, "in the resource 'https://a.org/x'"),
        ({}, {"https://a.org/x": {"$schema": DRAFTS[0]}}, "another draft"),
        (
            {"$defs": {"https://a.org/x": {}}},
            {"https://a.org/x": {}},
            "has a definition of this name",
        ),
        ({}, {"https://a.org/x": {"a": object()}}, "not a JSON document"),
    ],
)
def test_bad_resources_are_refused(schema, resources, problem):
    with pytest.raises(ConstraintError, match=problem):
        json_schema(schema, resources=resources)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("draft", DRAFTS)
def test_schemas_are_generated_under_their_drafts_own_schema(draft):
    constraint = json_schema({"$schema": draft, "$ref": draft})
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 1}},
        "required": ["a"],
    }
    assert sgl.grammar.matches(constraint, json.dumps(schema))
    for wrong in (
        {"type": "other"},
        {"properties": {"a": {"minLength": -1}}},
        {"required": ["a", "a"]},
    ):
        assert not sgl.grammar.matches(constraint, json.dumps(wrong)), wrong


def test_older_drafts_than_4_are_refused_by_name():
    with pytest.raises(ConstraintError, match="too old a draft") as caught:
        json_schema(
            {
                "$schema": "http://json-schema.org/draft-03/schema#",
                "properties": {"a": {"required": True}},
            }
        )
    assert caught.value.pointer == "/$schema"


def test_nothing_else_is_fetched():
    with pytest.raises(ConstraintError, match="leads out of the schema") as caught:
        sgl.grammar.matches({"$ref": "https://json-schema.org/draft/2020-12/nothing"}, "1")
    assert caught.value.pointer == "/$ref"
