"""ReAct: the model thinks, acts and reads what came back, in turns, until it finishes.
Run: python examples/react.py"""

import sglang_lite as sgl

FACTS = {
    "Eiffel Tower": "The Eiffel Tower was designed by Gustave Eiffel.",
    "Gustave Eiffel": "Gustave Eiffel was born in Dijon.",
    "Hamlet": "Hamlet was written by William Shakespeare.",
    "William Shakespeare": "William Shakespeare was born in Stratford.",
}
EXAMPLES = """Question: Where was the painter of the Mona Lisa born?
Thought: I need the painter of the Mona Lisa.
Action: search Mona Lisa
Observation: The Mona Lisa was painted by Leonardo da Vinci.
Thought: I need where Leonardo da Vinci was born.
Action: search Leonardo da Vinci
Observation: Leonardo da Vinci was born in Anchiano.
Thought: The answer is Anchiano.
Action: finish Anchiano

Question: Where was the composer of The Magic Flute born?
Thought: I need the composer of The Magic Flute.
Action: search The Magic Flute
Observation: The Magic Flute was composed by Wolfgang Mozart.
Thought: I need where Wolfgang Mozart was born.
Action: search Wolfgang Mozart
Observation: Wolfgang Mozart was born in Salzburg.
Thought: The answer is Salzburg.
Action: finish Salzburg

"""


@sgl.function
def react(s: sgl.ProgramState, question: str, steps: int = 4) -> str | None:
    s += EXAMPLES + f"Question: {question}\n"
    seen: list[str] = []
    for _ in range(steps):
        s += "Thought:" + sgl.gen("thought", max_tokens=30, stop="\n", temperature=0) + "\nAction: "
        known = [
            title
            for title in FACTS
            if title in s.text().removeprefix(EXAMPLES) and title not in seen
        ]
        s += sgl.select("action", ["finish", "search"] if known else ["finish"])
        if s["action"] == "finish":
            s += sgl.gen("answer", regex=r" [A-Z]\w+", max_tokens=12, temperature=0)
            return s["answer"].strip()
        s += " " + sgl.select("title", known) + "\n"
        seen.append(s["title"])
        s += f"Observation: {FACTS[seen[-1]]}\n"
    return None


def main() -> None:
    for question in (
        "Where was the designer of the Eiffel Tower born?",
        "Where was the author of Hamlet born?",
    ):
        state = react(question).run()
        print(state.text().removeprefix(EXAMPLES))
        print(f"-> {state.ret_value}\n")


if __name__ == "__main__":
    main()
