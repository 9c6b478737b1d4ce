"""A gateway in front of servers that do nothing: its own time of a request, and where rows go that
begin alike.

    python benchmarks/gateway.py [--package smg] [--requests 2000] [--groups 24] [--rows 40]
    [--at-once 8]

*Time*: processor time of the gateway's process, from `/proc`, over all requests, which come one
after the other on one connection; each is answered at once by a stub in this process. For
comparison, the wall time of a request with the gateway and without it.

*Rows*: few-shot rows, `--groups` sets of examples (some 2,000 characters each) with `--rows`
questions each, in random order over two servers, `--at-once` at a time: the share that goes to the
server which most of its set went to, after the first of the set.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2

sys.path.insert(0, str(Path(__file__).parent.parent))

from sglang_lite.server.replicas.gateway import Gateway
from sglang_lite.server.settings import ReplicaSettings, ServerSettings

TOLD = {
    "/health": {}, "/server_info": {"model_path": "m"}, "/model_info": {"model_path": "m", "is_generation": True},
    "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]},
    "/v1/loads": {"dp_rank_count": 1, "loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}]},
    "/generate": {"text": "yes", "meta_info": {}},
}  # fmt: skip


class Stub(ThreadingHTTPServer):
    """Server that answers at once, and knows the texts of its requests."""

    daemon_threads, request_queue_size = True, 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.texts: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Requests of a stub."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet

    def log_message(self, *_: object) -> None:
        """Logs nothing."""

    def do_GET(self) -> None:  # as the base class calls it
        """Answers."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.partition("?")[0]
        if path == "/generate":
            assert isinstance(self.server, Stub)
            self.server.texts.append(json.loads(body)["text"])
        data = json.dumps(TOLD.get(path, {})).encode()
        self.send_response(200 if path in TOLD else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET  # noqa: N815 # as the base class calls it


def processor_s(pid: int) -> float:
    """Processor time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(client: httpx2.Client, url: str, text: str) -> None:
    """Sends a request, and reads its answer."""
    body = {"text": text, "sampling_params": {"max_new_tokens": 1}}
    client.post(f"{url}/generate", json=body).raise_for_status()


def times(gateway: Gateway, stub: Stub, requests: int) -> None:
    """Prints the gateway's time of a request."""
    told = {}
    with httpx2.Client(timeout=60, trust_env=False) as client:
        for name, url in (("direct", stub.url), ("gateway", gateway.url)):
            for i in range(50):
                ask(client, url, f"warm {i}")
            before, started = processor_s(gateway.pid), time.perf_counter()
            for i in range(requests):
                ask(client, url, f"Question {i}: is {i} even?")
            spent, took = processor_s(gateway.pid) - before, time.perf_counter() - started
            told[name] = spent / requests * 1000, took / requests * 1000
    idle = told["direct"][0]  # what the gateway does beside requests
    print(
        f"gateway's processor time of a request: {told['gateway'][0] - idle:.3f} ms (and {idle:.3f} ms beside it)"
    )
    print(
        f"wall time of a request: {told['direct'][1]:.2f} ms direct, {told['gateway'][1]:.2f} ms through the gateway"
    )


def rows(gateway: Gateway, stubs: list[Stub], groups: int, each: int, at_once: int) -> None:
    """Prints where rows go that begin alike."""
    draw = random.Random(0)
    shots = [
        " ".join(f"Q{draw.random()} A{draw.random()}" for _ in range(50)) for _ in range(groups)
    ]
    asked = [(group, i) for group in range(groups) for i in range(each)]
    draw.shuffle(asked)
    with httpx2.Client(timeout=60, trust_env=False) as client, ThreadPoolExecutor(at_once) as pool:
        for done in [
            pool.submit(ask, client, gateway.url, f"{shots[group]} Q{i}") for group, i in asked
        ]:
            done.result()
    went: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for stub in stubs:
        for text in stub.texts:
            went[text.rpartition(" Q")[0]][stub.url] += 1
    found = [went[text] for text in shots]
    share = sum(max(count.values()) - 1 for count in found) / sum(
        count.total() - 1 for count in found
    )
    busiest = max(sum(count[stub.url] for count in found) for stub in stubs) / len(asked)
    print(
        f"rows that went where their prefix is: {share:.1%}; the busiest server had {busiest:.1%}"
    )


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", default="auto")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=8)
    options = parser.parse_args()
    stubs = [Stub(), Stub()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    replicas = ReplicaSettings(workers=tuple(stub.url for stub in stubs), gateway=options.package)
    gateway = Gateway(ServerSettings(log_level="error"), replicas, "127.0.0.1", port)
    try:
        for stub in stubs:
            gateway.add_worker(stub.url)
        while len(gateway.known) < len(stubs):
            time.sleep(0.1)
        time.sleep(2)  # it asks them for their load
        print(gateway.package)
        times(gateway, stubs[0], options.requests)
        for stub in stubs:
            stub.texts.clear()
        rows(gateway, stubs, options.groups, options.rows, options.at_once)
    finally:
        gateway.kill()


if __name__ == "__main__":
    main()
