"""A day's load in minutes: requests of all protocols, gRPC too, while the engine is killed, drained
and given its weights again; whether all were answered, and whether the server counted what its
clients did.

    python benchmarks/day.py [--model FOLDER] [--requests 20000] [--clients 32] [--kills 6] [--seed
    0]

The server is `sglang-lite serve --restart` in processes of its own. `--kills` times, evenly over
the load, the engine's process is killed; in between, generation is paused until all that runs is
back in the queue, and the weights are read from disk again, as often. Clients do what SDKs do: they
ask again after a 503 with `Retry-After`. A request that was open at a kill may fail; each other one
must be answered. Printed are the answers by protocol and status; the server's own counts of them,
of prompts' and of generated tokens beside those of the clients; and the memory of the server's
process after each kill, drain and reload, when its caches of texts have been filled. The exit
status is 1 where an answer failed though it was not open at a kill, where a count differs, or where
the memory is more than 5 % larger at the end than at first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx2
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as services

sys.path.insert(0, str(Path(__file__).parent))

from machine import describe
from mixed_requests import WORDS

from sglang_lite.compat.sglang.server_process import ServerProcess
from sglang_lite.runtime.config import DEFAULT_MODEL

ADMIN = "day"
KEY = (("authorization", f"Bearer {ADMIN}"),)
TOKENS = 8
CACHED = 8192  # texts whose tokens a tokenizer keeps
Asked = tuple[str, dict[str, Any]]
Told = Mapping[str, Any]


def _program(text: str) -> dict[str, Any]:
    nodes = [
        {"kind": "Text", "text": text},
        {"kind": "Gen", "name": "a", "params": {"max_tokens": TOKENS}},
    ]
    return {"version": 1, "prompt": "", "program": {"nodes": nodes}}


def _turn(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}


SAMPLING = {"max_new_tokens": TOKENS, "ignore_eos": True}
REQUESTS: dict[str, Callable[[str], Asked]] = {
    "generate": lambda text: ("/generate", {"text": text, "sampling_params": SAMPLING}),
    "generate, streamed": lambda text: ("/generate", {"text": text, "sampling_params": SAMPLING, "stream": True}),
    "completions": lambda text: ("/v1/completions", {"prompt": text, "max_tokens": TOKENS}),
    "chat": lambda text: ("/v1/chat/completions", _turn(text)),
    "chat, streamed": lambda text: (
        "/v1/chat/completions", {**_turn(text), "stream": True, "stream_options": {"include_usage": True}}
    ),
    "responses": lambda text: ("/v1/responses", {"input": text, "max_output_tokens": TOKENS, "store": False}),
    "messages": lambda text: ("/v1/messages", _turn(text)),
    "ollama": lambda text: ("/api/chat", {
        "model": "day", "stream": False, "options": {"num_predict": TOKENS}, "messages": _turn(text)["messages"],
    }),
    "program": lambda text: ("/program", _program(text)),
    "gRPC": lambda text: ("/Generate", {"input_ids": [100 + ord(letter) for letter in text]}),
}  # fmt: skip


def _usage(told: Told) -> tuple[int, int]:
    """Tokens of the prompt and of the answer, in any protocol's names."""
    usage = told.get("usage") or told.get("meta_info") or told
    prompt = usage.get("prompt_tokens", usage.get("prompt_eval_count"))
    if prompt is None:
        prompt = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    for name in ("completion_tokens", "output_tokens", "eval_count"):
        if name in usage:
            return prompt, usage[name]
    raise KeyError(f"no number of tokens in {usage}")


def _last(content: str) -> Told:
    """The whole answer, or the last event of a stream that has a usage; an error, if there is one."""
    if not content.startswith("data:"):
        found: Told = json.loads(content)
        return found
    events = [json.loads(line[5:]) for line in content.splitlines() if line.startswith("data: {")]
    return next((each for each in events if "error" in each), events[-1])


