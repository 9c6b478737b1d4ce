"""Source of random weights of any shape, for benchmarks and tests. Logits stay finite."""

from __future__ import annotations

from pathlib import Path

import torch

from sglang_lite.runtime.models.weights.source import WeightSource


class DummySource(WeightSource):
    """Source that returns normal random tensors with standard deviation 0.02 for any name, and ones for norms.

    The tensors depend only on the seed, the device and the order of calls.

    Args:
        device: device that random numbers are drawn on; on a CPU, billions take a minute.
        seed: seed of the generator.
    """

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        super().__init__("dummy weights", {})
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=dtype).mul_(0.02)

    def _read(self, name: str, file: Path) -> torch.Tensor:
        raise AssertionError("take() needs no file")
