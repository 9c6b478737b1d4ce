"""Processor time of a scheduler's plans while many requests wait and many programs are open, with a
model that computes nothing.

    python benchmarks/waiting.py [--waiting 30000] [--programs 2000] [--answer 200] [--steps 150]

256 requests run. The programs have 32 tokens each and pause; one goes on at every third step.
Requests have 60 random tokens, so each admission looks for a prefix. With short answers (`--answer
30`) some seven requests end in a step, and as many are admitted.
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np

from benchmarks.machine import describe
from sglang_lite.program.nodes import Gen, Node, Text
from sglang_lite.protocol import SamplingParams
from tests.runtime.scripted import SteppedEngine

WARM_UP = 30  # steps that don't count


class Unchecked(SteppedEngine):
    """An engine whose pages are not recounted after each step."""

    def check(self) -> None:
        pass


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def turn(draw: random.Random, letters: int) -> tuple[Node, ...]:
    return Text("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=letters))), Gen(
        "tool", greedy(2)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--waiting", type=int, default=30_000)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--answer", type=int, default=200, help="tokens of a request's answer")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    draw = random.Random(0)
    engine = Unchecked(
        max_running=256, context_length=512, max_total_tokens=131_072, page_size=16,
        max_queued=options.waiting + options.programs,
    )  # fmt: skip
    programs = [engine.open_program(sink=lambda _: None) for _ in range(options.programs)]
    for program in programs:
        program.extend((), turn(draw, 30))
    engine.drain()
    for _ in range(options.waiting):
        engine.start([draw.randrange(1, 27) for _ in range(60)], greedy(options.answer))
    engine.loop.inbox.run()
    plan, times = engine.scheduler.plan_batch, []

    def timed() -> object:
        began = time.process_time()
        batch = plan()
        times.append(time.process_time() - began)
        return batch

    engine.scheduler.plan_batch = timed  # type: ignore[method-assign, assignment]  # measured
    for i in range(options.steps):
        engine.step()
        if programs and i % 3 == 0:
            programs[i % len(programs)].extend((), turn(draw, 10))
    found = 1000 * np.array(times[WARM_UP:])
    queues = engine.scheduler.queues
    waiting, running = (
        len(queues.waiting) + len(queues.returned),
        len(queues.decoding) + len(queues.prefilling),
    )
    print(describe())
    print(
        f"{waiting:,} requests wait, {running} run, {len(engine.scheduler.pauses):,} programs pause"
    )
    print(
        f"a plan takes {found.mean():.2f} ms of processor time (median {np.median(found):.2f}, 90th percentile "
        f"{np.percentile(found, 90):.2f}, longest {found.max():.2f})"
    )


if __name__ == "__main__":
    main()
