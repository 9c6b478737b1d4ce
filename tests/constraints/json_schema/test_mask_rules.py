"""Rules that masks watch because no grammar says them: items that differ, names in any order. Token
by token, byte by byte.
"""

import itertools
import json
import random
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite.constraints.python_types.value_type import value_type
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import ConstraintError, InOrder, JsonSchema, Regex, ValueValidationError
from sglang_lite.runtime.structured_output.base import next_mask
from tests.constraints.engine import accepts, compiled


def p_set(least):
    return Annotated[set[int], Field(min_length=least)]


class Tagged(BaseModel):
    tags: set[str]


MANY = ["a", "ab", "abc", "b", "ba", "c", "ca", "d", "e", "f"]
POINT = {
    "type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", 10, 1]}}, "additionalProperties": False,
}  # fmt: skip
UNIQUE: dict[str, dict[str, Any]] = {
    "anything": {"uniqueItems": True},
    "strings": {"items": {"type": "string"}},
    "integers": {"items": {"type": "integer"}},
    "few integers": {"items": {"type": "integer", "minimum": -3, "maximum": 12}, "minItems": 16},
    "listed": {"items": {"enum": [*MANY, None, 1, 10, 100]}, "minItems": 12},
    "a pattern": {"items": {"type": "string", "pattern": "^[ab]{1,2}$|^c+$"}, "minItems": 5},
    "nested": {
        "items": {"type": ["boolean", "number", "null"]},
        "prefixItems": [{"type": "string"}],
    },
    "closed objects": {"items": POINT},
    "a few closed objects": {"items": {**POINT, "required": ["a", "b"]}, "minItems": 6},
    "tuples": {
        "items": {
            "type": "array",
            "prefixItems": [{"type": "boolean"}, {"enum": ["a", "ab", 1]}],
            "items": False,
            "minItems": 2,
        },
        "minItems": 6,
        "type": "array",
    },
    "open objects": {
        "items": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    },
    "objects of a pattern": {
        "items": {"patternProperties": {"^b": {"type": "null"}}, "additionalProperties": False}
    },
    "open arrays": {
        "items": {"items": {"type": ["number", "array"]}, "type": ["array", "boolean"]},
        "minItems": 4,
    },
    "open objects in arrays": {"items": {"type": "array", "items": {"type": "object"}}},
    "alternatives": {
        "anyOf": [{"items": {"type": "boolean"}, "minItems": 1}, {"maxItems": 0}],
        "items": {"enum": MANY},
    },
    "objects or numbers": {
        "items": {"anyOf": [POINT, {"type": "number"}]},
        "prefixItems": [{"const": 1}],
    },
}


def constraint_of(name, **options):
    return json_schema({"type": "array", "uniqueItems": True, **UNIQUE[name]}, **options)


def walked(constraint, rng, steps=120):
    """The text of a random way through the masks, which ends where it can after a while. There is
    always a token.
    """
    grammar, refusal = compiled(constraint)
    assert refusal is None
    matcher, text = grammar.matcher(), b""
    for step in range(steps):
        if matcher.finished or (matcher.complete and step > 20):
            break
        mask = next_mask(matcher)
        allowed = [byte for byte in range(256) if mask[byte >> 5] >> (byte & 31) & 1]
        assert allowed, text
        usual = [byte for byte in allowed if byte in b'abc10", -.]}[{:nulltruefalse' and byte < 128]
        token = rng.choice(usual or allowed)
        assert matcher.accept(token), (text, token)
        text += bytes([token])
    return text.decode("utf-8", "ignore"), matcher.complete


@pytest.mark.parametrize("name", UNIQUE)
def test_no_way_through_the_masks_has_an_item_twice_or_gets_stuck(name):
    constraint = constraint_of(name)
    for seed in range(6):
        text, complete = walked(constraint, random.Random(seed))
        if complete:
            parse_json(constraint, text)


