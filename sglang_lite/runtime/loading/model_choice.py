"""Decides which models with a short name fit this machine, and which one to propose to the user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_lite.runtime.config import DEFAULT_MODEL, EngineConfig
from sglang_lite.runtime.loading.load_model import pick_device, precision
from sglang_lite.runtime.models import memory_check
from sglang_lite.runtime.models.aliases import ALIASES, PROPOSED, HubModel
from sglang_lite.runtime.models.layers.linear import keeps_only_blocks

TOKENS = 8192  # tokens whose keys and values are counted
# Bytes of a process besides weights, keys and values. Measured on CPUs (docs/models.md); on GPUs an
# allowance for the context of CUDA, graphs, and a step's activations and logits.
_BESIDE = {"cpu": 900_000_000, "cuda": 3_000_000_000}
# most bytes of weights that a proposed model reads per token and CPU core
_READ_BY_CORE = 600_000_000


@dataclass(frozen=True, slots=True)
class HostMachine:
    """Machine that an engine would run on.

    Attributes:
        device: its device, as torch names it.
        free: bytes that an engine may use.
        cores: number of processor cores.
        item: bytes of a decoded weight, and of a number of a key or value.
        has_copies: whether a CPU keeps decoded weights in addition to a GGUF file's blocks.
    """

    device: str
    free: int
    cores: int
    item: int
    has_copies: bool = False

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def process_bytes(self) -> int:
        """Bytes that an engine's process takes in addition to weights, keys and values."""
        return _BESIDE["cpu" if self.is_cpu else "cuda"]


@dataclass(frozen=True, slots=True)
class ModelFit:
    """Memory that a model needs on a machine, and how much of it is lacking.

    Attributes:
        name: its short name.
        needed: bytes that its engine takes.
        lacking: bytes by which `needed` exceeds the free memory; 0 if it fits.
        read: bytes of weights read to generate a token.
        is_slow: whether the machine is a CPU with too few cores to read this much per token.
    """

    name: str
    needed: int
    lacking: int
    read: int
    is_slow: bool


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """All models with a short name, divided into those that fit a machine and those that don't.

    Attributes:
        machine: the machine.
        fitting: models that fit, the largest first. Models that are slow here come after the
            others, and models that generate nothing come last.
        others: models that don't fit, the one that lacks the least memory first.
        proposed: the proposed model; None if none of the tested models fits.
    """

    machine: HostMachine
    fitting: Sequence[ModelFit]
    others: Sequence[ModelFit]
    proposed: ModelFit | None


def measure_machine(config: EngineConfig | None = None) -> HostMachine:
    """Measures the machine that an engine of this config would run on. The default is the config of
    `sgl.Engine()`.

    Raises:
        ParameterError: the config names a device that can't be used.
    """
    config = config or EngineConfig()
    device = pick_device(config)
    free = memory_check.free_bytes(device) or 0
    if device.type == "cuda":  # an engine leaves a part of the GPU unused
        free -= int((1 - config.mem_fraction) * torch.cuda.mem_get_info(device)[1])
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    item = precision("auto", device).weights.itemsize
    has_copies = device.type == "cpu" and item == 2 and not keeps_only_blocks()
    return HostMachine(str(device), max(free, 0), cores, item, has_copies)


def choose_model(machine: HostMachine) -> ModelChoice:
    """Decides which models with a short name fit a machine, and which one to propose. Proposes the
    first model in `PROPOSED` that fits and is not slow on the machine.
    """
    fits = [_estimate_fit(name, machine) for name in ALIASES]
    fits.sort(
        key=lambda fit: (
            ALIASES[fit.name].token_numbers == 0,
            fit.is_slow,
            -ALIASES[fit.name].parameters,
        )
    )
    fitting = [fit for fit in fits if not fit.lacking]
    by_name = {fit.name: fit for fit in fitting if not fit.is_slow}
    proposed = next((by_name[name] for name in PROPOSED if name in by_name), None)
    return ModelChoice(
        machine, fitting, sorted((f for f in fits if f.lacking), key=lambda f: f.lacking), proposed
    )


def _estimate_fit(name: str, machine: HostMachine) -> ModelFit:
    model = ALIASES[name]
    decoded = machine.item * model.parameters
    if isinstance(model, HubModel):
        kept = read = decoded
    elif model.token_numbers == 0:  # an encoder, in the format of its file
        kept = read = model.file_bytes
    elif not machine.is_cpu:  # upper bound, as 4-bit matrices stay packed
        kept = read = decoded
    elif machine.has_copies:  # used in steps of many rows; those of few rows read the file's blocks
        kept = decoded + model.file_bytes
        read = model.file_bytes
    else:
        kept = read = model.file_bytes
    needed = kept + TOKENS * machine.item * model.token_numbers + machine.process_bytes
    is_slow = machine.is_cpu and read > machine.cores * _READ_BY_CORE
    return ModelFit(name, needed, max(needed - machine.free, 0), read, is_slow)


def suggest_larger_model(config: EngineConfig) -> str:
    """Returns one line that names the limits of the default model, and a larger model that fits
    this machine. Returns "" if the config does not use the default model.
    """
    if config.model != DEFAULT_MODEL:
        return ""
    choice = choose_model(measure_machine(config))
    limits = (
        f"{DEFAULT_MODEL} copies and chooses; rewriting and longer extraction need a larger model"
    )
    if choice.proposed is None or choice.proposed.name == DEFAULT_MODEL:
        return f"{limits} than fits here (sglang-lite models --fits)."
    name = choice.proposed.name
    needed = gigabytes(choice.proposed.needed)
    return f"{limits}: sgl.Engine({name!r}) needs {needed} of the {gigabytes(choice.machine.free)} free here."


def gigabytes(count: int) -> str:
    """Formats a number of bytes as gigabytes (units of 1,000,000,000 bytes)."""
    return f"{count / 1e9:,.1f} GB"
