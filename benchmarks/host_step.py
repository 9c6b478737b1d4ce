"""Cost of a step on the host, beside the model: planning, inputs, settling.

    python benchmarks/host_step.py [--rows 256] [--steps 300]

All requests decode with a model that computes nothing. Timed is everything the loop does but the
model's own calls and the draw, which are the accelerator's work. "plain" rows end by their limit;
"stops" have stop strings, so a token that may complete one is looked at; "streams" have both and
stream, so each token becomes text at once. "first" are the steps that admit and prefill all of
them. Last is the record of a step in which all rows decode, which is a part of the above.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.executor import cpu_runner as runner_module
from sglang_lite.runtime.executor.sampler import SampledTokens
from sglang_lite.runtime.executor.step_record import StepWriter
from tests.runtime.scripted import ScriptedModel, SteppedEngine, loaded


class Nothing(ScriptedModel):
    """A model that takes no time: whatever is asked of it, its time is subtracted."""

    spent = 0.0

    def forward(self, ids, positions, plan, cache):
        return torch.zeros(len(ids), 1)

    def logits(self, hidden):
        return hidden


def no_draw(
    logits: torch.Tensor, table: Any, slots: Any, *others: Any, **settings: Any
) -> SampledTokens:
    return SampledTokens([5] * len(slots), {})


class Unchecked(SteppedEngine):
    def check(self):
        pass


def measure(
    overlap: bool, params: SamplingParams, stream: bool, rows: int, steps: int
) -> tuple[list[float], float]:
    engine = Unchecked(
        overlap=overlap, max_running=rows, step_tokens=8192, page_size=16, context_length=512,
        max_total_tokens=rows * 512, model=replace(loaded(), model=Nothing()),
    )  # fmt: skip
    for i in range(rows):
        engine.start([1 + i % 29, 1 + i // 29, *range(1, 30)], params, stream=stream)
    started = time.perf_counter()
    while len(engine.scheduler.queues.decoding) < rows:
        engine.step()
    first = time.perf_counter() - started
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.loop.inbox.run()
        engine.loop.run_step()
        times.append(time.perf_counter() - began)
    return times, first


def time_record(rows: int, repeats: int) -> list[float]:
    """Times writing the record of a step in which all rows decode, in microseconds."""
    engine = Unchecked(
        max_running=rows, page_size=16, context_length=512, max_total_tokens=rows * 512
    )
    for i in range(rows):
        engine.start(
            [1 + i % 29, 2, 3], SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
        )
    while len(engine.scheduler.queues.decoding) < rows:
        engine.step()
    batch = engine.scheduler.plan_batch()
    assert batch is not None
    assert batch.decoding == rows
    writer = StepWriter(engine.store.table, engine.store.windows)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        writer.write_record(batch)
        times.append((time.perf_counter() - began) * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    draw, runner_module.sample = runner_module.sample, no_draw
    try:
        report(options.rows, options.steps)
    finally:
        runner_module.sample = draw


def report(rows: int, steps: int) -> None:
    print(describe())
    print(
        f"{'rows':>8} {'loop':>8} {'ms a step, median':>18} {'p99':>7} {'us a row':>9} {'first':>9}"
    )
    for name, params, stream in (
        ("plain", SamplingParams(max_tokens=400, ignore_eos=True), False),
        ("stops", SamplingParams(max_tokens=400, ignore_eos=True, stop=("\n", "never")), False),
        ("streams", SamplingParams(max_tokens=400, ignore_eos=True, stop=("never",)), True),
    ):
        for overlap in (False, True):
            times, first = measure(overlap, params, stream, rows, steps)
            ms = [t * 1e3 for t in times]
            print(
                f"{name:>8} {'depth 1' if overlap else 'depth 0':>8} {statistics.median(ms):18.3f} "
                f"{statistics.quantiles(ms, n=100)[-1]:7.3f} {statistics.median(ms) / rows * 1e3:9.2f} "
                f"{first * 1e3:6.1f} ms"
            )
    print("record of a step, us:    median   least")
    for count in (1, 16, rows):
        us = time_record(count, 10 * steps)
        print(f"{count:>4} decoding rows {statistics.median(us):15.1f} {min(us):7.1f}")


if __name__ == "__main__":
    main()
