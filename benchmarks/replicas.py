"""Servers behind a gateway, one a GPU, against one of them: tokens/s where each has as many
requests.

    python benchmarks/replicas.py [--replicas 2] [--shape qwen3-0.6b] [--requests 256] [--repeat 5]

W1        prompts and answers of 100 to 1,024 tokens
fewshot   2,048 tokens that all share and 64 of its own in front of 128

one       one server asked by itself, the others without work
split     all of them, asked by clients of their own: what the machine gives without a gateway
POLICY    all of them behind a gateway with that policy

`requests` is of each server: two have twice as many. Weights are random; answers come whole, over
`/generate`, to as many client processes as there are servers asked. All ways run by turns, after a
round that warms up; each run has texts of its own. Told are tokens/s, the median of the rounds
(least, most); the median of the rounds' ratios to `one`; the share of the time in which the GPUs
that had work did none, by `nvidia-smi`; and the busiest server's share of requests. Without a
gateway's package only `one` and `split` run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import requests

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))


from sglang_lite.bench.shapes import text_from_ids, write_model
from sglang_lite.protocol import CapabilityError
from sglang_lite.server.replicas.gateway import package_of

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
WORKLOADS = ("W1", "fewshot")
KEY = "benchmark"
Ask = tuple[int, bytes, int]  # the port, the body, and how many tokens the answer has


@dataclass(frozen=True, slots=True)
class Run:
    rate: float
    idle: float | None  # share of the time, of the GPUs that had work
    busiest: float  # share of the requests


def texts(workload: str, count: int, seed: int, scale: int) -> list[tuple[str, int]]:
    """Prompts, and how many tokens each is to be answered with. All lengths are divided by `scale`."""
    draw = random.Random(seed)

    def text(tokens: int) -> str:
        return text_from_ids([draw.randrange(300, 10_000) for _ in range(tokens // scale)])

    if workload == "W1":
        return [
            (text(draw.randint(100, 1024)), draw.randint(100, 1024) // scale) for _ in range(count)
        ]
    shared = text(2048)
    return [(shared + text(64), 128 // scale) for _ in range(count)]


async def _answered(port: int, body: bytes, tokens: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read(-1)
    writer.close()
    made = answer.rpartition(b'"completion_tokens":')[2].partition(b",")[0].rstrip(b"}\r\n]")
    assert made == b"%d" % tokens, answer[:500]


def _client(asks: Sequence[Ask], barrier: threading.Barrier) -> tuple[float, float]:
    """A process that asks, as soon as the others of it are there. When it began, and when it had
    all answers.
    """

    async def all_of_them() -> None:
        await asyncio.gather(*(_answered(*ask) for ask in asks))

    barrier.wait()
    begun = time.perf_counter()
    asyncio.run(all_of_them())
    return begun, time.perf_counter()


def asked(asks: Sequence[Sequence[Ask]]) -> tuple[float, float]:
    """When the first client began, each with what it asks, and when the last one had its answers."""
    with multiprocessing.Manager() as manager, ProcessPoolExecutor(len(asks)) as pool:
        barrier = manager.Barrier(len(asks))
        times = [each.result() for each in [pool.submit(_client, part, barrier) for part in asks]]
    return min(begun for begun, _ in times), max(ended for _, ended in times)


class Gpus:
    """How busy the GPUs are, asked on and on."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, int, int]] = []
        query = [
            "nvidia-smi",
            "--query-gpu=index,utilization.gpu",
            "--format=csv,noheader,nounits",
            "-lms",
            "100",
        ]
        try:
            self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            gpu, busy = line.split(",")
            self._lines.append((time.perf_counter(), int(gpu), int(busy)))

    def idle(self, begun: float, ended: float, count: int) -> float | None:
        """The share of that time in which the busiest of them did nothing."""
        shares: dict[int, list[int]] = {}
        for when, gpu, busy in list(self._lines):
            if begun <= when <= ended:
                shares.setdefault(gpu, []).append(busy)
        busiest = sorted(mean(each) for each in shares.values())[-count:]
        return 1 - mean(busiest) / 100 if busiest else None

    def close(self) -> None:
        if hasattr(self, "_process"):
            self._process.kill()


@contextmanager
def launched(folder: Path, *flags: str, gpu: int | None = None) -> Iterator[str]:
    """The address of a server, or of a gateway, while it runs."""
    command = [
        sys.executable, "-m", "sglang_lite.launch_server", "--model", str(folder), "--load-format", "dummy",
        "--port", "0", "--seed", "0", "--chat-template", TEMPLATE, "--log-level", "error", "--admin-api-key", KEY,
        *flags,
    ]  # fmt: skip
    environment = os.environ if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            line = next(line for line in server.stdout if line.startswith("Serving"))
            yield "http://" + line.partition("http://")[2].split()[0].rstrip("/")
        finally:
            server.terminate()


