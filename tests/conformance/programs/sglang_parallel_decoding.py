"""SGLang's parallel_decoding: points that are expanded in branches."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def parallel_decoding(s, topic):
    s += "Act as a writer. Topic: " + topic + "\nOutline: 1. Body 2. Mind\n"
    forks = s.fork(2)
    for i, f in enumerate(forks):
        f += f"Tip {i + 1}:" + sgl.gen("detailed_tip", max_tokens=4, stop=["Tip"])
    s += "Tips:" + forks[0]["detailed_tip"] + forks[1]["detailed_tip"] + "\n"
    s += "In summary," + sgl.gen("summary", max_tokens=4)


CASE = Case(
    parallel_decoding,
    {"Tip 1:": " eat", "Tip 2:": " rest", "summary,": " both"},
    text="Act as a writer. Topic: T\nOutline: 1. Body 2. Mind\nTips: eat rest\nIn summary, both",
    variables={"summary": " both"},
    arguments={"topic": "T"},
    programs=1,
)
