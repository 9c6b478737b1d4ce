"""Self-consistency: several chains of thought are drawn, and the answer that most of them reach
wins. Run: python examples/self_consistency.py
"""

from collections import Counter

import sglang_lite as sgl

EXAMPLES = """Q: Is a whale a fish? A: It breathes air and feeds milk, so no.
Q: Is ice lighter than water? A: It floats on water, so yes.
Q: Is the sun a planet? A: It is a star, so no.
"""


@sgl.function
def think(s: sgl.ProgramState, question: str, samples: int = 9) -> None:
    s += EXAMPLES + f"Q: {question} A:"
    forks = s.fork(samples)
    forks += sgl.gen("thought", regex=r" [A-Z][a-z ]{5,60}, so ", temperature=0.8) + sgl.select(
        "answer", ["no", "yes"]
    )
    forks.join()


def main() -> None:
    for question in ("Is a spider an insect?", "Is a cat a mammal?", "Is Paris a country?"):
        state = think(question).run(seed=3)
        votes = Counter(state["answer"])
        print(f"{question} {votes.most_common(1)[0][0]} {dict(votes)}")
        for thought, answer in list(zip(state["thought"], state["answer"]))[:3]:
            print(f"   {thought}{answer}")


if __name__ == "__main__":
    main()
