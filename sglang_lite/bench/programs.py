"""Workloads written as programs, to measure the cost of the language compared with plain requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sglang_lite import Engine
from sglang_lite.bench.shapes import text_from_ids
from sglang_lite.bench.workloads import Measured, Workload, generate_all, prepare_workload
from sglang_lite.lang.api import function, gen
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.state import ProgramState


@function
def _answer_in_forks(s: Any, shared: str, own: Sequence[str], new: Sequence[int]) -> None:
    s += shared
    branches = s.fork(len(own))
    branches += [
        text + gen("answer", max_tokens=count, ignore_eos=True) for text, count in zip(own, new)
    ]
    branches.join()


@function
def _answer_once(s: Any, shared: str, own: str, new: int) -> None:
    s += shared + own + gen("answer", max_tokens=new, ignore_eos=True)


def _run_forking(
    backend: LocalBackend, work: Workload, shared: str, own: Sequence[str]
) -> list[ProgramState]:
    """Runs one program that forks once, into a branch for each prompt."""
    return [
        _answer_in_forks.run(
            shared, own, work.output_lengths, backend=backend, temperature=work.temperature
        )
    ]


def _run_batch_of_programs(
    backend: LocalBackend, work: Workload, shared: str, own: Sequence[str]
) -> list[ProgramState]:
    """Runs one program per prompt, all at the same time."""
    items = [
        {"shared": shared, "own": text, "new": count}
        for text, count in zip(own, work.output_lengths)
    ]
    states: list[ProgramState] = _answer_once.run_batch(
        items, backend=backend, temperature=work.temperature, num_threads=len(items)
    )
    return states


PROGRAMS: dict[str, Callable[[LocalBackend, Workload, str, Sequence[str]], list[ProgramState]]] = {
    "fork64": _run_forking,
    "fewshot": _run_batch_of_programs,
}


def run_as_program(engine: Engine, name: str, work: Workload) -> Measured:
    """Runs a workload of PROGRAMS. The cache is empty at the start, except for the shared tokens if
    the workload is `cached`.

    Raises:
        RuntimeError: the number of generated tokens is not the expected one.
    """
    prompts = prepare_workload(work, partial(generate_all, engine), engine.flush_cache)
    shared = text_from_ids(prompts[0][: work.prefix_length])
    own = [text_from_ids(prompt[work.prefix_length :]) for prompt in prompts]
    backend = LocalBackend(engine)
    before = engine.stats()["steps"]
    started = time.perf_counter()
    states = PROGRAMS[name](backend, work, shared, own)
    for state in states:
        state["answer"]
    seconds = time.perf_counter() - started
    count = sum(state.usage().completion_tokens for state in states)
    if count != sum(work.output_lengths):
        raise RuntimeError(f"{count} tokens were generated, not {sum(work.output_lengths)}")
    return Measured(seconds, engine.stats()["steps"] - before)
