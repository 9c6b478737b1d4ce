"""A schema as text, as a model, and with options."""

from pydantic import BaseModel

import sglang_lite as sgl
from tests.conformance.case import Case


class Pet(BaseModel):
    young: bool


TEXT = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}'


@sgl.function
def program(s):
    s += "1 " + sgl.gen("a", json_schema=TEXT) + ",2 " + sgl.gen("b", json_schema=Pet)
    s += ",3 " + sgl.gen("c", json_schema=sgl.grammar.json_schema({"enum": ["x", "y"]})) + "."


CASE = Case(
    program,
    {"1 ": '{"a": 2}', "2 ": '{"young": true}', "3 ": '"y"'},
    text='1 {"a": 2},2 {"young": true},3 "y".',
    variables={"a": '{"a": 2}', "b": '{"young": true}', "c": '"y"'},
    programs=1,
)
