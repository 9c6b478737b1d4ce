"""A trace's file: what is wrong with one is refused with its line."""

import json

import pytest

import sglang_lite as sgl
from sglang_lite import cli
from sglang_lite.lang.trace import Trace
from sglang_lite.protocol import Generation, TraceHead, TraceNode, Usage


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.jsonl"
    nodes = (
        TraceNode("text", text="a question", where=("prog.py", 3, "prog"), cached=2),
        TraceNode("gen", place=1, name="a", text="an answer", forced=((0, 3),), end=1.5,
                  results=(Generation("an answer", (1, 2), usage=Usage(5, 2, 2, 1, 0.1, 0.2, 1.5)),)),
    )  # fmt: skip
    Trace(TraceHead(2, 1.5, "Backend", "model"), nodes).save(path)
    return path


def changed(path, line, /, **changes):
    lines = path.read_bytes().split(b"\n")
    message = json.loads(lines[line - 1])
    message.update({name: value for name, value in changes.items() if name in message})
    message["data"].update(
        {name: value for name, value in changes.items() if name not in ("version", "type")}
    )
    lines[line - 1] = json.dumps(message).encode()
    path.write_bytes(b"\n".join(lines))


@pytest.mark.parametrize(
    ("line", "changes", "message"),
    [
        (1, {"version": 2}, "line 1: version 2 of the format is not 1"),
        (2, {"version": 99}, "line 2: version 99 of the format is not 1"),
        (2, {"type": "Text"}, "line 2: "),
        (2, {"cached": 11}, "line 2: 11 of 10 characters"),
        (2, {"cached": -1}, "line 2: -1 of 10 characters"),
        (2, {"text": 5}, "line 2: Expected `str`, got `int`"),
        (2, {"code": "print()"}, "line 2: Object contains unknown field `code`"),
        (2, {"kind": "exec"}, "line 2: Invalid enum value 'exec'"),
        (3, {"forced": [[0, 10]]}, "line 3: the range 0 to 10 is outside its text"),
        (3, {"forced": [[0, 3], [2, 4]]}, "line 3: the range 2 to 4"),
        (3, {"start": 2.0}, "line 3: 2.0 to 1.5 seconds"),
        (3, {"end": {"$float": "inf"}}, "line 3: 0.0 to inf seconds"),
        (3, {"path": [1]}, "line 3: (1,) is not the path of a branch"),
        (3, {"place": -1}, "is not the path of a branch"),
        (1, {"nodes": 3}, "line 1: it says 3 nodes, but 2 are here"),
        (1, {"seconds": -1.0}, "line 1: -1.0 seconds"),
    ],
)
def test_what_can_not_be_is_refused(file, line, changes, message):
    changed(file, line, **changes)
    with pytest.raises(sgl.SglError) as caught:
        Trace.load(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: the file is empty"),
        (b"\n", "line 1: "),
        (b"\x80\x04\x95pickle", "line 1: byte 0 is not UTF-8"),
        (b'{"version": 1', "line 1: "),
        (b'{"version":1,"type":"TraceHead","data":{"nodes":0}}\n\n\n', "line 2: "),
        (b'{"version":1,"type":"TraceNode","data":{"kind":"text"}}\n', "not the head of a trace"),
        (
            b'{"version":1,"type":"Error","data":{"type":"SglError","message":"x"}}\n',
            "not the head of a trace",
        ),
        (
            b'{"version":1,"type":"TraceHead","data":{"nodes":0,"x":'
            + b"[" * 100_000
            + b"]" * 100_000
            + b"}}",
            "nested",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, message):
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(sgl.SglError) as caught:
        Trace.load(path)
    assert message in str(caught.value)


def test_a_file_that_is_too_large_is_refused_unread(tmp_path):
    path = tmp_path / "large.jsonl"
    with open(path, "wb") as out:
        out.truncate(100_000_000)
    with pytest.raises(sgl.SglError, match="has 100,000,000 bytes, the limit is"):
        Trace.load(path)


def test_the_command_makes_a_page(file, tmp_path, capsys):
    assert cli.main(["trace", str(file)]) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path / 'run.html'}: 2 nodes, 1.500 s; 5 prompt tokens, 2 of them cached; 2 generated, 0 in vain\n"
    )
    assert "answer" in (tmp_path / "run.html").read_text()
    assert cli.main(["trace", str(file), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("output", ["run.jsonl", "no/such/folder.html"])
def test_the_command_overwrites_no_trace_and_says_what_it_can_not_write(
    file, output, tmp_path, capsys
):
    before = file.read_bytes()
    assert cli.main(["trace", str(file), "-o", str(tmp_path / output)]) == 1
    assert capsys.readouterr().err.startswith("sglang-lite: ")
    assert file.read_bytes() == before


def test_the_command_shows_another_run_beside_it(file, tmp_path, capsys):
    Trace(TraceHead(1), (TraceNode("text", text="the other run"),)).save(tmp_path / "other.jsonl")
    assert cli.main(["trace", str(file), str(tmp_path / "other.jsonl")]) == 0
    assert "the other run" in file.with_suffix(".html").read_text()


def test_the_command_says_which_line_is_wrong(file, capsys):
    changed(file, 2, cached=99)
    assert cli.main(["trace", str(file)]) == 1
    assert "line 2: 99 of 10 characters" in capsys.readouterr().err
