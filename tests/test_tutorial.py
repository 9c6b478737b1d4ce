"""The tutorial: its snippets run, in their order, and print what the page shows below them."""

import re
from pathlib import Path
from typing import Any

import sglang_lite as sgl

PAGE = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text()


def test_the_tutorial_prints_what_it_shows(model_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with sgl.Engine(deterministic=True, dtype="float32", in_process=True) as engine:
        sgl.set_default_backend(engine)
        for snippet, shown in re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", PAGE, re.DOTALL):
            exec(compile(snippet, "tutorial.py", "exec"), names)
            assert capsys.readouterr().out.splitlines() == shown.splitlines()
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")
