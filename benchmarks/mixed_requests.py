"""Soak of the server: valid, invalid, aborted, slow and hostile requests of all protocols, mixed.

    python benchmarks/mixed_requests.py [--seconds 600] [--warm 60] [--clients 16] [--seed 0]
    [--points 2]

The server is `sglang-lite serve` in processes of its own, with the default model. Each client draws
one request after the other. Printed are the counts of answers by kind and status, and, before, in
the middle and after (when all has ended and the cache was flushed; `--points` says how often):
requests under way, room in use, descriptors, threads and memory of the server's processes, all
together and by what they are; and the longest wait for `/health`, which is asked all the while.
"Before" is after each request was made once, and the same mixture for `--warm` seconds. At the end
the clients' counts of responses (by route, method, status and key) and of tokens are compared with
`/metrics`. Requests of clients that read their answers have a key of their own, so that its tokens
must be the same. The exit status is 1 where an answer was a 5xx, a stream ended in an error, a
connection broke, no answer came within `--patience` seconds, something is more at the end than in
the middle, or counts differ.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import httpx2

sys.path.insert(0, str(Path(__file__).parent.parent))

from client_counts import ClientCounts, ServerCounts, differences
from machine import describe

from sglang_lite.compat.sglang.server_process import ServerProcess
from sglang_lite.runtime.config import DEFAULT_MODEL
from sglang_lite.server.routes import ROUTES

WORDS = [
    *(
        "the",
        "sea",
        "is",
        "green",
        "and",
        "seven",
        "old",
        "ships",
        "of",
        "stone",
        "sleep",
        "under",
        "a",
        "paper",
        "moon",
    ),
]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": POINT}}
# `/start_profile` would write a folder, and without it there is nothing that `/stop_profile` could
# stop. Routes that change what all others wait for, or that need an argument to be looked at.
LEFT_OUT = {"/pause_generation", "/sleep", "/release_memory_occupation", "/get_weights_by_name"}
LEFT_OUT |= {
    route.path for route in ROUTES if route.path.endswith(("_profile", "_distribution_record"))
}
POST = [route.path for route in ROUTES if "POST" in route.methods and route.path not in LEFT_OUT]
GET = [
    route.path
    for route in ROUTES
    # with POST, it acts
    if "GET" in route.methods and "POST" not in route.methods and route.path not in LEFT_OUT
]
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
BAD_BODIES = [
    b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"text": NaN}', b'{"prompt": Infinity}',
    b'{"text": "a", "text": 1}',
    b'{"model": "", "messages": [], "model": ""}', b'{"a": ' * 200 + b"1" + b"}" * 200, b"[" * 100_000,
    b'{"messages": 1e999}', b'{"prompt": "\\ud800"}', b'{"text": ' + b"9" * 10_000 + b"}", b'{"input": {"a": [null]}}',
    b'{"program": {"nodes": 1}}', b'{"version": 99, "program": {"nodes": []}}',
    b'{"messages": [{"role": []}], "max_tokens": -1}',
]  # fmt: skip
NO_HTTP = [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x00\x00", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 1000,
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000,
]  # fmt: skip
# that may be more afterwards: connections that are kept open, files that are read once
KEPT_DESCRIPTORS = 8
KEPT_MB = 64  # of memory that may be more: allocators keep some
# tokens: little, so that all of it has soon been written to, and counts as memory before as after
ROOM = 4096
# of requests whose answers are read to their end, with the tokens that the server counts
READING_KEY = "sk-reading"
# the administrator's, of all others: routes that need it are to see hostile bodies, too
LEAVING_KEY = "sk-leaving"
_HEALTH_S = 0.25  # between two looks at it
_DRAIN_S = 30  # for what was left alone to end
# by what they run
_ROLES = {"sglang_lite.engine.child.main": "engine", "structured_output.worker": "workers"}


class Client:
    """One who asks.

    Args:
        http: with the server's address.
        draw: its requests are a function of this.
        patience: seconds for an answer.
        seen: takes the counts of answers by kind and status.
        counts: takes the counts that are compared with the server's; `http` has its hooks.
    """

    def __init__(
        self,
        http: httpx2.AsyncClient,
        draw: random.Random,
        patience: float,
        seen: Counter[tuple[str, str]],
        counts: ClientCounts,
    ) -> None:
        self._http, self._draw, self._patience, self._seen = http, draw, patience, seen
        self._counts = counts

    async def ask(self, kind: str, request: Callable[[Client], Awaitable[str]]) -> None:
        """Makes a request, and counts its answer."""
        try:
            async with asyncio.timeout(self._patience):
                status = await request(self)
        except TimeoutError:
            status = "none came"
        except httpx2.TransportError as error:
            status = type(error).__name__
        self._seen[kind, status] += 1

    def text(self, most: int = 30) -> str:
        """A few words."""
        return " ".join(self._draw.choices(WORDS, k=self._draw.randrange(1, most)))

    def turns(self) -> list[dict[str, str]]:
        """A conversation."""
        return [{"role": "user", "content": self.text()}]

    async def post(self, path: str, body: object) -> str:
        """Status of an answer, which is read to its end. An error that a stream ends in counts as
        one.
        """
        answer = await self._http.post(
            path, content=body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        self._counts.answered(answer.content)
        return f"{answer.status_code}" + (
            " with an error" if b'data: {"error"' in answer.content else ""
        )

    async def leave(self, path: str, body: Mapping[str, Any]) -> str:
        """Leaves a stream after a part of it."""
        async with self._http.stream("POST", path, json={**body, "stream": True}) as answer:
            lines = answer.aiter_lines()
            for _ in range(self._draw.randrange(6)):
                await anext(lines, None)
        return f"{answer.status_code}"

    async def read_slowly(self, path: str, body: Mapping[str, Any]) -> str:
        """Reads a stream with pauses."""
        content = b""
        async with self._http.stream("POST", path, json={**body, "stream": True}) as answer:
            async for piece in answer.aiter_bytes():
                content += piece
                await asyncio.sleep(self._draw.random() * 0.2)
        self._counts.answered(content)
        return f"{answer.status_code}"

    async def send_slowly(self, path: str, body: object) -> str:
        """Sends a body in pieces with pauses."""

        async def pieces() -> AsyncIterator[bytes]:
            data = json.dumps(body).encode()
            for at in range(0, len(data), 40):
                yield data[at : at + 40]
                await asyncio.sleep(self._draw.random() * 0.05)

        answer = await self._http.post(path, content=pieces())
        self._counts.answered(answer.content)
        return f"{answer.status_code}"

    async def send_half(self, path: str) -> str:
        """Leaves in the middle of a body."""

        async def half() -> AsyncIterator[bytes]:
            yield b'{"text": "a'
            raise OSError("it leaves here")

        with contextlib.suppress(OSError, httpx2.TransportError):
            await self._http.post(path, content=half())
        return "left"

    async def send_bytes(
        self, *parts: bytes, then: Literal["wait", "half", "reset"] = "wait"
    ) -> str:
        """Sends bytes as they are, and waits for the end of the connection, or closes its own half
        of it before, or breaks it off.
        """
        url = self._http.base_url
        words = parts[0].split(b" ")
        if len(words) > 1:
            self._counts.sent(words[0].decode("latin-1"), words[1].decode("latin-1"))
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1 << 24)
        answer = b""
        with contextlib.suppress(ConnectionError):  # it may close before it has all
            for part in parts:
                writer.write(part)
                await writer.drain()
            if then == "reset":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
                writer.close()
                return "left"
            if then == "half":
                # not connected any more: it has answered already
                with contextlib.suppress(OSError):
                    writer.write_eof()
            answer = await reader.read(-1)
        writer.close()
        final = answer.rpartition(_INTERIM)[2]
        return final.split(b" ", 2)[1].decode() if final else "closed"

    async def send_any_body(self) -> str:
        """Sends what is no request to any route."""
        return await self.post(
            self._draw.choice(POST).replace("{", "").replace("}", ""), self._draw.choice(BAD_BODIES)
        )

    async def send_no_http(self) -> str:
        """Sends what is no HTTP."""
        return await self.send_bytes(self._draw.choice(NO_HTTP), then="half")

    async def send_100_mb(self) -> str:
        """Sends a body that is too large, in chunks."""
        chunk = b"%x\r\n" % 1_000_000 + b"a" * 1_000_000 + b"\r\n"
        return await self.send_bytes(_head("Transfer-Encoding: chunked"), *[chunk] * 100)

    async def send_and_close(self, then: Literal["half", "reset"]) -> str:
        """Sends a request, and closes the connection before it is answered."""
        body = json.dumps(
            {"text": self.text(), "sampling_params": {"max_new_tokens": 100}}
        ).encode()
        return await self.send_bytes(_head(f"Content-Length: {len(body)}"), body, then=then)

    async def look(self) -> str:
        """Asks for what can be looked at, on any route."""
        path = self._draw.choice([path for path in GET if "{" not in path])
        return f"{(await self._http.get(path)).status_code}"

    async def abort(self) -> str:
        """Aborts a request by its name."""
        rid = f"r{self._draw.getrandbits(64):x}"
        body = {
            "text": self.text(),
            "rid": rid,
            "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
        }
        asked = asyncio.ensure_future(self.post("/generate", body))
        await asyncio.sleep(self._draw.random() * 0.2)
        told = await self._http.post("/abort_request", json={"rid": rid})
        return f"{told.status_code}, {await asked}"

    async def respond(self) -> str:
        """Responses that continue one another, are listed, streamed again and forgotten."""
        first = await self._http.post(
            "/v1/responses", json={"input": self.text(), "max_output_tokens": 4}
        )
        if first.status_code != 200:
            return f"{first.status_code}"
        self._counts.answered(first.content)
        id = first.json()["id"]
        body = {
            "input": self.text(),
            "previous_response_id": id,
            "max_output_tokens": 4,
            "stream": True,
        }
        async with self._http.stream("POST", "/v1/responses", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        self._counts.answered("\n".join(lines))
        last = json.loads(lines[-1].removeprefix("data: "))["response"]["id"]
        again = await self._http.get(f"/v1/responses/{last}?stream=true&starting_after=2")
        listed = await self._http.get(f"/v1/responses/{id}/input_items")
        gone = await self._http.delete(f"/v1/responses/{id}")
        return ", ".join(str(each.status_code) for each in (answer, again, listed, gone))


def _head(field: str) -> bytes:
    key = f"Authorization: Bearer {LEAVING_KEY}\r\n"
    return f"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{key}{field}\r\n\r\n".encode()


def _program(client: Client, tokens: int, **more: object) -> dict[str, Any]:
    gen = {"kind": "Gen", "name": "a", "params": {"max_tokens": tokens}}
    nodes = [
        gen,
        {"kind": "Text", "text": client.text()},
        {"kind": "Select", "name": "b", "choices": ["yes", "no"]},
    ]
    return {"version": 1, "prompt": client.text(), "program": {"nodes": nodes}, **more}


def _chat(client: Client, **more: object) -> dict[str, Any]:
    return {"messages": client.turns(), "max_tokens": client.text().count(" ") + 1, **more}


def _bomb(client: Client) -> object:
    """A schema whose grammar is large, another one each time."""
    deep: object = {"type": "string", "maxLength": 10**6, "description": client.text()}
    for _ in range(6):
        deep = {
            "anyOf": [{"type": "array", "items": deep, "minItems": 20, "maxItems": 10**4}, deep]
        }
    return deep


def _format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
CALL = {"max_tokens": 120}  # a smaller limit than an answer's shortest text is refused
REQUESTS: dict[str, Mapping[str, Callable[[Client], Awaitable[str]]]] = {
    "valid": {
        "chat": lambda c: c.post("/v1/chat/completions", _chat(c)),
        "chat, streamed": lambda c: c.post("/v1/chat/completions", _chat(c, **STREAMED)),
        "chat, schema": lambda c: c.post("/v1/chat/completions", _chat(c, response_format=_format(POINT), **CALL)),
        "chat, tool": lambda c: c.post("/v1/chat/completions", _chat(c, tools=[TOOL], tool_choice="required", **CALL)),
        "completions": lambda c: c.post("/v1/completions", {"prompt": c.text(), "max_tokens": 8, "n": 2}),
        "generate": lambda c: c.post(
            "/generate", {"text": [c.text(), c.text()], "sampling_params": {"max_new_tokens": 6, "regex": "[a-z ]+"}}
        ),
        "messages": lambda c: c.post("/v1/messages", {"messages": c.turns(), "max_tokens": 8, "stream": True}),
        "responses": Client.respond,
        "decisions": lambda c: c.post(
            "/v1/decisions",
            {"model": "", "input": c.text(), "questions": [{"type": "predicate", "instructions": "Is it green?"}]},
        ),
        "score": lambda c: c.post("/v1/score", {"prompt": c.text(), "continuations": [c.text(4), c.text(4)]}),
        "program": lambda c: c.post("/program", _program(c, 4)),
        "program, streamed": lambda c: c.post("/program", _program(c, 4, stream=True)),
        "tokenize": lambda c: c.post("/tokenize", {"prompt": c.text()}),
        "any route": Client.look,
        "information": lambda c: c.post("/flush_cache", {}),
    },
    "invalid": {
        "no JSON": lambda c: c.post("/v1/chat/completions", b'{"messages": [' + c.text().encode()),
        "no UTF-8": lambda c: c.post("/generate", b'{"text": "\xff\xfe"}'),
        "deep": lambda c: c.post("/generate", b'{"text": ' + b"[" * 5000),
        "unknown field": lambda c: c.post("/v1/chat/completions", _chat(c, max_tokenz=3)),
        "wrong type": lambda c: c.post("/v1/completions", {"prompt": {"a": 1}}),
        "bad schema": lambda c: c.post("/v1/chat/completions", _chat(c, response_format=_format({"type": "nothing"}))),
        "bad regex": lambda c: c.post("/generate", {"text": "a", "sampling_params": {"regex": "(" + c.text()}}),
        "too long": lambda c: c.post("/v1/completions", {"prompt": "a b " * 5000}),
        "no such model": lambda c: c.post("/v1/chat/completions", _chat(c, model="nobody")),
        "no such route": lambda c: c.post(f"/v1/{c.text(3)}", {}),
        "no such response": lambda c: c.post("/v1/responses", {"input": "a", "previous_response_id": "resp_0"}),
        "embeddings": lambda c: c.post("/v1/embeddings", {"input": "a"}),
    },
    "aborted": {
        "left in a stream": lambda c: c.leave("/v1/chat/completions", _chat(c, max_tokens=300)),
        "left in a response": lambda c: c.leave("/v1/responses", {"input": c.text(), "max_output_tokens": 300}),
        "left in a program": lambda c: c.leave("/program", _program(c, 300)),
        "left in a body": lambda c: c.send_half("/generate"),
        "aborted by name": Client.abort,
    },
    "slow": {
        "reads slowly": lambda c: c.read_slowly("/v1/chat/completions", _chat(c, **STREAMED)),
        "sends slowly": lambda c: c.send_slowly("/v1/chat/completions", _chat(c)),
    },
    "hostile": {
        "any route, any body": Client.send_any_body,
        "no HTTP": Client.send_no_http,
        "100 MB": Client.send_100_mb,
        "half closed": lambda c: c.send_and_close("half"),
        "reset": lambda c: c.send_and_close("reset"),
        "half a body": lambda c: c.send_bytes(_head("Content-Length: 100"), b"{", then="half"),
        "hostile schema": lambda c: c.post("/v1/chat/completions", _chat(c, response_format=_format(_bomb(c)))),
    },
}  # fmt: skip


# Requests whose usage is not in their answers as quotas count it, or that need the administrator's
# key.
_NOT_COUNTED = {"valid: any route", "valid: decisions", "valid: information"}


def _is_counted(kind: str) -> bool:
    """Tells whether the server's counts of such requests must be those of the clients."""
    reads = kind.startswith(("valid", "invalid", "slow")) or kind == "aborted: aborted by name"
    return reads and kind not in _NOT_COUNTED


