"""Runs tests while a setting is hidden: whatever reads it finds its default.

`python -m tests.effects.hidden` does so with each setting that settings_effects.py has a test for,
which must fail. Names as arguments (`engine.max_running`) choose settings, `--gpu` those that only
a GPU shows; `--find` looks for a test of each instead.

Each setting is hidden in a fork of one process that has imported all, so that it costs a few
seconds. What another process of an engine reads is hidden, too, as this process sends it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MOST_TRIED = 6  # tests that `--find` tries for one setting
DEADLINE_S = 300  # of one test
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins are imported before a fork


# Functions that see the value all the same: those that make and check the settings. What else is
# made of them is hidden.
_CHECKS = re.compile(r"__init__|__post_init__|make|_?check\w*")
_OF_SETTINGS = {"<string>", *(str(ROOT / "sglang_lite" / name) for name in (
    "runtime/config.py", "runtime/config_checks.py", "server/settings.py",
))}  # fmt: skip


class _HiddenSetting:
    """Data descriptor that gives the default to all but the checks of the settings.

    Args:
        slot: descriptor that it stands in for.
        default: what others read.
    """

    def __init__(self, slot: Any, default: object) -> None:
        self._slot, self._default = slot, default

    def __get__(self, owner: Any, kind: type) -> object:
        if owner is None:
            return self
        code = sys._getframe(1).f_code
        checked = code.co_filename in _OF_SETTINGS and _CHECKS.fullmatch(code.co_name)
        return self._slot.__get__(owner, kind) if checked else self._default

    def __set__(self, owner: Any, value: object) -> None:
        self._slot.__set__(owner, value)


def hide_setting(settings: type, name: str) -> None:
    """Hides a setting of a dataclass with slots for the rest of this process."""
    (found,) = (each for each in fields(settings) if each.name == name)
    default = found.default if found.default_factory is MISSING else found.default_factory()
    setattr(settings, name, _HiddenSetting(settings.__dict__[name], default))


def fails(test: str, settings: type | None = None, name: str = "") -> bool:
    """Whether a test fails in a fork of this process, with a setting hidden if one is given."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.alarm(DEADLINE_S)
        code = 1
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                if settings is not None:
                    hide_setting(settings, name)
                code = int(
                    pytest.main(
                        [
                            "-q",
                            "-x",
                            "-p",
                            "no:cacheprovider",
                            "-p",
                            "no:faulthandler",
                            *_QUIET,
                            str(ROOT / test),
                        ]
                    )
                )
        finally:
            os._exit(code if code in (0, 1) else 2)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test left behind
    return os.waitstatus_to_exitcode(status) == 1


def tests_that_name(name: str) -> Iterator[str]:
    """Tests that give a setting by its name, short ones first."""
    found = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text()
        if {"effects", "real", "docs"}.isdisjoint(file.parts) and re.search(rf"\b{name}\b", text):
            lines = text.splitlines()
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                    source = "\n".join(lines[first - 1 : node.end_lineno])
                    if (
                        re.search(rf"\b{name}=|[\"']{name}[\"']", source)
                        and "refus" not in node.name
                    ):
                        found.append((len(source), f"{file.relative_to(ROOT)}::{node.name}"))
    return (test for _, test in sorted(found))


def find_test(settings: type, name: str) -> str | None:
    """A test that passes, and fails while a setting is hidden; None if none of the first few does."""
    for test in list(tests_that_name(name))[:MOST_TRIED]:
        if fails(test, settings, name) and not fails(test):
            return test
    return None


def main(names: list[str]) -> int:
    """Hides settings one after the other. Returns the number of those whose test passes all the
    same.

    Args:
        names: settings as `engine.NAME` or `server.NAME`, after `--find` if tests are looked for,
            or after `--gpu`; none for all.
    """
    from tests.effects.settings_effects import ON_GPU, SEEN, TABLES

    import_once()
    find = "--find" in names
    tests = ON_GPU if "--gpu" in names else SEEN
    names = [name for name in names if not name.startswith("--")]
    missed = 0
    for key in names or tests:
        table, name = key.split(".")
        settings = TABLES[table]
        if find:
            print(f"{key}: {find_test(settings, name)}", flush=True)
        elif not fails(tests[key], settings, name):
            missed += 1
            print(f"{key} is hidden, and {tests[key]} does not fail.", flush=True)
    return missed


def import_once() -> None:
    """Imports what most tests need, before the forks, on the CPU like tests/conftest.py."""
    if not os.environ.get("SGLANG_LITE_TEST_GPU"):
        os.environ["CUDA_VISIBLE_DEVICES"], os.environ["TRITON_INTERPRET"] = "", "1"
    import torch
    import transformers  # noqa: F401  # which takes seconds

    import sglang_lite.runtime.core.engine_core  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
