"""A server under attack from clients without a key: its memory, and how long `/ping` takes for
somebody else.

    python benchmarks/attacks.py [--seconds 15] [--connections 256] [--attacks header,address,…]

Each attack runs alone, in a process of its own and from addresses of its own (127.0.1.x, of which
each has its limit of connections), for some seconds on so many connections at once; a connection
that is closed is opened again after 50 ms. `/ping` is asked every 10 ms on one connection.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2

_GET = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n"
_POST = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"
_PART = b"a" * 65536
_LONG_QUERY = b"GET /version?%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % b"&".join(
    b"%d" % i for i in range(11_000)
)
_OF_ADDRESS = 250
_CHAT = "chats"
_CHATS = 2  # at once
_KEY = "secret"


async def _slowly(data: bytes) -> AsyncIterator[bytes]:
    for each in data:
        yield bytes([each])
        await asyncio.sleep(1)


async def _endless(begin: bytes, part: bytes) -> AsyncIterator[bytes]:
    yield begin
    while True:
        yield part


async def _chat() -> AsyncIterator[bytes]:
    message = {"role": "user", "content": "word " * 64}
    body = json.dumps({"model": "m", "messages": [message] * 20_000}).encode()
    yield (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n"
        % (_KEY.encode(), len(body))
    )
    yield body
    await asyncio.sleep(3600)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
    await asyncio.sleep(3600)


ATTACKS: dict[str, Callable[[], AsyncIterator[bytes]]] = {
    "header": lambda: _endless(_GET + b"X: ", _PART),
    "headers": lambda: _endless(_GET, b"X: y\r\n" * 10_000),
    "address": lambda: _endless(b"GET /", _PART),
    "trailer": lambda: _endless(_CHUNKED + b"0\r\nX: ", _PART),
    "extension": lambda: _endless(_CHUNKED + b"1;", _PART),
    "body": lambda: _endless(_POST + b"Content-Length: 1000000000000\r\n\r\n", _PART),
    "chunks": lambda: _endless(_CHUNKED, b"1\r\na\r\n" * 10_000),
    "pipeline": lambda: _endless(b"", (_GET + b"\r\n") * 1000),
    "query": lambda: _once(_LONG_QUERY),
    "slow": lambda: _slowly(_GET * 100),
    "half": lambda: _once(_GET),
    "idle": lambda: _once(b""),
    _CHAT: _chat,
}


async def _attack(name: str, port: int, address: str, end: float) -> None:
    """Attacks on one connection after the other."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))

        async def read() -> None:
            while await reader.read(1 << 16):
                pass
            raise ConnectionError

        async def write() -> None:
            async for part in ATTACKS[name]():
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)

        try:
            await asyncio.gather(read(), write())
        finally:
            writer.transport.abort()

    while (left := end - time.time()) > 0:
        try:
            async with asyncio.timeout(left):
                await one()
        except TimeoutError:
            return
        except OSError:
            await asyncio.sleep(0.05)


async def _attacks(name: str, port: int, connections: int, seconds: float) -> None:
    end = time.time() + seconds
    addresses = [f"127.0.1.{1 + i // _OF_ADDRESS}" for i in range(connections)]
    await asyncio.gather(*(_attack(name, port, address, end) for address in addresses))


def _memory(pid: int) -> float:
    """Resident MB of a process."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))


def watched(
    name: str, url: str, pid: int, connections: int, seconds: float
) -> tuple[list[float], float]:
    """Seconds of each `/ping` while a server is attacked, and the most memory that the server
    gained, in MB.
    """
    port = url.rsplit(":", 1)[1]
    command = [sys.executable, __file__, "--attack", name, "--port", port, "--connections", str(connections),
               "--seconds", str(seconds)]  # fmt: skip
    waits, before, most = [], _memory(pid), 0.0
    with httpx2.Client(base_url=url, timeout=120) as http:
        http.get("/ping").raise_for_status()
        with subprocess.Popen(command) as attacker:
            while attacker.poll() is None:
                began = time.perf_counter()
                http.get("/ping").raise_for_status()
                waits.append(time.perf_counter() - began)
                most = max(most, _memory(pid) - before)
                time.sleep(0.01)
    return sorted(waits), most


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="separated by commas")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.attack:
        asyncio.run(_attacks(options.attack, options.port, options.connections, options.seconds))
        return
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from machine import describe  # here, since attackers need none of it and would start late

    from sglang_lite.compat.sglang.server_process import ServerProcess
    from sglang_lite.runtime.config import DEFAULT_MODEL

    print(describe())
    model = options.model or DEFAULT_MODEL
    settings = {
        "model_path": model,
        "dtype": "float32",
        "threads": 1,
        "api_key": _KEY,
        "log_level": "error",
    }
    server = ServerProcess(settings, 120)
    try:
        print(
            f"{'attack':10}{'pings':>7}{'median ms':>11}{'99 % ms':>9}{'most ms':>9}{'more MB':>9}"
        )
        for name in itertools.chain(["none"], options.attacks.split(",")):
            connections = {"none": 0, _CHAT: _CHATS}.get(name, options.connections)
            waits, memory = watched(name, server.url, server.pid, connections, options.seconds)
            found = (waits[len(waits) // 2], waits[len(waits) * 99 // 100], waits[-1])
            print(f"{name:10}{len(waits):7}" + "".join(f"{1000 * each:10.1f}" for each in found) + f"{memory:9.0f}",
                  flush=True)  # fmt: skip
    finally:
        server.end_server()


if __name__ == "__main__":
    main()
