"""Adapters of one engine. Loads the adapters that the engine starts with, and loads and unloads
others on request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.embedding.load import LoadedEncoder
from sglang_lite.runtime.executor.gpu_adapters import GpuAdapters
from sglang_lite.runtime.loading.load_model import LoadedModel, longest_context
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.lora.adapter import Adapter, AdapterReader
from sglang_lite.runtime.models.lora.config import largest_rank
from sglang_lite.runtime.models.lora.cpu_step import CpuAdapters
from sglang_lite.runtime.models.lora.loaded import LoadedAdapters
from sglang_lite.runtime.models.lora.paths import LoraPath, read_lora_path
from sglang_lite.runtime.models.lora.pool import AdapterPool, PoolSize
from sglang_lite.runtime.models.memory_check import free_bytes
from sglang_lite.runtime.models.resolve import find_base_model
from sglang_lite.runtime.models.spec import ModelSpec

_HOST_SHARE = 0.5  # share of the host's free memory that adapters may use
_MERGE = "Merge the adapter into the weights with peft's merge_and_unload()."


@dataclass(frozen=True, slots=True)
class EngineAdapters:
    """Adapters of an engine.

    Attributes:
        loaded: adapters by name.
        pool: adapters on the device.
        memory: their memory, for the runner.
        of_model: adapter for requests that name none, if the model is an adapter's folder;
            otherwise None.
    """

    loaded: LoadedAdapters
    pool: AdapterPool
    memory: CpuAdapters | GpuAdapters
    of_model: str | None = None

    def adapter_for(self, name: str | None) -> Adapter | None:
        """Returns the adapter a request uses, or None if it uses none. Raises like
        `LoadedAdapters.adapter_for`.
        """
        name = self.of_model if name is None else name
        return None if name is None else self.loaded.adapter_for(name)

    def is_adapter_in_memory(self, name: str | None) -> bool:
        """Returns whether an adapter is in memory. If so, `adapter_for` reads no file and may be
        called on the loop's thread.
        """
        name = self.of_model if name is None else name
        return name is None or self.loaded.is_in_memory(name)

    def load_adapter(self, name: str, path: str, *, pinned: bool) -> None:
        """Checks and loads an adapter. Raises like `LoadedAdapters.register_adapter`. Must not be
        called on the loop's thread.
        """
        self.loaded.register_adapter(name, Path(path).expanduser(), pinned=pinned)
        if pinned:
            self.pool.pin(self.loaded.adapter_for(name))

    def unload(
        self,
        name: str,
        leave: Callable[[Sequence[Adapter], Callable[[], object]], object],
        post: Callable[[Callable[[], object]], object],
    ) -> Future[None]:
        """Forgets an adapter. Returns a future that is done when no request uses the adapter any
        more.

        The future fails with the error of `LoadedAdapters.unload`.

        Args:
            name: its name.
            leave: called on the loop's thread with the forgotten adapters and a function, which it
                has to call when no request uses them.
            post: function that runs a call on the loop's thread.
        """
        done: Future[None] = Future()
        try:
            adapters = self.loaded.unload(name)
        except ParameterError as error:
            done.set_exception(error)
            return done
        post(partial(leave, adapters, partial(done.set_result, None)))
        return done

    def drop_cpu_tensors(self) -> None:
        """Frees the adapters' tensors in an engine on a CPU, except tensors that waiting requests
        hold. An adapter is read again when a request names it. Call this only while no request
        runs.
        """
        assert isinstance(self.memory, CpuAdapters)
        self.pool.clear_all_slots()
        self.memory.free_step_copies()
        self.loaded.drop_all()

    def restore_pinned(self) -> None:
        """Reloads the pinned adapters that were dropped. Raises ModelError if one can't be read."""
        for each in self.loaded.list():
            if each.pinned:
                self.pool.pin(self.loaded.adapter_for(each.name))

    def list(self) -> list[dict[str, Any]]:  # texts, booleans and a whole number
        """Describes each loaded adapter in a dictionary."""
        found = []
        for each in self.loaded.list():
            adapter = each.adapter
            found.append(
                {
                    "lora_name": each.name,
                    "lora_path": str(each.files.config.folder),
                    "pinned": each.pinned,
                    "rank": each.files.rank,
                    "resident": adapter is not None and self.pool.slot_of(adapter) is not None,
                }
            )
        return found

    def stats(self) -> dict[str, int]:
        """Returns counts for `Engine.stats()`."""
        return {
            "adapters": len(self.loaded.list()),
            "adapters_resident": sum(each is not None for each in self.pool.slots),
            "adapter_bytes": self.loaded.bytes,
            "adapter_copies": self.pool.writes,
            "adapter_reads": self.loaded.reads,
        }