def _is_wrong(status: str) -> bool:
    """Tells whether no server should answer so."""
    return status not in ("left", "closed") and not all(
        each[0] in "234" and "error" not in each for each in status.split(", ")
    )


def _processes(pid: int) -> list[int]:
    """A process and those under it."""
    found, parents = [pid], {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def _held(server: ServerProcess, stats: Mapping[str, Any]) -> dict[str, float]:
    """Resources that a server's processes have at the moment."""
    descriptors = threads = 0
    megabytes: dict[str, float] = defaultdict(float)
    for pid in _processes(server.pid):
        with contextlib.suppress(OSError):
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
            runs = Path(f"/proc/{pid}/cmdline").read_text()
            descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            threads += int(status["Threads"])
            role = next((role for module, role in _ROLES.items() if module in runs), "server")
            megabytes[role] += int(status["VmRSS"].split()[0]) / 1024
    return {
        "requests under way": stats["running"] + stats["waiting"],
        "tokens of room in use": stats["total_tokens"] - stats["free_tokens"],
        "descriptors": descriptors,
        "threads": threads,
        "memory, MB": round(sum(megabytes.values())),
        **{f"  of the {role}": round(megabytes[role]) for role in ("server", *_ROLES.values())},
    }


async def _status(http: httpx2.AsyncClient, path: str) -> str:
    return f"{(await http.get(path)).status_code}"


async def _at_rest(http: httpx2.AsyncClient) -> Mapping[str, Any]:
    """Counts of the engine when all has ended, or `_DRAIN_S` seconds are over, and its cache was
    flushed.
    """
    deadline = time.monotonic() + _DRAIN_S
    while True:
        await http.post("/flush_cache")
        stats: Mapping[str, Any] = (await http.get("/server_info")).json()["internal_states"][0]
        idle = (
            not (stats["running"] or stats["waiting"])
            and stats["free_tokens"] == stats["total_tokens"]
        )
        if idle or time.monotonic() > deadline:
            return stats
        await asyncio.sleep(0.2)


class Crowd:
    """Clients with two keys, and what they have seen.

    Args:
        server: server that they ask.
        options: the command's.

    Attributes:
        seen: counts of answers by kind and status.
        waits: seconds that `/health` took.
        admin: requests with the administrator's key.
    """

    def __init__(self, server: ServerProcess, options: argparse.Namespace) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        self.waits: list[float] = []
        self._requests = [
            (f"{group}: {name}", each)
            for group, named in REQUESTS.items()
            for name, each in named.items()
        ]
        self._counts = (
            ClientCounts(READING_KEY, is_exact=True),
            ClientCounts(LEAVING_KEY, is_exact=False),
        )
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=options.clients)
        reading, self.admin = self._https = [
            httpx2.AsyncClient(
                base_url=server.url, timeout=None, limits=limits, event_hooks=counts.hooks(),
                headers={"authorization": f"Bearer {counts.key}"},
            )
            for counts in self._counts
        ]  # fmt: skip
        self._clients = []
        for i in range(options.clients):
            draw = random.Random(f"{options.seed} {i}")
            pair = [
                Client(http, draw, options.patience, self.seen, counts)
                for http, counts in zip((reading, self.admin), self._counts)
            ]
            self._clients.append((pair[0], pair[1]))
        self._draws = [random.Random(f"{options.seed} {i} kinds") for i in range(options.clients)]

    async def __aenter__(self) -> Crowd:
        self._before = ServerCounts((await self.admin.get("/metrics")).text)
        return self

    async def __aexit__(self, *_: object) -> None:
        for http in self._https:
            await http.aclose()

    async def ask_each(self) -> None:
        """Makes each request once."""
        for kind, request in self._requests:
            await self._ask(0, kind, request)

    async def work(self, seconds: float) -> None:
        """Makes requests of random kinds, all clients at once."""
        end = time.monotonic() + seconds

        async def of_one(number: int) -> None:
            while time.monotonic() < end:
                await self._ask(number, *self._draws[number].choice(self._requests))

        async def of_health() -> None:
            while time.monotonic() < end:
                began = time.monotonic()
                await self._clients[0][1].ask("health", lambda _: _status(self.admin, "/health"))
                self.waits.append(time.monotonic() - began)
                await asyncio.sleep(_HEALTH_S)

        await asyncio.gather(of_health(), *map(of_one, range(len(self._clients))))

    async def differences(self) -> list[str]:
        """Returns what the server has counted otherwise, once all has ended."""
        async with httpx2.AsyncClient(
            base_url=str(self.admin.base_url)
        ) as http:  # without hooks: it is not counted yet
            after = ServerCounts((await http.get("/metrics")).text)
        return differences(after.minus(self._before), self._counts)

    def totals(self) -> str:
        """What the clients with the reading key have counted."""
        counts = self._counts[0]
        responses, tokens = sum(counts.responses.values()), counts.tokens
        return f"{responses} responses, {tokens['prompt']} prompt and {tokens['completion']} completion tokens"

    async def _ask(
        self, number: int, kind: str, request: Callable[[Client], Awaitable[str]]
    ) -> None:
        reading, leaving = self._clients[number]
        await (reading if _is_counted(kind) else leaving).ask(kind, request)