@pytest.mark.parametrize("name", UNIQUE)
def test_samples_are_kept(name):
    constraint = constraint_of(name)
    try:
        text = sample(constraint, random.Random(1))
    except ConstraintError:  # draws of many that happen to differ
        return
    assert accepts(compiled(constraint)[0], text)


@pytest.mark.parametrize(
    ("name", "kept", "refused"),
    [
        ("anything", ['[1, true, [1], [true], {"a": 1, "b": 2}, "1"]'],
         ["[1, 1]", "[1, 1.0]", '[{"a": 1, "b": [2]}, {"b": [2], "a": 1}]', '["é", "\\u00e9"]', "[[], []]", "[null, null]"]),
        ("strings", ['["a", "ab", "b"]'], ['["a", "b", "a"]']),
        ("integers", ["[1, 12, 2, 0]"], ["[1, 12, 1]", "[0, 0]"]),
        ("closed objects", ['[{"a": true}, {"a": true, "b": 1}, {"a": true, "b": 10}, {}]'],
         ['[{"a": true}, {"a": true}]', "[{}, {}]", '[{"a": true, "b": 1}, {}, {"a": true, "b": 1}]']),
        ("open objects", ['[{"a": true}, {"a": true, "b": 1}, {"a": true, "b": 1, "c": {}}]'],
         ['[{"a": true}, {"a": true}]', '[{"a": true, "b": 1, "c": 1.0}, {"a": true, "c": 1, "b": 1}]', "[{}]"]),
        ("objects of a pattern", ['[{}, {"b": null}, 1, "b"]'], ["[{}, {}]", '[{"bb": null}, {"bb": null}]', "[1, 1]"]),
        ("open arrays", ["[[], [1], true, [1, []]]"], ["[[1], [], true, [1.0]]", "[[[]], [[]], [], true]"]),
        ("open objects in arrays", ["[[], [{}], [{}, {}]]"], ["[[{}], [{}]]"]),
        ("tuples", ['[[true, "a"], [true, "ab"], [true, 1], [false, 1], [false, "a"], [false, "ab"]]'], ["[[true, 1], [true, 1]]"]),
        ("objects or numbers", ['[1, {"a": true}, 1.5, {}]'], ["[1, 1]", '[1, {}, {}]', "[1, 1.0]"]),
        ("nested", ['["a", 1, 1.5, null, true]'], ['["a", 1, 1]']),
    ],
)  # fmt: skip
def test_unique_items(name, kept, refused):
    grammar, _ = compiled(constraint_of(name))
    assert [text for text in kept if not accepts(grammar, text)] == []
    assert [text for text in refused if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "pointer", "problem"),
    [
        ({"items": {"properties": {"a": {"type": "object"}}, "additionalProperties": False}}, "/uniqueItems", "objects and arrays"),
        ({"items": {"type": "array", "items": {"type": "object"}, "maxItems": 3}}, "/uniqueItems", "members that are not listed"),
        ({"items": {"$ref": "#/$defs/tree"}, "$defs": {"tree": {"properties": {"a": {"$ref": "#/$defs/tree"}}, "type": "object",
          "additionalProperties": False}}}, "/uniqueItems", "nest without a limit"),
        ({"items": {"enum": list(range(10_000))}}, "/uniqueItems", "more than 1,000 values"),
        ({"minItems": 10_000}, "/uniqueItems", "more than 1,000 different"),
        ({"anyOf": [{"items": {"type": "string"}}, {"items": {"type": "integer"}, "minItems": 3}]}, "/uniqueItems", "alternat"),
        ({"contains": {"const": 1}}, "/uniqueItems", "contains"),
        ({"prefixItems": [{"enum": ["a", "b"]}, {"const": "a"}], "minItems": 3}, "/uniqueItems", "first items"),
    ],
)  # fmt: skip
def test_what_masks_can_not_check_is_refused_in_a_line_with_its_pointer(schema, pointer, problem):
    with pytest.raises(ConstraintError, match=problem) as caught:
        sgl.grammar.matches({"type": "array", "uniqueItems": True, **schema}, "[]")
    assert caught.value.pointer == pointer
    assert "\n" not in caught.value.message


