"""Cost of the trace of a run: the log that every run keeps, and what is made of it when somebody
reads.

    python benchmarks/tracing.py [--seconds 1] [--nodes 10000] [--programs 8]

Programs of four generations on a backend that answers at once. Times are the process's CPU time.
The log is one list a branch; its own work is an append a node, which is timed by itself. Its bytes
are those that are given back when the lists are emptied; texts and results, which states keep
anyway, are in none.

Then the same beside the default model, in this process: the log can't be switched off, so the CPU
time within its functions (the appends, when each node ended, and in the engine why tokens were not
cached, and which were forced) over that of the whole run. Timing them is in it: each takes a
microsecond or so more than alone.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import sglang_lite as sgl
from sglang_lite.lang.execution.run import RunUsage
from sglang_lite.lang.trace import Trace, as_html
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.requests import output_builder


@sgl.function
def four_gens(s: Any) -> None:
    for name in "abcd":
        s += "Answer this question, please: "
        s += sgl.gen(name, max_tokens=16)


@sgl.function
def many(s: Any, nodes: int) -> None:
    for i in range(nodes // 2):
        s += f"Question {i}: is it so? "
        s += sgl.gen("a", max_tokens=16)
        if i % 100 == 99:  # a prompt that only grew would be what is measured
            with s.checkpoint() as c:
                c.rollback()


def cpu(work: Callable[[], object], seconds: float) -> float:
    """Microseconds of a call, the median of five stretches."""
    work()
    samples = []
    for _ in range(5):
        count, started = 0, time.process_time()
        while not count or time.process_time() - started < seconds / 5:
            work()
            count += 1
        samples.append((time.process_time() - started) / count * 1e6)
    return median(samples)


def append_cost() -> float:
    """Microseconds of one append."""
    count, best = 100_000, float("inf")
    for _ in range(5):
        log: list[object] = []
        append, started = log.append, time.process_time()
        for _ in range(count):
            append(log)
        best = min(best, (time.process_time() - started) / count * 1e6)
    return best


def bytes_a_node(backend: sgl.BaseBackend, programs: int) -> float:
    tracemalloc.start()
    states = [four_gens.run(backend=backend) for _ in range(programs)]
    for state in states:
        state.sync()
    nodes = sum(len(state.branch.player.played) for state in states)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for state in states:
        state.branch.player.played.clear()
    gc.collect()
    freed = before - tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return freed / nodes


LOG = (
    (RunUsage, "record_result"),
    (PrefixCache, "explain_miss"),
    (output_builder, "miss_fields"),
    (output_builder, "forced_text_spans"),
)


@contextmanager
def timed(functions: Iterable[tuple[object, str]]) -> Iterator[list[float]]:
    """`with`: functions note the CPU seconds of each of their calls."""
    spent: list[float] = []
    whole = {each: getattr(*each) for each in functions}

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                spent.append(time.thread_time() - began)

        return noted

    for (owner, name), work in whole.items():
        setattr(owner, name, noting(work))
    try:
        yield spent
    finally:
        for (owner, name), work in whole.items():
            setattr(owner, name, work)


def beside_a_model(programs: int, append_us: float) -> None:
    with sgl.Engine(in_process=True) as engine, timed(LOG) as spent:
        four_gens.run(backend=engine).sync()
        spent.clear()
        began = time.process_time()
        states = [four_gens.run(backend=engine) for _ in range(programs)]
        for state in states:
            state.sync()
        whole = time.process_time() - began
    nodes = sum(len(state.trace().nodes) for state in states)
    log = sum(spent) + nodes * append_us / 1e6
    print(f"{programs} programs on the default model: {whole * 1e3:.0f} ms; their log, in {len(spent)} calls and "
          f"{nodes} appends: {log * 1e3:.2f} ms, {log / whole:.2%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--nodes", type=int, default=10_000, help="of the long run")
    parser.add_argument("--programs", type=int, default=8, help="beside a model")
    options = parser.parse_args()
    backend = sgl.ScriptedBackend(default="an answer of some words")
    state = four_gens.run(backend=backend)
    nodes = len(state.trace().nodes)
    run = cpu(lambda: four_gens.run(backend=backend).sync(), options.seconds)
    backend.calls.clear()
    read = cpu(state.trace, options.seconds)
    one = append_cost()
    append = one * nodes
    print(f"a run of {nodes} nodes: {run:.1f} us; its log: {append:.2f} us, {append / run:.2%}")
    print(
        f"reading its trace: {read:.1f} us, {read / nodes:.1f} a node; bytes of the log a node: ",
        end="",
    )
    print(f"{bytes_a_node(backend, max(options.nodes // 8, 10)):.0f}")
    beside_a_model(options.programs, one)
    long = many.run(nodes=options.nodes, backend=backend)
    long.sync()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.jsonl"
        steps: dict[str, Callable[[], Any]] = {
            "trace()": long.trace, "save": lambda: trace.save(file), "load": lambda: Trace.load(file),
            "as_html": lambda: as_html(trace),
        }  # fmt: skip
        trace = long.trace()
        for name, work in steps.items():
            started = time.process_time()
            made = work()
            print(
                f"{len(trace.nodes):,} nodes, {name}: {(time.process_time() - started) * 1e3:.0f} ms",
                end="",
            )
            size = (
                file.stat().st_size if name == "save" else len(made) if isinstance(made, str) else 0
            )
            print(f", {size / len(trace.nodes):.0f} bytes a node" if size else "")


if __name__ == "__main__":
    main()
