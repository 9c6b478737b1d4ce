"""A value of an enumeration."""

import enum

import sglang_lite as sgl
from tests.conformance.case import Case


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@sgl.function
def program(s):
    s += "It is " + sgl.gen("colour", type=Colour) + "."


CASE = Case(
    program, {"It is ": "blue"}, text="It is blue.", variables={"colour": Colour.BLUE}, programs=1
)
