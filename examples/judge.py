"""A judge with votes: several judges see two answers in both orders, so that none wins by its
place. Run: python examples/judge.py
"""

from collections import Counter

import sglang_lite as sgl

PAIRS = [
    ("What is the capital of France?", "The capital of France is Paris.", "I like cheese."),
    ("How many legs has a spider?", "It is red.", "A spider has eight legs."),
    ("What do cows drink?", "Cows drink water.", "Cows drink stones."),
]
JUDGES = ["The better answer is", "A good teacher would say", "The answer that helps most is"]


@sgl.function
def judge(s: sgl.ProgramState, question: str, first: str, second: str) -> None:
    forks = s.fork(2 * len(JUDGES))
    for i, branch in enumerate(forks):
        a, b = (first, second) if i % 2 else (second, first)
        branch += f'Question: {question}\nTwo answers: "{a}" and "{b}"\n{JUDGES[i // 2]} "'
        branch += sgl.select("vote", [a, b])
    forks.join()


def main() -> None:
    for (question, *_), state in zip(PAIRS, judge.run_batch(PAIRS)):
        winner, votes = Counter(state["vote"]).most_common(1)[0]
        print(f"{question} {winner} ({votes} of {len(state['vote'])} votes)")


if __name__ == "__main__":
    main()
