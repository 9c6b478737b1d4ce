"""Runs workloads and prints what they took beside what they could take at best, written as programs, and what peers
take."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch

from sglang_lite.bench.limits import ideal, measure
from sglang_lite.bench.peers import installed, measure_peer
from sglang_lite.bench.programs import PROGRAMS, run_as_program
from sglang_lite.bench.shapes import ON_CPUS, SHAPES, load_shape
from sglang_lite.bench.workloads import WORKLOADS, Measured, run
from sglang_lite.engine.engine import Engine
from sglang_lite.protocol import ParameterError


def report(shape: str, names: Sequence[str], repeat: int, *, fp8: bool = False) -> None:
    """Prints a table, and a second one if a peer is installed.

    Args:
        shape: of SHAPES.
        names: of WORKLOADS; each runs once more beforehand, to warm up.
        repeat: times that each is measured; the median is told.
        fp8: weights, keys and values in 8 bits.

    Raises:
        ParameterError: there is no GPU, and the shape is not for CPUs.
    """
    if not torch.cuda.is_available() and shape not in ON_CPUS:
        raise ParameterError(
            "--shape", f"{shape} is measured on a GPU, and torch sees none.", hint=f"On a CPU: {', '.join(ON_CPUS)}."
        )
    ours = _ours(shape, names, repeat, fp8)
    if not torch.cuda.is_available():
        return
    gc.collect()  # a peer wants the whole GPU
    torch.cuda.empty_cache()
    compare(shape, ours, repeat, fp8=fp8)


def _ours(shape: str, names: Sequence[str], repeat: int, fp8: bool) -> dict[str, tuple[float, float]]:
    gpu = torch.cuda.is_available()
    rates = measure() if gpu else None
    started = time.perf_counter()
    with Engine.of(load_shape(shape, fp8=fp8)) as engine:
        ready = time.perf_counter() - started
        print(f"{torch.cuda.get_device_name() if gpu else 'CPU'}, torch {torch.__version__}" + (
            f": copies {rates.copy / 1e12:.2f} TB/s, bfloat16 products {rates.matmul / 1e12:.0f} TFLOP/s"
            if rates is not None else ""
        ))  # fmt: skip
        numbers = "8-bit weights, keys and values" if fp8 else "bfloat16" if gpu else "as the CPU computes"
        tokens = engine.stats()["total_tokens"]
        print(f"{shape}, {numbers}: ready after {ready:.1f} s, {tokens:,} tokens of KV cache")
        print(f"{'':10}{'seconds':>9}{'ideal':>8}{'share':>7}{'output tok/s':>14}{'ms a step':>11}"
              f"{'as program':>12}{'times':>7}{'steps':>7}{'as program':>12}")  # fmt: skip
        took = {}
        for name in names:
            work = WORKLOADS[name]() if gpu else WORKLOADS[name]().smaller(ON_CPUS[shape])
            ways: list[Callable[[], Measured]] = [partial(run, engine, work)]
            if name in PROGRAMS:
                ways.append(partial(run_as_program, engine, name, work))
            for way in ways:
                way()
            results = [[way() for way in ways] for _ in range(repeat)]  # in turn
            requests, *programs = [median(each.seconds for each in column) for column in zip(*results)]
            steps = [each.steps for each in results[0]]
            best = math.nan if rates is None else ideal(SHAPES[shape], work, rates, bits=8 if fp8 else 16)
            limit = f"{'–':>8}{'–':>7}" if rates is None else f"{best:8.3f}{best / requests:7.0%}"
            speed = f"{sum(work.new) / requests:14,.0f}{requests / steps[0] * 1e3:11.3f}"
            beside = [f"{each:12.3f}{each / requests:7.3f}{steps[0]:7}{steps[1]:12}" for each in programs]
            print(f"{name:10}{requests:9.3f}{limit}{speed}" + "".join(beside), flush=True)
            took[name] = requests, best
    return took


def compare(
    shape: str, ours: Mapping[str, tuple[float, float]], repeat: int, *, fp8: bool = False, patience: float = 1200.0
) -> None:
    """Prints a table of ours beside the peers that are installed; nothing where none is.

    Args:
        ours: by workload, seconds that ours took and would take at best.
        repeat, fp8: as of `report`.
        patience: seconds that a peer has to start. It has ten times ours for the workloads.
    """
    limit = patience + 10 * (repeat + 1) * sum(seconds for seconds, _ in ours.values())
    peers = {name: measure_peer(name, shape, list(ours), repeat, fp8=fp8, limit=limit) for name in installed()}
    if not peers:
        return
    print(f"{'seconds':10}{'ours':>9}{'ideal':>9}" + "".join(f"{name:>9}" for name in peers))
    for name, figures in ours.items():
        cells = [*figures, *(peer.seconds.get(name) for peer in peers.values())]
        print(f"{name:10}" + "".join(f"{'–':>9}" if cell is None else f"{cell:9.3f}" for cell in cells))
    for name, peer in peers.items():
        print(f"{name} {peer.version}".rstrip() + (f": {peer.failure}" if peer.failure else ""))
