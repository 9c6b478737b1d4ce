"""Capacity of an engine, computed from its config, its model and the machine's memory."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.sampling import parameters_for
from sglang_lite.runtime.capacity import Capacity, Sizes
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.executor import kv_pool_size
from sglang_lite.runtime.host import openmp
from sglang_lite.runtime.kv_cache.state_pages import OWN
from sglang_lite.runtime.loading.load_model import LoadedModel, longest_context
from sglang_lite.runtime.models.memory_check import check_free_memory
from sglang_lite.runtime.models.model import is_fused

logger = logging.getLogger("sglang_lite")
_MAX_STATES = 4096  # maximum number of states kept by default
# for models without attention
_KEPT_STATES = 4  # number of kept states for each request, on a CPU
_TOKENS_WITHOUT_KEYS = 1 << 24  # maximum number of cached tokens, which cost no device memory
_ENCODER_BYTES = 1 << 30  # used by an image encoder while it runs


def compute_capacity(config: EngineConfig, loaded: LoadedModel) -> Capacity:
    """Computes the capacity of an engine for a loaded model.

    Raises:
        ParameterError: the config asks for longer sequences than the model supports.
        ModelError: the machine has too little memory.
        SglError: another rank has failed.
    """
    context_length = longest_context(config, loaded.context_length)
    _warn_about_short_limits(config)
    device = loaded.model.device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for this thread, which launches the kernels
    else:
        openmp.log_unbounded_spinning()
    sizes = config.resolve_sizes(gpu=device.type == "cuda", longest=context_length)
    if loaded.media is not None and loaded.media.block:  # one step must compute a whole block
        least = loaded.media.block + sizes.max_running
        sizes = replace(sizes, step_tokens=max(sizes.step_tokens, least))
    model = loaded.model
    pool = config.max_total_tokens or max(context_length, sizes.max_running * 512)
    if not model.token_bytes and config.max_total_tokens is None:
        pool = max(pool, min(sizes.max_running * context_length, _TOKENS_WITHOUT_KEYS))
    window = _find_longest_window(config, loaded)
    state_room = (OWN + _KEPT_STATES) * sizes.max_running * model.state_bytes
    if device.type == "cuda" and config.max_total_tokens is None:
        assert is_fused(model), "models on a GPU are made of kernels"
        room = kv_pool_size.cache_room(
            model,
            config.mem_fraction,
            sizes,
            context_length,
            drafts=config.max_draft > 0,
            taken=0 if loaded.ranks is None else loaded.ranks.wait_until_loaded(),
            processes=_processes_per_gpu(config),
            layout=config.sharing,
            images=0 if loaded.tower is None else (config.image_cache_mb << 20) + _ENCODER_BYTES,
        )
        state_room = int(room.bytes)
        if model.token_bytes:
            pool = kv_pool_size.pool_tokens(
                model,
                room,
                sizes,
                context_length,
                window,
                states=None
                if config.max_mamba_cache_size is None
                else OWN * sizes.max_running + config.max_mamba_cache_size,
                state_share=config.mamba_full_memory_ratio,
            )
    pages = min(-(-pool // sizes.page_size), kv_pool_size.MAX_SLOTS // sizes.page_size - 1)
    longest = min(context_length, pages * sizes.page_size)
    tokens = pages * sizes.page_size
    window_pages = kv_pool_size.count_window_pages(window, pages, sizes, longest)
    size = kv_pool_size.pool_bytes(model, pages, window_pages, sizes.page_size)
    if model.token_bytes:
        state_room = int(config.mamba_full_memory_ratio * size)
    sizes = _limit_running_by_states(config, model.state_bytes, sizes, state_room)
    states = count_states(config, model.state_bytes, sizes, state_room)
    parts = {f"{tokens:,} tokens of keys and values": size}
    if states:
        parts[f"{states:,} states"] = states * model.state_bytes
    if device.type == "cpu":
        parts[f"{sizes.max_running:,} requests"] = sizes.max_running * (
            8 * longest + 2 * loaded.vocab_size
        )
    check_free_memory(
        parts, device, loaded.name, "Lower max_total_tokens, context_length or max_running."
    )
    return Capacity(sizes, context_length, pages, longest, window_pages, states)


def _limit_running_by_states(
    config: EngineConfig, state_bytes: int, sizes: Sizes, room: int
) -> Sizes:
    """Returns `sizes`, with fewer running requests if the config leaves their number open and
    `room`, the memory for states, is too small for all of them.
    """
    open_sizes = config.max_running is None and config.max_mamba_cache_size is None
    if not state_bytes or not open_sizes:
        return sizes
    most = room // state_bytes // (OWN + 1)
    return replace(sizes, max_running=max(min(sizes.max_running, most), 1))


def count_states(config: EngineConfig, state_bytes: int, sizes: Sizes, room: int) -> int:
    """Returns the number of places for states, both of running requests and of kept states. Returns
    0 for a model without states.

    Args:
        config: the engine's settings.
        state_bytes: size of a state.
        sizes: maximum number of running requests.
        room: bytes for all states.

    Raises:
        ParameterError: `max_mamba_cache_size` is given for a model without states, or is too small.
    """
    kept = config.max_mamba_cache_size
    if not state_bytes:
        if kept is not None:
            raise ParameterError(
                "max_mamba_cache_size",
                "the model has no recurrent layers.",
                hint="Leave it out.",
            )
        return 0
    if kept is not None and kept < sizes.max_running:
        raise ParameterError(
            "max_mamba_cache_size",
            f"{kept} states are fewer than the {sizes.max_running} requests of max_running, each of which keeps one.",
            hint=f"Take at least {sizes.max_running}, or lower max_running.",
        )
    if kept is None:
        fitting = room // state_bytes - OWN * sizes.max_running
        kept = min(max(fitting, sizes.max_running), _MAX_STATES)
    return OWN * sizes.max_running + kept


def _processes_per_gpu(config: EngineConfig) -> int:
    """Returns how many of the engine's processes share each of its GPUs."""
    return 1 if config.gpu_id_step else config.dp_size * config.parallel.ranks // config.nnodes


def _find_longest_window(config: EngineConfig, loaded: LoadedModel) -> int | None:
    """Returns the longest window of the layers that have a separate pool of pages, or None if there
    are no such layers.
    """
    if loaded.model.window is None:
        return None
    if config.enable_hierarchical_cache:
        logger.info(
            "layers with a window keep all tokens with enable_hierarchical_cache, which copies pages of all layers"
        )
        return None
    if config.deterministic and loaded.model.device.type != "cpu":
        logger.info(
            "layers with a window keep all tokens with deterministic on a GPU, whose attention has one table"
        )
        return None
    return loaded.model.window


def _warn_about_short_limits(config: EngineConfig) -> None:
    """Logs a warning if a limit in the config is shorter than an answer of the default length."""
    answer = parameters_for("sampling_params")["max_tokens"].default
    for name, tokens in (
        ("context_length", config.context_length),
        ("max_total_tokens", config.max_total_tokens),
    ):
        if tokens is not None and tokens < answer:
            logger.warning(
                "%s: %d tokens are all that a prompt and its answer can have, and by default an answer may take %d. "
                "Raise it, or leave it out.",
                name,
                tokens,
                answer,
            )
