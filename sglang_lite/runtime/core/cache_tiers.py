"""Tiers of the KV cache below the device, as an engine's config asks for them."""

from __future__ import annotations

import json

import torch

from sglang_lite.runtime.config import Capacity, EngineConfig
from sglang_lite.runtime.executor.model_runner import ModelRunner
from sglang_lite.runtime.kv_cache.host_tier import HostTier
from sglang_lite.runtime.kv_cache.page_names import PageNames
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.tiers import Tiers
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.models.memory_check import check_room

_FORMAT = 1  # of the rows of a page


def make_tiers(
    config: EngineConfig, loaded: LoadedModel, capacity: Capacity, store: PrefixCache, runner: ModelRunner
) -> Tiers:
    """Makes the tiers that a config with `enable_hierarchical_cache` asks for.

    Raises:
        ModelError: the host has too little memory, or can't pin it.
    """
    size = capacity.sizes.page_size * max(loaded.model.token_bytes, 1)
    slots = max(
        int(config.hicache_size * 1e9 / size if config.hicache_size else config.hicache_ratio * capacity.pages), 1
    )
    hint = "Lower hicache_size or hicache_ratio."
    check_room({f"{slots:,} pages of the host's cache": slots * size}, torch.device("cpu"), loaded.name, hint)
    host = HostTier(runner.page_memory(slots))
    return Tiers(store, host, page_names(config, loaded, capacity), config.hicache_write_policy)


def page_names(config: EngineConfig, loaded: LoadedModel, capacity: Capacity) -> PageNames:
    """Names of the pages of an engine: those of equal names have equal bytes, but for rounding in another order."""
    header = {
        "format": _FORMAT, "model": loaded.name, "weight_version": config.weight_version,
        "computes in": loaded.model.format, "token": loaded.model.token_bytes, "device": loaded.model.device.type,
        "page_size": capacity.sizes.page_size, "context_length": capacity.context_length,
        "kinds": [config.dtype, config.quantization, config.kv_dtype, config.load_format, config.model_impl],
    }  # fmt: skip
    return PageNames(json.dumps(header).encode(), capacity.sizes.page_size)
