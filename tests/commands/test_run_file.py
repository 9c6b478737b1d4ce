"""Programs of files, run from the command line."""

import io
import json

import pytest

from sglang_lite.cli import main

PROGRAM = """
import dataclasses
import sglang_lite as sgl

print("imported")
sgl.set_default_backend(sgl.ScriptedBackend({"fails": "x", "": "yes"}))


@dataclasses.dataclass
class Point:
    x: int


@sgl.function
def asks(s, day, count=1, text: str = "none"):
    s += f"{day!r} {count!r} {text!r}"
    if day == "fails":
        raise ValueError("bad day")
    s += sgl.gen("answer", max_tokens=3)
    s["point"] = Point(3)
    return s["answer"].upper()
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "asks_file.py"
    path.write_text(PROGRAM)
    return path


def test_a_run_prints_its_variables_as_json(file, capsys):
    assert main(["run", str(file), "--arg", "day=Monday"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"answer": "yes", "point": {"x": 3}, "return": "YES"}
    assert said.err == "imported\n"


def test_rows_are_a_line_each_and_a_failed_one_has_its_error(file, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"day": "Monday"}\n\n{"day": "fails"}\n{"day": 3, "count": 2}\n')
    assert main(["run", f"{file}:asks", "--rows", str(rows), "--arg", "text=so"]) == 1
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["answer"] == third["answer"] == "yes"
    assert second == {"error": "ValueError: bad day"}


def test_a_value_is_json_unless_its_parameter_is_text(file, capsys):
    other = file.with_name("echo_file.py")
    other.write_text(PROGRAM.replace('return s["answer"].upper()', "return [day, count, text]"))
    assert (
        main(["run", str(other), "--arg", "day=[1, 2]", "--arg", "count=3", "--arg", "text=3"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["return"] == [[1, 2], 3, "3"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--arg: asks: missing a required argument: 'day'. Give --arg day=…."),
        (["--arg", "day"], "--arg: 'day' has no =. Write --arg name=value."),
        (["--arg", "day=1", "--arg", "day=2"], "--arg: 'day=2' is given twice."),
        (["--arg", "dya=1"], "'day'"),
        (["--rows", "nowhere.jsonl"], "--rows: nowhere.jsonl: No such file or directory."),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(file, arguments, told, capsys):
    assert main(["run", str(file), *arguments]) == 1
    err = capsys.readouterr().err.removeprefix("imported\n")
    assert err.startswith("sglang-lite: ")
    assert err.count("\n") == 1
    assert told in err


def test_several_programs_want_a_name(file, capsys):
    file.write_text(PROGRAM + "\n\nother = sgl.function(lambda s: None)\n")
    assert main(["run", str(file)]) == 1
    assert "has several programs: asks, other. Name one: " in capsys.readouterr().err


def test_a_terminal_without_utf8_gets_what_it_can_show(file, monkeypatch):
    other = file.with_name("umlaut_file.py")
    other.write_text(PROGRAM.replace(".upper()", ' + "ü\\u2028"'))
    monkeypatch.setattr("sys.stdout", out := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["run", str(other), "--arg", "day=1"]) == 0
    out.flush()
    assert json.loads(out.buffer.getvalue())["return"] == "yesü\u2028"


def test_a_model_of_the_command_line_answers(file, small_file, capsys):
    assert (
        main(["run", str(file), "--arg", "day=1", "--model", str(small_file), "--seed", "3"]) == 0
    )
    first = capsys.readouterr().out
    assert json.loads(first)["answer"] != "yes"