def make_adapters(config: EngineConfig, loaded: LoadedModel) -> EngineAdapters | None:
    """Loads the adapters an engine starts with. Returns None if requests may not name adapters.

    Args:
        config: settings of the engine.
        loaded: its model.

    Raises:
        ParameterError: the model takes no adapters, or a setting does not fit one.
        ModelError: an adapter can't be used.
    """
    if not _uses_adapters(config):
        return None
    model = loaded.model
    if not isinstance(model, Decoder):
        raise ParameterError(
            "enable_lora",
            f"{loaded.name} runs with transformers' code, which takes no adapters here.",
            hint=_MERGE,
        )
    if config.deterministic:
        raise ParameterError(
            "deterministic",
            "products of adapters depend on the batch, so not with adapters.",
            hint="Leave one out.",
        )
    return _load_adapters(
        config,
        loaded.name,
        model.spec,
        model.precision.compute,
        partial(_make_adapter_memory, config, loaded, model),
    )


def make_encoder_adapters(config: EngineConfig, loaded: LoadedEncoder) -> EngineAdapters | None:
    """Loads the adapters of an engine whose model only reads texts. Otherwise works like
    `make_adapters`.
    """
    if not _uses_adapters(config):
        return None
    layers = loaded.model.spec.layers
    if not isinstance(layers, ModelSpec):
        raise ParameterError(
            "enable_lora",
            f"{loaded.name} is of BERT's kind; of models that read texts, decoders alone take adapters.",
            hint=_MERGE,
        )
    return _load_adapters(
        config, loaded.name, layers, loaded.model.dtype, lambda size: CpuAdapters(size.slots, 0)
    )


def _uses_adapters(config: EngineConfig) -> bool:
    """Returns whether requests may name adapters."""
    return config.enable_lora or find_base_model(config.model) is not None


def _load_adapters(
    config: EngineConfig,
    name: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    make_memory: Callable[[PoolSize], CpuAdapters | GpuAdapters],
) -> EngineAdapters:
    """Loads the adapters that a config names. `make_memory` allocates the memory for adapters in
    use.
    """
    own = (
        None
        if find_base_model(config.model) is None
        else LoraPath(Path(config.model).name, config.model, pinned=True)
    )
    given = [*map(read_lora_path, config.lora_paths), *([] if own is None else [own])]
    max_rank = largest_rank(config.max_lora_rank, [each.path for each in given])
    size = PoolSize.for_adapters(config.max_loras_per_batch, max_rank)
    memory = make_memory(size)
    reader = AdapterReader(
        spec,
        name,
        dtype,
        max_rank,
        memory.allocate_adapter_buffer,
        config.lora_target_modules or (),
    )
    adapters = EngineAdapters(
        LoadedAdapters(
            reader,
            frozenset({name, config.model, config.served_model_name or ""} if own is None else ()),
            config.max_loaded_loras,
            config.max_loras_per_batch - 1,
            _adapter_host_bytes(),
        ),
        AdapterPool(memory, size, config.max_loras_per_batch, config.lora_eviction_policy),
        memory,
        None if own is None else own.name,
    )
    for each in given:
        adapters.load_adapter(each.name, each.path, pinned=each.pinned)
    return adapters


def _make_adapter_memory(
    config: EngineConfig, loaded: LoadedModel, model: Decoder, size: PoolSize
) -> CpuAdapters | GpuAdapters:
    """Creates the memory for the runner's adapters. On a GPU, the memory is allocated immediately,
    before the KV cache takes the rest.
    """
    if model.fused:
        return GpuAdapters(model.spec, size, model.precision.compute, model.device, model.zeros)
    sizes = config.resolve_sizes(gpu=False, longest=longest_context(config, loaded.context_length))
    return CpuAdapters(size.slots, sizes.max_running)


def _adapter_host_bytes() -> int | None:
    """Returns how many bytes of the host's memory adapters may use; None if the free memory is
    unknown.
    """
    free = free_bytes(torch.device("cpu"))
    return None if free is None else int(free * _HOST_SHARE)
