"""Text held to a regex."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += (
        "Date: " + sgl.gen("date", regex=r"[0-9]{4}-[0-9]{2}") + " " + sgl.gen("rest", max_tokens=4)
    )


CASE = Case(
    program,
    {"Date: ": "1999-12", "12 ": "x"},
    text="Date: 1999-12 x",
    variables={"date": "1999-12", "rest": "x"},
    programs=1,
)
