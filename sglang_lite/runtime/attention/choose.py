"""Which attention runs a model."""

from __future__ import annotations

import logging

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.attention.base import AttentionBackend, Needs
from sglang_lite.runtime.attention.torch import TorchAttention
from sglang_lite.runtime.attention.triton import TritonAttention

logger = logging.getLogger("sglang_lite")

# The fastest first; the last one runs everything.
_BACKENDS: dict[str, type[AttentionBackend]] = {"triton": TritonAttention, "torch": TorchAttention}


def make_attention(name: str, needs: Needs) -> AttentionBackend:
    """The backend of that name; for "auto" the fastest that can, which is said in the log where it is not the first.

    Raises:
        ParameterError: the one that is named can't.
    """
    refused = {other: reason for other, kind in _BACKENDS.items() if (reason := kind.refuses(needs)) is not None}
    able = [other for other in _BACKENDS if other not in refused]
    if name in refused:
        raise ParameterError(
            "attention_backend", f"{name!r} can't run this model: {refused[name]}.",
            hint=f"These can: {', '.join(map(repr, able))}.",
        )  # fmt: skip
    if name == "auto":
        name = able[0]
        for other, reason in refused.items():
            logger.warning("attention_backend: %r, the slower path, as %r can't: %s.", name, other, reason)
    return _BACKENDS[name](needs)