def test_inside_another_constraint_masks_check_nothing_so_that_it_is_refused():
    with pytest.raises(ConstraintError, match="inside another constraint") as caught:
        sgl.grammar.matches(InOrder((Regex("a"), constraint_of("strings"))), "a[]")
    assert caught.value.pointer == "/uniqueItems"
    few = json_schema({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True})
    assert not sgl.grammar.matches(InOrder((Regex("a"), few)), "a[1, 1]")
    assert sgl.grammar.matches(InOrder((Regex("a"), few)), "a[2, 1]")


@pytest.mark.parametrize(
    "kind", [set[str], frozenset[int], set[float], set, p_set(3), set[tuple[bool, bool]], Tagged]
)
def test_sets_of_python_types_are_generated_without_doubled_items(kind):
    constraint = value_type(kind).constraint
    for seed in range(6):
        text, complete = walked(constraint, random.Random(seed))
        if complete:
            items = json.loads(text)
            items = items if kind is not Tagged else items["tags"]
            assert len({json.dumps(item) for item in items}) == len(items)
            value_type(kind).parse(text)


def test_a_set_may_be_written_with_an_item_twice_where_masks_check_nothing():
    constraint = value_type(set[str]).constraint
    assert constraint is not None
    assert sgl.grammar.matches(constraint, '["a", "b"]')
    assert not sgl.grammar.matches(constraint, '["a", "a"]')
    assert sgl.grammar.matches(InOrder((Regex("a"), constraint)), 'a["a", "a"]')
    assert sgl.grammar.validate(set[str], '["a", "a"]') == {"a"}
    assert sgl.grammar.matches(set[str] | list[int], '["a", "b"]')


def test_a_set_of_ten_thousand_items_is_refused_in_a_line_before_anything_runs():
    with pytest.raises(ConstraintError, match="more than 1,000 different items") as caught:
        sgl.grammar.matches(p_set(10_000), "[]")
    assert caught.value.pointer == ""
    assert "\n" not in caught.value.message


# ----------------------------------------------------------------------------- members in any order

MEMBERS = {"a": {"type": "integer"}, "b": {"type": "null"}, "c": {"type": "boolean"}}
OBJECTS: dict[str, dict[str, Any]] = {
    "one of any": {"minProperties": 1},
    "two of any": {"minProperties": 2},
    "open": {"properties": MEMBERS, "required": ["a", "b"]},
    "closed": {"properties": MEMBERS, "required": ["a", "b"], "additionalProperties": False},
    "many closed": {"properties": {**MEMBERS, **{f"p{i}": True for i in range(20)}}, "required": ["a", "b", "p3"],
                    "additionalProperties": False, "minProperties": 4},
    "many required": {"properties": MEMBERS, "required": ["a", "b", *(f"p{i}" for i in range(12))]},
    "alternatives": {"oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a", "b"]},
                               {"properties": {"a": {"const": 2}}, "required": ["a", "c"]}]},
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OBJECTS)
def test_members_come_in_any_order_each_once_and_all_that_have_to(name):
    constraint = json_schema({"type": "object", **OBJECTS[name]}, order="any")
    for seed in range(10):
        text, complete = walked(constraint, random.Random(seed), 200)
        if complete:
            parse_json(constraint, text)
    grammar, _ = compiled(constraint)
    required = (
        {f"p{i}": 0 for i in range(12)}
        if name == "many required"
        else {"p3": 0}
        if name == "many closed"
        else {}
    )
    for members in itertools.permutations({"a": 1, "b": None, "c": True}.items()):
        for some in ({}, {"a"}, {"b"}, {"c"}):
            value = {**dict(each for each in members if each[0] not in some), **required}
            text = json.dumps(value)
            assert accepts(grammar, text) == is_valid(constraint, text), text
            if name != "one of any":  # of which only a finished value is checked
                assert not accepts(grammar, text.replace("}", ', "a": 1, "a": 1}'))


