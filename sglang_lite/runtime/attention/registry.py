"""Attention backends by name, and the choice of a backend for a model.

A backend is a file in this folder; its name is added to `AttentionBackendName` and `_backend_class`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from sglang_lite.protocol import ParameterError

if TYPE_CHECKING:
    from sglang_lite.runtime.attention.base import (
        AttentionBackend,
        AttentionRequirements,
        ModelAttention,
    )

logger = logging.getLogger("sglang_lite")

AttentionBackendName = Literal["auto", "triton", "torch", "flashinfer", "flash_attn"]
BUILTIN_BACKENDS = ("triton", "torch")  # fastest first; the last one supports every model
PACKAGE_BACKENDS = tuple(
    name for name in get_args(AttentionBackendName) if name not in ("auto", *BUILTIN_BACKENDS)
)


def _backend_class(name: str, requirements: AttentionRequirements) -> type[AttentionBackend]:
    """Imports a backend's module and returns its class."""
    match name:
        case "triton" if requirements.batch_invariant:
            from sglang_lite.runtime.attention.invariant import InvariantAttention

            return InvariantAttention
        case "triton" if requirements.latent:
            from sglang_lite.runtime.attention.latent import LatentAttention

            return LatentAttention
        case "triton":
            from sglang_lite.runtime.attention.triton import TritonAttention

            return TritonAttention
        case "torch":
            from sglang_lite.runtime.attention.torch import TorchAttention

            return TorchAttention
        case "flashinfer":
            from sglang_lite.runtime.attention.flashinfer import FlashInferAttention

            return FlashInferAttention
        case "flash_attn":
            from sglang_lite.runtime.attention.flash_attn import FlashAttention

            return FlashAttention
    raise AssertionError(f"no backend {name!r}")


def _unsupported_reason(name: str, requirements: AttentionRequirements) -> str | None:
    if requirements.batch_invariant and name != "triton":
        return "its results depend on the batch, and deterministic=True is set"
    if requirements.both_ways and (requirements.batch_invariant or name not in BUILTIN_BACKENDS):
        return "tokens of images see later ones, which it can't read"
    return _backend_class(name, requirements).unsupported_reason(requirements)


def make_layers_attention(
    name: str, requirements: Sequence[AttentionRequirements]
) -> ModelAttention:
    """Returns the attention of all layers of a model, with one backend from `make_attention` for
    each distinct set of requirements.

    Args:
        name: name of a backend, or "auto".
        requirements: requirements of each layer.
    """
    from sglang_lite.runtime.attention.by_layer import AttentionByLayer  # needs Triton

    backends = {each: make_attention(name, each) for each in dict.fromkeys(requirements)}
    return (
        AttentionByLayer([backends[each] for each in requirements])
        if len(backends) > 1
        else backends[requirements[0]]
    )


def make_attention(name: str, requirements: AttentionRequirements) -> AttentionBackend:
    """Returns the backend of the given name. For "auto", returns the fastest built-in backend that
    can run the model, and logs a warning about faster ones that can't. A backend from a package
    must be named.

    Raises:
        ParameterError: the named backend can't meet the requirements, or none can.
    """
    if name == "auto" and requirements.batch_invariant:
        name = "triton"
    if name == "auto":
        unsupported = {}
        for name in BUILTIN_BACKENDS:
            reason = _unsupported_reason(name, requirements)
            if reason is None:
                break
            unsupported[name] = reason
        for other, reason in unsupported.items():
            logger.warning(
                "attention_backend: %r can't run this model: %s. Using %r, which is slower. To accept that without "
                "this warning, set attention_backend=%r.",
                other,
                reason,
                name,
                name,
            )
    elif (reason := _unsupported_reason(name, requirements)) is not None:
        able = [
            other
            for other in (*BUILTIN_BACKENDS, *PACKAGE_BACKENDS)
            if _unsupported_reason(other, requirements) is None
        ]
        hint = f"These can: {', '.join(map(repr, able))}." if able else "Leave deterministic out."
        raise ParameterError(
            "attention_backend", f"{name!r} can't run this model: {reason}.", hint=hint
        )
    return _backend_class(name, requirements)(requirements)
