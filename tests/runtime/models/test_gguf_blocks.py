"""GGUF's blocks as integers with scales, against the `gguf` package's own reading of them."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from sglang_lite.runtime.models.weights.gguf_blocks import READERS

ROWS, BLOCKS = 5, 3
# Where a block has float16 numbers: of random bytes many would not be finite.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize("kind", READERS)
def test_values_are_those_of_the_package(kind):
    columns, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    draw = np.random.default_rng(0)
    data = draw.integers(0, 256, (ROWS, BLOCKS, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        data[:, :, at : at + 2] = draw.normal(size=(ROWS, BLOCKS, 1)).astype(np.float16).view(np.uint8)
    data = data.reshape(ROWS, -1)
    blocks = READERS[kind](torch.from_numpy(data))
    expected = torch.from_numpy(dequantize(data, gguf.GGMLQuantizationType[kind]))
    assert blocks.shape == (ROWS, BLOCKS * columns)
    assert blocks.decode(0, ROWS).equal(expected)
    assert blocks.decode(2, 4).equal(expected[2:4])
