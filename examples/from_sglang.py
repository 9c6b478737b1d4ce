"""Migration of a program of SGLang: the import changes and nothing else; then it is typed, a line
at a time. Run: python examples/from_sglang.py
"""

import sglang_lite as sgl  # was: import sglang as sgl


@sgl.function
def multi_turn_question(s, question_1, question_2):
    s += sgl.system("Answer in a short sentence.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=32))
    s += sgl.user(question_2)
    with s.assistant():
        s += sgl.gen("answer_2", max_tokens=32)


first, second = sgl.gen("answer_1", max_tokens=32), sgl.gen("answer_2", max_tokens=32)


@sgl.function
def typed(s: sgl.ProgramState, question_1: str, question_2: str) -> None:
    s += sgl.system("Answer in a short sentence.")
    s += sgl.user(question_1) + sgl.assistant(first)
    s += sgl.user(question_2) + sgl.assistant(second)


def main() -> None:
    questions = ("What is the capital of Italy?", "What is the capital of France?")
    state = multi_turn_question.run(question_1=questions[0], question_2=questions[1], temperature=0)
    print(state["answer_1"], "|", state["answer_2"])
    again = typed(*questions).run(temperature=0)
    print(again[first], "|", again[second])  # editors know that these are texts
    print("the same:", again.text() == state.text())


if __name__ == "__main__":
    main()
