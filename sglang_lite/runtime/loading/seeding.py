"""Settings of an engine that receives its weights from a running engine, the seed. Needs no torch."""

from __future__ import annotations

from dataclasses import replace

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.models.weights.seed import Seed, seed_address


def complete_config_from_seed(config: EngineConfig) -> EngineConfig:
    """Completes the config of an engine that receives its weights from a seed. Asks the seed's
    server for the version of its weights and, for `instance://`, the model's name. Returns other
    configs unchanged.

    Raises:
        ParameterError: a setting contradicts another one, or is missing.
        ModelError: the server does not answer.
    """
    address = seed_address(config.model)
    if address is None and config.load_format != "remote_instance":
        return config
    if config.load_format not in ("auto", "remote_instance"):
        raise ParameterError(
            "load_format",
            f"{config.load_format!r} is not for {config.model}.",
            hint="Leave it out.",
        )
    if config.weight_version != "default":
        raise ParameterError(
            "weight_version", "is that of the engine that sends the weights.", hint="Leave it out."
        )
    said = Seed(*(address or seed_host_and_port(config))).request_json("/get_model_info")
    model = said.get("model_path")
    version = said.get("weight_version")
    if not isinstance(model, str) or not isinstance(version, str):
        raise ModelError(f"{config.model}: its server names neither a model nor a version.")
    host, port = address or seed_host_and_port(config)
    return replace(
        config,
        load_format="remote_instance",
        model=config.model if address is None else model,
        weight_version=version,
        remote_instance_weight_loader_seed_instance_ip=host,
        remote_instance_weight_loader_seed_instance_service_port=port,
    )


def seed_host_and_port(config: EngineConfig) -> tuple[str, int]:
    """Returns the host and port of the seed. Raises ParameterError if the config has none."""
    host = config.remote_instance_weight_loader_seed_instance_ip
    port = config.remote_instance_weight_loader_seed_instance_service_port
    if host is None or port is None:
        name = f"remote_instance_weight_loader_seed_instance_{'ip' if host is None else 'service_port'}"
        raise ParameterError(
            name,
            'is missing for load_format="remote_instance".',
            hint="Or use instance://host:port.",
        )
    return host, port
