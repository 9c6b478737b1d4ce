"""The line between a handle and its engine's process: whole frames, in order, and whatever else may
come.
"""

import os
import socket
import threading

import pytest

from sglang_lite.engine.connection import BrokenFrameError, Connection
from sglang_lite.engine.frames import HEADER, MAX_BYTES


def framed(content):
    return len(content).to_bytes(HEADER, "big") + content


@pytest.fixture
def pair():
    """A connection, and the other end's socket."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    yield connection, theirs
    theirs.close()
    connection.release_socket()


def contents(connection):
    return [bytes(content) for content in connection.read_frames()]


@pytest.mark.parametrize("cuts", [[], [1], [3], [4], [5], [1, 2, 3, 4, 5, 6, 7], [9, 10]])
def test_frames_are_whole_however_they_are_cut(pair, cuts):
    connection, other = pair
    every = [b"abc", b"", b"x" * 70_000]
    data = b"".join(map(framed, every))
    arrived = []
    reader = threading.Thread(target=lambda: arrived.extend(contents(connection)))
    reader.start()
    for start, end in zip([0, *cuts], [*cuts, len(data)]):
        other.sendall(data[start:end])
    other.close()
    reader.join()
    assert arrived == every


@pytest.mark.parametrize("cut", [1, HEADER, HEADER + 2])
def test_a_frame_that_is_cut_off_is_none(pair, cut):
    connection, other = pair
    other.sendall(framed(b"first") + framed(b"second")[:cut])
    other.close()
    assert contents(connection) == [b"first"]


def test_a_length_that_is_too_large_is_refused_before_anything_is_kept(pair):
    connection, other = pair
    other.sendall(framed(b"first") + (MAX_BYTES + 1).to_bytes(HEADER, "big"))
    frames = connection.read_frames()
    assert bytes(next(frames)) == b"first"
    with pytest.raises(BrokenFrameError, match="268,435,457 bytes"):
        next(frames)


def test_sending_waits_for_no_reader_and_loses_nothing(pair):
    connection, other = pair
    every = [bytes([i]) * 300_000 for i in range(20)]  # far more than a socket holds
    for content in every:
        connection.send(framed(content))
    reader = Connection(other.dup())
    frames = reader.read_frames()
    assert [bytes(next(frames)) for _ in every] == every
    frames.close()
    reader.release_socket()


def test_threads_that_send_at_a_time_send_whole_frames(pair):
    connection, other = pair

    def send(i):
        for j in range(50):
            connection.send(framed(bytes([i, j]) * 5_000))

    threads = [threading.Thread(target=send, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    reader = Connection(other.dup())
    frames = reader.read_frames()
    arrived = [bytes(next(frames)) for _ in range(8 * 50)]
    frames.close()
    reader.release_socket()
    assert all(content == content[:2] * 5_000 for content in arrived)
    for i in range(8):
        assert [content[1] for content in arrived if content[0] == i] == list(range(50))


@pytest.mark.parametrize("full", [False, True])
def test_a_connection_whose_other_end_is_gone_says_so(pair, full):
    connection, other = pair
    if full:
        connection.send(framed(b"x" * 2_000_000))  # what is unsent waits for nobody
    other.close()
    with pytest.raises(OSError):
        while True:  # until the thread that sends has seen it, too
            connection.send(framed(b"x"))
    connection.release_socket()


def test_a_connection_waits_whatever_time_sockets_are_given(monkeypatch):
    """`socket.setdefaulttimeout` is the caller's, for its own sockets."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.01)
    try:
        ours, theirs = socket.socketpair()
    finally:
        socket.setdefaulttimeout(before)
    connection, other = Connection(ours), Connection(theirs)
    assert os.get_blocking(ours.fileno())
    assert os.get_blocking(theirs.fileno())
    connection.release_socket()
    other.release_socket()


def test_a_forked_copy_neither_closes_the_line_nor_sends_on_it(pair):
    connection, other = pair
    copy = os.fork()
    if copy == 0:
        try:
            connection.close()
        finally:
            os._exit(0)
    assert os.waitpid(copy, 0)[1] == 0
    connection.send(framed(b"still here"))
    assert other.recv(100) == framed(b"still here")
