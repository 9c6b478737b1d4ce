"""`sgl.grammar.describe`: hints for prompts."""

import datetime
import json
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite.constraints.coerce import as_constraint
from sglang_lite.grammar import describe
from tests.constraints.python_types import examples


class City(BaseModel):
    """A place."""

    name: str = Field(description="as its people\nsay it", min_length=2)
    inhabitants: Annotated[int, Field(ge=0)]
    kind: Literal["city", "town"] = "city"
    tags: list[str] = []
    founded: datetime.date | None = None


CITY = """JSON: {
  "name": string,  // at least 2 characters, as its people say it
  "inhabitants": integer,  // at least 0
  "kind"?: "city" | "town",
  "tags"?: [string, …],
  "founded"?: string (format: date) | null
}"""


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (City, CITY),
        (list[City], CITY.replace("JSON: ", "JSON: [").replace("\n", "\n  ") + ", …]"),
        (int, "a whole number"),
        (float, "a number"),
        (str, "text"),
        (bool, "one of: true, false"),
        (datetime.date, "a date, as 2024-05-31"),
        (examples.Colour, 'one of: red, light "blue"'),
        (tuple[int, str], "JSON: [integer, string]"),
        (set[int], "JSON: [integer, …] (no two alike)"),
        (dict[str, set[int]], "JSON: {\n  …: [integer, …] (no two alike)\n}"),
        (dict[str, int], "JSON: {\n  …: integer\n}"),
        (sgl.Regex("a+"), "text that matches the regular expression a+"),
        (sgl.Choices(("a", "b")), "one of: a, b"),
        (sgl.Grammar('root ::= "a"'), 'text of the grammar:\nroot ::= "a"'),
        (examples.Tree, 'JSON: Tree\nwhere\nTree = {\n  "value": integer,\n  "children"?: [Tree, …]\n}'),
        ({"enum": [1, "a", None]}, 'JSON: 1 | "a" | null'),
        ({"type": ["string", "null"], "pattern": "^a", "x-own": 1}, "JSON: string | null (matches /^a/)"),
        ({"type": "number", "exclusiveMinimum": 0, "multipleOf": 2}, "JSON: number (more than 0, a multiple of 2)"),
        ({"properties": {"a": False, "b": {}}, "required": ["b"]}, 'JSON: {\n  "a"?: nothing,\n  "b": anything\n}'),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "JSON: string & anything (at least 1 characters)"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 1}, "JSON: [null, …] (at least 1 items)"),
        (
            {"type": "object", "patternProperties": {"^a": {}}},
            'JSON: {\n  …: anything\n} (patternProperties: {"^a": {}})',
        ),
        (True, "JSON: anything"),
    ],
)
def test_a_constraint_is_described(constraint, text):
    assert describe(constraint) == text


def test_what_refers_to_the_whole_schema_is_named():
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert describe(schema) == 'JSON: {\n  "next"?: Root\n}\nwhere\nRoot = {\n  "next"?: Root\n}'


def test_every_type_of_the_examples_is_described_with_its_names():
    for kind in examples.HELD:
        text = describe(kind)
        known = as_constraint(kind)
        if isinstance(known, sgl.grammar.JsonSchema):
            for name in json.loads(known.schema).get("properties", ()):
                assert json.dumps(name, ensure_ascii=False) in text, (kind, text)


def test_a_reference_to_nothing_is_refused():
    with pytest.raises(sgl.ConstraintError, match="has no"):
        describe({"$ref": "#/$defs/nothing"})
