"""The project that `sglang-lite init` writes. tests/test_docs.py runs its program on the default
model.
"""

import os
import subprocess
import sys

from sglang_lite.cli import main


def test_its_test_passes_and_its_program_runs_on_its_rows(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "a project"
    assert main(["init", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        "extract.py",
        "notes.jsonl",
        "test_extract.py",
    ]
    assert "sglang-lite run extract.py --rows notes.jsonl" in printed
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a reader has none of ours
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
    ]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert "2 passed" in ran.stdout
    assert main(["lint", str(folder / "extract.py"), "--data", str(folder / "notes.jsonl")]) == 0


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "extract.py").write_text("mine")
    assert main(["init", str(tmp_path)]) == 1
    assert "extract.py: there already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["extract.py"]


def test_a_folder_that_can_not_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / "file" / "project")]) == 1
    assert "can't be written: Not a directory." in capsys.readouterr().err
