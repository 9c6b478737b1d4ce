"""Report of a benchmark: runs the workloads as requests and as programs, and prints their times
next to the hardware's minimum and the times of peers.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sglang_lite import Engine
from sglang_lite.bench.agents import measure_agents
from sglang_lite.bench.limits import estimate_minimum_seconds, measure_rates
from sglang_lite.bench.peers import PeerResults, installed_peers, measure_peer
from sglang_lite.bench.programs import PROGRAMS, run_as_program
from sglang_lite.bench.records import BenchReport, Machine, Row, Runs
from sglang_lite.bench.shapes import ON_CPUS, SHAPES, load_shape, write_model
from sglang_lite.bench.start import measure_first_token
from sglang_lite.bench.workloads import WORKLOADS, Measured, Workload, run_workload
from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.models.sharding import rank_spec
from sglang_lite.runtime.parallel.layout import ALONE, Parallel


def print_report(
    shape: str,
    names: Sequence[str],
    repeat: int,
    *,
    fp8: bool = False,
    model_impl: str = "native",
    parallel: Parallel = ALONE,
    file: Path | None = None,
) -> None:
    """Measures workloads and prints a table, and a second one if a peer is installed.

    Args:
        shape: name of the model's shape, one of SHAPES.
        names: names of workloads, from WORKLOADS; each runs once more beforehand, which is reported
            separately.
        repeat: number of measured runs of each workload after that.
        fp8: whether weights, keys and values have 8 bits.
        model_impl: implementation of the model, as in `load_shape`; peers are measured only for
            "native".
        parallel: GPUs that share each layer. Peers are only measured on a single GPU.
        file: path of a JSON file to write everything to, or None.

    Raises:
        ParameterError: no GPU is available and the shape is not for CPUs, there are too few GPUs,
            they can't share the shape's layers, or the file can't be written.
    """
    gpu = torch.cuda.is_available()
    _check_shape(shape, gpu=gpu)
    if gpu and 1 < parallel.ranks > torch.cuda.device_count():
        raise ParameterError(
            "--tp", f"{parallel.ranks} GPUs are needed, and torch sees {torch.cuda.device_count()}."
        )
    rank_spec(SHAPES[shape], parallel, even=gpu)
    machine, rows = _measure_ours(shape, names, repeat, fp8, model_impl, parallel)
    peers: dict[str, PeerResults] = {}
    if gpu and model_impl == "native" and parallel.ranks == 1:
        gc.collect()  # because a peer takes the whole GPU
        torch.cuda.empty_cache()
        ours = {
            row.workload: (row.requests.median, math.nan if row.ideal is None else row.ideal)
            for row in rows
        }
        peers = compare_with_peers(shape, ours, repeat, fp8=fp8)
    if file is not None:
        BenchReport(machine, tuple(rows), peers).save(file)


def print_agents_report(shape: str, *, fp8: bool = False) -> None:
    """Measures agents that wait for tools, and prints a table. The engines have memory for all
    agents or only for some.

    Args:
        shape, fp8: as in `print_report`.

    Raises:
        ParameterError: as in `print_report`.
    """
    gpu = torch.cuda.is_available()
    _check_shape(shape, gpu=gpu)
    for line in measure_agents(
        load_shape(shape, fp8=fp8), scale=1.0 if gpu else 1 / ON_CPUS[shape]
    ):
        print(line, flush=True)


def _check_shape(shape: str, *, gpu: bool) -> None:
    if not gpu and shape not in ON_CPUS:
        raise ParameterError(
            "--shape",
            f"{shape} is measured on a GPU, and torch sees none.",
            hint=f"On a CPU: {', '.join(ON_CPUS)}.",
        )


def _measure_ours(
    shape: str, names: Sequence[str], repeat: int, fp8: bool, model_impl: str, parallel: Parallel
) -> tuple[Machine, list[Row]]:
    gpu = torch.cuda.is_available()
    settings: dict[str, Any] = {
        "model_impl": model_impl,
        "tp_size": parallel.tp,
        "ep_size": parallel.ep,
    }
    if fp8:
        settings |= {"quantization": "fp8"} | ({} if SHAPES[shape].latent else {"kv_dtype": "fp8"})
    start = measure_first_token(shape, settings)  # first, because this process takes the GPU
    rates = measure_rates(parallel.ranks) if gpu else None
    started = time.perf_counter()
    with _start_engine(shape, fp8, settings) as engine:
        machine = Machine(
            device=torch.cuda.get_device_name() if gpu else "CPU",
            ranks=parallel.ranks,
            torch=torch.__version__,
            shape=shape if model_impl == "native" else f"{shape} by the code of {model_impl}",
            numbers=_number_formats(shape, fp8=fp8, gpu=gpu),
            copy=None if rates is None else rates.bytes_per_s,
            matmul=None if rates is None else rates.flops_per_s,
            link=rates.link_bytes_per_s if rates is not None and rates.gpus > 1 else None,
            ready=time.perf_counter() - started,
            first_token=start.seconds,
            compiled=start.compiled,
            tokens=engine.stats()["total_tokens"],
        )
        _print_machine(machine)
        rows = []
        for name in names:
            work = WORKLOADS[name]() if gpu else WORKLOADS[name]().scaled_down(ON_CPUS[shape])
            best = (
                None
                if rates is None
                else estimate_minimum_seconds(SHAPES[shape], work, rates, bits=8 if fp8 else 16)
            )
            rows.append(_measure_row(engine, name, work, best, repeat))
            _print_row(rows[-1])
    return machine, rows


@contextmanager
def _start_engine(shape: str, fp8: bool, settings: Mapping[str, Any]) -> Iterator[Engine]:
    if settings["tp_size"] == 1:
        with Engine.of(load_shape(shape, fp8=fp8, model_impl=settings["model_impl"])) as engine:
            yield engine
        return
    with TemporaryDirectory() as folder:  # each rank reads the model's config itself
        write_model(Path(folder), shape)
        with Engine(folder, load_format="dummy", **settings) as engine:
            yield engine


def _number_formats(shape: str, *, fp8: bool, gpu: bool) -> str:
    """Describes the number formats in which a shape is measured."""
    if not fp8:
        return "bfloat16" if gpu else "as the CPU computes"
    return (
        "8-bit weights, bfloat16 latents"
        if SHAPES[shape].latent
        else "8-bit weights, keys and values"
    )


def _measure_row(engine: Engine, name: str, work: Workload, best: float | None, repeat: int) -> Row:
    """Measures a workload once, then `repeat` times, alternating between requests and program."""
    forms: list[Callable[[], Measured]] = [partial(run_workload, engine, work)]
    if name in PROGRAMS:
        forms.append(partial(run_as_program, engine, name, work))
    first = [form() for form in forms]
    later = [[form() for form in forms] for _ in range(repeat)]
    requests, *program = [
        Runs(one.seconds, tuple(each.seconds for each in column), column[0].steps)
        for one, column in zip(first, zip(*later))
    ]
    return Row(name, sum(work.output_lengths), best, requests, program[0] if program else None)


def _print_machine(machine: Machine) -> None:
    rates = ""
    if machine.copy is not None and machine.matmul is not None:
        rates = f": copies {machine.copy / 1e12:.2f} TB/s, bfloat16 products {machine.matmul / 1e12:.0f} TFLOP/s"
        if machine.link is not None:
            rates += f" of all, {machine.link / 1e9:.0f} GB/s from one to another"
    several = f"{machine.ranks} x " if machine.ranks > 1 else ""
    print(f"{several}{machine.device}, torch {machine.torch}{rates}")
    print(
        f"{machine.shape}, {machine.numbers}: ready after {machine.ready:.1f} s, {machine.tokens:,} tokens of KV cache"
    )
    print(
        f"a process of its own: {machine.first_token:.1f} s from its start to the first token, "
        f"{machine.compiled} kernels compiled"
    )
    print(
        f"{'':10}{'first s':>9}{'median s':>10}{'spread':>8}{'runs':>6}{'ideal':>8}{'share':>7}{'output tok/s':>14}"
        f"{'ms a step':>11}{'as program':>12}{'times':>7}{'steps':>7}{'as program':>12}"
    )


def _print_row(row: Row) -> None:
    runs = row.requests
    seconds = f"{runs.first:9.3f}{runs.median:10.3f}{runs.spread:8.1%}{len(runs.seconds):6}"
    limit = (
        f"{'–':>8}{'–':>7}"
        if row.ideal is None
        else f"{row.ideal:8.3f}{row.ideal / runs.median:7.0%}"
    )
    speed = f"{row.tokens / runs.median:14,.0f}{runs.median / runs.steps * 1e3:11.3f}"
    beside = ""
    if (program := row.program) is not None:
        beside = f"{program.median:12.3f}{program.median / runs.median:7.3f}{runs.steps:7}{program.steps:12}"
    print(f"{row.workload:10}{seconds}{limit}{speed}{beside}", flush=True)


def compare_with_peers(
    shape: str,
    ours: Mapping[str, tuple[float, float]],
    repeat: int,
    *,
    fp8: bool = False,
    patience: float = 1200.0,
) -> dict[str, PeerResults]:
    """Measures the installed peers, prints a table of their times next to ours, and returns their
    measurements. Prints nothing if no peer is installed.

    Args:
        ours: median seconds and minimum seconds of this runtime, by workload.
        repeat, fp8: as in `print_report`.
        patience: seconds that a peer may take to start. In addition, it gets ten times our seconds
            for the workloads.
    """
    limit = patience + 10 * (repeat + 1) * sum(seconds for seconds, _ in ours.values())
    peers = {
        name: measure_peer(name, shape, list(ours), repeat, fp8=fp8, limit=limit)
        for name in installed_peers()
    }
    if not peers:
        return {}
    print(f"{'seconds':10}{'ours':>9}{'ideal':>9}" + "".join(f"{name:>9}" for name in peers))
    for name, figures in ours.items():
        cells = [*figures, *(peer.seconds.get(name) for peer in peers.values())]
        print(
            f"{name:10}"
            + "".join(f"{'–':>9}" if cell is None else f"{cell:9.3f}" for cell in cells)
        )
    for name, peer in peers.items():
        print(f"{name} {peer.version}".rstrip() + (f": {peer.failure}" if peer.failure else ""))
    return peers
