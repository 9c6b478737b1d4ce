"""A pool of connections: each request has one to itself, they are used again, and taking one is no
more work with many.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import sys
from collections.abc import AsyncIterator

import certifi
import httpx2
import pytest
from openai_answers import run, said

import sglang_lite as sgl
from sglang_lite.lang.backend.http.client import ServerClient
from sglang_lite.lang.backend.http.connection_pool import ConnectionPool, pool_arguments

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b"


class EchoServer:
    """Answers a path with itself. `/hold…` is answered when it is let go, `/last…` closes the
    connection.

    Attributes:
        connections: how many were made so far.
        open: how many there are.
        asked: paths, as they came.
        held: how many wait.
    """

    def __init__(self) -> None:
        self.connections = self.open = self.held = 0
        self.asked: list[str] = []
        self._gate = asyncio.Event()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> EchoServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.url = "http://{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    def let_go(self) -> None:
        self._gate.set()

    def hold(self) -> None:
        self._gate.clear()

    async def until(self, name: str, count: int) -> None:
        """Waits until an attribute has a value."""
        while getattr(self, name) != count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 30)

    def _count(self, **by: int) -> None:
        for name, change in by.items():
            setattr(self, name, getattr(self, name) + change)
        self._changed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._count(connections=1, open=1)
        try:
            await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):  # the client has gone
            pass
        finally:
            self._count(open=-1)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = b""
        while not path.startswith(b"/last"):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1]
            self.asked.append(path.decode())
            if path.startswith(b"/hold"):
                self._count(held=1)
                await self._gate.wait()
                self._count(held=-1)
            writer.write(ANSWER % (len(path), path))
            await writer.drain()


@contextlib.asynccontextmanager
async def talking(pool: ConnectionPool) -> AsyncIterator[tuple[EchoServer, httpx2.AsyncClient]]:
    async with (
        EchoServer() as server,
        httpx2.AsyncClient(transport=pool, base_url=server.url, timeout=30) as client,
    ):
        yield server, client


async def echoed(client: httpx2.AsyncClient, *paths: str) -> None:
    """Asks for all at once, and holds each answer against its question."""
    answers = await asyncio.gather(*(client.get(path) for path in paths))
    assert [answer.text for answer in answers] == list(paths)


async def ask_many(client: httpx2.AsyncClient, server: EchoServer, count: int) -> None:
    """Has so many under way at once."""
    asking = asyncio.create_task(echoed(client, *(f"/hold{i}" for i in range(count))))
    await server.until("held", count)
    server.let_go()
    await asking


def test_one_after_another_has_one_connection():
    async def main():
        async with talking(ConnectionPool()) as (server, client):
            for i in range(5):
                await echoed(client, f"/{i}")
            assert server.connections == 1

    asyncio.run(main())


def test_many_at_once_have_one_each_which_are_used_again():
    async def main():
        async with talking(ConnectionPool()) as (server, client):
            await ask_many(client, server, 40)
            await echoed(client, *(f"/{i}" for i in range(40)))
            assert server.connections == 40

    asyncio.run(main())


def test_there_are_no_more_than_the_most():
    async def main():
        async with talking(ConnectionPool(max_connections=3)) as (server, client):
            await echoed(client, *(f"/{i}" for i in range(20)))
            assert server.connections == 3

    asyncio.run(main())


def test_who_waits_too_long_for_one_is_told_and_takes_nothing_away():
    async def main():
        async with talking(ConnectionPool(max_connections=1)) as (server, client):
            asking = asyncio.create_task(echoed(client, "/hold"))
            await server.until("held", 1)
            with pytest.raises(httpx2.PoolTimeout):
                await client.get("/late", timeout=httpx2.Timeout(30, pool=0.01))
            server.let_go()
            await asking
            await echoed(client, "/a", "/b")
            assert "/late" not in server.asked

    asyncio.run(main())


def test_one_that_the_server_has_closed_is_not_used_again():
    async def main():
        async with talking(ConnectionPool()) as (server, client):
            await echoed(client, "/last")
            await server.until("open", 0)
            await echoed(client, "/next")
            assert server.connections == 2

    asyncio.run(main())


def test_an_answer_that_nobody_waits_for_is_nobody_elses():
    async def main():
        async with talking(ConnectionPool(max_connections=1)) as (server, client):
            asking = asyncio.create_task(echoed(client, "/hold"))
            await server.until("held", 1)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            await echoed(client, "/next")
            async with client.stream("GET", "/unread"):
                pass
            await echoed(client, "/after")
            server.let_go()

    asyncio.run(main())


def test_one_that_was_idle_for_too_long_is_closed():
    async def main():
        async with talking(ConnectionPool(idle_s=0)) as (server, client):
            await ask_many(client, server, 5)
            await echoed(client, "/next")
            await server.until("open", 1)

    asyncio.run(main())


def test_closing_closes_all_also_those_in_use():
    async def main():
        async with talking(ConnectionPool()) as (server, client):
            await echoed(client, *(f"/{i}" for i in range(5)))
            asking = asyncio.create_task(client.get("/hold"))
            await server.until("held", 1)
            await client.aclose()
            server.let_go()
            with pytest.raises(httpx2.TransportError):
                await asking
            await server.until("open", 0)

    asyncio.run(main())


def test_taking_one_is_no_more_work_where_there_are_many():
    async def work(connections: int) -> int:
        """Calls of functions that a request takes beside so many connections, half of them idle."""
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event == "call"

        async with talking(ConnectionPool()) as (server, client):
            await ask_many(client, server, connections)
            server.hold()
            holding = asyncio.create_task(
                echoed(client, *(f"/hold{i}" for i in range(connections // 2)))
            )
            await server.until("held", connections // 2)
            await echoed(client, "/warm")
            sys.setprofile(count)
            try:
                await echoed(client, "/one")
            finally:
                sys.setprofile(None)
            server.let_go()
            await holding
        return calls

    async def main():
        few, many = await work(4), await work(200)
        assert many < few * 1.2

    asyncio.run(main())


def test_a_proxy_of_the_environment_is_gone_through(api, openai, monkeypatch):
    monkeypatch.setenv("http_proxy", api.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert pool_arguments() == {}
    assert pool_arguments(trust_env=False) != {}
    api.answers = [said("by the proxy")]
    assert run(openai(base_url="http://provider.invalid/v1"))["a"] == "by the proxy"
    assert api.requests[-1].path.startswith("http://provider.invalid/v1/")


def test_many_programs_at_once_have_their_own_answers(api, openai):
    """Each has its own answer."""

    @sgl.function
    def program(s, number):
        s += sgl.user(f"Say {number}.") + sgl.assistant(sgl.gen("a"))

    api.answers = lambda request: request.body["messages"][0]["content"]
    rows = [{"number": i} for i in range(60)]
    states = program.run_batch(rows, backend=openai(), num_threads=60)
    assert [state["a"] for state in states] == [f"Say {i}." for i in range(60)]


def test_authorities_of_tls_are_read_once_and_without_tls_never(tmp_path, monkeypatch, api):
    read, plain = [], ssl.SSLContext.load_verify_locations
    monkeypatch.setattr(
        ssl.SSLContext,
        "load_verify_locations",
        lambda *args, **to: read.append(args) or plain(*args, **to),
    )
    # that no test has read before
    monkeypatch.setenv("SSL_CERT_FILE", str(shutil.copy(certifi.where(), tmp_path)))
    for _ in range(3):
        ConnectionPool()
    assert len(read) == 1
    assert ServerClient(api.url, None, None, 60, 0).request_status("GET", "/v1/models") == 200
    assert len(read) == 1
