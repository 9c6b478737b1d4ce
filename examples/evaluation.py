"""An evaluation: two versions of a program on the same labelled rows, with an interval and the rows
that differ. Run: python examples/evaluation.py
"""

import json
import math
from pathlib import Path

import sglang_lite as sgl

DATA = Path(__file__).with_name("data") / "tickets.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()]
SHOTS, TESTED = ROWS[:8], ROWS[8:]
kind = sgl.select("kind", [" billing", " bug", " delivery"])


@sgl.function
def classify(s: sgl.ProgramState, text: str, shots: int) -> None:
    for shot in SHOTS[:shots]:
        s += f"{shot['text']} => {shot['kind']}\n"
    s += f"{text} =>" + kind


def interval(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share: where the true accuracy lies in 95 of 100 such evaluations."""
    p, d = right / n, 1 + z * z / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / d
    middle = (p + z * z / (2 * n)) / d
    return middle - half, middle + half


def main() -> None:
    answers = {}
    for shots in (0, 8):
        states = classify.run_batch([{"text": row["text"], "shots": shots} for row in TESTED])
        answers[shots] = [state[kind].strip() for state in states]
        right = sum(answer == row["kind"] for answer, row in zip(answers[shots], TESTED))
        low, high = interval(right, len(TESTED))
        print(f"{shots} examples: {right} of {len(TESTED)} right ({low:.0%} to {high:.0%})")
    for row, before, after in zip(TESTED, *answers.values()):
        if before != after:
            print(
                f"{before} -> {after} ({'right' if after == row['kind'] else 'wrong'}): {row['text']}"
            )


if __name__ == "__main__":
    main()
