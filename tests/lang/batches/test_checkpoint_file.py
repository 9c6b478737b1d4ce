"""A batch with a checkpoint file: stopped anywhere and run again, no item is lost and none is done
twice.
"""

import asyncio
import datetime
import enum
import gc
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.protocol import Usage
from tests.lang.test_tools import answer, call


class Colour(enum.Enum):
    RED = "red"


class City(BaseModel):
    name: str
    founded: datetime.date


@dataclass
class Point:
    x: int
    colour: Colour


def add(a: int, b: int = 1) -> int:
    return a + b


@sgl.function
def square(s, x):
    s += sgl.user(f"{x}")
    s += sgl.assistant(sgl.gen("a"))
    return x * x


ITEMS = [{"x": i} for i in range(6)]
TEXTS = [f"<{i}>" for i in range(6)]


def script():
    return sgl.ScriptedBackend(
        lambda call: f"<{call.prompt.messages[0].content[0]}>" if call.prompt.messages else "x"
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "batch.jsonl"


def kept(path):
    """The lines of items."""
    return [json.loads(line)["data"] for line in path.read_text().splitlines()[1:]]


def remove_codes(path):
    """Makes the file one of an earlier version."""
    path.write_bytes(re.sub(rb',"code":"[0-9a-f]{32}"', b"", path.read_bytes()))


def run(path, items=ITEMS, program=square, **options):
    """The answers, and how many calls it took."""
    backend = script()
    states = program.run_batch(items, backend=backend, checkpoint=path, **options)
    return [state["a"] for state in states], len(backend.calls)


# --------------------------------------------------------------------------------------- continuing


def test_what_is_finished_is_not_run_again(path):
    assert run(path) == (TEXTS, 6)
    assert run(path) == (TEXTS, 0)
    assert len(kept(path)) == 6


def test_a_restored_state_is_like_the_one_that_ran(path):
    @sgl.function
    def program(s, x):
        s += sgl.user("Look: " + sgl.image(b"GIF89a...") + f" {x}")
        with s.assistant():
            s += (
                sgl.gen("cut", max_tokens=1)
                + sgl.select("picked", ["p", "q"])
                + sgl.gen("several", n=2)
            )
            s += sgl.gen("typed", type=list[int])
            fork = s.fork(2)
            fork[1] += sgl.gen("half")
            fork.join()
            s["set"] = {"by": ["hand", None]}
            s["half"]

    backend = sgl.ScriptedBackend(lambda call: "[1, 2]" if call.constraint else "two words")
    (ran,) = program.run_batch([(1,)], backend=backend, checkpoint=path)
    (restored,) = program.run_batch(
        [(1,)], backend=sgl.ScriptedBackend(lambda call: str(1 / 0)), checkpoint=path
    )
    names = ["cut", "picked", "several", "typed", "half", "set"]
    assert [restored[name] for name in names] == [ran[name] for name in names]
    assert [restored.raw(name) for name in names] == [ran.raw(name) for name in names]
    assert restored["half"] == [None, "two words"]
    assert [restored.usage(name) for name in names] == [ran.usage(name) for name in names]
    assert restored.usage().total_s == pytest.approx(ran.usage().total_s)
    assert replace(restored.usage(), total_s=0) == replace(ran.usage(), total_s=0)
    assert restored.text() == ran.text()
    assert restored.messages() == ran.messages()
    assert restored.get_meta_info("cut") == ran.get_meta_info("cut")
    assert restored.get_meta_info("cut")["finish_reason"]["type"] == "length"
    assert restored.get_meta_info("set") is None
    assert restored.error() is None
    assert restored.ret_value is ran.ret_value is None
    assert list(restored.text_iter("cut")) == list(ran.text_iter("cut"))
    assert list(restored.stream_executor.variables) == list(ran.stream_executor.variables)
    with pytest.raises(sgl.UnknownVariableError):
        restored["nothing"]


def test_branches_that_nobody_has_read_are_kept_too(path):
    @sgl.function
    def forking(s, x):
        fork = s.fork(2)
        fork += sgl.gen("a")
        fork.join()

    backend = sgl.ScriptedBackend(default="v", latency=0.01)
    for _ in range(2):
        (state,) = forking.run_batch([(1,)], backend=backend, checkpoint=path)
        assert state["a"] == ["v", "v"]
    assert len(backend.calls) == 2


VALUES = [
    None, True, 3, 2**70, 2.5, "text \u2028 ü", [1, [2]], {"a": {"b": None}}, {"$odd": 1}, {1: "a", None: "b"}, (1, (2, "x")),
    {3}, frozenset({4}), Colour.RED, datetime.date(2024, 2, 29), datetime.time(8, 30),
    datetime.datetime(2024, 2, 29, 8, tzinfo=datetime.UTC), City(name="Rome", founded=datetime.date(1, 4, 21)),
    Point(1, Colour.RED), [City(name="R", founded=datetime.date(1, 1, 1))], {"p": (Point(2, Colour.RED),)}, float("inf"),
    Usage(3, total_s=0.5),
]  # fmt: skip


def test_a_failed_variable_that_its_program_could_do_without_is_kept_as_one(path):
    @sgl.function
    def program(s, x):
        fork = s.fork(2)
        fork += lambda i: f"branch {i}" + sgl.gen("a")
        fork.join()
        with pytest.raises(sgl.ProgramError):
            s["a"]
        s += "done"

    backend = sgl.ScriptedBackend({"branch 1": OSError("down")}, default="y")
    for _ in range(2):
        (state,) = program.run_batch([{"x": 1}], backend=backend, checkpoint=path)
        assert state.text() == "done"
        with pytest.raises(sgl.ProgramError, match="OSError: down"):
            state["a"]
    assert len(backend.calls) == 2


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_keep_their_types(path, value):
    @sgl.function
    def program(s, x):
        s["v"] = value
        return [value]

    program.run_batch([(1,)], backend=script(), checkpoint=path)
    (state,) = program.run_batch([(1,)], backend=script(), checkpoint=path)
    assert (state["v"], state.ret_value) == (value, [value])
    assert type(state["v"]) is type(value)


def test_calls_of_tools_are_kept(path):
    @sgl.function
    def agent(s, x):
        s += sgl.user("2+3?")
        return sgl.use_tools(s, [add])

    backend = sgl.ScriptedBackend(
        {"2+3?": '{"tool": "add", "arguments": {"a": 2, "b": 3}}', "Result": '{"answer": "5"}'}
    )
    for _ in range(2):
        (state,) = agent.run_batch([(1,)], backend=backend, checkpoint=path)
        assert (state["answer"], state.ret_value, state["answer_call_0"].run()) == ("5", "5", 5)
    assert len(backend.calls) == 2


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, type("Local", (), {})(), bytearray(b"bytes")],
    ids=lambda v: type(v).__name__,
)
def test_a_value_that_can_not_be_kept_fails_its_item_and_says_which(path, value):
    @sgl.function
    def program(s, x):
        s["odd"] = value if x else 0

    with pytest.raises(
        sgl.BatchError, match="1 of 2 programs failed, the first is item 1: 'odd' is a"
    ):
        program.run_batch([(0,), (1,)], backend=script(), checkpoint=path)
    assert len(kept(path)) == 1


