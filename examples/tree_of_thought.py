"""Tree of thought: many answers to a riddle are drawn, and each clue halves those that are left.
Run: python examples/tree_of_thought.py"""

import sglang_lite as sgl

CLUES = ["has wings", "lays eggs", "has a beak"]
RIDDLES = """Riddle: I am white and cold and fall in winter. Answer: snow
Riddle: I am yellow and shine in the day. Answer: sun
"""
TRUTHS = (
    "The snow is cold: true\nThe snow is hot: false\nThe sun shines: true\nThe sun is wet: false\n"
)


@sgl.function
def propose(s: sgl.ProgramState, clues: list[str], count: int) -> None:
    s += RIDDLES + f"Riddle: It {', '.join(clues)}. Answer:"
    forks = s.fork(count)
    forks += sgl.gen("thought", regex=r" [a-z]{3,12}\n", max_tokens=8, temperature=1)
    forks.join()


@sgl.function
def value(s: sgl.ProgramState, thought: str, clue: str) -> None:
    s += f"{TRUTHS}The {thought} {clue}:" + sgl.select("value", [" true", " false"])


def main() -> None:
    thoughts = {thought.strip(): 1.0 for thought in propose(CLUES, 12).run(seed=8)["thought"]}
    for clue in CLUES:
        states = value.run_batch([(thought, clue) for thought in thoughts])
        for thought, state in zip(thoughts, states):
            thoughts[thought] *= state.selection("value").probs[" true"]
        best = sorted(thoughts, key=lambda thought: -thoughts[thought])[
            : max(1, len(thoughts) // 2)
        ]
        print(f"{clue}: {', '.join(f'{thought} {thoughts[thought]:.2f}' for thought in best)}")
        thoughts = {thought: thoughts[thought] for thought in best}
    print("Answer:", next(iter(thoughts)))


if __name__ == "__main__":
    main()