def is_valid(constraint, text):
    try:
        parse_json(constraint, text)
        return True
    except ValueValidationError:
        return False


SCARCE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a pattern": ({"propertyNames": {"pattern": "^(0|1|1[01])$"}, "additionalProperties": {"const": 1}}, ["0", "1", "10", "11"]),
    "counted": (
        {"propertyNames": {"pattern": "^(0|1[01]?)$"}, "additionalProperties": {"const": 1}, "minProperties": 2, "maxProperties": 2},
        ["0", "1", "10", "11"],
    ),
    "patterns of members": ({"patternProperties": {"^[ab]?$": {"const": 1}}, "additionalProperties": False}, ["", "a", "b"]),
    "all of them": (
        {"patternProperties": {"^[ab]?$": {"const": 1}}, "additionalProperties": False, "minProperties": 3},
        ["", "a", "b"],
    ),
    "another pattern": (
        {"patternProperties": {"^a.?$": False, "^[ab]{1,2}$": {"const": 1}}, "additionalProperties": False},
        ["b", "ba", "bb"],
    ),
    "listed names": ({"propertyNames": {"enum": ["0", "1", "10"]}, "additionalProperties": {"const": 1}}, ["0", "1", "10"]),
}  # fmt: skip


def all_texts(constraint):
    """Texts of all ways through the masks, each of which ends."""
    grammar, refusal = compiled(constraint)
    assert refusal is None
    found, starts = set(), [b""]
    while starts:
        text, allowed = starts.pop(), []
        matcher = grammar.matcher()
        assert all(next_mask(matcher) is not None and matcher.accept(byte) for byte in text)
        while len(allowed) < 2:
            assert len(text) < 200, text
            mask = next_mask(matcher)
            allowed = [byte for byte in range(256) if mask[byte >> 5] >> (byte & 31) & 1]
            if matcher.complete:
                found.add(text.decode())
                break
            assert allowed, text
            if len(allowed) == 1:
                matcher.accept(allowed[0])
                text, allowed = text + bytes(allowed), []
        starts += [text + bytes([byte]) for byte in allowed]
    return found


@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize("name", SCARCE)
def test_no_name_is_begun_that_would_have_to_come_again(name, order):
    schema, names = SCARCE[name]
    constraint = json_schema({"type": "object", **schema}, order=order)
    orders = (p for count in range(5) for p in itertools.permutations(names, count))
    texts = {json.dumps(dict.fromkeys(order, 1)) for order in orders}
    if name == "listed names" and order == "schema":
        texts = {
            text
            for text in texts
            if list(json.loads(text)) == sorted(json.loads(text), key=names.index)
        }
    assert all_texts(constraint) == {
        text for text in texts if sgl.grammar.matches(constraint, text)
    }


@pytest.mark.parametrize(
    "kind",
    [dict[int, bool], list[dict[int, int]], dict[int, dict[int, None]], dict[int, bool] | None],
)
def test_a_dictionary_of_integers_has_each_once(kind):
    constraint = value_type(kind).constraint
    assert isinstance(constraint, JsonSchema)
    for seed in range(12):
        text, complete = walked(constraint, random.Random(seed))
        if complete:
            parse_json(constraint, text)


def test_names_that_run_out_are_not_checked_where_alternatives_differ():
    digits = {"type": "object", "propertyNames": {"pattern": "^[0-9]$"}}
    schema = {
        "anyOf": [
            {**digits, "additionalProperties": {"items": {"const": 1}, "type": "array"}},
            {**digits, "additionalProperties": {"items": {"const": 2}, "type": "array"}},
        ]
    }
    assert sgl.grammar.matches(schema, '{"0": [1], "1": [1]}')
    assert not sgl.grammar.matches(schema, '{"0": [1], "1": [2]}')
