"""Savings of compiling a program: compiled, as it is, and node by node, in turn.

    python benchmarks/compiled.py [--only caller,plain,latency,http,pool] [--repeat 5] [--rows 1000]
        [--own 2000] [--programs 32] [--tokens 24]

caller   default model in a process of its own, rows of four generations of one token: processor microseconds of the
         caller a row of `run_batch`, every variable read
plain    the same rows on a backend that answers at once, and costs nothing else: programs a processor second
latency  default model: seconds of a program of eight generations of two tokens (and of 16), and of 64 of them at once
http     rows of four generations on a scripted engine of 1 and of 20 ms a step: in this process, and in one of its own
         with a server, behind a line of 20 ms each way: requests, seconds, processor microseconds a row of each process
pool     default model: 32 programs of four generations, each after 2,000 tokens of its own, at once, in a pool for 8 of
         them: programs a second; prompt tokens computed over those that there are, and the most of one program (it
         takes minutes: 64,000 tokens a batch at least, and nine batches with `--repeat 3`)

Processor time is of this process alone. Ratios are of medians of the same run.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import describe

import sglang_lite as sgl
from sglang_lite.bench.scripted_core import scripted_engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.program.nodes import Gen, Program
from sglang_lite.protocol import Generation, Played, ProgramResult, Span, Usage
from sglang_lite.runtime.config import DEFAULT_MODEL

SECTIONS = ("caller", "plain", "latency", "http", "pool")
BETWEEN = " So say now what comes next of it, and why that is:"
_USAGE = Usage(prompt_tokens=8, completion_tokens=1)


@sgl.function
def four(s: Any, question: str, number: int) -> None:
    s += f"Question {number}: {question}\n" + sgl.gen("a", max_tokens=1)
    s += " and " + sgl.gen("b", max_tokens=1)
    s += " then " + sgl.gen("c", max_tokens=1)
    s += f" after {number}: " + sgl.gen("d", max_tokens=1)


@sgl.function
def eight(s: Any, question: str, tokens: int) -> None:
    s += question
    for i in range(8):
        s += f" {i}: " + sgl.gen(f"g{i}", max_tokens=tokens, ignore_eos=True)


@sgl.function
def after_own(s: Any, own: str, tokens: int) -> None:
    s += own
    for name in "abcd":
        s += BETWEEN + sgl.gen(name, max_tokens=tokens, ignore_eos=True)


class AtOnce(sgl.BaseBackend):
    """Plays programs at once: what is measured is everything else."""

    enforces = True

    def open_program(self, sink: Any, *, stream: bool, priority: int = 0) -> Any:
        raise NotImplementedError("it plays whole programs alone")

    def play_program(self, program: Program, sink: Any, flush: Any = None, priority: int = 0) -> Callable[[], object]:
        for place, node in enumerate(program.nodes):
            if isinstance(node, Gen):
                sink(Played((place,), node.name, Generation("a ", (7,), (Span("a ", (7,)),), "length", usage=_USAGE)))
        sink(ProgramResult("a a a a "))
        if flush is not None:
            flush()
        return int


def rows(count: int) -> list[dict[str, Any]]:
    return [{"question": f"what is {i}?", "number": i} for i in range(count)]


def batch(program: Any, backend: sgl.BaseBackend, given: list[dict[str, Any]]) -> None:
    for state in program.run_batch(given, backend=backend):
        for name in "abcd":
            state[name]


def processor(work: Callable[[], object], repeat: int) -> float:
    """Median processor seconds of this process, after a first time."""
    found = []
    for _ in range(repeat + 1):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return median(found[1:])


def elapsed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def caller(count: int, repeat: int) -> None:
    with sgl.Engine() as engine:
        backend = LocalBackend(engine)
        compiled = four.compile(backend)
        given = rows(count)
        found = {
            name: processor(partial(batch, program, backend, given), repeat) / count * 1e6
            for name, program in (("as it is", four), ("compiled", compiled))
        }
    print(f"caller: {found['as it is']:.0f} us a row as it is, {found['compiled']:.0f} us compiled: "
          f"{found['as it is'] / found['compiled']:.2f}x less", flush=True)  # fmt: skip


def plain(count: int, repeat: int) -> None:
    backend, given = AtOnce(), rows(count)
    compiled = four.compile(backend)
    seconds = processor(partial(batch, compiled, backend, given), repeat)
    print(f"plain: {count / seconds:,.0f} programs a processor second", flush=True)


def latency(repeat: int) -> None:
    given = [{"question": f"What is {i}?"} for i in range(64)]
    with sgl.Engine() as engine:
        backend = LocalBackend(engine)
        for tokens in (2, 16):
            program = eight.bind(tokens=tokens)
            ways: dict[str, tuple[Any, dict[str, Any]]] = {
                "node by node": (program, {"backend": backend, "push_down": False}),
                "as it is": (program, {"backend": backend}),
                "compiled": (program.compile(backend), {"backend": backend}),
            }
            one = {name: partial(run_one, *way) for name, way in ways.items()}
            told(f"latency, 8 x {tokens} tokens, ms", in_turn(one, repeat))
            if tokens == 2:
                many = {name: partial(run_many, *way, given) for name, way in ways.items()}
                told("64 at once, ms", in_turn(many, max(repeat // 2, 1)))


def run_one(program: Any, options: dict[str, Any], question: str) -> None:
    program.run(question, **options)["g7"]


def run_many(program: Any, options: dict[str, Any], given: list[dict[str, str]], _: str) -> None:
    for state in program.run_batch(given, **options):
        state["g7"]


def in_turn(ways: Mapping[str, Callable[[str], Any]], repeat: int) -> dict[str, float]:
    """Median seconds of each way, one after the other, after a first time."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(repeat + 1):
        for name, work in ways.items():
            found[name].append(elapsed(partial(work, f"What is {i}?")))
    return {name: median(each[1:]) for name, each in found.items()}


