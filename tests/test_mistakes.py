"""Mistakes on purpose: the message of each names the thing, the place and the cure."""

import runpy
import shlex
import tomllib
import traceback
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.cli import main

MISTAKES = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8"))["mistake"]
ANSWERED = [each for each in MISTAKES if "unanswered" not in each]


def test_of_80_mistakes_78_are_answered():
    assert len({each["title"] for each in MISTAKES}) == len(MISTAKES) == 80
    assert len(ANSWERED) >= 78


@pytest.mark.parametrize("mistake", [pytest.param(each, id=each["title"]) for each in ANSWERED])
def test_a_message_names_the_thing_the_place_and_the_cure(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    message = of_program(mistake["code"]) if "code" in mistake else of_command(mistake, capsys)
    for part in (*mistake["says"], mistake["cure"]):
        assert part in message


def of_program(code):
    """Message of the error of a program, which has to point at the line that is wrong."""
    text = f"import sglang_lite as sgl\n\n\n{code}"
    Path("prog.py").write_text(text, encoding="utf-8")
    here = 1 + next(number for number, line in enumerate(text.splitlines()) if "# here" in line)
    sgl.set_default_backend(sgl.ScriptedBackend(default="fine"))
    with pytest.raises(Exception) as caught:
        runpy.run_path("prog.py")
    where = getattr(caught.value, "where", None)
    frames = [frame.lineno for frame in traceback.extract_tb(caught.tb) if frame.filename == "prog.py"]
    assert here in ([*frames, where.line] if where else frames)
    return str(caught.value)


def of_command(mistake, capsys):
    """What a command prints, which is one line, and the last thing that it does."""
    for name, text in mistake.get("files", {}).items():
        Path(name).write_text(text, encoding="utf-8")
    status: object
    try:
        status = main(shlex.split(mistake["command"])[1:])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert status in (1, 2)
    assert said.startswith("sglang-lite")
    assert said.count("\n") == 1
    return said
