"""Servers behind a gateway, one a GPU, against one server: tokens/s where each has as many requests.

    python benchmarks/replicas.py [--replicas 2] [--shape qwen3-0.6b] [--requests 256] [--policies cache_aware]

W1        prompts and answers of 100 to 1,024 tokens
fewshot   2,048 tokens that all share and 64 of its own in front of 128

`requests` is of each server: two have twice as many. Weights are random; answers come whole, over `/generate`. The
median of three runs after one that warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from engine_process import write_model

from sglang_lite.bench.shapes import text_of

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def requests(workload: str, count: int, seed: int, scale: int) -> list[tuple[str, int]]:
    """Prompts, and how many tokens each is to be answered with. All lengths are divided by `scale`."""
    draw = random.Random(seed)

    def text(tokens: int) -> str:
        return text_of([draw.randrange(300, 10_000) for _ in range(tokens // scale)])

    if workload == "W1":
        return [(text(draw.randint(100, 1024)), draw.randint(100, 1024) // scale) for _ in range(count)]
    shared = text(2048)
    return [(shared + text(64), 128 // scale) for _ in range(count)]


async def _answered(port: int, prompt: str, tokens: int) -> int:
    """Asks for an answer; how many tokens it has."""
    parameters = {"max_new_tokens": tokens, "ignore_eos": True}
    data = json.dumps({"text": prompt, "sampling_params": parameters}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = "POST /generate HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read(-1)
    writer.close()
    return int(answer.rpartition(b'"completion_tokens":')[2].partition(b",")[0].rstrip(b"}\r\n]"))


async def _rate(port: int, asked: list[tuple[str, int]]) -> float:
    begun = time.perf_counter()
    made = await asyncio.gather(*(_answered(port, *each) for each in asked))
    assert sum(made) == sum(tokens for _, tokens in asked)
    return sum(made) / (time.perf_counter() - begun)


def rates(folder: Path, servers: int, policy: str | None, options: argparse.Namespace) -> dict[str, float]:
    """Tokens/s of each workload; without a policy one server answers by itself."""
    command = [
        sys.executable, "-m", "sglang_lite.launch_server", "--model", str(folder), "--load-format", "dummy",
        "--port", "0", "--seed", "0", "--chat-template", TEMPLATE, "--log-level", "error",
        *(() if policy is None else ("--replicas", str(servers), "--policy", policy)),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = next((line for line in server.stdout if line.startswith("Serving")), "")
        port = int(line.partition("http://")[2].split()[0].rstrip("/").rsplit(":", 1)[-1])
        try:
            return {
                workload: median(
                    [
                        asyncio.run(_rate(port, requests(workload, options.requests * servers, seed, options.scale)))
                        for seed in range(4)
                    ][1:]
                )
                for workload in ("W1", "fewshot")
            }
        finally:
            server.terminate()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--policies", default="cache_aware,round_robin")
    parser.add_argument("--scale", type=int, default=1, help="how many times shorter all texts are")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, options.shape)
        one = rates(folder, 1, None, options)
        print("one server: " + ", ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in one.items()), flush=True)
        for policy in options.policies.split(","):
            found = rates(folder, options.replicas, policy, options)
            told = ", ".join(f"{name} {rate:,.0f} tokens/s {rate / one[name]:.2f}x" for name, rate in found.items())
            print(f"{options.replicas} servers, {policy}: {told}", flush=True)


if __name__ == "__main__":
    main()