def told(what: str, found: dict[str, float]) -> None:
    each = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in found.items())
    ratio = found["node by node"] / found["compiled"]
    print(
        f"{what}: {each}; compiled {ratio:.2f}x, of as it is {found['as it is'] / found['compiled']:.2f}x", flush=True
    )


_SERVER = """
import gc, sys
from serve import serving
from sglang_lite.bench.scripted_core import scripted_engine
from sglang_lite.runtime.config import DEFAULT_MODEL
with scripted_engine(DEFAULT_MODEL, float(sys.argv[1])) as engine, serving(engine) as url:
    gc.collect()
    gc.freeze()
    print(url, flush=True)
    sys.stdin.read()
"""
_LINE = """
import sys
from serve import Line
line = Line(sys.argv[1])
print(line.url, flush=True)
sys.stdin.read()
print(line.requests)
"""


@contextmanager
def other(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process beside this one that runs code of these benchmarks."""
    folder = Path(__file__).parent
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)])}
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=paths) as process:
        yield process
        process.communicate()


def printed(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def spent(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def http(count: int, repeat: int, step_s: float) -> None:
    given = rows(count)
    with scripted_engine(DEFAULT_MODEL, step_s) as engine:
        local = LocalBackend(engine)
        here = four.compile(local)
        alone = processor(lambda: here.run_batch(given, backend=local), repeat)
        in_process = median([elapsed(lambda: here.run_batch(given, backend=local)) for _ in range(repeat)])
    with other(_SERVER, str(step_s)) as server, other(_LINE, printed(server)) as line:
        remote = sgl.RuntimeEndpoint(printed(line))
        there = four.compile(remote)
        work = partial(there.run_batch, given, backend=remote)
        work()
        before = spent(server.pid)
        client = processor(work, repeat)
        served = (spent(server.pid) - before) / (repeat + 1)
        over = median([elapsed(work) for _ in range(repeat)])
        remote.shutdown()
        asked = int(line.communicate()[0].split()[-1]) / (2 * repeat + 2)
    ratio = over / in_process
    print(f"http, {step_s * 1e3:g} ms a step: {count} rows in {asked:g} requests, {over:.3f} s, {in_process:.3f} s in "
          f"process: {ratio:.2f}x; processor us a row: client {client / count * 1e6:.0f}, server with engine "
          f"{served / count * 1e6:.0f}, in process {alone / count * 1e6:.0f}", flush=True)  # fmt: skip


def pool(own: int, programs: int, tokens: int, repeat: int) -> None:
    draw = random.Random(0)
    room = programs // 4 * (own + 4 * (16 + tokens) + 16)  # `BETWEEN` has 14 tokens
    with sgl.Engine(max_total_tokens=room) as engine:
        backend, each_way = LocalBackend(engine), after_own.bind(tokens=tokens)
        ways: dict[str, tuple[Any, bool]] = {
            "node by node": (each_way, False),
            "as it is": (each_way, True),
            "compiled": (each_way.compile(backend), True),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        again: dict[str, list[float]] = {name: [] for name in ways}  # of each program
        for i in range(repeat + 1):
            for name, (program, push_down) in ways.items():
                count = programs if i else 2  # the first time warms up
                given = [{"own": fresh_text(engine, draw, own)} for _ in range(count)]
                began = time.perf_counter()
                states = program.run_batch(given, backend=backend, push_down=push_down, num_threads=count)
                took = time.perf_counter() - began
                if i:
                    rates[name].append(count / took)
                    again[name] += map(computed_again, states)
    base = median(rates["node by node"])
    for name, each in rates.items():
        mean, most = sum(again[name]) / len(again[name]), max(again[name])
        print(f"pool, {name:13}{median(each):7.3f} programs/s, {median(each) / base:.2f}x; computed {mean:.2f}x, "
              f"{most:.2f}x of one program at most", flush=True)  # fmt: skip


def fresh_text(engine: sgl.Engine, draw: random.Random, tokens: int) -> str:
    """A text of about so many tokens that no other one begins with."""
    ids = [draw.randrange(1000, engine.vocab_size) for _ in range(tokens)]
    return engine.tokenizer.decode(engine.tokenizer.encode(engine.tokenizer.decode(ids))[:tokens])


def computed_again(state: sgl.ProgramState) -> float:
    """Prompt tokens that a program had computed, over those of its longest prompt."""
    usage, last = state.usage(), state.usage("d")
    return (usage.prompt_tokens - usage.cached_tokens) / last.prompt_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--own", type=int, default=2000, help="tokens of a program's own, in `pool`")
    parser.add_argument("--programs", type=int, default=32, help="at once in `pool`, which holds a fourth of them")
    parser.add_argument("--tokens", type=int, default=24, help="of each generation in `pool`")
    options = parser.parse_args()
    only = options.only.split(",")
    if unknown := set(only) - set(SECTIONS):
        parser.error(f"no section: {', '.join(unknown)}")
    gc.collect()
    gc.freeze()  # torch, which `machine` imports: a caller has none of it
    print(f"{describe()}; load {os.getloadavg()[0]:.1f}", flush=True)
    if "caller" in only:
        caller(options.rows, options.repeat)
    if "plain" in only:
        plain(options.rows, options.repeat)
    if "latency" in only:
        latency(options.repeat)
    if "http" in only:
        http(options.rows, options.repeat, 0.001)
        http(options.rows, options.repeat, 0.02)
    if "pool" in only:
        pool(options.own, options.programs, options.tokens, options.repeat)


if __name__ == "__main__":
    main()
