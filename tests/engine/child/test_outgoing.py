"""Frames that the engine's process sends: never waiting for the reader, deltas joined while they
are unsent.
"""

import socket
import threading

import pytest

from sglang_lite.engine import frames
from sglang_lite.engine.child.outgoing import MAX_LOGS, Outgoing
from sglang_lite.engine.connection import Connection
from sglang_lite.engine.frames import AskReply, Log, RequestEvent
from sglang_lite.protocol import Delta, Generation, ParameterError, TokenLogprob
from sglang_lite.wire.failure import as_error


class Line:
    """A connection that takes what is sent when it may."""

    def __init__(self):
        self.frames, self.go, self.sending = [], threading.Event(), threading.Event()

    def send_now(self, frame):
        self.sending.set()
        assert self.go.wait(60)
        self.frames.append(frames.decode_reports(memoryview(frame)[4:]))


@pytest.fixture
def line():
    return Line()


def held(line, outgoing):
    """Has the sending thread wait in the middle of a frame."""
    outgoing.post(Log("x", 20, "held"))
    assert line.sending.wait(60)


def messages(line, outgoing):
    line.go.set()
    outgoing.close()
    return [message for frame in line.frames for message in frame if not isinstance(message, Log)]


def test_deltas_that_are_unsent_are_joined_each_stream_by_itself(line):
    outgoing = Outgoing(line, 0)
    held(line, outgoing)
    for i in range(1000):
        for number, path, index in ((1, None, 0), (1, None, 1), (2, (), 0), (2, (0,), 0)):
            outgoing.put_event(
                RequestEvent(
                    number, Delta(f"{i},", (i,), (TokenLogprob(-1.0, i),), index), 3, path, "x"
                )
            )
        outgoing.flush()
    told = messages(line, outgoing)
    assert [(t.id, t.path, t.event.index) for t in told] == [
        (1, None, 0),
        (1, None, 1),
        (2, (), 0),
        (2, (0,), 0),
    ]
    for one in told:
        assert one.event.text == "".join(f"{i}," for i in range(1000))
        assert one.event.token_ids == tuple(range(1000))
        assert len(one.event.logprobs) == 1000
        assert (one.name, one.cached) == ("x", 3)


def test_log_records_that_nobody_takes_are_bounded_and_cost_no_event(line):
    outgoing = Outgoing(line, 0)
    held(line, outgoing)
    for i in range(3 * MAX_LOGS):
        outgoing.post(Log("x", 20, str(i)))
    outgoing.put_event(RequestEvent(1, Generation("end")))
    assert [told.event.text for told in messages(line, outgoing)] == ["end"]
    assert (
        sum(isinstance(message, Log) for frame in line.frames for message in frame) == 1 + MAX_LOGS
    )


def test_nothing_is_joined_over_what_ends_a_generation(line):
    outgoing = Outgoing(line, 0)
    held(line, outgoing)
    for text in "abc":
        outgoing.put_event(RequestEvent(1, Delta(text), path=(), name=text))
        outgoing.put_event(RequestEvent(1, Generation(text), path=(), name=text))
    outgoing.flush()
    told = messages(line, outgoing)
    assert [(type(t.event), t.event.text, t.name) for t in told] == [
        (kind, text, text) for text in "abc" for kind in (Delta, Generation)
    ]


def test_all_that_is_flushed_together_is_one_frame(line):
    outgoing = Outgoing(line, 0)
    line.go.set()
    for i in range(50):
        outgoing.put_event(RequestEvent(i, Delta("a")))
        outgoing.put_event(RequestEvent(i, Generation("a")))
    assert line.frames == []
    outgoing.flush()
    outgoing.close()
    assert [len(frame) for frame in line.frames] == [100]


def test_an_interval_holds_back_deltas_and_nothing_else(line):
    outgoing = Outgoing(line, 3600)
    line.go.set()
    outgoing.put_event(RequestEvent(1, Generation("first")))
    outgoing.flush()
    outgoing.put_event(RequestEvent(2, Delta("a")))
    outgoing.flush()
    outgoing.put_event(RequestEvent(3, Generation("b")))
    outgoing.flush()
    told = messages(line, outgoing)
    assert [t.id for t in told] == [1, 2, 3]


def test_what_is_too_large_fails_alone(line, monkeypatch):
    monkeypatch.setattr(frames, "MAX_BYTES", 2000)
    outgoing = Outgoing(line, 0)
    held(line, outgoing)
    for i in range(40):
        outgoing.put_event(RequestEvent(i, Generation("x" * (3000 if i == 20 else 100))))
    outgoing.flush()
    outgoing.post(AskReply(50, "y" * 3000))
    outgoing.post(AskReply(51, object()))
    *told, large, odd = messages(line, outgoing)
    assert [t.id for t in told] == list(range(40))
    bad = as_error(told.pop(20).event)
    assert isinstance(bad, ParameterError)
    assert "at most 2,000 fit" in str(bad)
    assert all(t.event == Generation("x" * 100) for t in told)
    assert (large.id, odd.id) == (50, 51)
    assert isinstance(as_error(large.failure), ParameterError)
    assert isinstance(as_error(odd.failure), ParameterError)


def test_a_reader_that_is_gone_stops_nobody():
    ours, theirs = socket.socketpair()
    outgoing = Outgoing(Connection(ours), 0)
    theirs.close()
    for i in range(100):
        outgoing.post(AskReply(i, "x" * 10_000))
    outgoing.close()
    for i in range(100):
        outgoing.put_event(RequestEvent(i, Generation("a")))
        outgoing.flush()
    ours.close()
