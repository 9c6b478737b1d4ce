"""SGLang's ReAct agent: thoughts, actions and observations until one finishes."""

import sglang_lite as sgl
from tests.conformance.case import Case

SOURCES = {"a": "It is blue.", "b": "It is far."}


@sgl.function
def react(s, question):
    s += f"Question: {question}\n"
    for i in range(1, 4):
        s += f"Thought {i}:" + sgl.gen(f"thought{i}", stop=["Action", "Observation"], max_tokens=12)
        s += f"Action {i}: " + sgl.select(f"action{i}", ["Search[", "Finish["])
        s += sgl.gen(f"subject{i}", regex="[ab]") + "]\n"
        if s[f"action{i}"] == "Finish[":
            break
        s += f"Observation {i}: " + SOURCES[s[f"subject{i}"]] + "\n"


CASE = Case(
    react,
    {
        "Thought 1:": " Look.\nAction",
        "Action 1: ": "Search[",
        "Search[": "b",
        "Thought 2:": " So.\n",
        "Action 2: ": "Finish[",
        "Finish[": "a",
    },
    text="Question: Q\nThought 1: Look.\nAction 1: Search[b]\nObservation 1: It is far.\n"
    "Thought 2: So.\nAction 2: Finish[a]\n",
    variables={"action1": "Search[", "subject1": "b"},
    arguments={"question": "Q"},
    programs=1,
)
