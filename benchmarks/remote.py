"""Programs on a model behind an API: many at once on one event loop, and a recorded run that replays.

    python benchmarks/remote.py [--programs 1000] [--latency 0.05] [--backends openai,anthropic,scripted] [--rounds 3]

*Concurrent*: programs of four generations, all under way at once, against a server in a process of its own that
answers each request after `--latency` seconds. The ideal is four times that, however many there are. Beside the wall
time stands the caller's processor time a call, which says what the wall time could be at best on a machine with nothing
else to do, and that of the bare SDK, which is asked the same without this package. `scripted` waits in the process,
without HTTP: what the language itself costs.

*Replay*: the same programs, recorded once on a scripted backend, replayed with sockets forbidden.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import sglang_lite as sgl
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
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Paris it is."}},
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


# ------------------------------------------------------------------------------------------------ the server


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
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


WHOLE = http("application/json", json.dumps(CHAT).encode())
EVENTS = http("text/event-stream", b"".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in MESSAGE))


async def serve(latency: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(latency), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ------------------------------------------------------------------------------------------------ measuring


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


async def bare(name: str, client: dict[str, Any], programs: int) -> None:
    """The same questions by the SDK alone."""
    if name == "openai":
        import openai

        gpt = openai.AsyncOpenAI(**client)

        async def ask(messages: Any) -> str:
            said = await gpt.chat.completions.create(model="gpt-4o", messages=messages, max_completion_tokens=16)
            return said.choices[0].message.content or ""

        close = gpt.close
    else:
        import anthropic

        claude = anthropic.AsyncAnthropic(**client)

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
            messages.append({"role": "user", "content": f"Question {i} of {number}: where is the Louvre?"})
            messages.append({"role": "assistant", "content": await ask(messages)})

    await asyncio.gather(*map(one, range(programs)))
    await close()


def concurrent(name: str, url: str, programs: int, latency: float, rounds: int) -> None:
    client: dict[str, Any] = {"base_url": f"{url}/v1" if name == "openai" else url, "api_key": "key", "timeout": 60.0}
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
        print(
            f"{name:10} {wall:7.2f} s wall, {ideal / wall:5.1%} of ideal ({ideal:.2f} s); "
            f"{cpu / programs / GENS * 1e6:6.0f} us of processor a call, {threads} threads, {megabytes():.0f} MB"
        )
    if name != "scripted":
        wall, cpu, _ = measured(lambda: bare(name, client, programs))
        print(
            f"{'':10} {wall:7.2f} s wall, {ideal / wall:5.1%} of ideal, "
            f"{cpu / programs / GENS * 1e6:6.0f} us of processor a call: the SDK alone"
        )
    backend.shutdown()


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--backends", default="openai,anthropic,scripted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="concurrent,replay")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
        return
    if "concurrent" in options.only:
        command = [sys.executable, __file__, "--serve", str(options.latency)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            try:
                for name in options.backends.split(","):
                    concurrent(name, url, options.programs, options.latency, options.rounds)
            finally:
                server.terminate()
    if "replay" in options.only:
        replay(options.programs, options.rounds)


if __name__ == "__main__":
    main()
