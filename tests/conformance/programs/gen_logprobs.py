"""Log-probabilities, read in the middle."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen(
        "a",
        max_tokens=3,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    s["told"] = isinstance(s.get_meta_info("a"), dict)
    s += "|" + sgl.gen("b", max_tokens=2, return_logprob=True) + "|" + sgl.gen("c", max_tokens=2)


CASE = Case(
    program,
    {"A: ": "1", "1|": "2", "2|": "3"},
    text="A: 1|2|3",
    variables={"a": "1", "told": True, "b": "2", "c": "3"},
    programs=1,
)
