"""A copy of the package and its tests, in which a recipe of CONTRIBUTING.md is carried out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_COPIED = ("sglang_lite", "tests", "docs", "pyproject.toml")
_LEFT_OUT = shutil.ignore_patterns("real", "assets", "node_modules")


class PackageCopy:
    """Copy of the package, its tests and its docs.

    Args:
        folder: an empty folder for it.

    Attributes:
        opened: files of the package that were changed or added.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.opened: set[str] = set()
        for name in _COPIED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                # with bytecode and times, so it stays valid
                shutil.copytree(source, target, ignore=_LEFT_OUT)
            else:
                shutil.copy2(source, target)

    def insert(self, path: str, text: str, *, before: str) -> None:
        """Inserts a text before the first occurrence of another in a file."""
        file = self._open(path)
        content = file.read_text()
        assert before in content, (
            f"CONTRIBUTING's recipe changes {path} before {before!r}, which is not there."
        )
        file.write_text(content.replace(before, text + before, 1))

    def append(self, path: str, text: str) -> None:
        """Adds a text to the end of a file, which may be new."""
        file = self._open(path)
        file.write_text((file.read_text() if file.exists() else "") + text)

    def run(self, *arguments: str) -> str:
        """Runs Python in the copy. Returns what it prints."""
        environment = os.environ | {"PYTHONPATH": str(self._folder), "SGLANG_LITE_CASES": "all"}
        run = subprocess.run(
            [sys.executable, *arguments],
            cwd=self._folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        return run.stdout + run.stderr

    def failing(self, *tests: str) -> set[str]:
        """Runs tests in the copy. Returns the names of those that fail."""
        printed = self.run(
            "-m", "pytest", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *tests
        )
        assert re.search(r"^\d+ passed|^\d+ failed|passed|\[100%\]", printed, re.MULTILINE), printed
        return set(re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", printed, re.MULTILINE))

    def _open(self, path: str) -> Path:
        if path.startswith("sglang_lite/"):
            self.opened.add(path)
        return self._folder / path
