"""SGLang's dtype_gen."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def dtype_gen(s):
    s += (
        "Q: What is the full name of DNS?\nA: The full names is "
        + sgl.gen("str_res", dtype=str, stop="\n")
        + "\n"
    )
    s += "Q: Which year was DNS invented?\nA: " + sgl.gen("int_res", dtype=int) + "\n"
    s += "Q: What is the value of pi?\nA: " + sgl.gen("float_res", dtype=float) + "\n"
    s += "Q: Is the sky blue?\nA: " + sgl.gen("bool_res", dtype=bool) + "\n"


CASE = Case(
    dtype_gen,
    {"names is ": '"DNS"', "invented?\nA: ": "1983", "pi?\nA: ": "3.14", "blue?\nA: ": "True"},
    text='Q: What is the full name of DNS?\nA: The full names is "DNS"\nQ: Which year was DNS invented?\nA: 1983\n'
    "Q: What is the value of pi?\nA: 3.14\nQ: Is the sky blue?\nA: True\n",
    variables={"str_res": '"DNS"', "int_res": "1983", "float_res": "3.14", "bool_res": "True"},
    programs=1,
)