def test_what_has_failed_is_run_again(path):
    failing = sgl.ScriptedBackend(
        lambda call: str(1 / 0) if call.prompt.messages[0].content[0] in ("1", "4") else "fine"
    )
    results = square.run_batch(ITEMS, backend=failing, checkpoint=path, on_error="return")
    assert [isinstance(r, Exception) for r in results] == [False, True, False, False, True, False]
    assert run(path) == (["fine", "<1>", "fine", "fine", "<4>", "fine"], 2)


def test_items_may_be_added_at_the_end(path):
    assert run(path, ITEMS[:4]) == (TEXTS[:4], 4)
    assert run(path, ITEMS) == (TEXTS, 2)


def test_equal_items_are_items_of_their_own(path):
    assert run(path, [{"x": 1}] * 3) == (["<1>"] * 3, 3)
    assert run(path, [{"x": 1}] * 4) == (["<1>"] * 4, 1)


def test_iterators_give_the_kept_items_in_their_place(path):
    run(path, ITEMS[:3])
    backend = script()
    states = square.run_batch(ITEMS, backend=backend, checkpoint=path, generator_style=True)
    assert [state["a"] for state in states] == TEXTS
    assert len(backend.calls) == 3
    pairs = square.run_batch(ITEMS, backend=backend, checkpoint=path, ordered=False)
    assert sorted((i, state["a"]) for i, state in pairs) == list(enumerate(TEXTS))
    assert len(backend.calls) == 3


