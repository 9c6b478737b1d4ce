"""Torch twin of `kernels.int8_product`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows


def int8_linear(
    x: EightBitRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    y = _multiply_scaled(x, x.values, weight, scales)
    return (y if bias is None else y + bias.float()).to(dtype)


def int8_parts(
    x: EightBitRows, weight: torch.Tensor, scales: torch.Tensor, parts: int
) -> torch.Tensor:
    shares = zip(x.values.chunk(parts, 1), weight.chunk(parts, 1))
    return torch.stack([_multiply_scaled(x, *share, scales) for share in shares])


def _multiply_scaled(
    x: EightBitRows, values: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    sums = values[: x.rows].double() @ weight.double().t()  # exact
    return sums.float() * scales * x.scales[: x.rows].unsqueeze(1)
