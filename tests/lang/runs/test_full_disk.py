"""Disks without room: the error has the file and what to do, and what is left is what was there."""

import subprocess
import sys

import pytest

# A limit on the size of files is for a program what a full disk is, and needs no disk of its own.
BEGIN = """
import os, resource, sys
sys.dont_write_bytecode = True  # Python would leave modules' files cut short, and all later imports broken
import sglang_lite as sgl

@sgl.function
def long(s, x=1):
    s += "y" * 1500 + sgl.gen("a")

@sgl.function
def short(s):
    s += sgl.gen("a")

backend = sgl.ScriptedBackend(default="z" * 300)

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def attempt(act):
    try:
        act()
    except sgl.SglError as error:
        print(f"{type(error).__name__} {error.message} {error.hint}")
    except Exception as error:
        print("bare", repr(error))
    print(sorted(os.listdir()))

long.run(backend=backend).save("old.json")
size = os.path.getsize("old.json")
state = long.run(backend=backend)
trace = state.trace()
"""


def printed(code: str, folder: object) -> list[str]:
    found = subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=str(folder),
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


FULL = r"can't be written: File too large. Make room on its disk, or give another path."


@pytest.mark.parametrize(
    "act",
    ["state.save({!r})", "trace.save({!r})", "trace.save({!r} + '.html')", "state.show({!r})"],
    ids=["save", "trace", "page", "show"],
)
def test_a_file_that_has_no_room_is_named_and_leaves_nothing(act, tmp_path):
    error, after, old, _ = printed(
        f"limit(1000)\nattempt(lambda: {act.format('new')})\nattempt(lambda: {act.format('old.json')})",
        tmp_path,
    )
    assert error.startswith("ParameterError path: 'new")
    assert error.endswith(FULL)
    assert after == "['old.json']"
    assert old.endswith(FULL)
    assert b'"type":"SavedRun"' in (tmp_path / "old.json").read_bytes()


def test_a_conversation_that_has_no_room_is_named_and_leaves_nothing(tmp_path):
    code = """
from sglang_lite.commands import chat
lines = ["x" * 1500, "/save new", "/save old.json", "/quit"]
def talk():
    chat.chat(lines, sys.stdout, backend, chat.Dialogue(), max_tokens=5, temperature=0)
limit(1000)
attempt(talk)
"""
    *said, after = printed(code, tmp_path)
    assert [line for line in said if line.startswith("sglang-lite")] == [
        f"sglang-lite: /save: '{name}' {FULL}" for name in ("new", "old.json")
    ]
    assert after == "['old.json']"
    assert b'"type":"SavedRun"' in (tmp_path / "old.json").read_bytes()


def test_a_batch_without_room_keeps_its_rows_and_goes_on_later(tmp_path):
    code = """
rows = [{"x": i} for i in range(4)]
def batch():
    return long.run_batch(rows, backend=backend, checkpoint="batch.jsonl", num_threads=1)
limit(7000)
attempt(batch)
lines = open("batch.jsonl", "rb").read().splitlines(keepends=True)
print(1 < len(lines) < 5, lines[-1][-1:])
limit(resource.RLIM_INFINITY)
calls = len(backend.calls)
print(len(batch()), len(backend.calls) - calls == 5 - len(lines))
limit(0)
attempt(lambda: long.run_batch(rows, backend=backend, checkpoint="new.jsonl"))
"""
    error, files, lines, results, head, at_last = printed(code, tmp_path)
    assert error.startswith("BatchError ")
    assert (
        "'batch.jsonl' can't be written: File too large. Make room on its disk, or give another path."
        in error
    )
    assert files == at_last == "['batch.jsonl', 'old.json']"
    assert (lines, results) == (r"True b'\n'", "4 True")
    assert head == f"ParameterError checkpoint: 'new.jsonl' {FULL}"


def test_a_recording_without_room_says_so_at_its_call_and_at_its_end(tmp_path):
    code = """
limit(7000)
def record():
    with sgl.record("run.jsonl", backend) as recording:
        for i in range(5):
            print(type(long.run(backend=recording).error()).__name__)
attempt(record)
limit(resource.RLIM_INFINITY)
replay = sgl.Replay("run.jsonl", partial=True)
print(replay.left, long.run(backend=replay)["a"][:3])
limit(10)
attempt(lambda: sgl.record("new.jsonl", backend))
"""
    *calls, error, files, replayed, head, at_last = printed(code, tmp_path)
    assert calls[0] == "NoneType"
    assert calls[-1] == "ParameterError"
    assert len(calls) == 5
    assert error == f"ParameterError path: 'run.jsonl' {FULL}"
    assert files == "['old.json', 'run.jsonl']"
    assert replayed == f"{calls.count('NoneType')} zzz"
    assert head == f"ParameterError path: 'new.jsonl' {FULL}"
    assert at_last == files
