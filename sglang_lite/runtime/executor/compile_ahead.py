"""Compiling a model's kernels side by side, in processes, while its weights are read.

Each process warms up the same runner on tensors without memory, so that it meets the variants that the engine's own
warm-up will, and compiles its share of them into Triton's cache. No process touches the GPU: the card need not be
there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton

from sglang_lite.runtime import kernels
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.executor.gpu_runner import GpuRunner
from sglang_lite.runtime.executor.sampler import SamplingTable
from sglang_lite.runtime.kernels.cache import prepare_cache
from sglang_lite.runtime.kernels.card import Card, card_of
from sglang_lite.runtime.kernels.kv_cache import KVScales
from sglang_lite.runtime.kernels.variants import Variant, telling
from sglang_lite.runtime.kv_cache.table import SlotTable
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.weights.source import WeightSource

logger = logging.getLogger("sglang_lite")

_MOST_PROCESSES = 16
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Runner:
    """A runner, as far as it decides which variants of kernels are launched.

    Attributes:
        longest: sequence, in tokens.
        max_running, page_size, step_tokens: sizes of steps.
        attention: name of the backend.
    """

    spec: ModelSpec
    precision: Precision
    longest: int
    max_running: int
    page_size: int
    step_tokens: int
    attention: str


def tell_variants(runner: Runner, card: Card, tell: Callable[[Variant], object]) -> None:
    """Tells every variant of a kernel that a runner's warm-up launches on a card."""
    layers = runner.spec.layers
    unlike = tuple(layer for i, layer in enumerate(layers) if layer not in layers[:i])  # equal ones launch the same
    spec = replace(runner.spec, layers=unlike)
    nowhere = torch.device("meta")
    pages = -(-runner.longest // runner.page_size)
    with telling(card, tell), torch.inference_mode():
        model = GpuDecoder(spec, _Weightless(), runner.precision, nowhere, runner.longest)
        if runner.precision.cache.itemsize == 1:
            planes = [planes[0].heads for planes in spec.kv_layout.layers]
            model.kv_scales = KVScales(*(tuple(torch.empty(n, device=nowhere) for n in planes) for _ in "kv"))
        table = SlotTable(runner.max_running, runner.longest, runner.page_size)
        GpuRunner(
            model, table, SamplingTable(runner.max_running), pages, runner.step_tokens, runner.attention
        ).warm_up()  # fmt: skip


class _Weightless(WeightSource):
    """Zeros of any shape, which take no memory."""

    def __init__(self) -> None:
        super().__init__("no weights", {})

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(()).expand(shape)

    def _read(self, name: str, file: Path) -> torch.Tensor:
        raise AssertionError("take() needs no file")


class Compiling:
    """Processes that compile a runner's kernels, unless the cache has them all.

    Args:
        runner: whose kernels.
        card: that it will run on.
        processes: how many; None for one a core, at most 16.
    """

    def __init__(self, runner: Runner, card: Card, processes: int | None = None) -> None:
        self._done = prepare_cache() / "sglang_lite" / _name(runner, card)
        self._processes: list[subprocess.Popen[bytes]] = []
        if self._done.exists():
            return
        count = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES) if processes is None else processes
        try:
            for index in range(count):
                self._processes.append(start_process(runner, card, index, count))
        except OSError as error:
            logger.warning("no process to compile kernels can be started (%s): the engine compiles them.", error)

    def wait(self) -> None:
        """Waits for all. Kernels that a process did not compile are left to the warm-up, which is said."""
        for process in self._processes:
            try:
                status = process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            if status:
                logger.warning(
                    "a process that compiles kernels ended with status %d: the engine compiles its share.", status
                )

    def kept(self) -> None:
        """Notes that the cache has all kernels, once the runner is warm."""
        try:
            self._done.parent.mkdir(exist_ok=True)
            self._done.touch()
        except OSError as error:
            logger.warning("%s can't be written (%s): the next start looks for kernels again.", self._done, error)

    def end(self) -> None:
        """Ends processes that are not needed any more."""
        for process in self._processes:
            process.kill()
            process.wait()


def start_process(runner: Runner, card: Card, index: int, count: int) -> subprocess.Popen[bytes]:
    """Starts a process that compiles every `count`-th variant, from `index` on.

    Raises:
        OSError: it can't be started.
    """
    # Ctrl-C is the caller's. This process's paths come before anything is imported.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"from {__name__} import main; main()"
    )
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE,
        env={**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it has ended, as its status tells
        pickle.dump((runner, card, index, count), pipe)
    return process


def compiling(
    config: EngineConfig, spec: ModelSpec, precision: Precision, longest: int, device: torch.device
) -> Compiling:
    """Starts compiling the kernels of a model that is about to be loaded.

    Args:
        longest: sequence, in tokens.
        device: a GPU.
    """
    sizes = config.sized(gpu=True, longest=longest)
    runner = Runner(
        spec, precision, longest, sizes.max_running, sizes.page_size, sizes.step_tokens, config.attention_backend
    )
    return Compiling(runner, card_of(device), config.compile_processes)


def _name(runner: Runner, card: Card) -> str:
    """Name of everything that decides which kernels there are: runner, card, kernels' sources, versions."""
    digest = hashlib.sha256(f"{runner} {card} {triton.__version__} {torch.__version__}".encode())
    for file in sorted(Path(kernels.__path__[0]).glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def main() -> None:
    """A process: its share of the variants, in their order."""
    runner, card, index, count = pickle.load(sys.stdin.buffer)
    seen = 0

    def compile_own(variant: Variant) -> None:
        nonlocal seen
        if seen % count == index:
            variant.compile()
        seen += 1

    tell_variants(runner, card, compile_own)
