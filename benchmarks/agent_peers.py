"""One agent in openai-agents, pydantic-ai and here, against one server of ours: lines, seconds, and
prompt tokens that the server computes.

    python benchmarks/agent_peers.py FILE [--python INTERPRETER] [--pages 10] [--repeat 3]
                                     [--agents openai-agents pydantic-ai …]

FILE is a model, for example a GGUF file; INTERPRETER has the peers (`pip install openai-agents
'pydantic-ai-slim[openai]'`). The agent reads a report whose pages come one by one from a tool, and
then answers. Every run is a process of its own on an empty cache; the seconds are those of the run,
without imports. Tokens are the differences of the server's counters, so all are counted alike.

Small models stop calling when they like. So that all agents have the same turns, those that use the
chat API reach the server through a relay in this process, which sets `tool_choice` to "required"
until the last page is read, and then to "auto", and changes nothing else. "sglang_lite, native" has
no chat requests to change: it sets `tool_choice="required"` and `max_calls=` itself, after which
`use_tools` adds a sentence to the last result. Checked is that each run reads all pages in order.

Lines are those of the agent's source below, without blank ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

TASK = '''
INSTRUCTIONS = "Read one page after the other. At the end, say the name of the last city."
QUESTION = "In which city does the report end? Begin with page 1."
PAGES = {pages}
read = []


def read_page(number: int) -> str:
    """Returns a page of the report."""
    read.append(number)
    if number < PAGES:
        return f"We went on to the next city. The next page is {{number + 1}}."
    return "The report ends in Oslo. There are no more pages. Now answer with one word: Oslo"
'''
OPENAI_AGENTS = """
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI
from task import INSTRUCTIONS, QUESTION, read_page

def run(url):
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url + "/v1", api_key="none")
    agent = Agent(
        "reader",
        instructions=INSTRUCTIONS,
        model=OpenAIChatCompletionsModel("reader", client),
        model_settings=ModelSettings(temperature=0, max_tokens=60),
        tools=[function_tool(read_page)],
    )
    return Runner.run_sync(agent, QUESTION, max_turns=40).final_output
"""
PYDANTIC_AI = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from task import INSTRUCTIONS, QUESTION, read_page

def run(url):
    provider = OpenAIProvider(base_url=url + "/v1", api_key="none")
    agent = Agent(
        OpenAIChatModel("reader", provider=provider),
        instructions=INSTRUCTIONS,
        model_settings={"temperature": 0, "max_tokens": 60},
        tools=[read_page],
    )
    return agent.run_sync(QUESTION).output
"""
OURS = """
import sglang_lite as sgl
from task import INSTRUCTIONS, QUESTION, read_page

@sgl.function
def reader(s):
    s += sgl.system(INSTRUCTIONS)
    s += sgl.user(QUESTION)
    return sgl.use_tools(s, [read_page], max_steps=40, temperature=0, max_tokens=60)

def run(url):
    backend = sgl.OpenAI("reader", base_url=url + "/v1", api_key="none")
    return reader.run(backend=backend).ret_value
"""
NATIVE = """
import sglang_lite as sgl
from task import INSTRUCTIONS, PAGES, QUESTION, read_page

@sgl.function
def reader(s):
    s += sgl.system(INSTRUCTIONS)
    s += sgl.user(QUESTION)
    limits = {"max_steps": 40, "max_calls": PAGES}
    options = {"tool_choice": "required", "temperature": 0, "max_tokens": 60}
    return sgl.use_tools(s, [read_page], **limits, **options)

def run(url):
    return reader.run(backend=sgl.RuntimeEndpoint(url)).ret_value
"""
AGENTS = {
    "openai-agents": OPENAI_AGENTS,
    "pydantic-ai": PYDANTIC_AI,
    "sglang_lite, OpenAI": OURS,
    "sglang_lite, native": NATIVE,
}
VERSIONS = """
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in ("openai-agents", "pydantic-ai-slim", "openai")))
"""
COUNTERS = ("prompt_tokens", "prompt_tokens_cached", "requests_submitted", "steps")


