"""The engine's process by itself: it ends with its line, whatever comes over that, and whoever else holds it."""

import os
from dataclasses import asdict

import pytest

from sglang_lite.engine.child_process import ChildProcess
from sglang_lite.engine.frames import HEADER, MOST_BYTES, Abort, Start, frame
from sglang_lite.runtime.config import EngineConfig
from tests.engine import processes

START = frame([Start(0, asdict(EngineConfig()), "/nowhere", os.getpid())])


@pytest.fixture
def process():
    child = ChildProcess("sglang_lite.engine.serve", "the process")
    yield child
    child.connection.close()
    child.kill()
    child.end()
    child.connection.release()


def framed(content):
    return len(content).to_bytes(HEADER, "big") + content


RUBBISH = {
    "too long": (MOST_BYTES + 1).to_bytes(HEADER, "big"),
    "no msgpack": framed(b"\xc1\xc1\xc1"),
    "no list": framed(b"\x01"),
    "no message": framed(b"\x91\x90"),
    "text": b"GET / HTTP/1.1\r\n\r\n" * 100,
}


@pytest.mark.parametrize("name", RUBBISH)
@pytest.mark.parametrize("started", [False, True])
def test_rubbish_ends_it(process, name, started):
    if started:
        process.connection.send(START)
    process.connection.send(RUBBISH[name])
    processes.ended(process.pid)
    assert "ended with status" in process.end()


@pytest.mark.parametrize("sent", [b"", b"\x00", START[:3], START[:-1], START, START + frame([Abort(1)])[:-1]])
def test_a_line_that_is_closed_ends_it_in_the_middle_of_a_frame_too(process, sent):
    if sent:
        process.connection.send(sent)
    process.connection.close()
    processes.ended(process.pid)
    assert "ended with status 0" in process.end()


def test_what_is_no_start_ends_it(process):
    process.connection.send(frame([Abort(1)]))
    processes.ended(process.pid)
    assert "ended with status 0" in process.end()


def test_a_start_by_a_process_that_is_gone_ends_it(process):
    """The line may be held open by a forked copy."""
    process.connection.send(frame([Start(0, asdict(EngineConfig()), "/nowhere", 2**22 + 1)]))
    processes.ended(process.pid)
    assert "ended with status 0" in process.end()


def test_what_it_prints_is_kept_for_who_asks_why():
    child = ChildProcess("tests.engine.printing", "the process")
    said = child.end(60)
    child.connection.release()
    assert said.startswith("ended with status 7. Its last output:\n")
    assert said.endswith("\nlast words")
    assert len(said) < 220_000
