"""Way of a generation through the package: modules entered, changes of module, and calls of
functions, by thread.

    python benchmarks/way.py [--in-process] [--calls THREAD] [--modules THREAD]

Counts, by `sys.setprofile`, once it is warm: of the statements `s += text + gen; s.text()` in a
body, of a run of a program with the same generation, its start, end and reads included, and of one
that forks eight branches with a generation each, and joins them. No clock. The engine is in a
process of its own, which is not counted, or with --in-process on a thread of this one, which is.
Weights are random.

--calls      also prints the calls of a thread, in order ("MainThread", "sglang_lite-executor", "sglang_lite-events",
             "sglang_lite-engine")
--modules    also prints the modules of a thread, by how often they are entered
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from engine_process import start

import sglang_lite as sgl
from sglang_lite.bench.shapes import write_model
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.variables import Variable

PACKAGE = f"{Path(sgl.__file__).parent}/"


@sgl.function
def one(s: sgl.ProgramState) -> None:
    s += " aaab aaac" + sgl.gen("a", max_tokens=1, ignore_eos=True)


@sgl.function
def fork(s: sgl.ProgramState) -> None:
    s += " aaab aaac"
    branches = s.fork(8)
    for branch in branches:
        branch += sgl.gen("a", max_tokens=1, ignore_eos=True)
    branches.join()


def read(program: Any, engine: sgl.Engine) -> None:
    state = program.run(backend=engine, temperature=0)
    state.text()
    state["a"]


def in_body(engine: sgl.Engine, count: Callable[[Callable[[], object]], object]) -> None:
    """Lets the statements of a generation be counted, in the body of a program."""

    @sgl.function
    def body(s: sgl.ProgramState) -> None:
        def statements() -> None:
            nonlocal s
            s += " aaab aaac" + sgl.gen("a", max_tokens=1, ignore_eos=True)
            s.text()

        count(statements)

    settle()
    engine.stats()  # answered behind the end of the program before
    settle()
    body.run(backend=engine).sync()


def settle() -> None:
    """Waits until the executor loop has done what was posted to it."""
    done = Variable()
    executor().post(done.set, None)
    done.wait(60)


def calls_by_thread(
    engine: sgl.Engine, work: Callable[[], object]
) -> dict[str, list[tuple[str, str]]]:
    """(module, function) of each call while some work is done, by the name of the thread: of this
    one, the executor loop, and the reader of the engine's process or, in this one, its loop.
    """
    calls: dict[str, list[tuple[str, str]]] = {}
    counts = False  # not while the threads are told to profile

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if counts and event == "call" and code.co_filename.startswith(PACKAGE):
            thread = calls.setdefault(threading.current_thread().name, [])
            thread.append((code.co_filename.removeprefix(PACKAGE), code.co_qualname))

    def profile(function: Any) -> None:
        executor().post(sys.setprofile, function)
        settle()
        engine.core.call_soon(lambda: sys.setprofile(function))
        for _ in range(2):  # the call is made behind the first answer
            engine.stats()
        sys.setprofile(function)

    profile(note)
    counts = True
    work()
    counts = False
    profile(None)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--calls", metavar="THREAD", default="")
    parser.add_argument("--modules", metavar="THREAD", default="")
    options = parser.parse_args()
    print(f"{'work':12}{'thread':24}{'modules':>8}{'changes':>9}{'calls':>7}")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "small")
        with start(Path(folder), here=options.in_process, max_total_tokens=8192) as engine:
            counts: dict[str, Callable[[Callable[[Callable[[], object]], object]], object]] = {
                "statements": lambda count: in_body(engine, count),
                "one": lambda count: count(lambda: read(one, engine)),
                "fork": lambda count: count(lambda: read(fork, engine)),
            }
            for name, run in counts.items():
                for _ in range(3):
                    run(lambda work: work())
                found: dict[str, list[tuple[str, str]]] = {}
                run(lambda work: found.update(calls_by_thread(engine, work)))  # noqa: B023 # called here
                for thread, calls in sorted(found.items()):
                    entered = [
                        (module, [*group]) for module, group in groupby(calls, lambda call: call[0])
                    ]
                    modules = len({module for module, _ in entered})
                    print(f"{name:12}{thread:24}{modules:8}{len(entered) - 1:9}{len(calls):7}")
                    if thread == options.modules:
                        for module, count in Counter(module for module, _ in entered).most_common():
                            print(f"{count:6} {module}")
                    if thread == options.calls:
                        for module, group in entered:
                            print(f"  {module}: {', '.join(function for _, function in group)}")


if __name__ == "__main__":
    main()
