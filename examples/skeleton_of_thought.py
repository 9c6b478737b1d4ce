"""Skeleton of thought: first a list of points, then all points at once, each in a branch of its
own. Run: python examples/skeleton_of_thought.py
"""

import sglang_lite as sgl


@sgl.function
def article(s: sgl.ProgramState, topic: str) -> None:
    s += "Three fruits: apples, pears, plums.\nThree parts of a bicycle: wheels, pedals, brakes.\n"
    s += f"Three {topic}:" + sgl.gen(
        "skeleton", regex=r"( [A-Za-z]{3,20},){2} [A-Za-z]{3,20}\.", temperature=0
    )
    points = s["skeleton"].strip(" .").split(", ")
    forks = s.fork(len(points))
    for branch, point in zip(forks, points):
        branch += f"\nThe capital of {point} is" + sgl.gen(
            "sentence", max_tokens=24, stop=".", temperature=0
        )
    s["sentences"] = [
        f"The capital of {point} is{fork['sentence']}." for point, fork in zip(points, forks)
    ]


def main() -> None:
    state = article("countries of Europe").run()
    print(state["skeleton"].strip(), *state["sentences"], sep="\n")


if __name__ == "__main__":
    main()
