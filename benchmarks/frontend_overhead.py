"""Cost of the language itself: programs on a backend that answers at once.

    python benchmarks/frontend_overhead.py [--sglang FOLDER] [--seconds 1] [--programs 1000]

FOLDER holds an unpacked `sglang` wheel (`pip download --no-deps sglang==0.5.23`, then unzip): its
frontend is run, unmodified, on the same machine in the same run. CPU time per program is that of
the whole process, all threads, and each program is waited for to its end: SGLang's join waits for
the branches, ours does not, so the list that a join gathers is read.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import sglang_lite as sgl
from sglang_lite.protocol import Generation

TEXT = "Answer this question, please: "


def load_upstream(folder: Path) -> Any:
    """SGLang's `lang` package without the server its `__init__` would import."""
    package = types.ModuleType("sglang")
    package.__path__ = [str(folder / "sglang")]  # type: ignore[attr-defined] # makes it a package
    sys.modules["sglang"] = package
    if "IPython" not in sys.modules:  # its utils imports it for a notebook helper
        display = types.ModuleType("IPython.display")
        display.HTML = display.display = None  # type: ignore[attr-defined] # never called here
        sys.modules["IPython"], sys.modules["IPython.display"] = (
            types.ModuleType("IPython"),
            display,
        )
    import sglang.lang.api as api  # type: ignore[import-not-found] # only when the folder is given
    from sglang.lang.backend.base_backend import BaseBackend  # type: ignore[import-not-found] # as above

    return api, BaseBackend


def with_blocking_hooks(base: type) -> Any:
    """The same backend class for both systems: SGLang's only interface."""

    class Blocking(base):  # type: ignore[misc] # either system's
        latency = 0.0

        def generate(self, s: Any, sampling_params: Any) -> Any:
            if self.latency:
                time.sleep(self.latency)
            return "an answer", {}

    backend = Blocking()
    backend.max_threads = 256
    return backend


class Native(sgl.BaseBackend):
    """A coroutine, which is what a remote API or an engine has."""

    latency = 0.0

    async def agenerate(self, prompt: Any, params: Any, constraint: Any, *, stream: bool) -> Any:
        if self.latency:
            await asyncio.sleep(self.latency)
        yield Generation("an answer")


class AtOnce(Native):
    """Answers without waiting where there is nothing to wait for, as ScriptedBackend does."""

    def answer_now(self, prompt: Any, params: Any, constraint: Any) -> Any:
        return None if self.latency else (Generation("an answer"),)


def programs(api: Any) -> dict[str, Any]:
    @api.function
    def one_gen(s: Any) -> None:
        s += TEXT
        s += api.gen("a", max_tokens=16)

    @api.function
    def four_gens(s: Any) -> None:
        for name in "abcd":
            s += TEXT
            s += api.gen(name, max_tokens=16)

    @api.function
    def fork_8(s: Any) -> None:
        s += TEXT
        forks = s.fork(8)
        for branch in forks:
            branch += api.gen("a", max_tokens=16)
        forks.join()

    return {"1 gen": one_gen, "4 gens": four_gens, "fork(8) + join": fork_8}


def run_to_end(program: Any, backend: Any) -> None:
    state = program.run(backend=backend)
    state.sync()
    state["a"]


def cpu_per_program(run: Callable[[], Any], seconds: float = 1.0) -> float:
    """Microseconds of CPU time, the median of five stretches."""
    for _ in range(20):
        run()
    samples = []
    for _ in range(5):
        count, started, cpu = 0, time.perf_counter(), time.process_time()
        while not count or time.perf_counter() - started < seconds / 5:
            run()
            count += 1
        samples.append((time.process_time() - cpu) / count * 1e6)
    return median(samples)


def batch_against_ideal(program: Any, backend: Any, count: int) -> float:
    """Wall time of programs of four 10 ms generations, 256 at a time, over the least it can take."""
    backend.latency = 0.010
    program.run_batch([{}] * min(count, 256), backend=backend, num_threads=256)
    started = time.perf_counter()
    states = program.run_batch([{}] * count, backend=backend, num_threads=256)
    elapsed = time.perf_counter() - started
    assert states[-1]["d"] == "an answer"
    backend.latency = 0.0
    return elapsed / (-(-count // 256) * 4 * 0.010)


def threads_of_forks(program: Any, backend: Any) -> int:
    """The most threads alive at once while 96 programs of eight branches are under way."""
    backend.latency = 0.05
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, threading.active_count())

    watcher = threading.Thread(target=watch)
    watcher.start()
    program.run_batch([{}] * 96, backend=backend, num_threads=96)
    done.set()
    watcher.join()
    backend.latency = 0.0
    return most - 2  # the watcher and the main thread


def live_states(api: Any, backend: Any, count: int) -> float:
    """Megabytes that so many states take, each with a generation under way."""
    backend.latency = 60.0
    before = _resident()
    program = programs(api)["1 gen"]
    states = [program.run(backend=backend) for _ in range(count)]
    states[-1].stream_executor  # noqa: B018 # all are alive
    used = _resident() - before
    backend.latency = 0.0
    return used


def _resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sglang", type=Path, help="folder of an unpacked sglang wheel")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure of CPU time")
    parser.add_argument(
        "--programs", type=int, default=1000, help="of a batch; ten times as many states are kept"
    )
    options = parser.parse_args()
    count = options.programs
    systems: dict[str, tuple[Any, Any]] = {
        "at once": (sgl, AtOnce()),
        "coroutine": (sgl, Native()),
        "hooks": (sgl, with_blocking_hooks(sgl.BaseBackend)),
    }
    if options.sglang:
        api, base = load_upstream(options.sglang)
        systems["SGLang, hooks"] = api, with_blocking_hooks(base)
    results: dict[str, dict[str, float]] = {}
    for name, (api, backend) in systems.items():
        results[name] = {}
        for what, program in programs(api).items():
            results[name][f"{what}, us CPU"] = cpu_per_program(
                partial(run_to_end, program, backend), options.seconds
            )
        batch = batch_against_ideal(programs(api)["4 gens"], backend, count)
        results[name][f"{count:,} x 4 gens of 10 ms at 256, x ideal"] = batch
        results[name]["threads, 96 x fork(8)"] = threads_of_forks(
            programs(api)["fork(8) + join"], backend
        )
    results["coroutine"][f"{10 * count:,} live states, MB"] = live_states(sgl, Native(), 10 * count)
    print(f"{'':42}" + "".join(f"{name:>15}" for name in results))
    for what in results["coroutine"]:
        values = [result.get(what) for result in results.values()]
        print(
            f"{what:42}"
            + "".join(f"{value:15,.1f}" if value is not None else f"{'':15}" for value in values)
        )


if __name__ == "__main__":
    main()
