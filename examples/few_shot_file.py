"""Few-shot prompts from a file: some of its rows are the examples, the others are asked.
Run: python examples/few_shot_file.py"""

import json
from pathlib import Path

import sglang_lite as sgl

DATA = Path(__file__).with_name("data") / "tickets.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()]
SHOTS, ASKED = ROWS[:8], ROWS[8:]
KINDS = sorted({row["kind"] for row in ROWS})
kind = sgl.select("kind", [f" {kind}" for kind in KINDS])


@sgl.function
def classify(s: sgl.ProgramState, text: str) -> None:
    for shot in SHOTS:
        s += f"{shot['text']} => {shot['kind']}\n"
    s += f"{text} =>" + kind


def main() -> None:
    states = classify.run_batch([{"text": row["text"]} for row in ASKED])
    for row, state in zip(ASKED, states):
        print(
            f"{state[kind].strip():9} {state.selection(kind).probs[state[kind]]:4.0%}  {row['text']}"
        )
    right = sum(state[kind].strip() == row["kind"] for row, state in zip(ASKED, states))
    print(f"{right} of {len(ASKED)} are right")


if __name__ == "__main__":
    main()
