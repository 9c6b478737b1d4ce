"""SGLang's tool_use: a selection decides what is generated."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def tool_use(s, question):
    s += "To answer: " + question + ", I need "
    s += sgl.select("tool", ["calculator", "web browser"]) + ". "
    if s["tool"] == "calculator":
        s += "The math is" + sgl.gen("expression", stop="\n")
    elif s["tool"] == "web browser":
        s += "The URL is" + sgl.gen("url", stop="\n")


CASE = Case(
    tool_use,
    {"I need ": "web browser", "URL is": " x.org\n"},
    text="To answer: How, I need web browser. The URL is x.org",
    variables={"tool": "web browser"},
    arguments={"question": "How"},
    programs=1,
)