@dataclass(frozen=True)
class Answer:
    """Answer of the server, of either kind.

    Attributes:
        status: its status, in HTTP's numbers.
        told: what it says, or the last event of a stream.
        wait: seconds after which to ask again; None if it does not say so.
    """

    status: int
    told: Told
    wait: int | None


@dataclass(frozen=True)
class Server:
    """Connections to the server: of HTTP, and of its gRPC service."""

    http: httpx2.AsyncClient
    stub: services.SglangSchedulerStub

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        if path == "/Generate":
            return await self._call(body["input_ids"])
        answer = await self.http.post(path, json=body)
        wait = answer.headers.get("retry-after")
        return Answer(answer.status_code, _last(answer.text), None if wait is None else int(wait))

    async def _call(self, ids: list[int]) -> Answer:
        params = pb.SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
        tokens = pb.TokenizedInput(input_ids=ids)
        request = pb.GenerateRequest(
            request_id=uuid.uuid4().hex, tokenized=tokens, sampling_params=params
        )
        try:
            [found] = [
                each async for each in self.stub.Generate(request, timeout=300, metadata=KEY)
            ]
        except grpc.aio.AioRpcError as error:
            busy = error.code() == grpc.StatusCode.UNAVAILABLE  # gRPC has no Retry-After
            return Answer(503 if busy else 500, {"error": error.details()}, 1 if busy else None)
        whole = found.complete
        return Answer(
            200,
            {"prompt_tokens": whole.prompt_tokens, "completion_tokens": whole.completion_tokens},
            None,
        )


@dataclass
class Day:
    """What the clients have counted.

    Attributes:
        answers: answers by protocol and outcome.
        statuses: answers by path and status.
        prompt, generated: tokens of answers that did not fail.
        left: requests that are still to be made.
        again: refusals after which a client has asked again.
        kills: times of kills.
        back: seconds from each kill to the first answer to who asked after it.
        killed: requests that were open at a kill and failed.
        lost: failures of others.
    """

    left: int
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    prompt: int = 0
    generated: int = 0
    again: int = 0
    kills: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    killed: int = 0
    lost: list[str] = field(default_factory=list)

    async def ask(self, server: Server, draw: random.Random) -> None:
        """Makes a request, again and again while the server says when to come back."""
        name, make = draw.choice([*REQUESTS.items()])
        path, body = make(text_of(draw))
        while True:
            began = time.monotonic()
            answer = await server.ask(path, body)
            self.statuses[path, str(answer.status)] += 1
            failed = answer.status != 200 or bool(answer.told.get("error"))
            outcome = (
                "an error in the stream" if failed and answer.status == 200 else str(answer.status)
            )
            self.answers[name, outcome] += 1
            if not failed:
                break
            if any(began < killed for killed in self.kills):
                self.killed += 1
                return
            if answer.wait is None:
                self.lost.append(f"{name}: {answer.told}"[:300])
                return
            self.again += 1
            await asyncio.sleep(answer.wait)
        prompt, generated = _usage(answer.told)
        self.prompt += prompt
        self.generated += generated


def text_of(draw: random.Random) -> str:
    """Some words, by chance."""
    return " ".join(draw.choices(WORDS, k=draw.randrange(1, 30)))


def _children(pid: int) -> dict[int, str]:
    """Command lines of the processes that a process has started, by id."""
    return {
        int(child): Path(f"/proc/{child}/cmdline").read_text()
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    }


