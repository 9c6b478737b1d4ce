"""Extraction into a type, measured: how often is each field right, and how sure was the model?
Run: python examples/extraction.py"""

import json
from pathlib import Path

from pydantic import BaseModel, Field

import sglang_lite as sgl

DATA = Path(__file__).with_name("data") / "people.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()]


class Person(BaseModel):
    name: str = Field(pattern=r"^[A-Z]\w+( [A-Z]\w+)*$")
    age: int = Field(ge=0, le=120)
    city: str = Field(pattern=r"^[A-Z]\w+( [A-Z]\w+)*$")


person = sgl.gen("person", type=Person, temperature=0, confidence=True)


EXAMPLES = {
    "Prof. Zoe Kim (23) sings in Seoul.": Person(name="Zoe Kim", age=23, city="Seoul"),
    "In Cairo I met Omar Said, who is 40.": Person(name="Omar Said", age=40, city="Cairo"),
    "At 65, Eva Blom left Ghent to travel.": Person(name="Eva Blom", age=65, city="Ghent"),
}


@sgl.function
def extract(s: sgl.ProgramState, text: str) -> None:
    for example, answer in EXAMPLES.items():
        s += sgl.user(f"Extract name, age and city: {example}") + sgl.assistant(
            answer.model_dump_json()
        )
    s += sgl.user(f"Extract name, age and city: {text}") + sgl.assistant(person)


def main() -> None:
    states = extract.run_batch([{"text": row["text"]} for row in ROWS])
    for row, state in zip(ROWS, states):
        wrong = [
            field for field in Person.model_fields if getattr(state[person], field) != row[field]
        ]
        print(state[person], f"wrong: {', '.join(wrong)}" if wrong else "right", sep="  ")
    print("field  right  mean confidence")
    for field in Person.model_fields:
        right = sum(getattr(state[person], field) == row[field] for row, state in zip(ROWS, states))
        sure = sum(state.confidence(person)[field].prob for state in states) / len(states)
        print(f"{field:6} {right} of {len(ROWS)} {sure:.2f}")


if __name__ == "__main__":
    main()
