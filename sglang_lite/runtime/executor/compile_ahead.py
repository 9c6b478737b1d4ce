"""Compiles a model's kernels in parallel while its weights are read.

A separate process warms up the same runner on tensors without memory, which yields the kernel
variants that the engine's warm-up will launch. Forks of that process compile them into Triton's
cache and report each one. The engine's warm-up waits for a variant when it first launches it. No
part of this touches a GPU, so none need be present.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime.cache import triton_key

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime import kernels
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.executor.gpu_adapters import GpuAdapters
from sglang_lite.runtime.executor.gpu_runner import GpuRunner
from sglang_lite.runtime.executor.step_record import SlotPages
from sglang_lite.runtime.kernels.all_reduce import Peers, rank_memory_shape
from sglang_lite.runtime.kernels.cache import prepare_cache
from sglang_lite.runtime.kernels.compile_process import MARKS, CompileProcess, marker_path
from sglang_lite.runtime.kernels.device_properties import DeviceProperties, properties_of
from sglang_lite.runtime.kernels.kv_cache import KVScales
from sglang_lite.runtime.kernels.two_shot import PartPeers
from sglang_lite.runtime.kernels.variants import (
    KernelVariant,
    compile_driver_bindings,
    intercept_launches,
    waiting_for_variants,
)
from sglang_lite.runtime.kv_cache.state_pages import OWN
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.gpu_ranks import GpuRanks
from sglang_lite.runtime.models.lora.config import largest_rank
from sglang_lite.runtime.models.lora.paths import read_lora_path
from sglang_lite.runtime.models.lora.pool import PoolSize
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.resolve import find_base_model
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.weights.blocks import Format
from sglang_lite.runtime.models.weights.dummy import DummySource
from sglang_lite.runtime.models.weights.quantised_formats import Matrices
from sglang_lite.runtime.parallel.collectives import ONE_PROCESS, Collectives
from sglang_lite.runtime.parallel.layout import Parallel

logger = logging.getLogger("sglang_lite")

_MAX_FORKS = 16
# Kernels that take longest to compile, from 10 s down to 1 s; all others take less.
_LONGEST = (
    "_packed_products",
    "prefill_kernel",
    "prefix_kernel",
    "_rope_attention",
    "_decode",
    "_prefix",
    "_prefill",
    "_pick",
    "_scan",
)
# Modules that tensors without memory and kernels of newer GPUs import late. They are imported while
# the engine's process looks for its GPU.
_IMPORTED_LATE = ("sglang_lite.runtime.kernels.prefix_attention_hopper",)


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """Parameters of a runner that decide which kernel variants it launches.

    Attributes:
        spec: shape of the model.
        precision: data types of the model and its cache.
        longest: longest sequence in tokens.
        max_running, page_size, step_tokens: sizes of steps.
        attention: name of the attention backend.
        draft_tokens: maximum number of guesses in a draft.
        adapters: size of the memory for adapters, or None for a runner without adapters.
        parallel: layout of the ranks, one of which has this runner.
        stored: format of the layers' matrices in the checkpoint, as in `Matrices`; None for 16
            bits.
    """

    spec: ModelSpec
    precision: Precision
    longest: int
    max_running: int
    page_size: int
    step_tokens: int
    attention: str
    draft_tokens: int = 0
    adapters: PoolSize | None = None
    parallel: Parallel = ONE_PROCESS.parallel
    stored: Format | None = None


def collect_variants(
    runner: RunnerShape, properties: DeviceProperties, on_variant: Callable[[KernelVariant], object]
) -> None:
    """Calls `on_variant` with every kernel variant that a runner's warm-up would launch on a GPU.
    The warm-up runs on tensors without memory. If it needs their values, as with the attention
    backend "torch", the collection stops early without an error.

    Args:
        runner: parameters of the runner.
        properties: properties of the GPU that the runner will run on.
        on_variant: callback for each variant.
    """
    layers = runner.spec.layers
    # equal ones share kernels
    unlike = [layer for i, layer in enumerate(layers) if layer not in layers[:i]]
    once = layers[0], *unlike  # a separate first layer, which adds no residual
    spec = replace(runner.spec, layers=once * runner.parallel.pp)  # for each stage
    if runner.spec.has_linked_layers:  # a layer's position matters
        spec = runner.spec
    nowhere = torch.device("meta")
    pages = -(-runner.longest // runner.page_size)
    unsupported = contextlib.suppress(NotImplementedError, ParameterError)
    with (
        intercept_launches(properties, on_variant),
        torch.inference_mode(),
        _ShapeOnlyProducts(),
        unsupported,
    ):
        row_bytes = spec.hidden_size * runner.precision.compute.itemsize
        ranks = _make_fake_collectives(runner.parallel, row_bytes, nowhere)
        source = DummySource(nowhere, Matrices(format=runner.stored))
        model = GpuDecoder(spec, source, runner.precision, nowhere, runner.longest, ranks=ranks)
        if runner.precision.cache.itemsize == 1:
            planes = [planes[0].heads for planes in model.kv_layout.layers]
            model.kv_scales = KVScales(
                *(tuple(torch.empty(n, device=nowhere) for n in planes) for _ in "kv")
            )
        adapters = None
        if runner.adapters is not None:
            adapters = GpuAdapters(spec, runner.adapters, runner.precision.compute, nowhere)
        slot_pages = SlotPages(runner.max_running, runner.longest, runner.page_size)
        made = GpuRunner(
            model,
            slot_pages,
            pages,
            runner.step_tokens,
            runner.attention,
            draft_tokens=runner.draft_tokens,
            states=OWN * runner.max_running if model.state_bytes else 0,
            adapters=adapters,
        )
        made.warm_up()


def _make_fake_collectives(
    parallel: Parallel, row_bytes: int, nowhere: torch.device
) -> Collectives:
    """Returns collectives between ranks whose tensors have no memory. They show which kernels are
    needed, but exchange nothing.
    """
    if parallel.ranks == 1:
        return ONE_PROCESS
    memory = torch.empty(
        rank_memory_shape(parallel.ranks, row_bytes), dtype=torch.int64, device=nowhere
    )
    in_stage = (
        None if parallel.pp == 1 else _make_fake_collectives(parallel.in_stage, row_bytes, nowhere)
    )
    place = parallel.rank, (0,) * parallel.ranks
    return GpuRanks(
        parallel, Peers.for_rank(*place, memory), None, in_stage, PartPeers.for_rank(*place, memory)
    )


class _ShapeOnlyProducts(TorchFunctionMode):
    """Torch mode in which `F.linear` returns an uninitialised result of the right shape. On tensors
    without memory, torch itself would first import a library for symbolic shapes (1.6 s).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # as torch defines it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # result of func
        if func is F.linear:
            x, weight = args[:2]
            return x.new_empty((*x.shape[:-1], len(weight)))
        return func(*args, **(kwargs or {}))


