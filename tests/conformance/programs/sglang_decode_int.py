"""SGLang's decode_int."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def decode_int(s):
    s += "The number of hours in a day is " + sgl.gen_int("hours") + "\n"
    s += "The number of days in a year is " + sgl.gen_int("days") + "\n"


CASE = Case(
    decode_int,
    {"a day is ": "24", "a year is ": "365"},
    text="The number of hours in a day is 24\nThe number of days in a year is 365\n",
    variables={"hours": "24", "days": "365"},
    settings={"temperature": 0.1},
    programs=1,
)