async def soak(server: ServerProcess, options: argparse.Namespace) -> int:
    """Makes the requests, and prints what came of them. 1 where something was wrong."""
    async with Crowd(server, options) as crowd:
        await crowd.ask_each()
        await crowd.work(options.warm)
        held = [_held(server, await _at_rest(crowd.admin))]
        for _ in range(options.points):
            await crowd.work(options.seconds / options.points)
            held.append(_held(server, await _at_rest(crowd.admin)))
        differing = await crowd.differences()
    seen, waits = crowd.seen, crowd.waits
    bad = sum(count for (_, status), count in seen.items() if _is_wrong(status))
    print(f"\n{sum(seen.values())} requests of {options.clients} clients; wrong: {bad}")
    for (kind, status), count in sorted(seen.items()):
        print(f"  {kind:32} {status:24} {count:6}")
    print(f"\nlongest wait for /health: {max(waits) * 1e3:.0f} ms of {len(waits)}")
    times = [f"{options.seconds * i / options.points:.0f} s" for i in range(1, options.points)]
    print(
        "\n  " + " ".join([f"{'held':32}", *(f"{each:>8}" for each in ("before", *times, "after"))])
    )
    for name in held[0]:
        print(f"  {name:32} " + " ".join(f"{each[name]:8g}" for each in held))
    kept = {"descriptors": KEPT_DESCRIPTORS, "threads": KEPT_DESCRIPTORS, "memory, MB": KEPT_MB}
    middle = held[len(held) // 2]
    leaks = [name for name, most in kept.items() if held[-1][name] > middle[name] + most]
    leaks += [
        name
        for name in ("requests under way", "tokens of room in use")
        if held[-1][name] > middle[name]
    ]
    print(f"\nnot given back: {', '.join(leaks) or 'nothing'}")
    print(
        f"counted otherwise by the server: {len(differing) or 'nothing'}; clients that read all: {crowd.totals()}"
    )
    for line in differing:
        print(f"  {line}")
    return int(bool(bad or leaks or differing))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--warm", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--points", type=int, default=2, help="times at which resources are counted, from 2 on"
    )
    parser.add_argument(
        "--patience", type=float, default=120.0, help="longest wait for an answer, in seconds"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args()
    print(describe())
    keys = {"api_key": READING_KEY, "admin_api_key": LEAVING_KEY}
    settings = {"model": options.model, "max_total_tokens": ROOM, "log_level": "warning", **keys}
    server = ServerProcess(settings, 120.0)
    try:
        return asyncio.run(soak(server, options))
    finally:
        server.end_server()


if __name__ == "__main__":
    sys.exit(main())
