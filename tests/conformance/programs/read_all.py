"""Every value is read before the next one is asked for."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    total = ""
    for i in range(4):
        s += f"{i}=" + sgl.gen(f"v{i}", regex="[a-d]") + " "
        total += s[f"v{i}"]
    s["total"] = total


CASE = Case(
    program,
    {"0=": "a", "1=": "b", "2=": "c", "3=": "d"},
    text="0=a 1=b 2=c 3=d ",
    variables={"total": "abcd", "v3": "d"},
    programs=1,
)
