"""Rotary position embedding (Su et al., arXiv:2104.09864) with scaled frequencies."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sglang_lite.runtime.models.spec import RopeSpec


class Rotation(NamedTuple):
    """Rotation of a step's queries and keys.

    Attributes:
        cos, sin: [T, 1, dim] each, as for `rotate`.
        query_scale: factors of the queries [T, 1, 1], or None.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_scale: torch.Tensor | None


class RotaryTable:
    """Table of cos and sin for every position, used as `x * cos + swap_halves(x) * sin`.

    A longrope table for more positions than the original training length uses the long factors from
    position 0 on: cached keys are shared between requests, so all sequences must be rotated alike,
    however short they are.

    Args:
        spec: specification of the embedding.
        head_dim: number of rotated elements if the spec rotates the whole head.
        positions: number of positions in the table.
        dtype, device: dtype and device of the table.
        divisors: divisors of the frequencies [dim / 2], if the checkpoint has them (GGUF), or None.

    Attributes:
        dim: number of rotated elements.
        axes: int32 [dim], which of three positions rotates each element, as in `RopeSpec`; None if
            there is one.
        query_scales: factor of the queries at every position [positions]; None for 1.
    """

    def __init__(
        self,
        spec: RopeSpec,
        head_dim: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
        divisors: torch.Tensor | None = None,
    ) -> None:
        self.dim = spec.rotary_dim or head_dim
        frequencies, amplitude = _frequencies(spec, self.dim, positions)
        if divisors is not None:
            frequencies = frequencies / divisors
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        cos = angles.cos().mul_(amplitude).to(dtype)
        sin = angles.sin_().mul_(amplitude).to(dtype)
        self.axes = (
            torch.tensor(spec.axes * 2, dtype=torch.int32, device=device) if spec.axes else None
        )
        self.query_scales: torch.Tensor | None = None
        if spec.query_growth:
            counted = torch.arange(positions, dtype=torch.float32) + spec.query_shift
            spans = counted / spec.query_span
            grown = spans.clamp(min=1) if spec.query_floor else 1 + spans.floor()
            scales = 1 + spec.query_growth * torch.log(grown)
            self.query_scales = scales.to(device, dtype)
        self._cos = torch.cat((cos, cos), -1).to(device)
        self._sin = torch.cat((-sin, sin), -1).to(device)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of every position, [positions, dim] each."""
        return self._cos, self._sin

    def rotation_at(self, positions: torch.Tensor) -> Rotation:
        """Returns the rotation at positions [T] or [3, T], as for `cos_sin_at`."""
        scale = None
        if self.query_scales is not None:
            at = positions if positions.ndim == 1 else positions[0]
            scale = self.query_scales[at].view(-1, 1, 1)
        return Rotation(*self.cos_sin_at(positions), scale)

    def cos_sin_at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin, [T, 1, dim] each, at positions [T]. Positions [3, T] give each
        token's time, row and column.
        """
        if positions.ndim == 1 or self.axes is None:
            at = positions if positions.ndim == 1 else positions[0]
            return self._cos[at].unsqueeze(1), self._sin[at].unsqueeze(1)
        rows = positions.T[:, self.axes]
        return self._cos.gather(0, rows).unsqueeze(1), self._sin.gather(0, rows).unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first dim elements of heads x [T, H, D] by tables [T, 1, dim], and returns the
    rest unchanged.
    """
    dim = cos.shape[-1]
    if dim == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(dim // 2, -1), sin)
    rotated = x[..., :dim]
    rotated = torch.addcmul(rotated * cos, rotated.roll(dim // 2, -1), sin)
    return torch.cat((rotated, x[..., dim:]), -1)


def _frequencies(spec: RopeSpec, dim: int, positions: int) -> tuple[torch.Tensor, float]:
    """Returns the rotation frequencies [dim / 2] in radians per position, and a factor for cos and
    sin.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    inverse = 1.0 / spec.theta**exponents
    p = spec.params
    if spec.kind == "none":
        return inverse * 0, 1.0
    if spec.kind == "proportional":
        rotated = int(p.get("partial_rotary_factor", 1.0) * dim // 2)
        inverse[rotated:] = 0.0
        return inverse / p.get("factor", 1.0), 1.0
    if spec.kind == "linear":
        return inverse / p["factor"], 1.0
    if spec.kind == "ntk":
        base = spec.theta * p["alpha"] ** (dim / (dim - 2))
        return 1.0 / base**exponents, 1.0
    if spec.kind == "llama3":
        return _llama3_frequencies(
            inverse,
            p["factor"],
            p["low_freq_factor"],
            p["high_freq_factor"],
            p["original_max_position_embeddings"],
        ), 1.0
    if spec.kind == "yarn":
        return _yarn_frequencies(spec, dim, inverse)
    if spec.kind == "longrope":
        factor = p["factor"]
        original = p["original_max_position_embeddings"]
        stretched = torch.tensor(p["long_factor"] if positions > original else p["short_factor"])
        amplitude = p.get("long_mscale" if positions > original else "short_mscale")
        if amplitude is None:
            amplitude = p.get("attention_factor")
        if amplitude is None:
            amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return inverse / stretched, amplitude
    return inverse, 1.0


def _llama3_frequencies(
    inverse: torch.Tensor, factor: float, low: float, high: float, original: int
) -> torch.Tensor:
    """Returns the frequencies of Llama 3.1: keeps short wavelengths, divides long ones by `factor`,
    and blends the range between.
    """
    wavelengths = 2 * math.pi / inverse
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return inverse * (blend + (1 - blend) / factor)


def _yarn_frequencies(
    spec: RopeSpec, dim: int, inverse: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Returns the frequencies and amplitude of YaRN (arXiv:2309.00071)."""
    p = spec.params
    factor = p["factor"]
    original = p["original_max_position_embeddings"]

    def dimension_for_rotations(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = dimension_for_rotations(p.get("beta_fast") or 32)
    high = dimension_for_rotations(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(
        0, 1
    )
    amplitude = p.get("attention_factor")
    if amplitude is None:
        amplitude = _yarn_amplitude(factor, p.get("mscale"), p.get("mscale_all_dim"))
    return inverse * (1 - ramp) + inverse / factor * ramp, amplitude


def _yarn_amplitude(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)
