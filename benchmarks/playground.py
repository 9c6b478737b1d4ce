"""Edits in the playground's page, in a headless Chromium: seconds from a key to the new answer on
the page, with the default model. The command is started, its page is opened at once, and the first
edit is made as soon as texts can be changed.

    python benchmarks/playground.py [--repeat 3]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser import chromium

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sglang_lite as sgl
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


@sgl.function
def extract(s: sgl.ProgramState, text: str = "Maria Lopez is 34 years old."):
    s += sgl.system("You extract facts.")
    s += sgl.user(f"Who is it? {text}") + sgl.assistant(sgl.gen("person", type=Person, max_tokens=60))
    s += sgl.user("Say so in a sentence.") + sgl.assistant(sgl.gen("said", max_tokens=32))
"""


# Playwright looks for a selector twice a second.
SHOWN = """number => new Promise(done => {
  const look = () => document.querySelectorAll("#shown option").length < number ? setTimeout(look, 5) : done()
  look()
})"""


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, float]]:
    """Address of the command's page, and when it was started."""
    (folder / "prog.py").write_text(PROGRAM)
    began = time.perf_counter()
    command = [sys.executable, "-m", "sglang_lite", "playground", "prog.py", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], began
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def edits(page: Any) -> dict[str, float]:  # of playwright
    """Seconds of each edit."""
    found: dict[str, float] = {}

    def edit(name: str, label: str, text: str) -> None:
        shown = page.locator("#shown option").count()
        page.get_by_label(label).fill(text)
        began = time.perf_counter()
        page.keyboard.press("Control+Enter")
        page.evaluate(SHOWN, shown + 1)
        found[name] = time.perf_counter() - began
        if failed := page.locator("#failed").inner_text():
            raise SystemExit(f"{name}: {failed}")

    edit("a prompt, the first edit", "prompt, line 13", "You extract names.")
    edit("another prompt", "prompt, line 15", "Write a sentence.")
    edit("an argument", "argument text", "Tom Baker, who is 51, is a baker.")
    edit(
        "a schema",
        "JSON schema, line 14",
        '{"type": "object", "properties": {"job": {"type": "string", "maxLength": 20}}}',
    )
    page.locator(".node.gen").first.click()
    edit("an answer", "another answer for person", '{"job": "cook"}')
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="turns, each with a command of its own (default: 3)"
    )
    options = parser.parse_args()
    runs = []
    with chromium() as browser:
        for _ in range(options.repeat):
            with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (address, began):
                page = browser.new_page()
                page.goto(address)
                page.wait_for_selector("#fields textarea")
                runs.append(
                    {"from the command to the texts": time.perf_counter() - began, **edits(page)}
                )
                page.close()
    for name in runs[0]:
        print(f"{name:30} {statistics.median(run[name] for run in runs):5.2f} s")


if __name__ == "__main__":
    main()
