"""Torch twin of `kernels.rotate`."""

from __future__ import annotations

import torch


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos = cos.float().unsqueeze(1)
    sin = sin.float().unsqueeze(1)
    return _rotate_rows(q, cos, sin), _rotate_rows(k, cos, sin)


def _rotate_rows(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