def _memory(pid: int) -> int:
    """Bytes of a process that are in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _total(metrics: str, name: str, labels: Mapping[str, str]) -> int:
    """Sum of a metric over all lines with these labels."""
    lines = (line for line in metrics.splitlines() if line.startswith(name + "{"))
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return round(
        sum(float(line.split()[-1]) for line in lines if all(each in line for each in wanted))
    )


async def disturb(day: Day, server: Server, process: int, kind: str) -> None:
    """Kills the engine, drains it, or gives it its weights again."""
    http = server.http
    if kind == "reload":
        path = (await http.get("/get_model_info")).json()["model_path"]
        (await http.post("/update_weights_from_disk", json={"model_path": path})).raise_for_status()
    elif kind == "drain":
        (await http.post("/pause_generation", json={"mode": "retract"})).raise_for_status()
        await asyncio.sleep(0.5)
        (await http.post("/continue_generation", json={})).raise_for_status()
    else:
        (engine,) = (pid for pid, line in _children(process).items() if "engine.child.main" in line)
        day.kills.append(time.monotonic())
        os.kill(engine, signal.SIGKILL)
        await day.ask(server, random.Random(len(day.kills)))
        day.back.append(time.monotonic() - day.kills[-1])


async def run(process: ServerProcess, grpc_port: int, given: argparse.Namespace) -> int:
    day = Day(given.requests)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=given.clients)
    async with (
        httpx2.AsyncClient(
            base_url=process.url, timeout=300, limits=limits, headers=dict(KEY)
        ) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
    ):
        server = Server(http, services.SglangSchedulerStub(channel))

        async def client(number: int) -> None:
            draw = random.Random(f"{given.seed} {number}")
            while day.left > 0:
                day.left -= 1
                await day.ask(server, draw)

        draw = random.Random(f"{given.seed} texts")
        for _ in range(CACHED // 512):
            texts = [text_of(draw) for _ in range(512)]
            (await http.post("/tokenize", json={"prompt": texts})).raise_for_status()
        before = (await http.get("/metrics")).text  # has the server's own first token
        clients = asyncio.gather(*map(client, range(given.clients)))
        kinds = ["drain", "kill", "reload"] * given.kills
        memory: list[int] = []
        for number, kind in enumerate(kinds, 1):
            while day.left > given.requests * (1 - number / (len(kinds) + 1)):
                await asyncio.sleep(0.02)
            await disturb(day, server, process.pid, kind)
            memory.append(_memory(process.pid))
        await clients
        memory.append(_memory(process.pid))
        counted = (await http.get("/metrics")).text
    for (name, status), count in sorted(day.answers.items()):
        print(f"  {name:20} {status:24} {count:6}")

    def total(metric: str, **labels: str) -> int:
        return _total(counted, metric, labels) - _total(before, metric, labels)

    pairs = {
        f"{path} {status}": (
            count,
            total("sglang_lite_http_responses_total", route=path, status=status),
        )
        for (path, status), count in sorted(day.statuses.items())
    }
    pairs["prompts' tokens"] = day.prompt, total("sglang:prompt_tokens_total")
    pairs["generated tokens"] = day.generated, total("sglang:generation_tokens_total")
    print(f"\n  {'':32} {'clients':>9} {'server':>9}")
    for name, (own, theirs) in pairs.items():
        print(f"  {name:32} {own:9} {theirs:9}{'' if own == theirs else '  DIFFERS'}")
    print(
        f"\n  memory of the server's process, MB: {' '.join(f'{each / 2**20:.0f}' for each in memory)}"
    )
    back = max(day.back, default=0)
    print(
        f"  {len(day.kills)} kills, answers again within {back:.1f} s; open at one and failed: {day.killed}"
    )
    print(
        f"  refused with Retry-After, and asked again: {day.again}; lost otherwise: {len(day.lost)}"
    )
    for each in day.lost[:5]:
        print(re.sub(r"\s+", " ", f"    {each}"))
    return int(
        bool(day.lost)
        or any(own != theirs for own, theirs in pairs.values())
        or memory[-1] > 1.05 * memory[0]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(describe())
    settings = {
        "model": given.model,
        "served_model_name": "day",
        "restart": True,
        "log_level": "error",
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        grpc_port = free.getsockname()[1]
    process = ServerProcess({**settings, "admin_api_key": ADMIN, "grpc_port": grpc_port}, 600.0)
    try:
        return asyncio.run(run(process, grpc_port, given))
    finally:
        process.end_server()


if __name__ == "__main__":
    sys.exit(main())