class BackgroundCompilation:
    """Compiles a runner's kernels in a separate process, unless the cache already has all of them.

    Args:
        runner: parameters of the runner.
        properties: properties of the GPU that the runner will run on.
        model: name of the model, as in the config.
        processes: maximum number of parallel forks. None for one per core, at most 16; 0 for no
            separate process.
        early: process that was started before the runner was known; its creator must end it.
    """

    def __init__(
        self,
        runner: RunnerShape,
        properties: DeviceProperties,
        model: str,
        processes: int | None = None,
        early: CompileProcess | None = None,
    ) -> None:
        folder = prepare_cache()
        self._done = folder / MARKS / _digest_of_requirements(runner, properties)
        self._model_mark = marker_path(model)
        self._process: CompileProcess | None = None
        cores = len(os.sched_getaffinity(0))
        count = min(cores, _MAX_FORKS) if processes is None else processes
        if self._done.exists() or not count or (processes is None and cores == 1):
            return
        try:
            self._process = early or CompileProcess()
        except OSError as error:
            logger.warning(
                "no process to compile kernels can be started (%s): the engine compiles them.",
                error,
            )
        else:
            self._process.send(pickle.dumps((os.fspath(folder), runner, properties, count)))

    @contextlib.contextmanager
    def waiting_for_kernels(self) -> Iterator[None]:
        """Makes the first launch of each kernel in the `with` block wait until that kernel is
        compiled. On exit, ends the compile process and records that the cache has all kernels.
        """
        try:
            if self._process is None:
                yield
            else:
                with waiting_for_variants(self._process.wait_for):
                    yield
        finally:
            self.end_process()
        try:
            self._done.parent.mkdir(exist_ok=True)
            self._done.touch()
            self._model_mark.touch()
        except OSError as error:
            logger.warning(
                "%s can't be written (%s): the next start looks for kernels again.",
                self._done,
                error,
            )

    def end_process(self) -> None:
        """Ends the compile process."""
        if self._process is not None:
            self._process.kill()


