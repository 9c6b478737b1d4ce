"""Random weights of any shape, for speed measurements and tests. Logits stay finite."""

from __future__ import annotations

from pathlib import Path

import torch

from sglang_lite.runtime.models.weights.source import WeightSource


class DummySource(WeightSource):
    """Answers every name with a normal tensor of deviation 0.02, norms with ones; the same for the same seed."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        super().__init__("dummy weights", {})
        self._device = device  # where they are drawn: billions take a minute on a CPU
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=dtype).mul_(0.02)

    def _read(self, name: str, file: Path) -> torch.Tensor:
        raise AssertionError("take() needs no file")
