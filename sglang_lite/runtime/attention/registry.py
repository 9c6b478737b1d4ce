"""Which attention runs a model."""

from __future__ import annotations

import logging

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.attention.base import AttentionBackend, AttentionRequirements
from sglang_lite.runtime.attention.flash_attn import FlashAttention
from sglang_lite.runtime.attention.flashinfer import FlashInferAttention
from sglang_lite.runtime.attention.torch import TorchAttention
from sglang_lite.runtime.attention.triton import TritonAttention

logger = logging.getLogger("sglang_lite")

_BACKENDS: dict[str, type[AttentionBackend]] = {
    "triton": TritonAttention,
    "torch": TorchAttention,
    "flashinfer": FlashInferAttention,
    "flash_attn": FlashAttention,
}
_OWN = ("triton", "torch")  # the fastest first; the last one runs everything


def make_attention(name: str, needs: AttentionRequirements) -> AttentionBackend:
    """The backend of that name; for "auto" the fastest of our own that can, which is said in the log where it is not
    the first. A package's is taken only where it is named.

    Raises:
        ParameterError: the one that is named can't.
    """
    if name == "auto":
        refused = {}
        for name in _OWN:
            reason = _BACKENDS[name].refuses(needs)
            if reason is None:
                break
            refused[name] = reason
        for other, reason in refused.items():
            logger.warning("attention_backend: %r, the slower path, as %r can't: %s.", name, other, reason)
    elif (reason := _BACKENDS[name].refuses(needs)) is not None:
        able = [other for other, kind in _BACKENDS.items() if kind.refuses(needs) is None]
        raise ParameterError(
            "attention_backend", f"{name!r} can't run this model: {reason}.",
            hint=f"These can: {', '.join(map(repr, able))}.",
        )  # fmt: skip
    return _BACKENDS[name](needs)