@contextmanager
def serve_model(file: str) -> Iterator[str]:
    """Yields the address of a server of a model while it runs."""
    command = [sys.executable, "-m", "sglang_lite.launch_server", "--model", file]
    command += ["--device", "cpu", "--port", "0", "--served-model-name", "reader"]
    command += ["--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = next(line for line in server.stdout if line.startswith("Serving"))
            yield line.split()[-1].rstrip("/")
        finally:
            server.terminate()


@contextmanager
def relay_to(server: str, pages: int) -> Iterator[str]:
    """Yields the address of a relay that sets `tool_choice` of chat requests."""
    client = httpx2.Client(base_url=server, timeout=600)

    class Relay(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body.get("tools"):
                read = sum(message["role"] == "tool" for message in body["messages"])
                body["tool_choice"] = "required" if read < pages else "auto"
            self.send_back(client.post(self.path, json=body))

        def do_GET(self) -> None:
            self.send_back(client.get(self.path))

        def send_back(self, answer: httpx2.Response) -> None:
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None:
            pass

    with client, ThreadingHTTPServer(("127.0.0.1", 0), Relay) as relay:
        relay.daemon_threads = True
        thread = threading.Thread(target=relay.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{relay.server_address[1]}"
        finally:
            relay.shutdown()
            thread.join()


def read_counters(server: str) -> dict[str, int]:
    text = httpx2.get(f"{server}/metrics", timeout=60).text
    found = {}
    for name in COUNTERS:
        (value,) = re.findall(rf"^sglang_lite_{name}_total{{.*}} (\S+)$", text, re.MULTILINE)
        found[name] = int(float(value))
    return found


def run_source(file: str, url: str) -> dict[str, Any]:
    """Runs an agent's source in this process; for the child."""
    run = runpy.run_path(file)["run"]
    began = time.perf_counter()
    answer = run(url)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "answer": answer, "read": sys.modules["task"].read}


def run_agent(name: str, python: str, folder: Path, server: str, relay: str) -> dict[str, Any]:
    """Runs an agent in a process on an empty cache."""
    file = folder / "agent.py"
    file.write_text(AGENTS[name].lstrip())
    ours = name.startswith("sglang_lite")
    url = server if AGENTS[name] is NATIVE else relay
    httpx2.post(f"{server}/flush_cache", timeout=60).raise_for_status()
    before = read_counters(server)
    packages = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable if ours else python, __file__, "--child", str(file), url],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": packages},
    )
    after = read_counters(server)
    counts = {each: after[each] - before[each] for each in COUNTERS}
    return {**json.loads(done.stdout.splitlines()[-1]), **counts}


def compare_agents(options: argparse.Namespace) -> None:
    """Prints a row for each agent."""
    pages = options.pages
    print(f"{read_versions(options.python)}; load {os.getloadavg()[0]:.1f}", flush=True)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.agents}
    with (
        tempfile.TemporaryDirectory() as place,
        serve_model(options.model) as server,
        relay_to(server, pages) as relay,
    ):
        folder = Path(place)
        (folder / "task.py").write_text(TASK.format(pages=pages))
        for _ in range(options.repeat):
            for name, found in runs.items():
                found.append(run_agent(name, options.python, folder, server, relay))
                assert found[-1]["read"] == list(range(1, pages + 1)), f"{name}: {found[-1]}"
    print("| agent | lines | s | prompt tokens sent | computed | steps | turns | answer |")
    print("|---|---|---|---|---|---|---|---|")
    for name, found in runs.items():
        print(describe_runs(name, found), flush=True)
    answers = {str(run["answer"]).strip() for found in runs.values() for run in found}
    print(f"answers equal: {'yes' if len(answers) == 1 else 'no'}; load {os.getloadavg()[0]:.1f}")


def describe_runs(name: str, runs: list[dict[str, Any]]) -> str:
    lines = sum(bool(line.strip()) for line in AGENTS[name].splitlines())
    seconds = [run["seconds"] for run in runs]
    sent = {run["prompt_tokens"] for run in runs}
    computed = {run["prompt_tokens"] - run["prompt_tokens_cached"] for run in runs}
    turns = {run["requests_submitted"] for run in runs}
    steps = {run["steps"] for run in runs}
    answers = {str(run["answer"]).strip() for run in runs}
    wall = f"{median(seconds):.1f} ({min(seconds):.1f}–{max(seconds):.1f})"
    counts = [
        ", ".join(f"{each:,}" for each in sorted(every)) for every in (sent, computed, steps, turns)
    ]
    return " | ".join([f"| {name}", str(lines), wall, *counts, f"{'; '.join(sorted(answers))} |"])


def read_versions(python: str) -> str:
    command = [python, "-c", VERSIONS.strip()]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="FILE")
    parser.add_argument("--python", default=sys.executable, metavar="INTERPRETER")
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--agents", nargs="+", choices=list(AGENTS), default=list(AGENTS))
    options = parser.parse_args()
    compare_agents(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(run_source(*sys.argv[2:])))
    else:
        main()
