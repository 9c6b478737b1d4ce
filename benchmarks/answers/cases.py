"""Cases of the tasks, and the manifest that they must match."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

FOLDER = Path(__file__).parent
TASKS = ("extraction", "tools", "labels", "agents", "quotes")
HALVES = ("open", "held_out", "fresh")  # two halves, and a set that was written later
Case: TypeAlias = dict[str, Any]  # a line of JSON

PROMPTS: dict[str, str] = tomllib.loads((FOLDER / "prompts.toml").read_text(encoding="utf-8"))
_WRITTEN = (
    "data/*.jsonl", "prompts.toml", "schemas.py", "toolbox.py", "scoring.py", "ways.py", "instructor_worker.py",
)  # fmt: skip


class ChangedFilesError(Exception):
    """Files differ from the manifest that was committed before the first run."""


class HeldOutError(Exception):
    """These cases are run once, and have been run with this model and way before."""


def hashes(folder: Path = FOLDER) -> dict[str, str]:
    """SHA-256 of each file that decides what the models are asked, how answers are read, and what is right."""
    paths = sorted(path for pattern in _WRITTEN for path in folder.glob(pattern))
    return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in paths}


def check_manifest(folder: Path = FOLDER) -> None:
    """Compares the files with MANIFEST.

    Raises:
        ChangedFilesError: a file was added, removed or changed.
    """
    lines = (folder / "MANIFEST").read_text().splitlines()
    recorded = {name: digest for digest, name in (line.split("  ") for line in lines)}
    found = hashes(folder)
    changed = sorted(name for name in recorded | found if recorded.get(name) != found.get(name))
    if changed:
        raise ChangedFilesError(
            f"{', '.join(changed)}: not what MANIFEST lists. Figures would not be comparable: restore the files, or "
            "write a new set of cases in a folder of its own."
        )


def load_cases(task: str, half: str) -> list[Case]:
    """Returns a task's cases in one of `HALVES`."""
    text = _cases_file(task, half).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def tasks_without_cases(half: str) -> list[str]:
    """Returns the tasks that have no cases in one of `HALVES`."""
    return [task for task in TASKS if not _cases_file(task, half).exists()]


def _cases_file(task: str, half: str) -> Path:
    return FOLDER / "data" / f"{task}.{half}.jsonl"


def record_run(model: str, half: str, task: str, ways: list[str], record: Path = FOLDER / "HELD_OUT.jsonl") -> None:
    """Records a run of cases that are run once, before it starts.

    Args:
        half: "held_out" or "fresh". Lines of the record that name none are of the held-out half.

    Raises:
        HeldOutError: one of the ways has been run on these cases before.
    """
    uses = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    for use in uses:
        again = sorted(set(use["ways"]) & set(ways))
        if (use["model"], use.get("half", "held_out"), use["task"]) == (model, half, task) and again:
            raise HeldOutError(
                f"{half} {task}, {', '.join(again)}: already run with {model} on {use['date']}. These cases are run "
                "once: see the results with --show, or name other ways with --ways."
            )
    use = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit(), "model": model,
        "half": half, "task": task, "ways": ways,
    }  # fmt: skip
    with record.open("a") as file:
        file.write(json.dumps(use) + "\n")


def commit() -> str:
    """Commit of the working tree, with "+" if tracked files differ from it; "" where there is no git."""
    if shutil.which("git") is None:
        return ""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=FOLDER, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short=8", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
