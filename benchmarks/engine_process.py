"""Costs and savings of an engine in a process of its own, against the same engine here.

    python benchmarks/engine_process.py [--shape qwen3-0.6b] [--repeat 5] [--only
    undisturbed,busy,...]

undisturbed  seconds of workloads of `sglang-lite bench`, both forms in turn, and the median of the
pairs' ratios
busy         the same while threads of the caller compute: a loop in Python, `json.loads` in a loop, eight such threads;
             over the time of the same form beside the same loops in an unrelated process
program      microseconds of a program of four generations of one token; processor time of the caller a row of a batch
streams      processor time of the caller a token, of 256 streams; with `stream_interval_s`
start        of a fresh process: seconds to the first token, and what memory the caller has
hostile      a stream beside requests (`--requests`, 60) whose constraints take long or are refused: the longest gap
             between two tokens; and beside the same requests without constraints

Weights are random. On a CPU the shape is `small`, and texts are 16 times shorter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import sglang_lite as sgl
from sglang_lite.bench.shapes import ON_CPUS, SHAPES, text_from_ids, write_model
from sglang_lite.bench.workloads import WORKLOADS, run_workload
from sglang_lite.protocol import Delta, SamplingParams

TOKENS = 300_000  # of KV cache: two engines share a GPU
SECTIONS = ("undisturbed", "busy", "program", "streams", "start", "hostile")
_DOCUMENT = json.dumps({f"key{i}": [i, str(i), {"x": i / 7}] for i in range(200)})
_PYTHON = "x = 0\nwhile True: x += 1"
_JSON = f"import json\nwhile True: json.loads({_DOCUMENT!r})"


def start(folder: Path, *, here: bool, **settings: Any) -> sgl.Engine:
    common: dict[str, Any] = {"load_format": "dummy", "max_total_tokens": TOKENS, "seed": 0}
    return sgl.Engine(str(folder), in_process=here, **common | settings)


@contextmanager
def threads(code: str, count: int) -> Iterator[None]:
    """Threads of this process that run some code, until the block ends."""
    ended = threading.Event()
    body = compile(code.replace("while True", "while not ended()"), "busy", "exec")
    started = [
        threading.Thread(target=exec, args=(body, {"ended": ended.is_set})) for _ in range(count)
    ]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in started:
            thread.join()


@contextmanager
def unrelated(code: str, count: int) -> Iterator[None]:
    """The same in a process of its own."""
    whole = f"import threading\ndef run():\n{chr(10).join('    ' + line for line in code.splitlines())}\n"
    whole += f"for _ in range({count}): threading.Thread(target=run).start()"
    process = subprocess.Popen([sys.executable, "-c", whole])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def undisturbed(
    engines: dict[str, sgl.Engine], names: list[str], work: Callable[[str], Any], repeat: int
) -> None:
    print(
        f"\n{'undisturbed':14}{'here, s':>10}{'process, s':>12}{'ratio':>8}   (of {repeat} pairs: median, range)"
    )
    for name in names:
        pairs = []
        for i in range(repeat + 1):  # the first warms up
            took = {
                form: run_workload(engine, work(name)).seconds for form, engine in engines.items()
            }
            if i:
                pairs.append((took["here"], took["process"]))
        ratios = sorted(b / a for a, b in pairs)
        print(f"{name:14}{median(a for a, _ in pairs):10.4f}{median(b for _, b in pairs):12.4f}"
              f"{median(ratios):8.3f}   ({ratios[0]:.3f}-{ratios[-1]:.3f})", flush=True)  # fmt: skip


def busy(
    engines: dict[str, sgl.Engine], names: list[str], work: Callable[[str], Any], repeat: int
) -> None:
    loops = {"x += 1": (_PYTHON, 1), "json.loads": (_JSON, 1), "8 threads": (_PYTHON, 8)}
    columns = f"{'alone, s':>10}{'unrelated':>11}{'beside':>9}{'/alone':>8}{'/unrelated':>12}"
    print(f"\n{'busy, process':28}{columns}")
    engine = engines["process"]
    for name in names:
        for label, (code, count) in loops.items():
            took: dict[str, list[float]] = {"alone": [], "unrelated": [], "beside": []}
            for _ in range(repeat):
                took["alone"].append(run_workload(engine, work(name)).seconds)
                with unrelated(code, count):
                    took["unrelated"].append(run_workload(engine, work(name)).seconds)
                with threads(code, count):
                    took["beside"].append(run_workload(engine, work(name)).seconds)
            alone, apart, beside = (median(took[key]) for key in ("alone", "unrelated", "beside"))
            print(f"{name + ', ' + label:28}{alone:10.4f}{apart:11.4f}{beside:9.4f}{beside / alone:8.2f}"
                  f"{beside / apart:12.2f}", flush=True)  # fmt: skip
    few = work("decode1").scaled_down(8)
    alone = run_workload(engines["here"], few).seconds
    with threads(_PYTHON, 1):
        beside = run_workload(engines["here"], few).seconds
    tokens = few.output_lengths[0]
    print(
        f"in process: {tokens} tokens alone {alone:.4f} s, beside x += 1 {beside:.4f} s: {beside / alone:.0f}x"
    )


_BEGINNING, _QUESTION = text_from_ids(range(100, 110)), text_from_ids(range(5))


@sgl.function
def _four(s: Any) -> None:
    s += _BEGINNING
    for name in "abcd":
        s += _QUESTION + sgl.gen(name, max_tokens=1, ignore_eos=True)


def program(engines: dict[str, sgl.Engine], repeat: int) -> None:
    took: dict[str, list[float]] = {form: [] for form in engines}
    for i in range(40 * repeat):
        for form, engine in engines.items():
            began = time.perf_counter()
            _four.run(backend=engine, temperature=0).text()
            if i >= 20:
                took[form].append(time.perf_counter() - began)
    here, process = (median(took[form]) * 1e6 for form in ("here", "process"))
    print(f"\nprogram of 4 generations: here {here:.0f} us, process {process:.0f} us: {process - here:+.0f} us "
          f"(medians of {len(took['here'])})", flush=True)  # fmt: skip
    cpu = [cpu_of_rows(engines["process"], 500) for _ in range(repeat + 1)]
    print(
        f"row of a batch of it: {median(cpu[1:]) * 1e6:.0f} us of the caller's processor",
        flush=True,
    )


def cpu_of_rows(engine: sgl.Engine, count: int) -> float:
    """Processor seconds of this process a row."""
    began = time.process_time()
    for state in _four.run_batch([{}] * count, backend=engine, temperature=0):
        state.text()
    return (time.process_time() - began) / count


def stream(engine: sgl.Engine, rows: int, tokens: int) -> tuple[float, float, int]:
    """Processor seconds of this process, seconds, and how many events."""
    done, left, events = threading.Event(), rows, 0

    def sink(event: object) -> None:
        nonlocal left, events
        events += 1
        if not isinstance(event, Delta):
            left -= 1
            if not left:
                done.set()

    cpu, wall = time.process_time(), time.perf_counter()
    for i in range(rows):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        engine.submit([100 + i, 7, 8], params, sink=sink, stream=True)
    done.wait()
    return time.process_time() - cpu, time.perf_counter() - wall, events


def streams(folder: Path, tokens: int, repeat: int) -> None:
    print(f"\n{'256 streams':22}{'caller, us a token':>20}{'tokens an event':>17}{'seconds':>9}")
    for label, interval in (("each token", 0.0), ("every 20 ms", 0.02)):
        with start(folder, here=False, max_running=256, stream_interval_s=interval) as engine:
            stream(engine, 256, tokens)
            found = [stream(engine, 256, tokens) for _ in range(repeat)]
        count = 256 * tokens
        print(f"{label:22}{median(cpu for cpu, *_ in found) / count * 1e6:20.2f}"
              f"{count / median(events for *_, events in found):17.1f}{median(wall for _, wall, _ in found):9.3f}",
              flush=True)  # fmt: skip


_FRESH = """
import sys, time
began = time.perf_counter()
import sglang_lite as sgl
engine = sgl.Engine(*{arguments!r}, in_process={here!r}, **{settings!r})
engine.generate(input_ids=[5, 6, 7], sampling_params={{"max_new_tokens": 1, "temperature": 0}})
took = time.perf_counter() - began
resident = int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
print(took, resident, "torch" in sys.modules)
engine.close()
"""


def fresh(label: str, arguments: tuple[str, ...], settings: dict[str, Any], repeat: int) -> None:
    found: dict[bool, list[list[str]]] = {True: [], False: []}
    for _ in range(repeat):
        for here, rows in found.items():
            code = _FRESH.format(arguments=arguments, here=here, settings=settings)
            rows.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
                        .stdout.split())  # fmt: skip
    for here, rows in found.items():
        print(f"{label + (', here' if here else ', process'):34}{median(float(row[0]) for row in rows):10.2f}"
              f"{median(float(row[1]) for row in rows):13.0f}{rows[0][2]:>8}", flush=True)  # fmt: skip


def hostile(requests: int) -> None:
    print()
    for form in ("here", "process"):
        with sgl.Engine(in_process=form == "here", max_total_tokens=8192) as engine:
            _told_gaps(engine, 0)  # warms up
            for what in ("requests", "hostile constraints"):
                times = _told_gaps(engine, requests, constrained=what != "requests")
                gaps = [b - a for a, b in pairwise(times)]
                longest, usual = max(gaps) * 1e3, median(gaps) * 1e3
                print(f"beside {requests} {what}, {form:8} {len(times):5} tokens, longest gap {longest:7.1f} ms, "
                      f"median {usual:.2f} ms", flush=True)  # fmt: skip


def _told_gaps(engine: sgl.Engine, count: int, *, constrained: bool = True) -> list[float]:
    """When the tokens of a stream came, while so many constraints are compiled."""
    from sglang_lite.constraints.coerce import as_constraint
    from tests.constraints.hostile import AMBIGUOUS, KEPT, REFUSED

    asked: list[Any] = [
        constraint
        for constraint, *_ in (*KEPT.values(), *REFUSED.values())
        if constraint is not None
    ]
    asked += [sgl.Grammar(grammar) for grammar, _ in AMBIGUOUS.values()]
    times: list[float] = []
    twenty, over, ended, left = threading.Event(), threading.Event(), threading.Event(), count

    def streamed(event: object) -> None:
        times.append(time.perf_counter())
        if len(times) == 20:
            twenty.set()
        if not isinstance(event, Delta):
            over.set()

    def told(event: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            ended.set()

    long = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
    running = engine.submit("Once upon a time", long, stream=True, sink=streamed)
    twenty.wait()
    for i, constraint in enumerate(islice(cycle(asked), count)):
        try:
            known = as_constraint(constraint) if constrained else None
            engine.submit(f"{i}", SamplingParams(max_tokens=4, temperature=0), known, sink=told)
        except sgl.SglError as error:
            told(error)
    if count:
        ended.wait()
    running.abort()
    over.wait()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument(
        "--workloads", default="decode1,plain64,w1", help="undisturbed ones, separated by commas"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--requests", type=int, default=60, help="beside the stream of `hostile`")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    options = parser.parse_args()
    only = options.only.split(",")
    if unknown := set(only) - set(SECTIONS):
        parser.error(f"no section: {', '.join(unknown)}")

    def work(name: str) -> Any:
        whole = WORKLOADS[name]()
        return whole.scaled_down(ON_CPUS[options.shape]) if options.shape in ON_CPUS else whole

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, options.shape)
        if "start" in only:
            print(f"\n{'from nothing to a token':34}{'seconds':>10}{'caller, MB':>13}{'torch':>8}")
            fresh(
                options.shape,
                (str(folder),),
                {"load_format": "dummy", "max_total_tokens": TOKENS},
                options.repeat,
            )
            if options.shape in ON_CPUS:
                fresh("smollm2-135m", (), {}, options.repeat)
        if set(only) & {"undisturbed", "busy", "program"}:
            with start(folder, here=True) as here, start(folder, here=False) as process:
                print(f"\n{here.core.description}; {process.core.description}")
                engines = {"here": here, "process": process}
                if "undisturbed" in only:
                    undisturbed(engines, options.workloads.split(","), work, options.repeat)
                if "program" in only:
                    program(engines, options.repeat)
                if "busy" in only:
                    busy(engines, ["decode1", "plain64"], work, options.repeat)
        if "streams" in only:
            streams(folder, options.tokens, options.repeat)
    if "hostile" in only:
        hostile(options.requests)


if __name__ == "__main__":
    main()
