"""Layout of a KV cache: what a token takes in each layer. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plane:
    """Numbers of a token that are stored together: `size` for each of `heads`."""

    heads: int
    size: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Planes of a token, layer by layer.

    Attributes:
        layers: per layer its keys and its values, or one plane that is read as both.
    """

    layers: tuple[tuple[Plane, ...], ...]

    @property
    def numbers(self) -> int:
        """Numbers that a token takes in all layers."""
        return sum(plane.heads * plane.size for planes in self.layers for plane in planes)
