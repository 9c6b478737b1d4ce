"""The table of keywords in docs/constraints.md is true: every keyword has the examples of its row."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_lite.constraints.json_schema.assertions import ASSERTING
from sglang_lite.constraints.json_schema.normal_form import normalise
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import ConstraintError
from tests.constraints.engine import accepts, byte_engine

OLD = "http://json-schema.org/draft-07/schema#"
OF_2019 = "https://json-schema.org/draft/2019-09/schema"
OBJECT, ARRAY = {"type": "object"}, {"type": "array"}

# keyword: a schema, texts that are kept, texts that are not
ENFORCED: dict[str, Any] = {
    "type": ({"type": ["integer", "null"]}, ["3", "null"], ["3.5", '"3"']),
    "enum": ({"enum": [1, "a", [True]]}, ["1", '"a"', "[true]"], ["2", "true"]),
    "const": ({"const": {"a": None}}, ['{"a": null}'], ["{}", "null"]),
    "minimum": ({"type": "number", "minimum": 1.5}, ["1.5", "20"], ["1.4", "-3"]),
    "maximum": ({"type": "number", "maximum": 1.5}, ["1.5", "-20"], ["1.6"]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, ["4"], ["3"]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 3}, ["2.99"], ["3"]),
    "multipleOf": ({"type": "number", "multipleOf": 0.05}, ["0.15", "-3"], ["0.11"]),
    "minLength": ({"type": "string", "minLength": 2}, ['"é😀"'], ['"a"']),
    "maxLength": ({"type": "string", "maxLength": 2}, ['"é😀"', '""'], ['"abc"']),
    "pattern": ({"type": "string", "pattern": "b+$"}, ['"abb"'], ['"ba"']),
    "format": ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"']),
    "x-quote": ({"type": "string", "x-quote": "one, two"}, ['"one"', '"one, two"'], ['"two one"', '"tw"', '""']),
    "prefixItems": ({**ARRAY, "prefixItems": [{"type": "null"}]}, ["[null, 1]", "[]"], ["[1]"]),
    "items": ({**ARRAY, "items": {"type": "null"}}, ["[null, null]"], ["[1]"]),
    "additionalItems": ({"$schema": OLD, **ARRAY, "items": [True], "additionalItems": False}, ["[1]"], ["[1, 2]"]),
    "minItems": ({**ARRAY, "minItems": 1}, ["[1]"], ["[]"]),
    "maxItems": ({**ARRAY, "maxItems": 1}, ["[1]"], ["[1, 2]"]),
    "uniqueItems": ({**ARRAY, "items": {"enum": [1, 2]}, "uniqueItems": True}, ["[2, 1]"], ["[1, 1]"]),
    "contains": ({**ARRAY, "contains": {"const": 1}}, ["[2, 1]"], ["[2]"]),
    "minContains": ({**ARRAY, "contains": {"const": 1}, "minContains": 2}, ["[1, 1]"], ["[1]"]),
    "maxContains": ({**ARRAY, "contains": {"const": 1}, "maxContains": 1}, ["[1, 2]"], ["[1, 1]"]),
    "properties": ({**OBJECT, "properties": {"a": {"type": "null"}}}, ['{"a": null}'], ['{"a": 1}']),
    "patternProperties": ({**OBJECT, "patternProperties": {"^a": {"type": "null"}}}, ['{"ab": null}'], ['{"ab": 1}']),
    "additionalProperties": ({**OBJECT, "additionalProperties": {"type": "null"}}, ['{"a": null}'], ['{"a": 1}']),
    "propertyNames": ({**OBJECT, "propertyNames": {"maxLength": 1}}, ['{"a": 1}'], ['{"ab": 1}']),
    "required": ({**OBJECT, "required": ["a"]}, ['{"a": 1}'], ["{}"]),
    "minProperties": ({**OBJECT, "minProperties": 1}, ['{"a": 1}'], ["{}"]),
    "maxProperties": ({**OBJECT, "maxProperties": 1}, ['{"a": 1}', "{}"], ['{"a": 1, "b": 2}']),
    "dependentRequired": ({**OBJECT, "dependentRequired": {"a": ["b"]}}, ['{"b": 2, "a": 1}'], ['{"a": 1}']),
    "dependentSchemas": ({**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}}, ['{"b": 2}'], ['{"a": 1}']),
    "dependencies": ({**OBJECT, "dependencies": {"a": ["b"]}}, ['{"b": 2, "a": 1}'], ['{"a": 1}']),
    "unevaluatedProperties": (
        {**OBJECT, "allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False}, ['{"a": 1}'], ['{"b": 1}'],
    ),
    "unevaluatedItems": (
        {**ARRAY, "allOf": [{"prefixItems": [True]}], "unevaluatedItems": False}, ["[1]"], ["[1, 2]"],
    ),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, ["null"], ["1"]),
    "$dynamicRef": ({"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "type": "null"}}}, ["null"], ["1"]),
    "$recursiveRef": (
        {"$schema": OF_2019, "properties": {"a": {"$recursiveRef": "#"}}, **OBJECT}, ['{"a": {}}'], ['{"a": 1}'],
    ),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, ["3"], ["2", "3.5"]),
    "anyOf": ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, ["null", "1"], ["1.5"]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}]}, ["1", "2.5"], ["2", "1.5"]),
    "not": ({"not": {"type": ["string", "object"]}}, ["1", "[]"], ['"a"', "{}"]),
    "if": ({"type": "integer", "if": {"minimum": 3}, "then": {"multipleOf": 2}}, ["4", "1"], ["5"]),
    "then": ({"type": "integer", "if": {"minimum": 3}, "then": {"multipleOf": 2}}, ["4", "1"], ["5"]),
    "else": ({"type": "integer", "if": {"minimum": 3}, "else": {"multipleOf": 2}}, ["5", "2"], ["1"]),
}  # fmt: skip

# keyword: schemas in which it can't be enforced
REFUSED = {
    "multipleOf": [{"multipleOf": 37}],
    "pattern": [{"pattern": "(?<=ab)c"}, {"pattern": r"(a)\1"}],
    "patternProperties": [{"patternProperties": {"(?<!ab)": True}}],
    "uniqueItems": [
        {**ARRAY, "items": {**OBJECT, "maxProperties": 3}, "uniqueItems": True},
        {**ARRAY, "items": {"enum": list(range(2000))}, "uniqueItems": True},
        {**ARRAY, "uniqueItems": True, "minItems": 10_000},
        {**ARRAY, "uniqueItems": True, "contains": {"const": 1}},
    ],
    "minProperties": [{"propertyNames": {"pattern": "^a?b?$"}, **OBJECT, "minProperties": 5}],
    "$ref": [{"$ref": "https://example.com/a.json"}],
    "oneOf": [
        {
            "oneOf": [
                {**OBJECT, "required": [f"p{i}"], "properties": {f"p{i}": {"const": i}}}
                for i in range(14)
            ]
        }
    ],
    "not": [{"not": {**ARRAY, "uniqueItems": True}}],
}


def rows():
    text = (Path(__file__).parents[3] / "docs" / "constraints.md").read_text(encoding="utf-8")
    found = {}
    for line in text.splitlines():
        if match := re.fullmatch(
            r"\| ((?:`[^`]+`(?:, )?)+) \| (enforced|enforced or refused|refused)(?:; [^|]*)? \|",
            line,
        ):
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", match[1]), match[2])
    return found


def test_the_table_has_a_row_for_every_keyword_and_no_other():
    assert sorted(rows()) == sorted(ASSERTING)


def test_each_row_says_what_its_examples_show():
    for keyword, status in rows().items():
        assert (keyword in ENFORCED) == status.startswith("enforced"), keyword
        assert (keyword in REFUSED) == status.endswith("refused"), keyword


@pytest.mark.parametrize("keyword", ENFORCED)
def test_enforced(keyword):
    schema, valid, invalid = ENFORCED[keyword]
    assert f'"{keyword}"' in json.dumps(schema)
    grammar = byte_engine().compile(json_schema(schema))
    assert [text for text in valid if not accepts(grammar, text)] == []
    assert [text for text in invalid if accepts(grammar, text)] == []


@pytest.mark.parametrize("keyword", REFUSED)
def test_refused_with_its_pointer_or_left_to_a_check(keyword):
    for schema in REFUSED[keyword]:
        with pytest.raises(ConstraintError) as caught:
            normalise(json_schema(schema))
        assert caught.value.pointer.startswith(f"/{keyword}")
        assert "\n" not in caught.value.message
        best_effort = json_schema(schema, enforce="best_effort")
        # without which a value could not be checked either
        if keyword.endswith("Ref") or keyword == "$ref":
            with pytest.raises(ConstraintError):
                normalise(best_effort)
        else:
            assert [pointer for pointer, _ in normalise(best_effort).checked] == [
                caught.value.pointer
            ]
