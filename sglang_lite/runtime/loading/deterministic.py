"""Refusal of what a deterministic engine can't run on a GPU."""

from __future__ import annotations

import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.models.spec import AttentionSpec, ExpertsSpec, ModelSpec


def check_deterministic(config: EngineConfig, spec: ModelSpec, device: torch.device) -> None:
    """Raises ParameterError if `deterministic` is set and the GPU, the model or another parameter can't have it."""
    if not config.deterministic or device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise ParameterError(
            "deterministic", "needs a CPU or a Hopper GPU (H100, H200), whose order of summation is known.",
            hint='Use device="cpu".',
        )  # fmt: skip
    for name, able in (
        ("dtype", ("auto", "bfloat16", "float16")), ("quantization", (None,)), ("kv_dtype", ("auto",)),
        ("attention_backend", ("auto", "triton")),
    ):  # fmt: skip
        if (value := getattr(config, name)) not in able:
            raise ParameterError(name, f"{value!r} does not go with deterministic on a GPU.", hint="Leave one out.")
    for layer in spec.layers:
        attention = layer.attention
        if not isinstance(attention, AttentionSpec):
            _refuse("latent attention")
        elif attention.sinks:
            _refuse("attention sinks")
        if isinstance(layer.feed_forward, ExpertsSpec):
            _refuse("a mixture of experts")


def _refuse(what: str) -> None:
    raise ParameterError(
        "deterministic", f"the model has {what}, whose sums on a GPU depend on the batch.", hint='Use device="cpu".'
    )
