"""Tables of results, in Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.answers.cases import HALVES, tasks_without_cases
from benchmarks.answers.scoring import Counts, interval, total

_BASE = {
    "extraction": "instructor, JSON",
    "tools": "free text",
    "labels": "select",
    "agents": "free text",
    "quotes": "free text",
}
_COLUMNS = {  # title, count, out of
    "extraction": (
        ("valid", "valid", None), ("right fields", "right", "fields"), ("of stated", "found", "stated"),
        ("invented", "invented", "null"),
    ),
    "tools": (("right", "right", "of"), ("invalid calls", "invalid", "")),
    "labels": (("right", "right", "of"), ("a label", "valid", None)),
    "agents": (("right", "right", "of"), ("invalid calls", "invalid", "")),
    "quotes": (("right", "right", "of"), ("verbatim", "verbatim", "of")),
}  # fmt: skip


def show(results: Path | Mapping[str, Any]) -> str:
    """Tables of all results of a folder, or of those given by name: a model's, or "model, half"."""
    if isinstance(results, Path):
        results = {
            ", ".join(path.stem.rsplit(".", 1)): json.loads(path.read_text()) for path in sorted(results.glob("*.json"))
        }
    parts = []
    for name, tasks in results.items():
        parts += [_table(name, task, ways) for task, ways in tasks.items()]
        parts += _note_missing_cases(name)
    return "\n\n".join(parts)


def _note_missing_cases(name: str) -> list[str]:
    """Says which tasks can't have a table, as the half that the name ends with has no cases of them."""
    half = name.rpartition(", ")[2]
    missing = tasks_without_cases(half) if half in HALVES else []
    return [f"{name}: there are no {half} cases for {', '.join(missing)}."] if missing else []


def _table(name: str, task: str, ways: Mapping[str, Any]) -> str:
    base = ways.get(_BASE[task])
    titles = [name, *(title for title, _, _ in _COLUMNS[task]), "tokens written", "read", "seconds"]
    if base is not None:
        titles.append(f"right, over {_BASE[task]}")
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines[0] = lines[0].replace(f"| {name} |", f"| {task}: {name} |", 1)
    for way, result in ways.items():
        counts = [{key: value for key, value in case.items() if key not in ("id", "text")} for case in result["cases"]]
        cells = [way, *_shares(task, counts), f"{result['completion_tokens']:,}", f"{result['prompt_tokens']:,}"]
        cells.append(f"{result['seconds']:.0f}")
        if base is not None:
            cells.append("" if result is base else _gain(result["cases"], base["cases"]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shares(task: str, counts: list[Counts]) -> list[str]:
    summed = total(counts)
    cells = []
    for _, key, of in _COLUMNS[task]:
        whole = len(counts) if of is None else summed.get(of, 0)
        cells.append(f"{100 * summed[key] / whole:.1f} % of {whole}" if whole else str(summed[key]))
    return cells


def _gain(ours: list[Counts], theirs: list[Counts]) -> str:
    gain, low, high = interval(ours, theirs)
    return f"{gain:+.1f} ({low:+.1f} to {high:+.1f})"
