"""Creates the tiers of the KV cache that are not on the device (host memory and files), as the
engine's config requests.
"""

from __future__ import annotations

import json
import secrets
from concurrent.futures import Executor, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import torch

from sglang_lite.runtime.capacity import Capacity
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.executor.model_runner import ModelRunner
from sglang_lite.runtime.kv_cache.disk_tier import DiskTier
from sglang_lite.runtime.kv_cache.host_tier import HostTier
from sglang_lite.runtime.kv_cache.page_file import THREADS
from sglang_lite.runtime.kv_cache.page_names import PageNames
from sglang_lite.runtime.kv_cache.page_store import make_store
from sglang_lite.runtime.kv_cache.page_sums import compile_sum_pages
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.state_pages import OWN
from sglang_lite.runtime.kv_cache.state_tier import StateTier
from sglang_lite.runtime.kv_cache.tiers import Tiers
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.models.memory_check import check_free_memory
from sglang_lite.runtime.models.model import Model

# version of the layout of pages and files; engines with another version use other names
_FORMAT = 4
# samples of a weights file that distinguish it from others
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def make_tiers(
    config: EngineConfig,
    loaded: LoadedModel,
    capacity: Capacity,
    store: PrefixCache,
    runner: ModelRunner,
    executor: Executor | None,
) -> Tiers:
    """Creates the tiers for a config with `enable_hierarchical_cache`.

    Args:
        executor: executor that reads and writes files; None to create new threads.

    Raises:
        ModelError: the host has too little memory, or can't pin it.
        ParameterError: the store of files is unknown, or can't be used.
    """
    token_bytes = loaded.model.token_bytes
    size = capacity.sizes.page_size * max(token_bytes, 1)
    state_bytes = loaded.model.state_bytes
    slots, state_slots = _count_host_slots(config, capacity, token_bytes, state_bytes)
    hint = "Lower hicache_size or hicache_ratio."
    parts = {f"{slots:,} pages of the host's cache": slots * size}
    if state_slots:
        parts[f"{state_slots:,} states of the host's cache"] = state_slots * state_bytes
    check_free_memory(
        parts,
        torch.device("cpu"),
        loaded.name,
        hint,
    )
    compile_sum_pages()  # now, so no request waits for it
    disk = None
    if config.hicache_storage_backend is not None and config.hicache_storage_dir is not None:
        writer = executor or ThreadPoolExecutor(THREADS, "sglang_lite-write")
        executor = executor or ThreadPoolExecutor(THREADS, "sglang_lite-disk")
        most = int(config.hicache_storage_max_gb * 1e9)
        disk = DiskTier(
            make_store(config.hicache_storage_backend, config.hicache_storage_dir, most),
            executor,
            writer,
        )
    host = HostTier(runner.allocate_page_memory(slots))
    states = None
    if store.states is not None:
        states = StateTier(
            store.states,
            HostTier(runner.allocate_state_memory(state_slots)),
            on_drop=config.hicache_write_policy == "write_back",
        )
    return Tiers(
        store,
        host,
        page_names(
            config,
            loaded.name,
            loaded.path,
            loaded.model,
            capacity,
            given=config.load_format == "remote_instance",
        ),
        config.hicache_write_policy,
        disk,
        config.hicache_storage_prefetch_policy,
        states,
    )


def _count_host_slots(
    config: EngineConfig, capacity: Capacity, token_bytes: int, state_bytes: int
) -> tuple[int, int]:
    """Returns how many pages and states the host tier has room for. That is `hicache_ratio` times
    the device's numbers or, if `hicache_size` is set, as many as fit into that size.
    `mamba_full_memory_ratio` then determines the share for states.

    Args:
        token_bytes: size of a token's keys and values; 0 for models without attention.
        state_bytes: size of a state; 0 for models without states. Both are 0 for the tests' model.
    """
    # pages without keys and values take no memory, but states are found through them
    if config.hicache_size and state_bytes and not token_bytes:
        return (
            max(int(config.hicache_ratio * capacity.pages), 1),
            max(int(config.hicache_size * 1e9 / state_bytes), 1),
        )
    if not config.hicache_size:
        kept = capacity.states - OWN * capacity.sizes.max_running
        return (
            max(int(config.hicache_ratio * capacity.pages), 1),
            max(int(config.hicache_ratio * kept), 1) if state_bytes else 0,
        )
    size = config.hicache_size * 1e9
    page_bytes = capacity.sizes.page_size * max(token_bytes, 1)
    if not state_bytes:
        return max(int(size / page_bytes), 1), 0
    pages = size / (1 + config.mamba_full_memory_ratio)
    return max(int(pages / page_bytes), 1), max(int((size - pages) / state_bytes), 1)


def page_names(
    config: EngineConfig,
    name: str,
    path: Path | None,
    model: Model,
    capacity: Capacity,
    *,
    given: bool = False,
) -> PageNames:
    """Returns the scheme by which an engine names its cached pages. Pages with equal names have
    equal contents, apart from rounding differences.

    Args:
        config: settings of the engine.
        name: name of the engine's model.
        path: folder or file of the model's weights; None if they don't come from files.
        model: the model.
        capacity: sizes of the engine.
        given: whether weights came as tensors, in which case no other engine may use the names.
    """
    header = {
        "format": _FORMAT, "weight_version": config.weight_version,
        "model": name if path is None else _fingerprint(path), "update": secrets.token_hex(16) if given else "",
        "computes in": model.format, "token": model.token_bytes, "device": model.device.type,
        "page_size": capacity.sizes.page_size, "context_length": capacity.context_length,
        "kinds": [config.dtype, config.quantization, config.kv_dtype, config.load_format, config.model_impl],
        "records": [config.enable_return_routed_experts, config.enable_return_hidden_states],
        "kv_scales": config.quantization_param_path and _fingerprint(Path(config.quantization_param_path)),
    }  # fmt: skip
    states = _describe_states(config, model)
    if states:
        header["states"] = states
    return PageNames(json.dumps(header).encode(), capacity.sizes.page_size, states)


def _describe_states(config: EngineConfig, model: Model) -> str:
    """Returns a description of a model's states. It is equal only for models whose states have the
    same format, and empty for a model without states.
    """
    if not model.state_bytes:
        return ""
    shapes = [] if model.spec is None else [planes for planes in model.spec.states if planes]
    layers = "; ".join(f"{each.tail} x {each.channels}, {each.sums}" for each in shapes)
    return f"{model.state_bytes:,} bytes in {config.mamba_ssm_dtype} ({layers})"


def _fingerprint(path: Path) -> str:
    """Computes a hash of the names, sizes and content samples of a model's files."""
    found = blake2b(digest_size=16)
    for file in (
        [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    ):
        size = file.stat().st_size
        found.update(f"{file.name} {size} ".encode())
        with file.open("rb") as data:
            for i in range(_SAMPLES):
                data.seek(max(size - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1))
                found.update(data.read(_SAMPLE_BYTES))
    return found.hexdigest()
