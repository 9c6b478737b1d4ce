"""Overhead of `use_tools`: seconds of a turn between the model's answer and the next request.

    python benchmarks/agent_loop.py [--turns 50] [--repeat 5] [--model NAME_OR_FILE] [--no-engine]

The tool does nothing, and the answers are forced or scripted, so what is left is the loop: it reads
the answer, checks and makes the call, and adds the next turn. Backends note when an answer leaves
them and when the next request comes; an engine notes both at its core's door. A journal waits for
the disk (`fsync`) twice a turn. Prints milliseconds of a turn: the median of all, the 90th percentile,
the median of the last tenth of the turns, whose prompts are the longest, and the median of this
process's processor time, which other work on the machine does not change much; at last, that of a
first run, in which a chat template is rendered for conversations of these lengths.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal, TypeAlias

import sglang_lite as sgl
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.protocol import Generation

CALL = json.dumps({"tool": "nothing", "arguments": {"number": 1}})
ANSWER = json.dumps({"answer": "done"})


def nothing(number: Literal[1]) -> int:
    """Returns its number."""
    return number


async def nothing_later(number: Literal[1]) -> int:
    """Returns its number."""
    return number


nothing_later.__name__ = "nothing"


Turn: TypeAlias = tuple[float, float]  # seconds by the clock, and of the processor


class Clock:
    """Times between an answer and the next request."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._left: Turn | None = None

    def note_request(self) -> None:
        if self._left is not None:
            wall, processor = self._left
            self.turns.append((time.perf_counter() - wall, time.process_time() - processor))
            self._left = None

    def note_answer(self) -> None:
        self._left = time.perf_counter(), time.process_time()


class Scripted(sgl.BaseBackend):
    """A coroutine, which is what a remote API has, that answers with these texts."""

    def __init__(self, clock: Clock, texts: Iterator[str]) -> None:
        self._clock, self._texts = clock, texts
        self.chat_template = get_chat_template("chatml")

    async def agenerate(self, prompt: Any, params: Any, constraint: Any, *, stream: bool) -> Any:
        self._clock.note_request()
        text = next(self._texts)
        self._clock.note_answer()
        yield Generation(text)


class ClockedEngine:
    """An engine with a clock at its door."""

    def __init__(self, engine: sgl.Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, *request: Any, sink: Callable[[Any], None], **options: Any) -> Any:
        def note(event: Any) -> None:
            if isinstance(event, Generation):
                self._clock.note_answer()
            sink(event)

        self._clock.note_request()
        return self._engine.submit(*request, sink=note, **options)

    def submit_when_room(self, submit: Callable[[], Any], count: int) -> Any:
        return self._engine.submit_when_room(submit, count)


@sgl.function
def agent(s: sgl.ProgramState, turns: int, options: dict[str, Any]) -> str:
    s += sgl.user("Call the tool until you are told to answer.")
    return str(sgl.use_tools(s, [nothing], max_steps=turns, max_calls=turns, **options))


@sgl.function
async def async_agent(s: sgl.ProgramState, turns: int, options: dict[str, Any]) -> str:
    s += sgl.user("Call the tool until you are told to answer.")
    tools = [nothing_later]
    return str(await sgl.use_tools(s, tools, max_steps=turns, max_calls=turns, **options))


def scripted(clock: Clock, turns: int) -> Scripted:
    return Scripted(clock, iter([CALL] * turns + [ANSWER]))


def run_scripted(turns: int, program: Any = agent, **options: Any) -> list[Turn]:
    """Runs an agent on a scripted backend and returns the times of its turns."""
    clock = Clock()
    journal = options.pop("journal", None)
    state = program.run(turns, options, backend=scripted(clock, turns), journal=journal)
    assert state.ret_value == "done"
    return clock.turns


def run_with_journal(turns: int) -> list[Turn]:
    with tempfile.TemporaryDirectory() as folder:
        return run_scripted(turns, journal=Path(folder, "run.jsonl"))


def run_on_engine(engine: sgl.Engine, turns: int) -> list[Turn]:
    """Runs an agent on an engine, whose grammar forces each call."""
    clock = Clock()
    options = {"tool_choice": "required", "max_tokens": 40, "temperature": 0}
    backend: Any = ClockedEngine(engine, clock)
    with contextlib.suppress(sgl.TruncatedError):  # of the answer at the end
        agent.run(turns, options, backend=LocalBackend(backend)).sync()
    return clock.turns


def report(name: str, run: Callable[[], list[Turn]], turns: int, repeat: int) -> None:
    first = median(turn[1] for turn in run())  # it also warms up
    runs = [run() for _ in range(repeat)]
    assert all(len(each) == turns for each in runs), f"{name}: {[len(each) for each in runs]}"
    wall = [1000 * turn[0] for each in runs for turn in each]
    processor = [1000 * turn[1] for each in runs for turn in each]
    last = [1000 * turn[0] for each in runs for turn in each[-max(turns // 10, 1) :]]
    tail = quantiles(wall, n=10)[-1] if len(wall) > 1 else wall[0]
    figures = (median(wall), tail, median(last), median(processor), 1000 * first)
    print(f"| {name} | " + " | ".join(f"{each:.2f}" for each in figures) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--no-engine", action="store_true", help="scripted backends only")
    asked = parser.parse_args()
    turns, repeat = asked.turns, asked.repeat
    print(f"load {os.getloadavg()[0]:.1f}")
    print(
        "| ms a turn | median | 90 % | last tenth | processor | the first run's |"
        "\n|---|---|---|---|---|---|"
    )
    cases: dict[str, Callable[[], list[Turn]]] = {
        "scripted": lambda: run_scripted(turns),
        "scripted, `approve=`": lambda: run_scripted(turns, approve=lambda call: True),
        "scripted, `tool_timeout=`": lambda: run_scripted(turns, tool_timeout=60),
        "scripted, `journal=`": lambda: run_with_journal(turns),
        "scripted, coroutines": lambda: run_scripted(turns, async_agent),
    }
    for name, run in cases.items():
        report(name, run, turns, repeat)
    if asked.no_engine:
        return
    for where, in_process in (("in this process", True), ("in its own process", False)):
        with sgl.Engine(asked.model, in_process=in_process) as engine:
            report(f"engine {where}", lambda: run_on_engine(engine, turns), turns, repeat)


if __name__ == "__main__":
    main()