def start_compiling(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    longest: int,
    device: torch.device,
    early: CompileProcess | None = None,
    parallel: Parallel = ONE_PROCESS.parallel,
    stored: Format | None = None,
) -> BackgroundCompilation:
    """Starts compiling the kernels of a model that is about to be loaded.

    Args:
        config: config of the engine.
        spec: shape of the model.
        precision: data types of the model and its cache.
        longest: longest sequence in tokens.
        device: GPU that the model will run on.
        early: as for `BackgroundCompilation`.
        parallel: layout of the ranks, and this rank's place in it.
        stored: same as in `RunnerShape`.
    """
    sizes = config.resolve_sizes(gpu=True, longest=longest)
    adapters = None
    own = [] if find_base_model(config.model) is None else [config.model]
    if config.enable_lora or own:
        folders = [*own, *(read_lora_path(each).path for each in config.lora_paths)]
        adapters = PoolSize.for_adapters(
            config.max_loras_per_batch, largest_rank(config.max_lora_rank, folders)
        )
    runner = RunnerShape(
        spec,
        precision,
        longest,
        sizes.max_running,
        sizes.page_size,
        sizes.step_tokens,
        config.attention_backend,
        config.max_draft,
        adapters,
        parallel,
        stored,
    )
    return BackgroundCompilation(
        runner, properties_of(device), config.model, config.compile_processes, early
    )


def _digest_of_requirements(runner: RunnerShape, properties: DeviceProperties) -> str:
    """Returns a digest of everything that decides which kernels a runner needs: runner, GPU, kernel
    sources and versions.
    """
    digest = hashlib.sha256(
        f"{runner} {properties} {triton.__version__} {torch.__version__}".encode()
    )
    for file in sorted(Path(kernels.__path__[0]).glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def main(descriptor: int) -> None:
    """Runs the compile process: reads its work from a socket, compiles it and exits.

    Args:
        descriptor: file descriptor of the process's end of the socket.
    """
    line = socket.socket(fileno=descriptor)
    _run_in_fork(compile_driver_bindings)  # first, as the engine's process needs it first
    triton_key()  # computed once for all forks, as it reads Triton's sources
    for name in _IMPORTED_LATE:
        with contextlib.suppress(ImportError):  # older versions of Triton lack some of them
            import_module(name)
    work = b"".join(iter(lambda: line.recv(1 << 20), b""))
    if not work:
        return
    os.environ["TRITON_CACHE_DIR"], runner, properties, count = pickle.loads(work)
    variants: list[KernelVariant] = []
    collect_variants(runner, properties, variants.append)
    raise SystemExit(compile_all(variants, count, line))


def compile_all(variants: list[KernelVariant], count: int, line: socket.socket) -> int:
    """Compiles variants in forks of this process.

    Args:
        variants: variants to compile.
        count: maximum number of parallel forks.
        line: socket to which the digest of each variant is sent once it is in the cache.

    Returns:
        Exit status: 1 if a fork failed, else 0.
    """
    tasks: list[Callable[[], None]] = []
    launchers: set[str] = set()
    for variant in sorted(variants, key=_compilation_order_key):
        tasks.append(
            partial(_compile, variant, line, with_launcher=variant.launcher not in launchers)
        )
        launchers.add(variant.launcher)
    running: set[int] = set()
    failed = 0
    while tasks or running:
        if tasks and len(running) < count:
            running.add(_run_in_fork(tasks.pop(0)))
            continue
        process, status = os.wait()
        running.discard(process)
        failed |= status != 0
    return failed


def _compilation_order_key(variant: KernelVariant) -> int:
    """Returns a variant's position in the order of compilation. The kernels that take longest come
    first.
    """
    name = variant.name.rpartition(".")[2]
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)


def _run_in_fork(task: Callable[[], None]) -> int:
    """Starts a fork that runs a task and then exits. Returns the fork's process id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        task()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _compile(variant: KernelVariant, line: socket.socket, *, with_launcher: bool) -> None:
    variant.compile()
    if with_launcher:
        variant.compile_launcher()
    line.sendall(variant.digest.encode() + b"\n")