def test_coroutines_go_on_too(path):
    async def main():
        await square.arun_batch(ITEMS[:3], backend=script(), checkpoint=path)
        backend = script()
        states = await square.arun_batch(ITEMS, backend=backend, checkpoint=path)
        ordered = [
            s["a"]
            async for s in await square.arun_batch(ITEMS, checkpoint=path, generator_style=True)
        ]
        return [state["a"] for state in states], ordered, len(backend.calls)

    sgl.set_default_backend(script())
    assert asyncio.run(main()) == (TEXTS, TEXTS, 3)


def test_many_items_at_once_are_all_kept(path):
    items = [{"x": i} for i in range(200)]
    run(path, items, num_threads=32)
    assert sorted(line["index"] for line in kept(path)) == list(range(200))
    assert run(path, items)[1] == 0


# ------------------------------------------------------------------------------------------ killed

KILLED = """
import os, signal, sys
import sglang_lite as sgl

path, log, window, count = sys.argv[1], sys.argv[2], int(sys.argv[4]), 12

def note(i):
    with open(log, "a") as file:
        file.write(f"{i}\\n")

@sgl.function
def program(s, i):
    s += f"item {i}: " + sgl.gen("a")
    value = s["a"]
    if str(i) == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
    note(i)
    return value

backend = sgl.ScriptedBackend(lambda call: call.prompt.text.upper())
states = program.run_batch([{"i": i} for i in range(count)], backend=backend, checkpoint=path, num_threads=window)
print([state.ret_value for state in states] == [f"ITEM {i}: " for i in range(count)])
"""


@pytest.mark.parametrize("window", [1, 4])
def test_a_killed_batch_goes_on_where_it_was(tmp_path, window):
    path, log = tmp_path / "batch.jsonl", tmp_path / "ran.txt"

    def start(last):
        command = [sys.executable, "-c", KILLED, str(path), str(log), str(last), str(window)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def kept():
        return [json.loads(line)["data"]["index"] for line in path.read_bytes().split(b"\n")[1:-1]]

    assert start(last=7).returncode == -signal.SIGKILL
    first = kept()
    assert 7 not in first
    assert first == list(range(7)) or window > 1
    ran = log.read_text().splitlines()
    again = start(last=-1)
    assert (again.returncode, again.stdout) == (0, "True\n"), again.stderr
    assert sorted(kept()) == list(range(12))
    assert sorted(map(int, log.read_text().splitlines()[len(ran) :])) == sorted(
        set(range(12)) - set(first)
    )


def test_a_last_line_cut_anywhere_is_dropped_and_its_item_run_again(path):
    run(path, ITEMS[:3], num_threads=1)
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in [*range(start, start + 40), *range(start + 40, len(whole), 23)]:
        path.write_bytes(whole[:end])
        assert run(path, ITEMS[:3]) == (TEXTS[:3], 1), f"cut after {end - start} bytes"
        assert [line["index"] for line in kept(path)] == [0, 1, 2]


# ----------------------------------------------------------------------------------- something else


def refused(path, message, items=ITEMS, program=square, hint="Name another file", **options):
    """Running with the file is refused before anything runs, and the file stays as it is."""
    before, backend = path.read_bytes(), script()
    with pytest.raises(sgl.ProgramError, match=message) as caught:
        program.run_batch(items, **{"backend": backend, **options}, checkpoint=path)
    assert str(path) in str(caught.value)
    assert hint in str(caught.value)
    assert path.read_bytes() == before
    assert backend.calls == []


def test_other_arguments_are_refused(path):
    run(path, num_threads=1)
    refused(path, "line 4: item 2 has other arguments now", [*ITEMS[:2], {"x": 9}, *ITEMS[3:]])
    refused(path, "line 2: item 0 has other arguments now", ITEMS[::-1])
    refused(path, "line 2: item 0 has other arguments now", [(0,)])


def test_fewer_items_are_refused(path):
    run(path, num_threads=1)
    refused(path, "line 6: the line is of item 4, but this batch has 4 items", ITEMS[:4])


def test_another_program_is_refused(path):
    run(path)

    @sgl.function
    def cube(s, x):
        s += "never"

    refused(
        path, "line 1: the checkpoint is of the program 'square', but this is 'cube'", program=cube
    )


@pytest.mark.parametrize(
    "content",
    [
        b'{"precious": "data", "without": "a line end"}',
        b'{"precious": "data"}\n',
        b"some notes\nof mine\n",
        b"some notes",
        b"[]\n",
        b"\n",
        b"\x80\x81\n",
        b'{"version":1,"type":"Usage","data":{}}\n',
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(path, content):
    path.write_bytes(content)
    refused(path, "line 1: the file is not a batch checkpoint")


def test_a_file_of_an_earlier_version_is_refused(path):
    path.write_text('{"sglang_lite_batch":4,"program":"square","parts":{}}\n')
    refused(path, "line 1: the checkpoint was made by an earlier version")


@pytest.mark.parametrize(
    "damage", [b"torn in the middle", b"", b"[]", b'{"index": "x"}', b"\xff\x00", b'{"index": 1']
)
def test_a_damaged_line_is_named_and_skipped_on_request(path, damage, caplog):
    run(path, num_threads=1)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:3], damage, *lines[4:]]))
    refused(path, "line 4: the line is damaged.", hint="skip_damaged=True")
    assert run(path, skip_damaged=True) == (TEXTS, 1)
    assert f"{path}, line 4: the line is damaged and skipped" in caplog.text
    assert run(path, skip_damaged=True) == (TEXTS, 0)


