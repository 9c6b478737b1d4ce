"""A value of a pydantic model."""

from typing import Literal

from pydantic import BaseModel

import sglang_lite as sgl
from tests.conformance.case import Case


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    young: bool


@sgl.function
def program(s):
    s += "Pet: " + sgl.gen("pet", type=Pet) + "."


CASE = Case(
    program,
    {"Pet: ": '{"kind": "cat", "young": false}'},
    text='Pet: {"kind": "cat", "young": false}.',
    variables={"pet": Pet(kind="cat", young=False)},
    programs=1,
)
