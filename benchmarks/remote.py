"""Programs on a model behind an API: many at once on one event loop, a server far away, a recorded
run that replays.

    python benchmarks/remote.py [--programs 100,1000] [--latency 0.05] [--backends
    openai,anthropic,scripted]
                                [--rounds 3] [--only concurrent,endpoint,replay] [--sglang FOLDER]

*Concurrent*: programs of four generations, all under way at once, against a server in a process of
its own that answers each request after `--latency` seconds. The ideal is four times that, however
many there are. Beside the wall time stands the caller's processor time a call; calls times that is
the floor on one event loop. The bare SDK is asked the same without this package: with its own pool
of connections, and with ours, which is the least that any backend on that SDK can need. `scripted`
waits in the process, without HTTP: what the language itself costs.

*Endpoint*: a program of eight generations on a server of ours behind a line of 20 ms each way,
whose engine is scripted: by `sgl.RuntimeEndpoint`, and by SGLang's own client; seconds and
requests. FOLDER holds an unpacked `sglang` wheel (`pip download --no-deps sglang==0.5.23`, then
unzip; it needs aiohttp, requests, pybase64); without it the client asks call by call, as SGLang's
does.

*Replay*: the same programs, recorded once on a scripted backend, replayed with sockets forbidden.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

sys.path.insert(0, str(Path(__file__).parent.parent))


import sglang_lite as sgl
from sglang_lite.lang.backend.http.connection_pool import ConnectionPool
from sglang_lite.testing import no_network

GENS = 4
CHAT = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "gpt-4o",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Paris it is."}}],
    "usage": {"prompt_tokens": 20, "completion_tokens": 4, "total_tokens": 24},
}  # fmt: skip
START = {
    "type": "message_start",
    "message": {
        "id": "msg-1", "type": "message", "role": "assistant", "model": "claude-opus-5", "content": [],
        "usage": {"input_tokens": 20, "output_tokens": 1},
    },
}  # fmt: skip
MESSAGE = [
    START,
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "Paris it is."},
    },
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}},
    {"type": "message_stop"},
]


@sgl.function
async def questions(s: Any, number: int) -> None:
    for i in range(GENS):
        s += sgl.user(f"Question {i} of {number}: where is the Louvre?")
        s += sgl.assistant(sgl.gen(f"a{i}", max_tokens=16))
        await s.get(f"a{i}")


# --------------------------------------------------------------------------------------- the server


class Connection(asyncio.Protocol):
    """Answers every request of a connection after a while, whatever it asks."""

    def __init__(self, latency: float) -> None:
        self._latency, self._data = latency, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            self._data = self._data[end + 4 + length :]
            answer = EVENTS if b"/messages" in head.split(b"\r\n", 1)[0] else WHOLE
            asyncio.get_running_loop().call_later(self._latency, self._transport.write, answer)


def http(kind: str, body: bytes) -> bytes:
    return (
        f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


WHOLE = http("application/json", json.dumps(CHAT).encode())
EVENTS = http(
    "text/event-stream",
    b"".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in MESSAGE),
)


async def serve(latency: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(latency), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ---------------------------------------------------------------------------------------- measuring


def measured(work: Callable[[], Awaitable[object]]) -> tuple[float, float, int]:
    """Seconds of wall and processor time, and the most threads there were."""
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, threading.active_count() - 1)  # without this one

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, cpu = time.perf_counter(), time.process_time()
    try:
        asyncio.run(wrapped(work))
        return time.perf_counter() - began, time.process_time() - cpu, most
    finally:
        done.set()
        watcher.join()


async def wrapped(work: Callable[[], Awaitable[object]]) -> None:
    await work()


def megabytes() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def bare(name: str, client: dict[str, Any], programs: int, *, pool: bool) -> None:
    """Asks the same questions by the SDK alone, on our pool of connections or its own."""
    if name == "openai":
        import openai

        own: Any = (
            {"http_client": openai.DefaultAsyncHttpxClient(transport=ConnectionPool())}
            if pool
            else {}
        )
        gpt = openai.AsyncOpenAI(**client, **own)

        async def ask(messages: Any) -> str:
            said = await gpt.chat.completions.create(
                model="gpt-4o", messages=messages, max_completion_tokens=16
            )
            return said.choices[0].message.content or ""

        close = gpt.close
    else:
        import anthropic

        own = (
            {"http_client": anthropic.DefaultAsyncHttpxClient(transport=ConnectionPool())}
            if pool
            else {}
        )
        claude = anthropic.AsyncAnthropic(**client, **own)

        async def ask(messages: Any) -> str:
            text = ""
            async with await claude.messages.create(
                model="claude-opus-5", messages=messages, max_tokens=16, stream=True
            ) as events:
                async for event in events:
                    if event.type == "content_block_delta" and event.delta.type == "text_delta":
                        text += event.delta.text
            return text

        close = claude.close

    async def one(number: int) -> None:
        messages: list[dict[str, str]] = []
        for i in range(GENS):
            messages.append(
                {"role": "user", "content": f"Question {i} of {number}: where is the Louvre?"}
            )
            messages.append({"role": "assistant", "content": await ask(messages)})

    await asyncio.gather(*map(one, range(programs)))
    await close()


def concurrent(name: str, url: str, programs: int, latency: float, rounds: int) -> None:
    client: dict[str, Any] = {
        "base_url": f"{url}/v1" if name == "openai" else url,
        "api_key": "key",
        "timeout": 60.0,
    }
    backend: sgl.BaseBackend
    if name == "openai":
        backend = sgl.OpenAI("gpt-4o", **client)
    elif name == "anthropic":
        backend = sgl.Anthropic("claude-opus-5", **client)
    else:
        backend = sgl.ScriptedBackend(default="Paris it is.", latency=latency)
    rows: list[Any] = [{"number": i} for i in range(programs)]
    ideal = GENS * latency

    async def run() -> None:
        states = await questions.arun_batch(rows, backend=backend, num_threads=programs)
        assert all(state["a3"] == "Paris it is." for state in states)

    for _ in range(rounds):
        wall, cpu, threads = measured(run)
        tell(f"{name}, {programs} programs", programs, ideal, wall, cpu)
        print(f"{'':26} {threads} threads, {megabytes():.0f} MB", flush=True)
    if name != "scripted":
        for told, pool in (("the SDK on our pool", True), ("the SDK alone", False)):
            wall, cpu, _ = measured(partial(bare, name, client, programs, pool=pool))
            tell(told, programs, ideal, wall, cpu)
    backend.shutdown()


def tell(what: str, programs: int, ideal: float, wall: float, cpu: float) -> None:
    calls = programs * GENS
    print(
        f"{what:26} {wall:7.2f} s wall, {ideal / wall:6.1%} of ideal ({ideal:.2f} s); processor {cpu:6.2f} s, "
        f"{cpu / calls * 1e6:6.0f} us a call",
        flush=True,
    )


# -------------------------------------------------------------------------------- a server far away


def eight(api: Any) -> Any:
    """A program of eight generations, of either system's language."""

    @api.function
    def program(s: Any, start: str) -> None:
        s += start
        for i in range(8):
            s += api.gen(f"a{i}", max_tokens=2, temperature=0.0, ignore_eos=True) + f" {i}, then"

    return program


