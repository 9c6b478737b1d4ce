"""What SGLang's users can name: the names of its wheel as last read, and why some are not here."""

import json
from pathlib import Path
from typing import Any

SURFACE = Path(__file__).parent / "data" / "surface.json"
DECISIONS = Path(__file__).with_name("decisions.tsv")
Names = dict[str, list[Any]]  # with the default of each, if it has one


def read_surface() -> dict[str, Names]:
    """Returns the names of the wheel that the tests know, by table."""
    found: dict[str, Names] = json.loads(SURFACE.read_text(encoding="utf-8"))
    return found


def write_surface(surface: dict[str, Names]) -> None:
    """Writes the names of a wheel, one a line."""
    tables = [
        f"{json.dumps(table)}: {{\n"
        + ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in names.items())
        + "\n}"
        for table, names in surface.items()
    ]
    SURFACE.write_text("{\n" + ",\n".join(tables) + "\n}\n", encoding="utf-8")


def read_decisions(table: str) -> dict[str, str]:
    """Returns the names of a table that are not here, with the reasons."""
    lines = DECISIONS.read_text(encoding="utf-8").splitlines()[1:]
    rows = (line.split("\t") for line in lines)
    return {name: reason for of, name, reason in rows if of == table}
