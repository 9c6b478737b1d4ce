"""Chat streams over HTTP from another process, against the same engine asked directly.

    python benchmarks/serve_gpu.py [--shape qwen3-0.6b] [--streams 256] [--tokens 256 ...] [--repeat
    3]

direct     tokens/s of `Engine(in_process=True)`, without streams: what the device gives
streams    the same, with a stream each, whose events are counted
handle     streams of an engine in a process of its own; at most one event in 20 ms
http 20ms  tokens/s over HTTP, where a stream has at most one event in 20 ms (`--stream-interval-ms
20`)
http       and one event a token, with the events/s

Behind the ratio: milliseconds from the start until the last stream has its first event. Weights are
random. The client reads sockets in a process of its own, whose connections are open before, and
counts events and tokens. Of several numbers of tokens, each is measured on the same engines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from engine_process import start

import sglang_lite as sgl
from sglang_lite.bench.shapes import text_from_ids, write_model
from sglang_lite.protocol import Delta

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def texts(streams: int) -> list[str]:
    """Prompts of 32 tokens, each with another beginning."""
    return [text_from_ids([100 + (i + 7 * j) % 300 for j in range(32)]) for i in range(streams)]


def asked_directly(
    engine: sgl.Engine, *, stream: bool, streams: int, tokens: int, repeat: int
) -> dict[str, float]:
    """Tokens/s, and when the last stream has begun, the medians of some runs."""
    params = sgl.SamplingParams(max_tokens=tokens, ignore_eos=True)
    found = []
    for _ in range(repeat + 1):  # the first one warms up
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        begun = time.perf_counter()
        for number, text in enumerate(texts(streams)):
            engine.submit(text, params, sink=partial(_put, events, number), stream=stream)
        made = left = 0
        firsts: dict[int, float] = {}
        while left < streams:
            number, event = events.get()
            firsts.setdefault(number, time.perf_counter())
            if not isinstance(event, Delta):
                left += 1
                made += len(event.token_ids)
        took = time.perf_counter() - begun
        found.append({"tokens": made / took, "begun": max(firsts.values()) - begun})
    return _medians(found[1:])


def _put(events: queue.SimpleQueue[Any], number: int, event: object) -> None:
    events.put((number, event))


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(each[name] for each in found) for name in found[0]}


async def _stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: str, tokens: int
) -> tuple[int, int, float]:
    """Asks for a stream, and reads it; how many events and tokens it had, and when the first came."""
    body = {
        "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    )
    head += "Connection: close\r\n\r\n"
    writer.write(head.encode() + data)
    events, last, first = 0, b"", 0.0
    while part := await reader.read(65536):
        events += part.count(b"data: {")
        if events and not first:
            first = time.perf_counter()
        last = (last + part)[-4096:]
    writer.close()
    usage = last[last.rindex(b'"completion_tokens":') + 20 :]
    return events, int(usage.partition(b",")[0]), first


async def _client(port: int, streams: int, tokens: int) -> dict[str, float]:
    opened = [await asyncio.open_connection("127.0.0.1", port, limit=2**20) for _ in range(streams)]
    begun = time.perf_counter()
    found = await asyncio.gather(
        *(_stream(*each, text, tokens) for each, text in zip(opened, texts(streams)))
    )
    took = time.perf_counter() - begun
    return {
        "tokens": sum(each[1] for each in found) / took, "events": sum(each[0] for each in found) / took,
        "begun": max(each[2] for each in found) - begun,
    }  # fmt: skip


def over_http(
    folder: Path, *, interval_ms: float, streams: int, counts: Sequence[int], repeat: int
) -> dict[int, dict[str, float]]:
    """By number of tokens: tokens/s, events/s, and when the last stream has begun, the medians of
    some runs.
    """
    command = [
        sys.executable, "-m", "sglang_lite.launch_server", "--model", str(folder), "--load-format", "dummy",
        "--port", "0", "--max-total-tokens", "300000", "--seed", "0", "--chat-template", TEMPLATE,
        "--stream-interval-ms", str(interval_ms), "--log-level", "error",
        "--max-connections", "8192", "--max-connections-per-client", "8192",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().rsplit(":", 1)[-1].strip()
        client = [sys.executable, __file__, "--client", port, "--streams", str(streams), "--tokens"]

        def asked(tokens: int) -> dict[str, Any]:
            done = subprocess.run(
                [*client, str(tokens)], check=True, capture_output=True, text=True
            )
            found: dict[str, Any] = json.loads(done.stdout)
            return found

        try:
            return {
                tokens: _medians([asked(tokens) for _ in range(repeat + 1)][1:])
                for tokens in counts
            }
        finally:
            server.terminate()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    streams, counts, repeat = options.streams, options.tokens, options.repeat
    if options.client is not None:
        print(json.dumps(asyncio.run(_client(options.client, streams, *counts))))
        return
    direct = {}

    def show(label: str, tokens: int, found: Mapping[str, float]) -> None:
        rate = found["tokens"]
        events = f"  {found['events']:,.0f} events/s" if "events" in found else ""
        over = f"{rate / direct.setdefault(tokens, rate):.3f}  {found['begun'] * 1000:4.0f} ms"
        print(f"{label:10} {tokens:5} {rate:11,.0f} tokens/s  {over}{events}", flush=True)

    def ask(label: str, engine: sgl.Engine, *, stream: bool) -> None:
        for tokens in counts:
            show(
                label,
                tokens,
                asked_directly(
                    engine, stream=stream, streams=streams, tokens=tokens, repeat=repeat
                ),
            )

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, options.shape)
        with start(folder, here=True) as engine:
            ask("direct", engine, stream=False)
            ask("streams", engine, stream=True)
        with start(folder, here=False, stream_interval_s=0.02) as engine:
            ask("handle", engine, stream=True)
        for label, interval in (("http 20ms", 20.0), ("http", 0.0)):
            found = over_http(
                folder, interval_ms=interval, streams=streams, counts=counts, repeat=repeat
            )
            for tokens in counts:
                show(label, tokens, found[tokens])


if __name__ == "__main__":
    main()
