"""The page for those who come from other libraries: each statement of ours that it shows runs."""

import re
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel

import sglang_lite as sgl

PAGE = Path(__file__).parent.parent / "docs" / "coming_from.md"
ROWS = [
    re.split(r"(?<!\\)\|", line)[1:-1]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ")
]
STATEMENT = re.compile(r"s \+=|with s\.|if s|\w+ = s\.\w+\(|s\[|ask =|forks =|branch =|for ")
SHOWN = [
    code.replace(r"\|", "|")
    for _, ours in ROWS
    for code in re.findall(r"`([^`]+)`", ours)
    if STATEMENT.match(code) and "…" not in code
]


class Person(BaseModel):
    name: str
    age: int


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def test_every_table_shows_statements():
    assert len(ROWS) > 80
    assert len(SHOWN) > 60


@pytest.mark.parametrize("code", SHOWN)
def test_a_statement_of_the_page_runs(code):
    def body(s):
        s += "Well, "
        names = {
            "sgl": sgl,
            "s": s,
            "Person": Person,
            "Annotated": Annotated,
            "add": add,
            "question": "Why?",
        }
        exec(compile(code, PAGE.name, "exec"), names)

    sgl.function(body).run(backend=sgl.ScriptedBackend(), seed=1).sync()
