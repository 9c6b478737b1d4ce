"""SGLang's regex_gen: an address."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def regex_gen(s):
    s += "Q: What is the IP address of the Google DNS servers?\nA: "
    s += sgl.gen(
        "answer",
        temperature=0,
        regex=r"((25[0-5]|2[0-4]\d|[01]?\d\d?).){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)",
    )


CASE = Case(
    regex_gen,
    {"A: ": "8.8.8.8"},
    text="Q: What is the IP address of the Google DNS servers?\nA: 8.8.8.8",
    variables={"answer": "8.8.8.8"},
    programs=1,
)
