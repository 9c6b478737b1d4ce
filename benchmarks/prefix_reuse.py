"""A multiple-choice set of questions with solved ones before them: what the prefix cache saves.

    python benchmarks/prefix_reuse.py [--questions 200] [--shots 5]

Every question stands behind the same solved ones, and its four answers are scored by `select`. In
one run with the cache and one without; the answers must be the same.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import machine

import sglang_lite as sgl

SUBJECTS = ["apples", "books", "coins", "stamps", "marbles", "tickets", "pencils", "cards"]
NAMES = ["Ada", "Ben", "Chloe", "Dan", "Eva", "Finn", "Gita", "Hugo"]


def question(draw: random.Random) -> tuple[str, list[str], str]:
    """A sum in words, four answers, and the right one."""
    name, other = draw.sample(NAMES, 2)
    things, a, b = draw.choice(SUBJECTS), draw.randrange(2, 40), draw.randrange(2, 40)
    text = (
        f"{name} has {a} {things} and keeps them in a box under the bed. On Monday {other} gives {name} {b} more "
        f"{things}, and nobody takes any away. How many {things} does {name} have in the end?"
    )
    right = str(a + b)
    wrong = draw.sample([str(a + b + d) for d in (-10, -3, -1, 1, 2, 10) if a + b + d > 0], 3)
    answers = [right, *wrong]
    draw.shuffle(answers)
    return text, answers, right


def solved(draw: random.Random) -> str:
    text, answers, right = question(draw)
    return f"Question: {text}\nPossible answers: {', '.join(answers)}\nAnswer: {right}\n\n"


@sgl.function
def ask(s: sgl.ProgramState, shots: str, text: str, answers: list[str]) -> None:
    s += shots
    s += f"Question: {text}\nPossible answers: {', '.join(answers)}\nAnswer:"
    s += sgl.select("answer", [" " + answer for answer in answers])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--shots", type=int, default=5)
    options = parser.parse_args()
    count = options.questions
    draw = random.Random(0)
    shots = "".join(solved(draw) for _ in range(options.shots))
    questions = [question(draw) for _ in range(count)]
    items: list[dict[str, Any]] = [
        {"shots": shots, "text": text, "answers": answers} for text, answers, _ in questions
    ]
    print(machine.describe())
    seconds, picks = {}, {}
    for cached in (True, False):
        with sgl.Engine(device="cpu", prefix_cache=cached) as engine:
            ask.run(**items[0], backend=engine).sync()
            engine.flush_cache()
            started = time.perf_counter()
            states = ask.run_batch(items, backend=engine)
            seconds[cached] = time.perf_counter() - started
        picks[cached] = [state["answer"] for state in states]
        usages = [state.usage() for state in states]
        prompt, found = sum(u.prompt_tokens for u in usages), sum(u.cached_tokens for u in usages)
        print(
            f"cache {'on ' if cached else 'off'}: {seconds[cached]:6.2f} s, {prompt:,} prompt tokens, "
            f"{found / prompt:.1%} of them from the cache"
        )
    same = sum(a == b for a, b in zip(picks[True], picks[False]))
    right = sum(pick.strip() == answer for pick, (_, _, answer) in zip(picks[True], questions))
    print(
        f"{seconds[False] / seconds[True]:.1f}x faster; {same} of {count} answers the same, {right} right"
    )


if __name__ == "__main__":
    main()
