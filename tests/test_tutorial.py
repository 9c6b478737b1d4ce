"""The tutorial: its snippets run, in their order, and print what the page says of them."""

import re
from pathlib import Path
from typing import Any

import sglang_lite as sgl

PAGE = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text()


def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script: Any = {"Extract name": '{"name": "Maria Lopez", "age": 34}', "It says": "About 2,800,000."}
    monkeypatch.setattr(sgl.global_config, "default_backend", sgl.ScriptedBackend(script))
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(snippet, "tutorial.md", "exec"), names)
    printed = capsys.readouterr().out
    for told in re.findall(r"print\(error\)  # (.*)", PAGE):
        for part in filter(None, map(str.strip, told.split("…"))):
            assert part in printed
    assert names["states"][0]["person"].age is not None
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")
