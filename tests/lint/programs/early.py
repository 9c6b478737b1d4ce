"""A variable is read on a way on which nobody has made it."""

import sglang_lite as sgl


@sgl.function
def answer(s, question):
    s += f"Question: {question}\nKind: " + sgl.select("kind", ["fact", "opinion"])
    if s["kind"] == "fact":
        s += "\nSource:" + sgl.gen("source", max_tokens=16, stop="\n")
    s += "\nAnswer (by " + s["source"] + "):"  # fault: unknown-variable
    s += sgl.gen("answer", max_tokens=64)
