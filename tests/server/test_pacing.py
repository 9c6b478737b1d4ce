"""Connections' data is parsed for a few of them in each turn of the event loop, whole and in order."""

import asyncio
import socket

import pytest
import uvloop

from sglang_lite.server.pacing import PacedConnection, Pacer

COUNT, SIZE = 60, 100_000


class Turns:
    """Number of the loop's turn, and how many connections were parsed in each."""

    def __init__(self):
        self.number, self.parsed = 0, {}
        self._next()

    def _next(self):
        self.number += 1
        asyncio.get_running_loop().call_soon(self._next)


class Recorder(asyncio.Protocol):
    def __init__(self, turns, ended):
        self.turns, self.ended, self.data = turns, ended, b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.data += data
        self.turns.parsed[self.turns.number] = self.turns.parsed.get(self.turns.number, 0) + 1
        if self.data == b"close":
            self.transport.close()

    def connection_lost(self, exc):
        self.ended.append(self.data)


async def received(data):
    """What a paced server received on each connection, when all clients had sent theirs before it
    read anything.
    """
    loop = asyncio.get_running_loop()
    turns, ended, pacer = Turns(), [], Pacer()
    server = await loop.create_server(
        lambda: PacedConnection(Recorder(turns, ended), pacer), "127.0.0.1", 0
    )
    port = server.sockets[0].getsockname()[1]

    def send(each):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(each)

    await asyncio.gather(*(asyncio.to_thread(send, each) for each in data))
    while len(ended) < len(data):
        await asyncio.sleep(0)
    server.close()
    return ended, turns


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_large_data_is_parsed_for_a_few_connections_in_a_turn(factory):
    data = [bytes([number]) * SIZE for number in range(COUNT)]
    with asyncio.Runner(loop_factory=factory) as runner:
        ended, turns = runner.run(received(data))
    assert sorted(ended) == data
    assert max(turns.parsed.values()) <= 8


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_small_data_does_not_wait(factory):
    data = [bytes([number]) * 900 for number in range(COUNT)]
    with asyncio.Runner(loop_factory=factory) as runner:
        ended, _ = runner.run(received(data))
    assert sorted(ended) == data


class Transport(asyncio.Transport):
    """Transport of a test: whether it is read from."""

    def __init__(self):
        super().__init__()
        self.reads, self.closing = True, False

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        self.reads = True

    def is_closing(self):
        return self.closing


class Teller(asyncio.Protocol):
    def __init__(self, told):
        self.told = told

    def data_received(self, data):
        self.told.append(data)


class Alone(PacedConnection):
    """A connection whose data a test sends."""

    def __init__(self, pacer):
        self.told, self.transport = [], Transport()
        super().__init__(Teller(self.told), pacer)
        self.connection_made(self.transport)

    def send(self, data):
        self.get_buffer(len(data))[: len(data)] = data
        self.buffer_updated(len(data))


def test_a_connection_is_not_read_from_while_its_data_waits():
    async def run():
        connection = Alone(Pacer())
        connection.send(b"a" * 2000)
        assert (connection.told, connection.transport.reads) == ([], False)
        connection.send(b"b")  # what the loop had read before it heard of the pause
        await asyncio.sleep(0)
        assert (connection.told, connection.transport.reads) == ([b"a" * 2000 + b"b"], True)
        connection.send(b"c")
        assert connection.told[1:] == [b"c"]

    asyncio.run(run())


def test_what_a_closed_connection_sent_is_not_parsed():
    async def run():
        connection = Alone(Pacer())
        connection.send(b"a" * 2000)
        connection.transport.closing = True
        await asyncio.sleep(0)
        assert connection.told == []

    asyncio.run(run())