@pytest.mark.parametrize("damage", [b"torn", b"torn\n", b"\n", b'{"index": 1}\n', b"\x00\x00\x00"])
def test_a_damaged_last_line_is_dropped_and_said(path, damage, caplog):
    run(path, num_threads=1)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:6]) + b"\n" + damage)
    assert run(path) == (TEXTS, 1)
    assert f"{path}: the last line was cut short" in caplog.text
    assert [line["index"] for line in kept(path)] == list(range(6))


def test_a_class_that_is_gone_is_told(path):
    @sgl.function
    def program(s, x):
        s["v"] = Colour.RED

    program.run_batch([(1,)], backend=script(), checkpoint=path)
    path.write_text(path.read_text().replace(":Colour", ":Color"))
    remove_codes(path)
    refused(path, "line 2: its values can't be restored: AttributeError.*Color", [(1,)], program)


def test_a_file_that_can_not_be_written_is_refused_before_anything_runs(tmp_path):
    backend = script()
    for path in (tmp_path, tmp_path / "nowhere" / "batch.jsonl"):
        with pytest.raises(sgl.ParameterError, match=r"checkpoint: .* can't be written"):
            square.run_batch(ITEMS, backend=backend, checkpoint=path)
    assert backend.calls == []


def test_the_path_may_be_text(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    run("batch.jsonl", ITEMS[:1])
    assert path.exists()
    assert os.fspath(Path("batch.jsonl")) == "batch.jsonl"


def test_a_file_that_another_run_has_open_is_refused(path):
    states = square.run_batch(
        ITEMS, backend=script(), checkpoint=path, generator_style=True, num_threads=1
    )
    assert next(states)["a"] == TEXTS[0]
    refused(path, "is being written by another run", hint="Wait for its end", num_threads=1)
    code = (
        "import sglang_lite as sgl, sys\n"
        "program = sgl.function(lambda s, x: None)\n"
        "try: program.run_batch([(1,)], backend=sgl.ScriptedBackend(), checkpoint=sys.argv[1])\n"
        "except sgl.ProgramError as error: print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60
    )
    assert "is being written by another run" in said.stdout, said.stderr
    states.close()
    assert run(path)[0] == TEXTS


def test_an_iterator_that_is_dropped_lets_others_have_the_file(path):
    square.run_batch(ITEMS, backend=script(), checkpoint=path, generator_style=True)
    gc.collect()
    assert run(path) == (TEXTS, 6)


# ------------------------------------------------------------------------------------ changed lines

SECRET = "correct horse battery"


def edited(path, line, *changes):
    """Replaces texts in a line of the file."""
    lines = path.read_bytes().splitlines(keepends=True)
    for before, after in changes:
        assert before in lines[line - 1]
        lines[line - 1] = lines[line - 1].replace(before, after)
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("line", [3, 7])
@pytest.mark.parametrize("secret", [None, SECRET])
def test_an_answer_that_was_changed_is_not_believed(path, line, secret):
    run(path, secret=secret)
    before = path.read_bytes()
    index = kept(path)[line - 2]["index"]
    edited(path, line, (f"<{index}>".encode(), b"<forged>"))
    with pytest.raises(
        sgl.ProgramError,
        match=rf"line {line}: the line was changed, or is damaged\. Set `skip_damaged=True`",
    ):
        run(path, secret=secret)
    assert run(path, secret=secret, skip_damaged=True) == (TEXTS, 1)
    path.write_bytes(before)
    assert run(path, secret=secret) == (TEXTS, 0)


def test_under_a_secret_no_line_of_another_file_is_believed(path, tmp_path):
    run(path, secret=SECRET)
    other = tmp_path / "other.jsonl"
    run(other, secret=SECRET, temperature=0.5)  # settings differ
    rows = path.read_bytes().splitlines(keepends=True)
    for stolen in (other, tmp_path / "plain.jsonl"):
        if stolen != other:
            run(stolen)  # a checksum anybody can make
        lines = stolen.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*rows[:2], lines[2], *rows[3:]]))
        with pytest.raises(sgl.ProgramError, match="line 3: the line was changed, or is damaged"):
            run(path, secret=SECRET)


