"""RMS norm and layer norm as torch operations."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F


def apply_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: Literal["rms", "layer"]
) -> torch.Tensor:
    """Returns x [..., size], normalised over its last axis.

    Args:
        x: values to normalise.
        weight: weight, with the bias of a layer norm, in the form described in `Layer`; None for an
            RMS norm without a weight.
        eps: epsilon.
        kind: kind of norm, as in `ModelSpec.norm`.
    """
    size = (x.shape[-1],)
    if kind == "rms":
        return F.rms_norm(x, size, weight, eps)
    assert weight is not None
    if weight.dim() == 2:
        return F.layer_norm(x, size, weight[0], weight[1], eps)
    # each head has its own weights
    return (F.layer_norm(x.float(), size, eps=eps) * weight[0] + weight[1]).to(x.dtype)
