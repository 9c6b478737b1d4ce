"""Asks a resolver whether the package, each of its extras and the libraries that people use beside
it can be installed together.

    python -m tests.ranges [--uv PATH]

Needs `uv` and a package index; installs nothing. Each row is resolved with the newest releases and
with the oldest that pyproject.toml allows. Exits with 1 if a row conflicts that is not in CONFLICTS,
or if one in CONFLICTS no longer does.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# Extras of tools and tests are pinned, each for an environment of its own.
OWN = ("dev", "clients", "gateways", "quantisers", "docs")
# What people have installed, with the release that they have at least: without it, a resolver would
# go back to a release of years ago rather than say that the newest doesn't fit.
BESIDE = (
    "instructor>=1.17", "dspy>=3.4", "langchain>=1.5", "langchain-openai>=1.1", "pydantic-ai>=2.60",
    "litellm>=1.100", "transformers>=5.24", "openai-agents>=0.20", "llama-index-core>=0.14", "outlines>=1.2",
)  # fmt: skip
EXTRAS_BESIDE = ((), ("openai",), ("openai", "anthropic"), ("local",), ("all",))
CONFLICTS: dict[tuple[tuple[str, ...], str], str] = {}


@dataclass(frozen=True, slots=True)
class Row:
    """Requirements that are resolved together.

    Attributes:
        oldest: whether to take the oldest releases that our own requirements allow.
    """

    extras: tuple[str, ...]
    beside: str = ""
    python: str = "3.11"
    oldest: bool = False

    @property
    def bracket(self) -> str:
        return f"[{','.join(self.extras)}]" if self.extras else ""

    def describe(self) -> str:
        beside = f" with {self.beside}" if self.beside else ""
        return f"sglang-lite{self.bracket}{beside}, Python {self.python}, {'oldest' if self.oldest else 'newest'}"


def read_extras() -> list[str]:
    """Returns the extras that users install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [name for name in project["optional-dependencies"] if name not in OWN]


def list_rows() -> Iterator[Row]:
    for extra in ("", *read_extras()):
        extras: tuple[str, ...] = (extra,) if extra else ()
        yield from (Row(extras, python=python) for python in PYTHONS)
        yield Row(extras, oldest=True)
    yield Row(("litellm", "openai"))
    for extras, beside in itertools.product(EXTRAS_BESIDE, BESIDE):
        yield Row(extras, beside)


def resolve(uv: str, row: Row) -> str:
    """Resolves a row. Returns why it can't be, or an empty text."""
    options = ["--python-version", row.python, "--python-platform", "linux", "--quiet"]
    if row.oldest:  # read from the file, as a requirement by its address has no oldest release
        extras = [f"--extra={extra}" for extra in row.extras]
        source = ["pyproject.toml", *extras, "--resolution", "lowest-direct"]
    else:
        source = ["-"]
    command = [uv, "pip", "compile", *source, *options]
    wanted = f"sglang-lite{row.bracket} @ {ROOT.as_uri()}\n{row.beside}\n"
    done = subprocess.run(
        command, input=wanted, cwd=ROOT, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stderr.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", default="uv")
    uv = parser.parse_args().uv
    rows = list(list_rows())
    with ThreadPoolExecutor(4) as pool:
        problems = list(pool.map(lambda row: resolve(uv, row), rows))
    wrong = 0
    for row, problem in zip(rows, problems):
        known = CONFLICTS.get((row.extras, row.beside))
        if bool(problem) == (known is not None):
            continue
        wrong += 1
        print(f"{row.describe()}: {problem or f'no conflict any more: {known}'}\n")
    print(f"{len(rows)} rows, {len(CONFLICTS)} known conflicts, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