def test_a_secret_is_needed_where_there_is_one_and_refused_where_there_is_none(path):
    run(path, secret=SECRET)
    with pytest.raises(
        sgl.ProgramError, match=r"line 1: the file was written under a secret\. Give it: secret="
    ):
        run(path)
    with pytest.raises(
        sgl.ProgramError,
        match=r"line 1: it is of another secret, or was changed\. Name another file",
    ):
        run(path, secret=SECRET[::-1])
    edited(path, 1, (b',"secret":true', b""))
    with pytest.raises(
        sgl.ProgramError, match=r"line 1: the file was written under no secret\. Name another file"
    ):
        run(path, secret=SECRET)
    with pytest.raises(sgl.ProgramError, match=r"line 1: the line was changed, or is damaged"):
        run(path)


def test_a_file_of_an_earlier_version_goes_on(path):
    run(path, ITEMS[:3])
    remove_codes(path)
    assert b'"code":"' not in path.read_bytes()
    assert run(path) == (TEXTS, 3)
    assert run(path) == (TEXTS, 0)
    edited(path, 6, (b"<", b"<forged "))
    with pytest.raises(sgl.ProgramError, match="line 6: the line was changed, or is damaged"):
        run(path)
    with pytest.raises(sgl.ProgramError, match="line 1: the file was written under no secret"):
        run(path, secret=SECRET)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"secret": "short", "checkpoint": "x"}, r"secret: it has 5 characters\. Draw 16 or more"),
        ({"secret": 3, "checkpoint": "x"}, r"secret: 3 is not a string"),
        ({"secret": SECRET}, r"secret: it has no effect without a checkpoint file"),
    ],
)
def test_a_secret_that_protects_nothing_is_refused(options, said):
    with pytest.raises(sgl.ParameterError, match=said):
        square.run_batch(ITEMS, backend=script(), **options)


def pay(n: int) -> str:
    """Pays."""
    return f"paid {n}"


@sgl.function
def payer(s, x):
    s += sgl.user(f"{x}")
    return sgl.use_tools(s, [pay], approve=lambda each: each.arguments["n"] < 2 or "ask")


def pay_once(request):
    text = request.prompt.text
    if "Result of" in text:
        return answer("done")
    return call("pay", n=int(request.prompt.messages[0].content[0]))


def test_suspended_items_are_not_stored_and_begin_anew(tmp_path):
    path = tmp_path / "b.jsonl"
    items = [{"x": i} for i in range(4)]
    for begun in (4, 2):
        backend = sgl.ScriptedBackend(pay_once)
        states = payer.run_batch(items, backend=backend, checkpoint=path)
        assert [len(state.pending()) for state in states] == [0, 0, 1, 1]
        assert [state.ret_value for state in states] == ["done", "done", None, None]
        first = [each for each in backend.calls if "Result of" not in each.prompt.text]
        assert len(first) == begun
    assert states[3].resume(states[3].pending()[0].approve()).ret_value == "done"


@pytest.mark.parametrize("method", ["run_batch", "arun_batch"])
def test_a_batch_takes_no_journal(method, tmp_path):
    batch = getattr(square, method)
    with pytest.raises(sgl.ParameterError) as caught:
        found = batch(ITEMS, backend=script(), journal=tmp_path / "run.jsonl")
        if method == "arun_batch":
            asyncio.run(found)
    assert caught.value.parameter == "journal"
    assert "checkpoint=…" in caught.value.hint
    assert "run(journal=…)" in caught.value.hint
