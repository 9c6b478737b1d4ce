"""Members in any order: by the grammar or checked by the masks, held against another validator,
byte by byte.
"""

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import ConstraintError
from tests.constraints.engine import accepts, compiled
from tests.constraints.json_schema.test_mask_rules import MEMBERS, walked

NEEDS: dict[str, dict[str, Any]] = {
    "one": {"not": {"additionalProperties": {"type": "null"}}},
    "of a pattern": {"not": {"patternProperties": {"^x": {"type": "null"}}}, "required": ["a"]},
    "listed or not": {"properties": {"a": {"type": ["null", "integer"]}, "b": True}, "minProperties": 1,
                      "not": {"patternProperties": {"^[ax]": {"type": "integer"}}}},
    "closed": {"properties": {"a": True, "b": True, "x1": {"type": "string"}}, "additionalProperties": False,
               "not": {"patternProperties": {"^[bx]": {"type": "null"}}}},
    "two": {"allOf": [{"not": {"patternProperties": {"^x": {"type": "null"}}}},
                      {"not": {"patternProperties": {"1$": {"type": "integer"}}}}]},
    "many required": {"not": {"patternProperties": {"^x": {"type": "null"}}}, "minProperties": 2},
    "of alternatives": {"oneOf": [{"patternProperties": {"^x": {"type": "null"}}, "required": ["a"]},
                                  {"patternProperties": {"^[xa]": {"type": "integer"}}, "required": ["b"]}]},
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDS)
def test_members_of_a_pattern_that_have_to_come_come_in_any_order(name):
    schema = {"type": "object", **NEEDS[name]}
    constraint, oracle = json_schema(schema, order="any"), jsonschema.Draft202012Validator(schema)
    grammar, refusal = compiled(constraint)
    assert refusal is None
    for value in objects(["a", "b", "x1", "x2"], [1, None], 3):
        assert accepts(grammar, json.dumps(value)) == oracle.is_valid(value), value
    assert not accepts(grammar, '{"a": 1, "b": 1, "x1": 1, "x1": null}')
    never_gets_stuck(constraint, oracle)


FREE = {f"p{i}": {"type": "integer"} for i in range(9)}  # more members than a grammar remembers
CLOSED = {"properties": {**FREE, "a": True, "b": True, "c": True}, "additionalProperties": False}
KINDS: dict[str, dict[str, Any]] = {
    "required": {**CLOSED, "anyOf": [{"required": ["a"]}, {"required": ["b", "c"]}]},
    "one required": {**CLOSED, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "not together": {**CLOSED, "not": {"required": ["a", "b"]}, "required": ["c"]},
    "told by a value": {"oneOf": [
        {"properties": {**FREE, "a": {"const": 1}, "b": True}, "required": ["a"], "additionalProperties": False},
        {"properties": {"a": {"const": 2}, "c": True}, "required": ["a", "c"], "additionalProperties": False}]},
    "with equal parts": {"oneOf": [
        {"properties": {**FREE, "a": {"const": 1}, "b": {"type": ["array", "null"], "items": {"type": "integer"}}},
         "required": ["a"], "additionalProperties": False},
        {"properties": {**FREE, "a": {"type": "null"}, "b": {"type": ["array", "null"], "items": {"type": "integer"}}, "c": {}},
         "required": ["a"], "additionalProperties": False}]},
    "with equal circles": {
        "$defs": {name: {"type": ["array", "null"], "items": {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"const": 2}]}} for name in "xy"},
        "oneOf": [{"properties": {**FREE, "a": {"const": 1}, "b": {"$ref": "#/$defs/x"}}, "required": ["a"]},
                  {"properties": {**FREE, "a": {"type": "null"}, "b": {"$ref": "#/$defs/y"}}, "required": ["a"]}]},
    "told by types": {"anyOf": [
        {"properties": {**FREE, "a": {"type": ["integer", "array"]}, "b": True}, "required": ["b"]},
        {"properties": {**FREE, "a": {"type": "null"}, "c": True}, "required": ["c", "p0"]}]},
    "told by names": {"anyOf": [
        {"properties": {**FREE, "a": True}, "patternProperties": {"^b": True}, "additionalProperties": False},
        {"properties": {**FREE, "c": True}, "additionalProperties": False, "minProperties": 2}]},
    "at most": {"anyOf": [{**CLOSED, "required": ["a", "b"]}, {"maxProperties": 1}]},
    "depends": {**CLOSED, "dependentRequired": {"a": ["b"], "b": ["c"]}, "minProperties": 1},
    "conditions": {**CLOSED, "if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]},
                   "else": {"required": ["c"]}},
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_objects_with_many_members_come_in_any_order(name):
    schema = {"type": "object", **KINDS[name]}
    constraint, oracle = json_schema(schema, order="any"), jsonschema.Draft202012Validator(schema)
    grammar, refusal = compiled(constraint)
    assert refusal is None
    for value in objects(["a", "b", "c", "p0"], [1, None, [2]], 3):
        assert accepts(grammar, json.dumps(value)) == oracle.is_valid(value), value
    for names in itertools.permutations(["a", "b", "c", "p0"]):
        value = dict.fromkeys(names, 1)
        assert accepts(grammar, json.dumps(value)) == oracle.is_valid(value), value
    never_gets_stuck(constraint, oracle)


