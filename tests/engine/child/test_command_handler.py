"""The engine's process by itself: it ends with its line, whatever comes over that, and whoever else
holds it.
"""

import os
import threading
from dataclasses import asdict

import pytest

from sglang_lite.engine.child.command_handler import CommandHandler
from sglang_lite.engine.frames import HEADER, MAX_BYTES, Abort, Start, Submit, encode_frame
from sglang_lite.engine.spawned_process import SpawnedProcess
from sglang_lite.protocol import OverloadedError, SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.open_requests import Ticket
from tests.engine import processes

START = encode_frame([(0, Start(asdict(EngineConfig()), "/nowhere", os.getpid()))])


@pytest.fixture
def process():
    child = SpawnedProcess("sglang_lite.engine.child.main", "the process", "model", "cpu", None)
    yield child
    child.connection.close()
    child.kill()
    child.await_process_end()
    child.connection.release_socket()


def framed(content):
    return len(content).to_bytes(HEADER, "big") + content


RUBBISH = {
    "too long": (MAX_BYTES + 1).to_bytes(HEADER, "big"),
    "no msgpack": framed(b"\xc1\xc1\xc1"),
    "no list": framed(b"\x01"),
    "no message": framed(b"\x91\x90"),
    "text": b"GET / HTTP/1.1\r\n\r\n" * 100,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RUBBISH)
@pytest.mark.parametrize("started", [False, True])
def test_rubbish_ends_it(process, name, started):
    if started:
        process.connection.send(START)
    process.connection.send(RUBBISH[name])
    processes.ended(process.pid)
    assert "ended with status" in process.await_process_end().text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "sent", [b"", b"\x00", START[:3], START[:-1], START, START + encode_frame([(1, Abort())])[:-1]]
)
def test_a_line_that_is_closed_ends_it_in_the_middle_of_a_frame_too(process, sent):
    if sent:
        process.connection.send(sent)
    process.connection.close()
    processes.ended(process.pid)
    assert "ended with status 0" in process.await_process_end().text


def test_what_is_no_start_ends_it(process):
    process.connection.send(encode_frame([(1, Abort())]))
    processes.ended(process.pid)
    assert "ended with status 0" in process.await_process_end().text


def test_a_start_by_a_process_that_is_gone_ends_it(process):
    """The line may be held open by a forked copy."""
    process.connection.send(
        encode_frame([(0, Start(asdict(EngineConfig()), "/nowhere", 2**22 + 1))])
    )
    processes.ended(process.pid)
    assert "ended with status 0" in process.await_process_end().text


def test_what_it_prints_is_kept_for_who_asks_why():
    child = SpawnedProcess("tests.engine.printing", "the process")
    processes.ended(child.pid)
    end = child.await_process_end()
    child.connection.release_socket()
    said = end.text
    assert end.by_itself
    assert said.startswith("ended with status 7. Its last output:\n")
    assert said.endswith("\nlast words")
    assert len(said) < 220_000


def test_a_process_that_was_killed_did_not_end_by_itself(process):
    process.kill()
    end = process.await_process_end()
    assert (end.by_itself, end.text.partition(".")[0]) == (False, "was ended by SIGKILL")


class FullCore:
    """Core that has no room when it is asked for the first time. While it is asked for the second
    time, its caller is told to abort what waits.
    """

    def __init__(self, room):
        self.room, self.asked = room, 0
        self.waits, self.submitting, self.told = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.waiting, self.ended = [], []

    @property
    def open_requests(self):
        return self

    def submit(self, asked, sink, flush):
        self.asked += 1
        if self.asked == 2:
            self.submitting.set()
            assert self.told.wait(60)
            if self.room:
                return Ticket(lambda: self.ended.append(asked))
        raise OverloadedError("full.")

    def wait_for_room(self, call, count, *, first):
        self.waiting.append(call)
        self.waits.set()

    def give_up_place(self, call):
        self.waiting = [each for each in self.waiting if each is not call]


class Told:
    def __init__(self):
        self.messages = []

    def post(self, message):
        self.messages.append(message)

    put = post

    def flush(self):
        pass


@pytest.mark.parametrize("room", [True, False])
def test_an_abort_that_comes_while_room_is_given_ends_what_gets_it(room):
    """Else the request would run, and nobody would see it."""
    core, outgoing = FullCore(room), Told()
    served = CommandHandler(outgoing)  # type: ignore[arg-type]  # it is told, and sends nothing

    def messages():
        yield 1, Submit(b"\x05\x00\x00\x00", SamplingParams(), None, False, "", 0, None)
        assert core.submitting.wait(60)
        yield 1, Abort()
        core.told.set()

    served.start_executing(core)  # type: ignore[arg-type]  # it has what is called here
    reader = threading.Thread(target=served.execute_all, args=(messages(),))
    reader.start()
    assert core.waits.wait(60)
    core.waiting.pop()()  # as the loop does when there is room
    reader.join()
    assert len(core.ended) == room
    assert core.waiting == []
    (told,) = outgoing.messages
    assert (told.id, told.event.type, told.ends) == (1, "RequestAbortedError", True)
