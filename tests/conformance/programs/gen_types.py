"""Values of many types."""

from dataclasses import dataclass
from typing import Literal, TypedDict

import sglang_lite as sgl
from tests.conformance.case import Case


@dataclass
class Point:
    x: bool
    y: Literal["l", "r"]


class Named(TypedDict):
    on: bool


@sgl.function
def program(s):
    s += (
        "1 "
        + sgl.gen("a", type=int)
        + ",2 "
        + sgl.gen("b", type=bool)
        + ",3 "
        + sgl.gen("c", type=Literal["p", "q"])
    )
    s += (
        ",4 "
        + sgl.gen("d", type=Point)
        + ",5 "
        + sgl.gen("e", type=Named)
        + ",6 "
        + sgl.gen("f", type=bool | None)
    )
    s += ",7 " + sgl.gen("g", type=tuple[bool, bool]) + "."


CASE = Case(
    program,
    {
        "1 ": "7",
        "2 ": "true",
        "3 ": "q",
        "4 ": '{"x": true, "y": "r"}',
        "5 ": '{"on": false}',
        "6 ": "null",
        "7 ": "[true, false]",
    },
    text='1 7,2 true,3 q,4 {"x": true, "y": "r"},5 {"on": false},6 null,7 [true, false].',
    variables={
        "a": 7,
        "b": True,
        "c": "q",
        "d": Point(True, "r"),
        "e": {"on": False},
        "f": None,
        "g": (True, False),
    },
    programs=1,
)
