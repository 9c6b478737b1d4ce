"""A connection without a key makes the server keep little, and wait for nothing for long."""

import asyncio
import contextlib
import json
import re
import socket
import tracemalloc
from functools import partial

import httpx2
import pytest
import uvloop

from sglang_lite.protocol import ParameterError
from sglang_lite.server import lingering
from sglang_lite.server.settings import ServerSettings
from tests.server.conftest import Running, serving
from tests.server.scripted import Scripted
from tests.waiting import until

KEY = ("secret",)  # which no request here has
GET = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"


def connected(url, address="127.0.0.1"):
    port = int(url.rsplit(":", 1)[1])
    return socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(address, 0))


def rest(connection):
    """Everything that comes until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):  # it closes before it has read all
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def answered(url, *parts, address="127.0.0.1"):
    """Answer to bytes, of which the server may not read the end."""
    with connected(url, address) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for part in parts:
                connection.sendall(part)
        return rest(connection)


def refused(answer, status):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), head
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == status
    return error["message"]


@pytest.fixture(scope="module")
def locked(engine):
    with serving(engine, api_key=KEY) as url:
        yield url


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "a header": (POST + b"X: ", b"a" * 65536, 431),
    "headers": (POST, b"X: y\r\n" * 10000, 431),
    "the name of a header": (POST, b"a" * 65536, 431),
    "an address": (b"GET /", b"a" * 65536, 414),
    "a query": (b"GET /ping?", b"a=b&" * 16384, 414),
    "a trailer": (POST + CHUNKED + b"0\r\nX: ", b"a" * 65536, 401),
    "an extension of a chunk": (POST + CHUNKED + b"1;a=", b"a" * 65536, 401),
    "lines before a request": (b"", b"\r\n" * 32768, 431),
}


@pytest.mark.parametrize(("begin", "more", "status"), ENDLESS.values(), ids=ENDLESS)
def test_what_has_no_end_takes_no_memory(locked, begin, more, status):
    """What comes after a request was refused is dropped."""
    tracemalloc.start()
    answer = answered(locked, begin, *[more] * 320)  # 20 MB
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 10_000_000  # beside what others do in this process
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1") == 1
    assert httpx2.get(f"{locked}/ping").status_code == 200


def test_a_client_that_never_ends_is_cut_off(locked, monkeypatch):
    monkeypatch.setattr(lingering, "_LINGER_S", 0.05)
    with connected(locked) as connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
        connection.sendall(POST + b"X: ")
        until(lambda: connection.sendall(b"a" * 65536), looks=10_000)


def test_few_connections_are_read_after_their_end(engine, monkeypatch):
    """Clients over a limit keep no descriptors."""
    monkeypatch.setattr(lingering, "_MAX_LINGERING", 0)
    with serving(engine, max_connections_per_client=1) as url, connected(url) as first:
        first.sendall(GET + b"\r\n")
        assert first.recv(12) == b"HTTP/1.1 200"
        with connected(url) as second, pytest.raises((ConnectionResetError, BrokenPipeError)):
            until(lambda: second.sendall(b"a" * 65536), looks=10_000)


@pytest.mark.parametrize(("head", "status", "told"), [
    (GET + b"X: " + b"a" * 70_000 + b"\r\n", 431, "larger than 65,536 bytes"),
    (GET + b"".join(b"X%d: %b\r\n" % (i, b"a" * 1000) for i in range(80)), 431, "larger than 65,536 bytes"),
    (GET + b"X: y\r\n" * 100, 431, "more than 100 header lines"),
    (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n", 414, "longer than 65,536 bytes"),
])  # fmt: skip
def test_a_head_over_a_limit_is_an_answer_that_names_it(locked, head, status, told):
    assert told in refused(answered(locked, head + b"\r\n"), status)


def test_a_head_at_the_limits_is_served(locked):
    close = b"Connection: close\r\n\r\n"
    for head in (
        GET + b"X: y\r\n" * 98,
        GET + b"X: " + b"a" * 65_000 + b"\r\n",
        b"GET /ping?" + b"a" * 65_000 + b" HTTP/1.1\r\nHost: localhost\r\n",
    ):
        assert answered(locked, head + close).startswith(b"HTTP/1.1 200"), head[:40]


@pytest.mark.parametrize("begun", [b"GET /pi", GET, POST + b"Content-Length", GET + b"X: "])
def test_a_head_that_does_not_come_is_given_up(engine, begun):
    """A connection on which nothing has come in that time is closed without an answer, and here
    tried again.
    """
    with serving(engine, head_timeout_s=0.05) as url:
        for before in (b"", GET + b"\r\n"):
            answer = until(partial(answered, url, before, begun))
            assert answer.count(b"HTTP/1.1 200") == bool(before)
            assert "did not arrive within 0.05 seconds" in refused(
                answer[answer.rindex(b"HTTP/1.1") :], 408
            )


@pytest.mark.parametrize("begun", [b"", b"\r\n"])
def test_a_connection_on_which_no_request_comes_is_closed(engine, begun):
    with serving(engine, head_timeout_s=0.05) as url:
        assert answered(url, begun) == b""


def test_a_body_that_does_not_come_as_a_whole_is_given_up(engine):
    """Also one of which a part comes now and then; and behind an answer that did not wait for it."""
    body = POST + CHUNKED
    with serving(engine, body_timeout_s=0.05) as url, connected(url) as connection:
        connection.sendall(body)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            until(lambda: connection.sendall(b"1\r\na\r\n"), looks=1000)
        assert rest(connection).startswith(b"HTTP/1.1 408")
    with serving(engine, body_timeout_s=0.05, api_key=KEY) as url, connected(url) as connection:
        connection.sendall(body)
        answer = rest(connection)
        assert answer.startswith(b"HTTP/1.1 401")
        assert answer.count(b"HTTP/1.1") == 1


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(engine):
    with serving(engine, max_body_mb=1) as url, connected(url) as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 1048577\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 413"
        # it can still be used
        connection.sendall(b"a" * 1048577 + GET + b"Connection: close\r\n\r\n")
        assert rest(connection).count(b"HTTP/1.1 200") == 1


def test_connections_over_a_limit_are_told_to_come_again(engine):
    with (
        serving(engine, max_connections=5, max_connections_per_client=3) as url,
        contextlib.ExitStack() as stack,
    ):

        def open_one(address):
            connection = stack.enter_context(connected(url, address))
            connection.sendall(GET + b"\r\n")
            return connection

        def status(connection):
            return connection.recv(4096)[9:12]

        first = [open_one("127.0.0.2") for _ in range(3)]
        assert {status(each) for each in first} == {b"200"}
        told = answered(url, address="127.0.0.2")
        assert "3 connections of this client" in refused(told, 429)
        assert b"retry-after: 1" in told
        assert [status(open_one("127.0.0.3")) for _ in range(2)] == [b"200"] * 2
        told = answered(url, address="127.0.0.4")
        assert "5 connections are open" in refused(told, 503)
        assert b"retry-after: 1" in told
        for each in first:
            each.sendall(GET + b"\r\n")  # those that are open are served
            assert status(each) == b"200"
            each.close()

        def room():
            return answered(
                url, GET + b"Connection: close\r\n\r\n", address="127.0.0.2"
            ).startswith(b"HTTP/1.1 200")

        until(room)


def told_while_sending(url, head, address="127.0.0.1"):
    """Answer to a request with a body that is still being sent when the server refuses it. No reset
    may hide it.
    """
    with connected(url, address) as connection:
        connection.sendall(head + b"Content-Length: 400000\r\n\r\n" + b"a" * 100_000)
        for _ in range(3):
            connection.sendall(b"a" * 100_000)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)


def test_a_client_that_is_still_sending_reads_why_it_is_refused(engine):
    with serving(engine, max_connections_per_client=1) as url:
        with connected(url, "127.0.0.2") as first:
            first.sendall(GET + b"\r\n")
            assert first.recv(12) == b"HTTP/1.1 200"
            for _ in range(20):
                told = told_while_sending(url, POST, "127.0.0.2")
                assert "1 connections of this client" in refused(told, 429)
        for number in range(20):
            told = told_while_sending(url, b"POST / HTTP/1.1\r\n", f"127.0.1.{number + 1}")
            assert "no header lines `Host`" in refused(told, 400)


def test_a_body_of_tiny_chunks_is_refused(engine, locked):
    with serving(engine) as url:
        assert "1,000 chunks" in refused(answered(url, POST + CHUNKED, b"1\r\na\r\n" * 2000), 413)
        larger = b"".join(b"40\r\n%b\r\n" % (b"a" * 64) for _ in range(2000))
        close = POST + b"Connection: close\r\n" + CHUNKED
        assert answered(url, close, larger, b"0\r\n\r\n").startswith(b"HTTP/1.1 400")
    with connected(locked) as connection:
        connection.sendall(POST + CHUNKED)
        assert connection.recv(12) == b"HTTP/1.1 401"
        connection.sendall(b"1\r\na\r\n" * 2000)
        assert b"HTTP/1.1" not in rest(connection)


def numbered(number, method=b"GET", path=b"/ping"):
    """A request that is refused without a key, or not; its answer has its number."""
    return b"%b %b HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: n%d\r\n\r\n" % (
        method,
        path,
        number,
    )


def numbers(answers):
    return [int(part.partition(b"\r")[0]) for part in answers.split(b"x-request-id: n")[1:]]


@pytest.mark.parametrize("count", [18, 500])
def test_all_requests_that_are_sent_ahead_are_answered_in_order(locked, count):
    line = b"".join(
        numbered(each, path=b"/ping" if each % 3 else b"/version") for each in range(count)
    )
    answers = answered(locked, line + GET + b"Connection: close\r\n\r\n")
    assert numbers(answers) == list(range(count))
    assert answers.count(b"HTTP/1.1 401") == (count + 2) // 3
    assert answers.count(b"HTTP/1.1") == count + 1


def test_bodies_that_are_sent_ahead_are_read_whole(engine):
    body = json.dumps({"text": "a" * 9000}).encode()
    post = b"POST /separate_reasoning HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
    texts = [
        json.dumps({"text": f"{each:05}" * 2000, "reasoning_parser": "qwen3"}).encode()
        for each in range(60)
    ]
    line = b"".join(post % (len(each), each) for each in texts)
    assert len(body) > 4096
    with serving(engine) as url:
        answers = answered(url, line + GET + b"Connection: close\r\n\r\n")
    for each in range(60):
        assert answers.count(f"{each:05}".encode() * 2000) == 1
    assert answers.count(b"HTTP/1.1 200") == 61


def test_requests_sent_ahead_by_who_reads_no_answers_take_no_memory(locked):
    """They wait where they are: the client is read no further until it reads."""
    line = b"".join(numbered(each, path=b"/openapi.json") for each in range(100_000))
    tracemalloc.start()
    with connected(locked) as connection:
        connection.setblocking(False)
        sent = 0

        def is_full():
            nonlocal sent
            before = sent
            with contextlib.suppress(BlockingIOError):
                while sent < len(line):
                    sent += connection.send(line[sent : sent + 65536])
            return sent == before and httpx2.get(f"{locked}/ping").status_code == 200

        until(lambda: all(is_full() for _ in range(20)))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sent < len(line)
        assert most < 32_000_000
        connection.settimeout(60)
        answers = b""
        while len(numbers(answers)) < 50:
            answers += connection.recv(1 << 20)
        assert numbers(answers)[:50] == list(range(50))


def test_a_bad_request_behind_others_is_told_so_after_their_answers(locked):
    for bad, status in (
        (GET + b"X: y\r\n" * 200, b"431"),
        (b"GET / HTTP/1.1\r\n", b"400"),
        (b"what\r\n", b"400"),
    ):
        answers = answered(
            locked, b"".join(map(numbered, range(30))) + bad + b"\r\n" + numbered(99)
        )
        assert numbers(answers) == list(range(30))
        assert answers.count(b"HTTP/1.1") == 31
        assert refused(answers[answers.rindex(b"HTTP/1.1") :], int(status))


@pytest.mark.parametrize("hosts", [0, 2])
def test_a_request_has_one_host(locked, hosts):
    """RFC 9112, 3.2."""
    head = b"GET /ping HTTP/1.1\r\n" + b"Host: localhost\r\n" * hosts
    assert f"{hosts or 'no'} header lines `Host`" in refused(answered(locked, head + b"\r\n"), 400)
    assert answered(locked, b"GET /ping HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
LONG = {
    "text": "a",
    "sampling_params": {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True},
}


def posted(body, version=b"1.1"):
    content = json.dumps(body).encode()
    head = b"POST /generate HTTP/%b\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    return head % (version, len(content)) + content


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_client_that_ends_its_side_gets_its_answers(engine, loop):
    running = Running(engine, loop_factory=loop)
    try:
        for sent, count in (
            (posted(LONG), 1), (posted({**LONG, "stream": True}), 1), (posted(LONG, b"1.0"), 1),
            (posted(LONG) + GET + b"\r\n", 2), ((GET + b"\r\n") * 40 + posted(LONG), 41),
        ):  # fmt: skip
            with connected(running.url) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                answers = rest(connection)
            assert answers.count(b"HTTP/1.1 200") == count
            assert b'"completion_tokens":300' in answers
            # the second is interim
            assert set(re.findall(rb"HTTP/1.1 (\d+) ", answers)) <= {b"200", b"100"}
    finally:
        running.stop()


@pytest.mark.parametrize("ahead", [0, 30, 1000])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_client_that_leaves_ends_its_request(engine, loop, ahead):
    fake = Scripted(engine, ["a"], endless=True)
    running = Running(fake, loop_factory=loop)
    try:
        with connected(running.url) as connection:
            connection.sendall(posted(LONG) + (GET + b"\r\n") * ahead)
            until(lambda: len(fake.submitted) == 2)  # one is the server's own, as it starts
        until(lambda: fake.submitted[-1].aborted)
    finally:
        running.stop()


def test_a_client_that_ends_its_side_within_a_request_is_told_so(locked):
    for begun in (GET, POST + b"Content-Length: 9\r\n\r\n{", POST + CHUNKED):
        for before in (0, 3):
            with connected(locked) as connection:
                connection.sendall(b"".join(map(numbered, range(before))) + begun)
                connection.shutdown(socket.SHUT_WR)
                answers = rest(connection)
            assert numbers(answers)[:before] == list(range(before))
            assert answers[answers.rindex(b"HTTP/1.1") :].startswith(
                (b"HTTP/1.1 400", b"HTTP/1.1 401")
            )
            # 100 is an interim answer
            assert len(re.findall(rb"HTTP/1.1 [24]", answers)) == before + 1


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_client_that_reads_no_answers_is_given_up(engine, loop):
    running = Running(
        engine, loop_factory=loop, unread_timeout_s=0.05, max_connections_per_client=2
    )
    try:
        with slow_reader(running.url) as connection:
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 256)
            with connected(running.url) as other:
                other.sendall(GET + b"\r\n")
                assert other.recv(12) == b"HTTP/1.1 200"
                until(
                    lambda: answered(running.url, GET + b"Connection: close\r\n\r\n").startswith(
                        b"HTTP/1.1 200"
                    )
                )
    finally:
        running.stop()


def slow_reader(url):
    """Connection whose system takes a few kilobytes that nobody reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    return connection


@pytest.mark.parametrize("name", ["max_head_kb", "max_header_lines", "head_timeout_s", "body_timeout_s",
                                  "unread_timeout_s", "max_connections", "max_connections_per_client"])  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_limit_is_a_number_greater_than_0(name, value):
    with pytest.raises(ParameterError, match=name):
        ServerSettings(**{name: value})


def test_a_client_that_leaves_a_silent_stream_ends_it(engine):
    """Nothing is written to it that its system could reset."""
    fake = Scripted(engine, ["a"], endless=True)
    with serving(fake) as url:
        with connected(url) as connection:
            body = json.dumps({"model": "", "prompt": "a", "stream": True}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % len(body) + body)
            answer = b""
            while b"data:" not in answer:
                answer += connection.recv(65536)
        until(lambda: fake.submitted[-1].aborted, looks=1000)