def workers_of(gateway: str, count: int) -> list[str]:
    """Addresses of a gateway's servers, as soon as it has all of them."""
    while True:
        answer = requests.get(
            f"{gateway}/workers", headers={"Authorization": f"Bearer {KEY}"}, timeout=10
        )
        there = [each["url"] for each in answer.json()["workers"] if each.get("is_healthy")]
        if len(there) == count:
            return sorted(there)
        time.sleep(0.2)


def _submitted(server: str) -> float:
    """How many requests a server has had."""
    lines = requests.get(f"{server}/metrics", timeout=10).text.splitlines()
    return float(
        next(
            line for line in lines if line.startswith("sglang_lite_requests_submitted_total")
        ).split()[-1]
    )


def measured(
    addresses: Sequence[str], servers: Sequence[str], prompts: list[tuple[str, int]], gpus: Gpus
) -> Run:
    """A run in which clients ask, each an address of its own.

    Args:
        servers: that are behind the addresses.
    """
    asks: list[list[Ask]] = [[] for _ in addresses]
    for i, (prompt, tokens) in enumerate(prompts):
        parameters = {"max_new_tokens": tokens, "ignore_eos": True}
        body = json.dumps({"text": prompt, "sampling_params": parameters}).encode()
        client = i % len(addresses)
        asks[client].append((int(addresses[client].rsplit(":", 1)[1]), body, tokens))
    before = [_submitted(server) for server in servers]
    begun, ended = asked(asks)
    idle = gpus.idle(begun, ended, len(servers))
    counts = [_submitted(server) - count for server, count in zip(servers, before, strict=True)]
    return Run(
        sum(tokens for _, tokens in prompts) / (ended - begun), idle, max(counts) / sum(counts)
    )


def told(runs: dict[tuple[str, str], list[Run]]) -> None:
    """Prints a table."""
    print(
        f"\n{'':22}{'tokens/s':>10}{'least':>10}{'most':>10}{'ratio':>8}{'GPU idle':>10}{'busiest':>9}"
    )
    for (workload, way), found in runs.items():
        rates = [run.rate for run in found]
        ratio = median(
            run.rate / one.rate for run, one in zip(found, runs[workload, "one"], strict=True)
        )
        idle = [run.idle for run in found if run.idle is not None]
        print(f"{workload:8} {way:13}{median(rates):10,.0f}{min(rates):10,.0f}{max(rates):10,.0f}{ratio:7.2f}x"
              f"{f'{median(idle):.0%}' if idle else '-':>10}{median(run.busiest for run in found):9.0%}",
              flush=True)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--policies", default="cache_aware,round_robin")
    parser.add_argument("--scale", type=int, default=1, help="how many times shorter all texts are")
    parser.add_argument("--gateway", default="auto", help="its package; none: no gateway")
    options = parser.parse_args(arguments)
    policies = options.policies.split(",")
    try:
        package = "" if options.gateway == "none" else package_of(options.gateway)
    except CapabilityError as error:
        print(error, flush=True)
        package = ""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_model(folder, options.shape)
        gpus = Gpus()
        stack.callback(gpus.close)
        ways: dict[str, list[str]] = {}
        if package:
            flags = ("--gateway", package, "--policy")
            first = stack.enter_context(
                launched(folder, *flags, policies[0], "--replicas", str(options.replicas))
            )
            servers = workers_of(first, options.replicas)
            ways[policies[0]] = [first] * options.replicas
            for policy in policies[1:]:
                other = stack.enter_context(
                    launched(folder, *flags, policy, "--workers", ",".join(servers))
                )
                workers_of(other, options.replicas)
                ways[policy] = [other] * options.replicas
        else:
            servers = [
                stack.enter_context(launched(folder, gpu=i)) for i in range(options.replicas)
            ]
        ways = {"one": [], "split": servers, **ways}
        print(f"{options.replicas} servers, gateway {package or 'none'}, after {time.perf_counter() - begun:.0f} s",
              flush=True)  # fmt: skip
        runs: dict[tuple[str, str], list[Run]] = {
            (workload, way): [] for workload in WORKLOADS for way in ways
        }
        for turn in range(-1, options.repeat):
            for number, (workload, way) in enumerate(runs):
                busy = [servers[turn % options.replicas]] if way == "one" else servers
                prompts = texts(
                    workload, options.requests * len(busy), 1000 * turn + number, options.scale
                )
                run = measured(ways[way] or busy, busy, prompts, gpus)
                if turn >= 0:
                    runs[workload, way].append(run)
            if turn >= 0:
                told(runs)
            print(f"round {turn} ended after {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
