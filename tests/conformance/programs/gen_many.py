"""Ten generations in a loop."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    for i in range(10):
        s += f"{i}: " + sgl.gen(f"v{i}", max_tokens=4) + "\n"


CASE = Case(
    program,
    {f"{i}: ": f"is {i}" for i in range(10)},
    text="".join(f"{i}: is {i}\n" for i in range(10)),
    variables={f"v{i}": f"is {i}" for i in range(10)},
    programs=1,
)
