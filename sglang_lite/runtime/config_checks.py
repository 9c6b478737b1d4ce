"""Checks of engine settings that depend on each other."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.runtime.parallel.addresses import parse_address
from sglang_lite.runtime.parallel.layout import Parallel
from sglang_lite.runtime.tokens.image_options import parse_media_setting

if TYPE_CHECKING:
    from sglang_lite.runtime.config import EngineConfig

_MAX_REPLICAS = 1024
# Settings that must keep their defaults with several ranks.
_OF_ONE_RANK = (
    "in_process",
    "deterministic",
    "enable_lora",
    "enable_hierarchical_cache",
    "enable_memory_saver",
    "cpu_offload_gb",
    "kv_dtype",
    "encoder_only",
    "language_only",
)
# The same when replicas share feed-forwards.
_OF_WHOLE_REPLICAS = (
    "restart",
    "nnodes",
    "use_ray",
    "enable_eplb",
    "expert_distribution_recorder_mode",
    "enable_return_routed_experts",
)
_SEED = "remote_instance_weight_loader_"


def check_unset(
    config: EngineConfig, names: Collection[str], problem: str, hint: str = "Leave one out."
) -> None:
    """Raises ParameterError with the given problem if any of these settings differs from its
    default.
    """
    for field in fields(config):
        if field.name in names and getattr(config, field.name) != field.default:
            raise ParameterError(field.name, problem, hint=hint)


def check_int(name: str, value: object, least: int) -> None:
    """Raises ParameterError if a setting is not a whole number or is less than `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ParameterError(name, f"{value!r} is not a whole number of at least {least}.")


def check_number(name: str, value: object, valid: Callable[[float], bool], problem: str) -> None:
    """Raises ParameterError with the given problem if a setting is not a number, or if `valid`
    rejects it.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not valid(value):
        raise ParameterError(name, f"{value!r} is {problem}")


def check_chat_template(template: str | None) -> None:
    """Raises ParameterError if a text is neither a template nor the path of one."""
    if template is not None and "{" not in template and not os.path.isfile(template):
        problem = f"there is no file {short_repr(template)}, and the text has no {{{{ or {{%, so it is no template."
        raise ParameterError("chat_template", problem)


def check_scales(path: str | None, kv_dtype: str) -> None:
    """Raises ParameterError if a file with scales is given although keys and values are not stored
    in 8 bits.
    """
    if path is not None and kv_dtype != "fp8":
        raise ParameterError(
            "quantization_param_path",
            "scales are for keys and values in 8 bits.",
            hint='Add kv_dtype="fp8".',
        )


def normalise_seed_ports(service: int | None, group: UserValue) -> tuple[int, ...] | None:
    """Checks the ports of an engine that sends its weights to other engines. Returns the port of
    its process group as a tuple, or None if any free port may be used.

    Args:
        service: port of its server.
        group: ports of the group as given.

    Raises:
        ParameterError: a port is invalid, or there are several.
    """
    of_group = f"{_SEED}send_weights_group_ports"
    of_service = f"{_SEED}seed_instance_service_port"
    if group is not None and (not isinstance(group, list | tuple) or len(group) != 1):
        raise ParameterError(of_group, f"{short_repr(group)} is no list of one port.")
    ports = None if group is None else tuple(group)
    for name, port in ((of_service, service), *((of_group, port) for port in ports or ())):
        if port is not None:
            check_int(name, port, 1)
            if port >= 1 << 16:
                raise ParameterError(name, f"{port:,} is no port.")
    return ports


def check_offload(gigabytes: int, group_size: int, *, saver: bool) -> None:
    """Raises ParameterError if the settings for keeping layers' weights in the host's memory are
    wrong, or are combined with the memory saver (`saver`).
    """
    check_int("cpu_offload_gb", gigabytes, 0)
    if group_size != -1:
        check_int("offload_group_size", group_size, 1)
        if not gigabytes:
            raise ParameterError(
                "offload_group_size",
                "is for weights in the host's memory.",
                hint="cpu_offload_gb=4",
            )
    if gigabytes and saver:
        raise ParameterError(
            "cpu_offload_gb", "is not here with enable_memory_saver.", hint="Leave one out."
        )


def _normalise_encoder_urls(given: UserValue) -> tuple[str, ...]:
    """Returns the addresses of encoders without trailing slashes. Raises ParameterError if one is
    invalid.
    """
    found = (given,) if isinstance(given, str) else given
    if not isinstance(found, list | tuple):
        raise ParameterError("encoder_urls", f"{short_repr(given)} is no list of addresses.")
    for each in found:
        if not isinstance(each, str) or not re.fullmatch(
            r"https?://(\[[\da-fA-F:]+\]|[\w.-]+)(:\d+)?/?", each
        ):
            problem = f"{short_repr(each)} is no address of a server."
            raise ParameterError(
                "encoder_urls", problem, hint="Write http://10.0.0.2:30000, for example."
            )
    return tuple(each.rstrip("/") for each in found)


def _check_encoders(
    encoder_only: bool, language_only: bool, urls: tuple[str, ...], media: bool | None
) -> None:
    """Raises ParameterError if settings of encoders on other servers conflict with each other or
    with `enable_multimodal`.
    """
    if language_only and encoder_only:
        raise ParameterError(
            "encoder_only", "and language_only are both given.", hint="Leave one out."
        )
    if language_only and not urls:
        hint = "Add encoder_urls, or use enable_multimodal=False to read text alone."
        raise ParameterError("language_only", "needs servers that encode.", hint=hint)
    if urls and not language_only:
        raise ParameterError(
            "encoder_urls", "are asked with language_only alone.", hint="Add language_only=True."
        )
    if media is False and (encoder_only or language_only):
        name = "encoder_only" if encoder_only else "language_only"
        raise ParameterError(
            name, "is for images, videos and sounds.", hint="Leave enable_multimodal=False out."
        )


def apply_layer_dump_settings(config: EngineConfig) -> None:
    """Checks the numbers of the layers to dump. Turns off overlapping steps for dumps, and CUDA
    graphs for dumps and for profiles of layers.

    Raises:
        ParameterError: their numbers are invalid, or given without a folder.
    """
    name = "debug_tensor_dump_layers"
    folder = config.debug_tensor_dump_output_folder
    layers: UserValue = config.debug_tensor_dump_layers
    if layers is not None:
        if folder is None:
            raise ParameterError(
                name, "is for debug_tensor_dump_output_folder.", hint="Add it, or leave this out."
            )
        if not isinstance(layers, list | tuple):
            raise ParameterError(name, f"{short_repr(layers)} is no list of numbers.")
        for each in layers:
            check_int(name, each, 0)
        object.__setattr__(config, name, tuple(layers))
    if folder is not None:
        object.__setattr__(config, "overlap", False)  # records have all ids then
    if folder is not None or config.enable_layerwise_nvtx_marker:
        object.__setattr__(config, "cuda_graphs", False)


def normalise_media_settings(config: EngineConfig) -> None:
    """Checks and normalises the settings of images, videos and sounds. Raises ParameterError if one
    is invalid.
    """
    for name, kind in (("limit_mm_data_per_request", int), ("mm_process_config", Mapping)):
        found = parse_media_setting(name, getattr(config, name))
        for medium, value in found.items():
            if not isinstance(value, kind) or isinstance(value, bool) or value == 0:
                raise ParameterError(name, f"{short_repr(value)} is not right for {medium!r}.")
            if medium == "audio" and kind is Mapping:
                raise ParameterError(name, "sounds have no settings.", hint="Leave it out.")
        object.__setattr__(config, name, found or None)
    object.__setattr__(config, "encoder_urls", _normalise_encoder_urls(config.encoder_urls))
    _check_encoders(
        config.encoder_only, config.language_only, config.encoder_urls, config.enable_multimodal
    )


def check_replicas(replicas: int, first_gpu: int, gpu_step: int, device: str, ranks: int) -> None:
    """Raises ParameterError if settings of replicas are wrong, or don't fit the device.

    Args:
        replicas, first_gpu, gpu_step, device: `dp_size`, `base_gpu_id`, `gpu_id_step`, `device`.
        ranks: number of each replica's ranks.
    """
    for name, value, least in (
        ("dp_size", replicas, 1),
        ("base_gpu_id", first_gpu, 0),
        ("gpu_id_step", gpu_step, 0),
    ):
        check_int(name, value, least)
        if value > _MAX_REPLICAS:
            raise ParameterError(name, f"{value:,} is more than {_MAX_REPLICAS:,}.")
    _, _, number = device.partition(":")
    processes = replicas * ranks
    if number and processes > 1:
        hint = f'Use device="cuda" with base_gpu_id={number}.'
        raise ParameterError(
            "device", f"{device!r} is one GPU, for {processes} processes.", hint=hint
        )
    if first_gpu and (number or device == "cpu"):
        raise ParameterError("base_gpu_id", f"device is {device!r}.", hint="Leave one out.")


def check_parallel(config: EngineConfig) -> None:
    """Raises ParameterError if a setting conflicts with several ranks, or with several replicas."""
    if config.enable_dp_attention and config.dp_size == 1:
        hint = "Add dp_size and as large a tp_size, or leave it out."
        raise ParameterError("enable_dp_attention", "is for several replicas.", hint=hint)
    if config.enable_dp_attention:
        check_unset(config, _OF_WHOLE_REPLICAS, "is not here with enable_dp_attention.")
    parallel = config.sharing
    check_replicas(
        config.dp_size, config.base_gpu_id, config.gpu_id_step, config.device, config.parallel.ranks
    )
    check_nodes(config.nnodes, config.node_rank, config.dist_init_addr, config.dp_size)
    several = "use_ray=True" if config.use_ray else f"nnodes={config.nnodes}"
    if config.restart and (config.use_ray or config.nnodes > 1):
        raise ParameterError("restart", f"is not here with {several}.", hint="Leave one out.")
    if config.use_ray and parallel.ranks == 1:
        raise ParameterError(
            "use_ray", "is for several ranks.", hint="Add tp_size, or leave it out."
        )
    if config.use_ray:
        check_unset(config, ("nnodes", "dp_size"), f"is not here with {several}.")
    check_experts(config, parallel)
    if parallel.ranks == 1:
        return
    if parallel.pp > 1 and config.enable_return_routed_experts:
        problem = "rank 0 has only the first layers' experts with pp_size."
        raise ParameterError("enable_return_routed_experts", problem, hint="Use tp_size.")
    check_unset(config, _OF_ONE_RANK, f"is not here with {parallel.setting}={parallel.ranks}.")


def check_experts(config: EngineConfig, parallel: Parallel) -> None:
    """Raises ParameterError if settings of experts are wrong, or conflict with a layout."""
    check_int("ep_num_redundant_experts", config.ep_num_redundant_experts, 0)
    check_int("eplb_rebalance_num_iterations", config.eplb_rebalance_num_iterations, 1)
    if parallel.ep == 1:
        of_several = ("enable_eplb", "ep_num_redundant_experts", "init_expert_location")
        check_unset(config, of_several, "is for ep_size above 1.", "Add ep_size, or leave it out.")
    if parallel.pp > 1:
        of_one_stage = ("enable_eplb", "expert_distribution_recorder_mode")
        check_unset(config, of_one_stage, f"is not here with pp_size={parallel.pp}.")


def check_nodes(nodes: int, own: int, first: str | None, replicas: int) -> None:
    """Raises ParameterError if settings of several machines are wrong.

    Args:
        nodes, own, first, replicas: `nnodes`, `node_rank`, `dist_init_addr`, `dp_size`.
    """
    check_int("node_rank", own, 0)
    if nodes == 1 and (own or first is not None):
        name = "node_rank" if own else "dist_init_addr"
        raise ParameterError(name, "is for several machines.", hint="Add nnodes, or leave it out.")
    if nodes > 1:
        parse_address(first)
    if replicas > 1 and replicas % nodes:
        raise ParameterError(
            "nnodes", f"{nodes} does not divide {replicas} replicas.", hint="Use a divisor."
        )
    if own >= nodes:
        raise ParameterError("node_rank", f"{own} is none of {nodes} machines, counted from 0.")


def check_states(config: EngineConfig) -> None:
    """Raises ParameterError if settings of kept states are wrong."""
    if config.max_mamba_cache_size is not None:
        check_int("max_mamba_cache_size", config.max_mamba_cache_size, 1)
    check_int("mamba_track_interval", config.mamba_track_interval, 0)
    check_number(
        "mamba_full_memory_ratio",
        config.mamba_full_memory_ratio,
        lambda x: 0 < x <= 1000,
        "no number above 0, and at most 1,000.",
    )


def check_cache_tiers(config: EngineConfig) -> None:
    """Raises ParameterError if settings of the cache's tiers are wrong or conflict."""
    ratio = config.hicache_ratio
    folder = config.hicache_storage_dir
    check_number(
        "hicache_ratio", ratio, lambda x: 0 < x <= 10_000, "no number above 0, and at most 10,000."
    )
    check_int("hicache_size", config.hicache_size, 0)
    most = config.hicache_storage_max_gb
    check_number("hicache_storage_max_gb", most, lambda x: 0 < x < 1e9, "no number of GB above 0.")
    if config.enable_hierarchical_cache is True and config.prefix_cache is False:
        raise ParameterError(
            "enable_hierarchical_cache",
            "nothing is kept with prefix_cache=False.",
            hint="Leave one out.",
        )
    if config.enable_weights_cpu_backup is True and config.enable_memory_saver is False:
        raise ParameterError(
            "enable_weights_cpu_backup",
            "it is for engines that sleep.",
            hint="Add enable_memory_saver=True.",
        )
    if config.hicache_storage_backend is not None and config.enable_hierarchical_cache is not True:
        problem = "files are written from the host's memory."
        raise ParameterError(
            "hicache_storage_backend", problem, hint="Add enable_hierarchical_cache=True."
        )
    goes_with = (
        folder is None
        if config.hicache_storage_backend is None
        else isinstance(folder, str) and folder != ""
    )
    if not goes_with:
        problem = f"{folder!r} does not go with hicache_storage_backend={config.hicache_storage_backend!r}."
        raise ParameterError(
            "hicache_storage_dir",
            problem,
            hint='Give a folder for "file", a URL for "fsspec", or neither.',
        )
