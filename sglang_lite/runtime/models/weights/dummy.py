"""Source of random weights of any shape, for benchmarks and tests. Logits stay finite."""

from __future__ import annotations

import math
import re
from pathlib import Path
from zlib import crc32

import torch

from sglang_lite.runtime.models.weights.blocks import Blocks, Format
from sglang_lite.runtime.models.weights.fp4 import E2M1, Mxfp4Experts
from sglang_lite.runtime.models.weights.fp8 import ScaledRows
from sglang_lite.runtime.models.weights.quantised_formats import PLAIN, Matrices
from sglang_lite.runtime.models.weights.source import Stored, WeightSource

# routers stay in 16 bits
_OF_LAYER = re.compile(r".*\.\d+\..*(?<!\bgate\.weight)(?<!\brouter\.weight)")
_DEVIATION = 0.02


class DummySource(WeightSource):
    """Source that returns normal random tensors with standard deviation 0.02 for any name, and ones
    for norms.

    A tensor depends only on the seed, the device and its name, so layers may be read in any order.

    Args:
        device: device that random numbers are drawn on; on a CPU, billions take a minute.
        matrices: how matrices of layers are stored; quantised ones have uniformly distributed
            numbers.
        seed: seed of the generator.
    """

    def __init__(self, device: torch.device, matrices: Matrices = PLAIN, seed: int = 0) -> None:
        super().__init__("dummy weights", {})
        self._device = device
        self._matrices = matrices
        self._seed = seed
        self._generator = None if device.type == "meta" else torch.Generator(device)

    @property
    def has_packed_matrices(self) -> bool:
        return bool(self._matrices.packings) or self._matrices.format is not None

    def take_tensor_or_stack(self, name: str, shape: tuple[int, ...]) -> Stored:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if self._generator is not None:
            self._generator.manual_seed(self._seed + crc32(name.encode()))
        if _OF_LAYER.fullmatch(name):
            if len(shape) == 2 and self._matrices.format is not None:
                return self._blocks(self._matrices.format, *shape)
            if len(shape) == 2 and self._matrices.scales:
                return self._random_scaled_rows(*shape)
            if len(shape) == 3 and self._matrices.stacks:
                return self._experts(*shape)
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=dtype).mul_(
            _DEVIATION
        )

    def _blocks(self, form: Format, rows: int, columns: int) -> Blocks:
        low, high, dtype = (0, 16, torch.uint8) if form.bits == 4 else (-127, 128, torch.int8)
        numbers = self._random_integers(low, high, (rows, columns), dtype)
        values = torch.tensor(form.table) if form.table else torch.arange(float(low), high)
        blocks = columns // math.gcd(form.group or columns, columns)
        scale = (
            torch.full((rows, blocks), _DEVIATION / values.std().item(), device=self._device)
            .half()
            .float()
        )
        return Blocks(
            numbers,
            scale,
            -values.mean().item() * scale if form.minimum else None,
            table=form.table,
        )

    def _random_scaled_rows(self, rows: int, columns: int) -> ScaledRows:
        numbers = torch.randn((rows, columns), generator=self._generator, device=self._device).to(
            torch.float8_e4m3fn
        )
        high, wide = self._matrices.block or (1, columns)
        scales = torch.full(
            (-(-rows // high), -(-columns // wide)), _DEVIATION, device=self._device
        )
        return ScaledRows(
            (rows, columns), lambda start, end: numbers[start:end], scales, (high, wide)
        )

    def _experts(self, experts: int, inputs: int, outputs: int) -> Mxfp4Experts:
        numbers = self._random_integers(0, 256, (experts, outputs, inputs // 32, 16), torch.uint8)
        exponent = 127 + round(math.log2(_DEVIATION / torch.tensor(E2M1).std().item()))
        return Mxfp4Experts(numbers, torch.full_like(numbers[..., 0], exponent))

    def _random_integers(
        self, low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.randint(
            low, high, shape, generator=self._generator, device=self._device, dtype=dtype
        )

    def _read_stored(self, name: str, file: Path) -> Stored:
        raise AssertionError("take_tensor_or_stack() needs no file")
