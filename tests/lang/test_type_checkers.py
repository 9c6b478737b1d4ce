"""Type checkers at their strictest find fault with all wrong calls (test_wrong_types.py) and with
no right one (test_right_types.py).
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RIGHT, WRONG = (Path(__file__).parent / f"test_{kind}_types.py" for kind in ("right", "wrong"))
WHERE = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
PYRIGHT = shutil.which("basedpyright", path=WHERE) or shutil.which("pyright", path=WHERE)


def test_there_are_many_calls():
    functions = {
        node.name: node
        for node in ast.parse(WRONG.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    wrong = {
        line.lineno: line.end_lineno for name in ("reads", "calls") for line in functions[name].body
    }
    assert len(wrong) >= 40
    assert wrong == {
        i: i
        for i, line in enumerate(WRONG.read_text().splitlines(), 1)
        if "# type: ignore[" in line
    }
    right = ast.parse(RIGHT.read_text())
    assert (
        sum(
            isinstance(node, ast.Call) and "assert_type" not in ast.unparse(node.func)
            for node in ast.walk(right)
        )
        >= 60
    )
    assert not re.search(
        r"type: ignore|\bAny\b", RIGHT.read_text().partition('"""')[2].partition('"""')[2]
    )


def test_mypy_checks_them_strictly():
    """It does so in `make check`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    loosened, strict = (
        next(each for each in settings["overrides"] if name in each["module"])
        for name in ("tests.*", "tests.lang.test_wrong_types")
    )
    assert settings["strict"]
    off = {
        name for name, value in loosened.items() if value is False and name != "warn_unreachable"
    }
    assert {name for name in off if strict.get(name) is not True} <= {
        "disallow_subclassing_any", "disallow_untyped_calls"  # which are about other people's code
    }  # fmt: skip
    assert set(strict["enable_error_code"]) == set(loosened["disable_error_code"])


def test_mypy_says_what_the_page_shows(tmp_path):
    page = (ROOT / "docs" / "typing.md").read_text()
    first, wrong, said = re.search(
        r"```python.*?\n(.*?)```.*?```python\n(.*?)```.*?```text\n(.*?)```", page, re.DOTALL
    ).groups()
    (tmp_path / "app.py").write_text(first + wrong)
    settings = [
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
    ]
    call = [sys.executable, "-m", "mypy", *settings, "app.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    shown = subprocess.run(
        call, cwd=tmp_path, env=environment, capture_output=True, text=True
    ).stdout
    assert [line for line in shown.splitlines() if "defined in" not in line] == said.splitlines()


@pytest.mark.skipif(PYRIGHT is None, reason="pip install basedpyright")
def test_pyright_finds_all_wrong_calls_and_no_right_one(tmp_path):
    settings = {
        "include": [os.path.relpath(file, tmp_path) for file in (RIGHT, WRONG)],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "strict",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    call = [str(PYRIGHT), "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    report = json.loads(subprocess.run(call, capture_output=True, text=True).stdout)
    assert report["summary"]["filesAnalyzed"] == 2
    assert [
        (each["file"], each["range"]["start"]["line"] + 1, each["message"])
        for each in report["generalDiagnostics"]
    ] == []