def call_by_call(url: str) -> Callable[[str], object]:
    """The eight generations, a request each, as SGLang's client makes them."""
    native = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}

    def ask(text: str) -> None:
        for i in range(8):
            told = httpx2.post(
                f"{url}/generate", json={"text": text, "sampling_params": native}, timeout=60
            ).json()
            text += f"{told['text']} {i}, then"

    return ask


def endpoint(folder: Path | None, repeat: int) -> None:
    # Here, as they bring torch, whose memory the programs above have no part in.
    from frontend_overhead import load_upstream
    from serve import Line, serving

    from benchmarks.scripted_core import scripted_engine
    from sglang_lite.runtime.config import DEFAULT_MODEL

    with scripted_engine(DEFAULT_MODEL, 0.001) as engine, serving(engine) as url:
        line = Line(url)
        backend = sgl.RuntimeEndpoint(line.url)
        ours = eight(sgl)
        work: dict[str, Callable[[str], object]] = {
            "sgl.RuntimeEndpoint": lambda start: ours.run(start, backend=backend).text()
        }
        if folder is None:
            work["call by call"] = call_by_call(line.url)
        else:
            api, _ = load_upstream(folder)
            from sglang.lang.backend.runtime_endpoint import (  # type: ignore[import-not-found] # only where the folder is given
                RuntimeEndpoint,
            )

            theirs, other = eight(api), RuntimeEndpoint(line.url)
            work["SGLang's client"] = lambda start: theirs.run(start, backend=other).text()
        took: dict[str, list[float]] = {name: [] for name in work}
        asked = {}
        for i in range(repeat + 1):
            for name, run in work.items():
                line.requests = 0
                began = time.perf_counter()
                run(f"Once upon a time, the {i}th by {name}: ")  # nothing of it is in the cache
                if i:  # the first makes connections
                    took[name].append(time.perf_counter() - began)
                asked[name] = line.requests
        backend.shutdown()
        line.close()
    first, other_name = work
    for name, times in took.items():
        print(
            f"endpoint   {name:20} {median(times) * 1e3:6.1f} ms, {asked[name]} requests",
            flush=True,
        )
    print(f"{'':10} {median(took[other_name]) / median(took[first]):.1f}x", flush=True)


