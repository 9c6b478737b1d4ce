"""Random texts satisfy what they were drawn from."""

import json
import random

import pytest

from sglang_lite.constraints.matching import matches
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import (
    Choices,
    ConstraintError,
    Ebnf,
    InOrder,
    JsonSchema,
    Lark,
    OneOf,
    Regex,
    Repeated,
    StructuralTag,
    Tag,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 3, "exclusiveMaximum": 9},
        "name": {"type": "string", "minLength": 2, "maxLength": 4},
        "kind": {"enum": ["a", "b"]},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "mail": {"type": "string", "format": "email", "maxLength": 20},
        "list": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "minItems": 1},
        "any": {"anyOf": [{"type": "null"}, {"const": 7}]},
        "free": True,
        "two": {"type": ["boolean", "null"]},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["id", "name", "kind", "code", "mail", "list", "any", "free", "two", "tree"],
    "$defs": {
        "flag": {"type": "boolean"},
        "tree": {
            "type": "object",
            "properties": {"below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
        },
    },
}
CONSTRAINTS = [
    json_schema(SCHEMA),
    Choices(("a", "b")),
    Regex(r"(?i)[a-z]+@\d{3,}|x?"),
    Ebnf('root ::= "a" | "(" root ")" | root "+" root'),
    Lark('start: NAME | "(" start ")"\nNAME: /[a-z]+/ & ~/if|else/'),
    InOrder((Regex("[0-9]+"), Choices((" EUR", " USD")))),
    OneOf((json_schema({"type": "integer"}), Choices(("none",)))),
    Repeated(Choices(("ab", "c")), 2, 4),
    StructuralTag((Tag("<call>", json_schema({"type": "object"}), "</call>"),), ("<call>",)),
]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda c: type(c).__name__)
def test_samples_satisfy_the_constraint_and_are_repeatable(constraint):
    texts = [sample(constraint, random.Random(seed)) for seed in range(20)]
    assert texts == [sample(constraint, random.Random(seed)) for seed in range(20)]
    assert len(set(texts)) > 1
    assert all(matches(constraint, text) for text in texts)


@pytest.mark.parametrize("schema", [False, {"allOf": [{"type": "integer"}], "type": "string"}])
def test_what_nothing_satisfies_is_refused(schema):
    with pytest.raises(ConstraintError, match="no text satisfies it"):
        sample(JsonSchema(json.dumps(schema)), random.Random(0))
