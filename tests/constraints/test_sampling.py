"""Random texts satisfy what they were drawn from."""

import json
import random

import pytest

from sglang_lite.constraints.sampling import sample
from sglang_lite.protocol import Choices, ConstraintError, JsonSchema

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 3, "exclusiveMaximum": 9},
        "name": {"type": "string", "minLength": 2, "maxLength": 4},
        "kind": {"enum": ["a", "b"]},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "minItems": 1},
        "any": {"anyOf": [{"type": "null"}, {"const": 7}]},
        "free": True,
        "two": {"type": ["boolean", "null"]},
    },
    "required": ["id", "name", "kind", "code", "list", "any", "free", "two"],
    "$defs": {"flag": {"type": "boolean"}},
}


def test_samples_of_a_schema_are_valid_and_repeatable():
    constraint = JsonSchema(json.dumps(SCHEMA))
    texts = [sample(constraint, random.Random(seed)) for seed in range(20)]
    assert texts == [sample(constraint, random.Random(seed)) for seed in range(20)]
    assert len(set(texts)) > 10


def test_choices():
    assert sample(Choices(("a", "b")), random.Random(0)) in ("a", "b")


@pytest.mark.parametrize("schema", [False, {"allOf": [{"type": "integer"}], "type": "string"}])
def test_what_it_cannot_satisfy_it_refuses(schema):
    with pytest.raises(ConstraintError, match="no text satisfies"):
        sample(JsonSchema(json.dumps(schema)), random.Random(0))