def objects(names, values, most):
    """All objects of some names and values, in any order; of those with `most` members one in five."""
    for count in range(most + 1):
        chosen = itertools.product(
            itertools.permutations(names, count), itertools.product(values, repeat=count)
        )
        for each, given in itertools.islice(chosen, 0, None, 5 if count == most else 1):
            yield dict(zip(each, given))


def never_gets_stuck(constraint, oracle):
    for seed in range(6):
        text, complete = walked(constraint, random.Random(seed))
        assert not complete or oracle.is_valid(json.loads(text)), text


def test_what_came_before_decides_what_is_possible_below():
    closed = {"type": "object", **CLOSED}
    inner = [{**closed, "required": ["a"]}, {**closed, "required": ["b"]}]
    kinds = [
        {"properties": {"k": {"const": i}, "x": each}, "required": ["k", "x"]}
        for i, each in enumerate(inner)
    ]
    with pytest.raises(ConstraintError, match="alternatives of objects"):
        sgl.grammar.matches(json_schema({"type": "object", "anyOf": kinds}, order="any"), "{}")


def test_members_of_a_pattern_have_rules_of_their_own():
    closed = {"type": "object", **CLOSED, "required": ["a", "b"]}
    schema = {
        "type": "object",
        "patternProperties": {"^x": closed},
        "properties": {"y": {"type": "object"}},
    }
    constraint, oracle = json_schema(schema, order="any"), jsonschema.Draft202012Validator(schema)
    grammar, refusal = compiled(constraint)
    assert refusal is None
    for value in (
        {"b": 1, "a": 2},
        {"a": 1},
        {"b": 1, "p0": 1, "a": 1, "z": 1},
        {"b": 1, "p0": 2, "a": 3},
        1,
    ):
        for names in itertools.permutations(["x1", "y", "z"], 2):
            each = dict.fromkeys(names, value)
            assert accepts(grammar, json.dumps(each)) == oracle.is_valid(each), each
    never_gets_stuck(constraint, oracle)


def test_a_hundred_members_come_in_any_order():
    names = [f"p{i}" for i in range(120)]
    members = {"properties": {name: {"type": "integer"} for name in names}, "required": names[:80]}
    grammar, _ = compiled(
        json_schema({"type": "object", **members, "additionalProperties": False}, order="any")
    )
    random.Random(0).shuffle(names)
    assert accepts(grammar, json.dumps(dict.fromkeys(names, 1)))
    assert not accepts(grammar, json.dumps({name: 1 for name in names if name != "p7"}))
    assert not accepts(grammar, json.dumps(dict.fromkeys(names, 1))[:-1] + ', "p119": 1}')


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {f"p{i}": True for i in range(401)}}, "401 members; at most 400"),
        ({"properties": MEMBERS, "required": ["a"], "maxProperties": 2}, "maxProperties"),
        (
            {"not": {"patternProperties": {"^[xy]$": {"type": "null"}}}, "type": "object"},
            "whose pattern has few names",
        ),
        (
            {
                "anyOf": [
                    {**CLOSED, "required": ["a"]},
                    {"not": {"additionalProperties": {"type": "null"}}},
                ]
            },
            "these alternatives",
        ),
        (
            {
                "anyOf": [
                    {**CLOSED, "properties": {**FREE, "a": {"items": {"type": each}}}}
                    for each in ("null", "string")
                ]
            },
            "these alternatives",
        ),
        (
            {"allOf": [{"not": {"patternProperties": {f"^x{i}": False}}} for i in range(5)]},
            "5 members whose names match",
        ),
    ],
)
def test_what_can_not_come_in_any_order_is_refused_in_a_line(schema, problem):
    with pytest.raises(ConstraintError, match=problem) as caught:
        sgl.grammar.matches(json_schema(schema, order="any"), "{}")
    assert caught.value.pointer == ""
    assert "\n" not in caught.value.message
