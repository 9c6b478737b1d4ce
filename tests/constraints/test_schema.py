"""Schemas are checked before anything runs, and values against them afterwards."""

import pytest

from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import ConstraintError, JsonSchema, ValueValidationError


def test_a_schema_may_be_text_a_mapping_or_a_boolean():
    assert json_schema('{"type": "integer"}') == JsonSchema('{"type": "integer"}')
    assert json_schema({"type": "integer"}) == JsonSchema('{"type": "integer"}')
    assert json_schema(True) == JsonSchema("true")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "not list"),
        ({"type": object()}, "not a JSON document"),
        ("[" * 100_000, "nested too deeply"),
        ('"' + "x" * 2_000_001 + '"', "the limit is"),
    ],
)
def test_what_is_no_schema_is_refused(schema, message):
    with pytest.raises(ConstraintError, match=message):
        json_schema(schema)


def test_the_fault_of_a_schema_has_its_pointer():
    with pytest.raises(ConstraintError) as caught:
        json_schema({"properties": {"a/b": {"type": "strin"}}})
    assert caught.value.pointer == "/properties/a~1b/type"


def test_values_are_validated():
    constraint = json_schema({"type": "object", "properties": {"n": {"type": "integer", "maximum": 3}}})
    assert parse_json(constraint, '{"n": 2}') == {"n": 2}
    with pytest.raises(ValueValidationError, match=r"\$\.n: 5 is greater") as caught:
        parse_json(constraint, '{"n": 5}')
    assert (caught.value.text, caught.value.value) == ('{"n": 5}', {"n": 5})
    with pytest.raises(ValueValidationError, match="not JSON"):
        parse_json(constraint, '{"n":')
