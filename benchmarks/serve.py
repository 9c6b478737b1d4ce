"""Cost of HTTP: the server against the engine's handle, and against calls one by one.

    python benchmarks/serve.py [--only events,first,streams,program,decisions] [--repeat 5]
    [--seconds 10]

events     a scripted engine (a thread here) tells 500 streams of chat: events a second and a processor second of this
           process, script included; from the telling of an event to its reading by the client;
           /health meanwhile
first      default model, idle: seconds to the first token over HTTP, and of the engine's handle, in turn
streams    default model, 64 streams at once: tokens a second over HTTP, and of the handle, in turn
program    eight generations of two tokens by /program, and by eight calls of /generate, over a line of 20 ms each way
decisions  default model: 20 choice questions about a text, and one of them; with and without the
text in the cache

The clients of the first and third are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import describe

import sglang_lite as sgl
from benchmarks.scripted_core import scripted_engine
from sglang_lite.protocol import Delta, SamplingParams
from sglang_lite.runtime.config import DEFAULT_MODEL
from sglang_lite.server.app import application
from sglang_lite.server.http_server import HttpServer
from sglang_lite.server.settings import ServerSettings

SECTIONS = ("events", "first", "streams", "program", "decisions")
_DELAY_S = 0.02


@contextlib.contextmanager
def serving(engine: sgl.Engine) -> Iterator[str]:
    """A server of an engine on a thread, with the command's settings."""
    settings = ServerSettings(max_connections_per_client=1024)
    server, ready = HttpServer(application(engine, settings), settings), threading.Event()
    config = server.config

    async def serve() -> None:
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        ready.set()
        await server.main_loop()
        await server.shutdown()

    def run() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()


# ----------------------------------------------------------------------------- the client's process


