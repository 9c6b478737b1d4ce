"""Text held to a JSON schema."""

import sglang_lite as sgl
from tests.conformance.case import Case

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@sgl.function
def program(s):
    s += "JSON: " + sgl.gen("x", json_schema=SCHEMA) + "\n"


CASE = Case(
    program,
    {"JSON: ": '{"a": 2, "b": true}'},
    text='JSON: {"a": 2, "b": true}\n',
    variables={"x": '{"a": 2, "b": true}'},
    programs=1,
)
