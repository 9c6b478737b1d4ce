"""A chat in the terminal: answers appear while they are generated, and the conversation goes on
until an empty line. Run: python examples/chat.py
"""

import sys

import sglang_lite as sgl


@sgl.function
def reply(s: sgl.ProgramState, history: list[tuple[str, str]], question: str) -> None:
    s += sgl.system("You are a helpful assistant. Answer in one short sentence.")
    for asked, answered in history:
        s += sgl.user(asked) + sgl.assistant(answered)
    s += sgl.user(question) + sgl.assistant(sgl.gen("answer", max_tokens=48, temperature=0))


def main() -> None:
    history: list[tuple[str, str]] = []
    while question := read("You: "):
        print("Model: ", end="")
        state = reply(history, question).run(stream=True)
        for piece in state.text_iter("answer"):
            print(piece, end="", flush=True)
        print()
        history.append((question, state["answer"]))


def read(prompt: str) -> str:
    try:
        question = input(prompt).strip()
    except EOFError:
        question = ""
    if not sys.stdin.isatty():
        print(question)  # a terminal shows what is typed
    return question


if __name__ == "__main__":
    main()