def replay(programs: int, rounds: int) -> None:
    rows: list[Any] = [{"number": i} for i in range(programs)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.jsonl"
        cpu = time.process_time()
        with sgl.record(file, sgl.ScriptedBackend(default="Paris it is.")) as recorder:
            first = [state.text() for state in plain.run_batch(rows, backend=recorder)]
        print(
            f"recorded   {programs * GENS:,} nodes, {file.stat().st_size / programs / GENS:,.0f} bytes a node, "
            f"{(time.process_time() - cpu) / programs / GENS * 1e6:.0f} us of processor a node"
        )
        for _ in range(rounds):
            with no_network():
                began, cpu = time.perf_counter(), time.process_time()
                backend = sgl.Replay(file)
                opened = time.process_time() - cpu
                again = [plain.run(backend=backend, **row).text() for row in rows]
                wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            assert again == first
            nodes = programs * GENS
            rest = nodes / (cpu - opened)
            print(
                f"replayed   {nodes / wall:8,.0f} nodes/s wall, {nodes / cpu:8,.0f} a second of processor time, with "
                f"opening the file ({opened / nodes * 1e6:.0f} us a node); {rest:8,.0f} without"
            )


@sgl.function
def plain(s: Any, number: int) -> None:
    for i in range(GENS):
        s += sgl.user(f"Question {i} of {number}: where is the Louvre?")
        s += sgl.assistant(sgl.gen(f"a{i}", max_tokens=16))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--programs",
        default="100,1000",
        help="at once, separated by commas; the last one is replayed",
    )
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--backends", default="openai,anthropic,scripted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", default="concurrent,endpoint,replay", help="sections, separated by commas"
    )
    parser.add_argument("--sglang", type=Path, help="an unpacked wheel")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
        return
    programs = [int(count) for count in options.programs.split(",")]
    only = options.only.split(",")
    if unknown := set(only) - {"concurrent", "endpoint", "replay"}:
        parser.error(f"no section: {', '.join(unknown)}")
    print(f"Python {platform.python_version()}; load {os.getloadavg()[0]:.1f}", flush=True)
    if "concurrent" in only:
        command = [sys.executable, __file__, "--serve", str(options.latency)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            try:
                for name, count in itertools.product(options.backends.split(","), programs):
                    concurrent(name, url, count, options.latency, options.rounds)
            finally:
                server.terminate()
    if "endpoint" in only:
        endpoint(options.sglang, 5 * options.rounds)
    if "replay" in only:
        replay(programs[-1], options.rounds)


if __name__ == "__main__":
    main()
