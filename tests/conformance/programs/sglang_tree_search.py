"""A tree of thoughts: three plans, each carried out in two ways, each marked."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def tree_search(s, question):
    s += f"Q: {question}\n"
    plans = s.fork(3)
    plans += sgl.gen("plan", max_tokens=4, temperature=1.0)
    for plan in plans:
        ways = plan.fork(2)
        ways += " Way:" + sgl.gen("way", max_tokens=4, temperature=1.0)
        ways += " Mark:" + sgl.gen("mark", regex="[1-5]")
        ways.join()
    plans.join()


CASE = Case(
    tree_search,
    {"Q: X\n": "p", "Way:": "w", "Mark:": "4"},
    text="Q: X\n",
    variables={"plan": ["p"] * 3, "way": [["w", "w"]] * 3, "mark": [["4", "4"]] * 3},
    arguments={"question": "X"},
    programs=1,
)