async def _stream(host: str, port: int, body: dict[str, Any], found: dict[str, Any]) -> None:
    """Reads a stream of chat from a plain socket, as fast as it comes."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n"
    head += "Connection: close\r\n\r\n"
    writer.write(head.encode() + data)
    rest = b""
    while part := await reader.read(1 << 16):
        now = time.perf_counter_ns()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            at = line.find(b'"content":"')
            if at < 0:
                continue
            text = line[at + 11 : line.find(b'"', at + 11)]
            if not text:
                continue
            if found["stamped"]:
                for stamp in text.split():
                    found["delays"].append((now - int(stamp)) / 1e9)
            found["events"] += 1
            found["last"] = now
    writer.close()


async def _client(url: str, streams: int, tokens: int, *, stamped: bool) -> dict[str, Any]:
    host, _, port = url.removeprefix("http://").partition(":")
    found: dict[str, Any] = {"events": 0, "delays": [], "health": [], "stamped": stamped}
    body = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": tokens, "stream": True,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    began = time.perf_counter_ns()
    work = asyncio.gather(
        *(
            _stream(
                host, int(port), {**body, "messages": [{"role": "user", "content": f"{i}"}]}, found
            )
            for i in range(streams)
        )
    )
    async with httpx2.AsyncClient(base_url=url) as client:
        while stamped and not work.done():
            sent = time.perf_counter()
            assert (await client.get("/health")).status_code == 200
            found["health"].append(time.perf_counter() - sent)
            await asyncio.sleep(0.02)
    await work
    return {**found, "seconds": (found["last"] - began) / 1e9}


def _in_a_process(url: str, streams: int, tokens: int, *, stamped: bool = False) -> dict[str, Any]:
    command = [
        sys.executable,
        __file__,
        "--client",
        url,
        str(streams),
        str(tokens),
        str(int(stamped)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        found: dict[str, Any] = json.loads(process.communicate()[0])
    return found


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


# ------------------------------------------------------------------------------------- the sections


def events(streams: int, rate: float, seconds: float, repeat: int) -> None:
    step = streams / rate
    with (
        scripted_engine(DEFAULT_MODEL, step, lambda: f"{time.perf_counter_ns()} ") as engine,
        serving(engine) as url,
    ):
        _in_a_process(url, 8, 4, stamped=True)
        rows = []
        for _ in range(repeat):
            cpu = time.process_time()
            found = _in_a_process(url, streams, max(int(seconds / step), 1), stamped=True)
            cpu = time.process_time() - cpu
            tokens = len(found["delays"])
            rows.append((tokens / found["seconds"], tokens / cpu, _quantile(found["delays"], 0.5),
                         _quantile(found["delays"], 0.99), _quantile(found["health"], 0.99)))  # fmt: skip
    told, per_cpu, half, most, health = (median(row[i] for row in rows) for i in range(5))
    print(f"events: {streams} streams, {told:,.0f} events/s, {per_cpu:,.0f} a processor second; delay p50 "
          f"{half * 1e3:.1f} ms, p99 {most * 1e3:.1f} ms; /health p99 {health * 1e3:.1f} ms", flush=True)  # fmt: skip


def first(engine: sgl.Engine, url: str, repeat: int) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    body = {
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
    took: dict[str, list[float]] = {"handle": [], "/generate": [], "chat": []}
    with httpx2.Client(base_url=url, timeout=60) as client:
        for i in range(10 * repeat):
            done, text = threading.Event(), f"Once {i} upon"
            began = time.perf_counter()
            engine.submit(text, params, sink=partial(_set, done), stream=True)
            done.wait()
            took["handle"].append(time.perf_counter() - began)
            took["/generate"].append(
                _until_first(client, "/generate", {**body, "text": f"Twice {i} upon"})
            )
            took["chat"].append(_until_first(client, "/v1/chat/completions", chat))
    base, native, talk = (median(took[name][2:]) * 1e3 for name in took)
    print(f"first token: handle {base:.2f} ms, /generate {native:.2f} ms ({native - base:+.2f}), "
          f"chat {talk:.2f} ms (a longer prompt)", flush=True)  # fmt: skip


def _set(done: threading.Event, _: object) -> None:
    done.set()


def _until_first(client: httpx2.Client, path: str, body: dict[str, Any]) -> float:
    began = time.perf_counter()
    with client.stream("POST", path, json=body) as response:
        parts = response.iter_bytes()
        next(parts)
        took = time.perf_counter() - began
        for _ in parts:
            pass
    return took


def streams(engine: sgl.Engine, url: str, count: int, tokens: int, repeat: int) -> None:
    template = engine.chat_template()
    assert template is not None
    prompts = [
        template.render([{"role": "user", "content": f"{i}"}], add_generation_prompt=True)
        for i in range(count)
    ]

    def of_handle() -> float:
        left, done = count, threading.Event()

        def sink(event: object) -> None:
            nonlocal left
            if not isinstance(event, Delta):
                left -= 1
                if not left:
                    done.set()

        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        began = time.perf_counter()
        for prompt in prompts:
            engine.submit(prompt, params, sink=sink, stream=True)
        done.wait()
        return count * tokens / (time.perf_counter() - began)

    def over_http() -> float:
        return count * tokens / float(_in_a_process(url, count, tokens)["seconds"])

    of_handle(), over_http()
    pairs = [(of_handle(), over_http()) for _ in range(repeat)]
    ratios = sorted(http / handle for handle, http in pairs)
    print(f"{count} streams of {tokens} tokens: handle {median(a for a, _ in pairs):,.0f} tokens/s, HTTP "
          f"{median(b for _, b in pairs):,.0f}: {median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})",
          flush=True)  # fmt: skip


class Line:
    """A line to a server that takes 20 ms each way."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._open: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.url = "http://{}:{}".format(*self._server.sockets[0].getsockname())
        self.requests = 0

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        there, back = await asyncio.open_connection(*self._target)
        try:
            # by `_end`: asyncio's server would print it
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(
                    self._carry(reader, back, count=True), self._carry(there, writer, count=False)
                )
        finally:
            self._open.discard(task)
            for end in (writer, back):
                end.close()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):  # an end that has gone
            while part := await reader.read(1 << 16):
                self.requests += count and part.startswith(b"POST ")
                self._loop.call_later(_DELAY_S, writer.write, part)
        await asyncio.sleep(_DELAY_S)
        writer.close()

    async def _end(self) -> None:
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def close(self) -> None:
        """Ends the line, and what it carries."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def program(label: str, url: str, repeat: int) -> None:
    line = Line(url)
    parameters = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    nodes: list[dict[str, Any]] = []
    for i in range(8):
        nodes += [
            {"kind": "Gen", "name": str(i), "params": parameters},
            {"kind": "Text", "text": f" {i}, then"},
        ]
    native = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    with httpx2.Client(base_url=line.url, timeout=60) as client:

        def whole(text: str) -> None:
            body = {"version": 1, "prompt": text, "program": {"nodes": nodes}}
            client.post("/program", json=body).raise_for_status()

        def one_by_one(text: str) -> None:
            for i in range(8):
                told = client.post(
                    "/generate", json={"text": text, "sampling_params": native}
                ).json()
                text += f"{told['text']} {i}, then"

        took: dict[Callable[[str], None], list[float]] = {whole: [], one_by_one: []}
        asked = {}
        for i in range(4 * repeat + 1):
            for work, times in took.items():
                line.requests = 0
                began = time.perf_counter()
                # nothing of it is in the cache
                work(f"Once upon a time, the {i}th of {work.__name__}")
                if i:
                    times.append(time.perf_counter() - began)
                asked[work] = line.requests
    line.close()
    a, b = median(took[whole]), median(took[one_by_one])
    print(f"program, {label}: {a * 1e3:.1f} ms in {asked[whole]} request, call by call {b * 1e3:.1f} ms in "
          f"{asked[one_by_one]}: {b / a:.1f}x", flush=True)  # fmt: skip


_WORDS = (
    *(
        "the",
        "cat",
        "sat",
        "on",
        "a",
        "mat",
        "and",
        "looked",
        "at",
        "our",
        "old",
        "house",
        "by",
        "river",
        "where",
    ),
    *(
        "people",
        "came",
        "every",
        "day",
        "to",
        "buy",
        "fish",
        "bread",
        "milk",
        "from",
        "her",
        "brother",
    ),
)


def _words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=count))


def decisions(engine: sgl.Engine, url: str, tokens: int, questions: int, repeat: int) -> None:
    """`short`: a question with its choices has some 25 tokens; `long`: each choice has 18, and
    stands in the question and behind it.
    """
    short = [_words(1, i) for i in (1, 2, 4, 5)]
    kinds = {"short": lambda i: short, "long": lambda i: [_words(18, 10 * i + j) for j in range(4)]}
    with httpx2.Client(base_url=url, timeout=600) as client:
        for label, choices in kinds.items():
            asked = [
                {"type": "choice", "instructions": f"What is thing {i} in it?",
                 "choices": [{"value": value} for value in choices(i)]} for i in range(questions)
            ]  # fmt: skip

            def ask(text: str, count: int) -> tuple[float, int]:
                body = {"model": engine.model_name, "input": text, "questions": asked[:count]}  # noqa: B023 # called in this round alone
                began = time.perf_counter()
                found = client.post("/v1/decisions", json=body).raise_for_status().json()
                return time.perf_counter() - began, found["usage"]["input_tokens"]

            rows = []
            for i in range(repeat):
                row = []
                for count in (1, questions):
                    engine.flush_cache()
                    text = _words(tokens, i)
                    row += [ask(text, count), ask(text, count)]
                rows.append(row)
            one, one_cached, all_of_them, all_cached = (
                median(row[i][0] for row in rows) for i in range(4)
            )
            ratio = median(row[2][0] / row[0][0] for row in rows)
            print(f"decisions, {label} choices: one {one:.2f} s ({rows[0][0][1]} tokens), {questions} "
                  f"{all_of_them:.2f} s ({rows[0][2][1]}): {ratio:.2f}x; cached {one_cached:.2f} s, {all_cached:.2f} s",
                  flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run of events")
    parser.add_argument("--streams", type=int, default=500, help="of events")
    parser.add_argument(
        "--rate", type=float, default=10_000.0, help="events a second that are told"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of each of the 64 streams")
    parser.add_argument(
        "--words", type=int, default=1950, help="of the text that decisions are about"
    )
    parser.add_argument("--questions", type=int, default=20, help="of a decision")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        url, count, tokens, stamped = options.client
        print(
            json.dumps(asyncio.run(_client(url, int(count), int(tokens), stamped=stamped == "1")))
        )
        return
    only = options.only.split(",")
    if unknown := set(only) - set(SECTIONS):
        parser.error(f"no section: {', '.join(unknown)}")
    print(f"{describe()}; load {os.getloadavg()[0]:.1f}", flush=True)
    if "events" in only:
        events(options.streams, options.rate, options.seconds, options.repeat)
    if "program" in only:
        with scripted_engine(DEFAULT_MODEL, 0.001) as engine, serving(engine) as url:
            program("scripted", url, options.repeat)
    work: dict[str, Callable[[sgl.Engine, str], None]] = {
        "first": partial(first, repeat=options.repeat),
        "streams": partial(streams, count=64, tokens=options.tokens, repeat=options.repeat),
        "program": lambda _, url: program("default model", url, options.repeat),
        "decisions": partial(
            decisions, tokens=options.words, questions=options.questions, repeat=options.repeat
        ),
    }
    if set(only) & work.keys():
        with sgl.Engine() as engine, serving(engine) as url:
            for name, measure in work.items():
                if name in only:
                    measure(engine, url)


if __name__ == "__main__":
    main()
