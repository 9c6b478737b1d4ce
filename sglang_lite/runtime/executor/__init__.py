"""Runners that execute batches: torch operations on a CPU, fused kernels on a GPU."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_lite.runtime.capacity import Capacity
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.drafting.drafting import Drafting
from sglang_lite.runtime.executor.cpu_runner import CpuRunner
from sglang_lite.runtime.executor.expert_balance import ExpertBalance
from sglang_lite.runtime.executor.gpu_adapters import GpuAdapters
from sglang_lite.runtime.executor.model_runner import ModelRunner
from sglang_lite.runtime.executor.ranks import CpuLeadRunner, GpuLeadRunner, RankLinks, start_ranks
from sglang_lite.runtime.executor.step_record import SlotPages
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.layer_watch import create_dump_folder
from sglang_lite.runtime.models.lora.cpu_step import CpuAdapters
from sglang_lite.runtime.models.model import Model, is_fused

if TYPE_CHECKING:
    from sglang_lite.runtime.executor.compile_ahead import BackgroundCompilation


def make_runner(
    model: Model,
    capacity: Capacity,
    config: EngineConfig,
    compiling: BackgroundCompilation | None = None,
    cores_contended: Callable[[], bool] | None = None,
    drafting: Drafting | None = None,
    adapters: CpuAdapters | GpuAdapters | None = None,
    links: RankLinks | None = None,
) -> ModelRunner:
    """Returns the runner for the device that the model is on. A GPU runner is already warmed up.

    Args:
        model: model to run; a fused one gets a `GpuRunner`, any other a `CpuRunner`.
        capacity: numbers of slots and pages, and maximum numbers of tokens.
        config: attention backend, CUDA graphs and numerical settings.
        compiling: background compilation of the model's kernels; the warm-up waits for each kernel
            that it launches.
        cores_contended: callback that returns True if the engine has other work that needs a CPU
            core. Ignored unless torch's threads use all cores of the process, and in deterministic
            mode.
        drafting: creates drafts, and receives the measured times of captured steps.
        adapters: adapters of the slots, or None if no request may have one.
        links: rank 0's links to the ranks that hold the other parts of the model; None if there are
            none.
    """
    sizes = capacity.sizes
    pages = capacity.pages
    own_pages = capacity.window_pages
    slot_pages = SlotPages(
        sizes.max_running, capacity.longest, sizes.page_size, windows=own_pages > 0
    )
    if not is_fused(model):
        assert not isinstance(adapters, GpuAdapters)
        has_all = (
            torch.get_num_threads() >= len(os.sched_getaffinity(0))
            if sys.platform == "linux"
            else False
        )
        if links is not None:
            start_ranks(links, capacity)
        runner = CpuRunner(
            model,
            slot_pages,
            capacity.tokens,
            own_pages * sizes.page_size,
            capacity.states,
            one_by_one=config.deterministic,
            original_logprobs=config.original_logprobs,
            cores_contended=cores_contended if has_all and not config.deterministic else None,
            adapters=adapters,
        )
        _start_tensor_dump(model, config)
        return (
            runner if links is None else CpuLeadRunner(runner, links, _make_balance(model, config))
        )
    from sglang_lite.runtime.executor.cuda_graphs import graph_sizes  # needs Triton
    from sglang_lite.runtime.executor.gpu_runner import GpuRunner

    assert not isinstance(adapters, CpuAdapters)

    sizes_to_capture = (
        graph_sizes(sizes.max_running) if config.cuda_graphs and model.device.type == "cuda" else ()
    )
    if links is not None:
        start_ranks(links, capacity)
    gpu_runner = GpuRunner(
        model,
        slot_pages,
        pages,
        sizes.step_tokens,
        config.attention_backend,
        sizes_to_capture,
        draft_tokens=config.max_draft,
        original_logprobs=config.original_logprobs,
        window_pages=own_pages,
        states=capacity.states,
        adapters=adapters,
    )
    if model.device.type == "cuda":
        with contextlib.nullcontext() if compiling is None else compiling.waiting_for_kernels():
            gpu_runner.warm_up()
            # true on all ranks or on none, so that their collectives match
            if gpu_runner.graphs.sizes and (drafting is not None or model.parts is not None):
                measured = gpu_runner.graphs.measure_steps()
                if drafting is not None:
                    drafting.cost.use_measured_times(measured)
    _start_tensor_dump(model, config)
    return (
        gpu_runner
        if links is None
        else GpuLeadRunner(gpu_runner, links, _make_balance(model, config))
    )


def _start_tensor_dump(model: Model, config: EngineConfig) -> None:
    """Starts writing the outputs of a model's layers to files, if the config asks for it."""
    if config.debug_tensor_dump_output_folder is not None:
        assert isinstance(model, Decoder), "others are refused"
        model.watch.folder = create_dump_folder(
            config.debug_tensor_dump_output_folder, model.ranks.parallel
        )


def _make_balance(model: Model, config: EngineConfig) -> ExpertBalance | None:
    """Returns the object that rebalances experts between ranks, or None if the model was not loaded
    for it.
    """
    return (
        ExpertBalance(model, config)
        if isinstance(model, Decoder) and model.expert_moves is not None
        else None
    )
