"""SGLang's judge of an essay: dimensions in branches, a grade by a regex."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def judge(s, essay):
    s += "Essay: " + essay + "\n"
    forks = s.fork(3)
    for f, dimension in zip(forks, ("clarity", "style", "depth")):
        f += f"Judge the {dimension}: " + sgl.gen("judgment", max_tokens=6, stop="END") + " END"
    s += "Judgments: " + ", ".join(f["judgment"] for f in forks) + "\n"
    s += "Grade: " + sgl.gen("grade", regex="[ABCD][+-]?")


CASE = Case(
    judge,
    {"clarity: ": "good", "style: ": "poor", "depth: ": "deep", "Grade: ": "B+"},
    text="Essay: E\nJudgments: good, poor, deep\nGrade: B+",
    variables={"grade": "B+"},
    arguments={"essay": "E"},
    programs=1,
)
