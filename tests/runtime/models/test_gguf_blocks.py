"""GGUF's blocks as integers with scales, against the `gguf` package's own reading of them."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from sglang_lite.runtime.kernels.packed_products import decode_weight
from sglang_lite.runtime.models.layers.packed_linear import pack_matrix
from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.gguf_blocks import READERS, GgufBlocks
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE

ROWS, BLOCKS = 5, 3
# Where a block has float16 numbers: of random bytes many would not be finite.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(kind, rows=ROWS, count=BLOCKS):
    """Bytes [rows, …] of `count` random blocks in a row."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    draw = np.random.default_rng(0)
    data = draw.integers(0, 256, (rows, count, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        data[:, :, at : at + 2] = (
            draw.normal(size=(rows, count, 1)).astype(np.float16).view(np.uint8)
        )
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", READERS)
def test_values_are_those_of_the_package(kind):
    columns, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = random_blocks(kind)
    blocks = READERS[kind](torch.from_numpy(data))
    expected = torch.from_numpy(dequantize(data, gguf.GGMLQuantizationType[kind]))
    assert blocks.shape == (ROWS, BLOCKS * columns)
    assert blocks.decode(0, ROWS).equal(expected)
    assert blocks.decode(2, 4).equal(expected[2:4])


@pytest.mark.parametrize("kind", READERS)
def test_a_matrix_of_a_file_is_read_when_it_is_needed(kind, monkeypatch):
    data, read = torch.from_numpy(random_blocks(kind)), READERS[kind]
    whole, rows = read(data), []
    monkeypatch.setitem(READERS, kind, lambda data: (rows.append(len(data)), read(data))[1])
    matrix = GgufBlocks(data, kind, whole.shape[1])
    assert (matrix.shape, matrix.format, matrix.as_integers()) == (
        whole.shape,
        whole.format,
        matrix,
    )
    assert not rows
    ids = torch.tensor([3, 0, 3])
    assert matrix[ids].equal(whole[ids])
    assert matrix.decode(1, 3).equal(whole.decode(1, 3))
    assert matrix.slice_part(slice(1, 4))[:].equal(whole[1:4])
    assert rows == [3, 2, 3]  # only those that are asked for
    half = slice(whole.shape[1] // 3, whole.shape[1])
    assert matrix.slice_part(slice(1, 4), half)[:].equal(whole.slice_part(slice(1, 4), half)[:])
    assert matrix.q.equal(whole.q)
    assert matrix.scale.equal(whole.scale)
    assert (matrix.minimum is None) == (whole.minimum is None)
    assert rows == [3, 2, 3, ROWS]
    assert not hasattr(matrix, "scales")


@needs_kernels
@pytest.mark.parametrize("kind", READERS)
def test_a_gpu_keeps_blocks_of_four_bits(kind):
    """Scales and minima are exact, or rounded to float16."""
    blocks = READERS[kind](torch.from_numpy(random_blocks(kind)))
    packed = pack_matrix([blocks, blocks.slice_part(slice(2))], DEVICE)
    assert (packed is None) == (kind not in ("Q4_0", "Q4_1", "Q4_K"))
    if packed is None:
        return
    exact = torch.cat((blocks.decode(0, ROWS), blocks.decode(0, 2)))
    error = (decode_weight(packed, torch.float32).cpu() - exact).abs()
    assert blocks.minimum is not None
    steps = torch.cat(
        (
            15 * blocks.scale.abs() + blocks.minimum.abs(),
            *(15 * blocks.scale[:2].abs() + blocks.minimum[:2].abs(),),
        )
    )
    assert (error.view(*steps.shape, -1) <= steps.unsqueeze(-1) * 2.0**-11).all()
    assert kind == "Q4_K" or error.max() <= exact.abs().max() * 2.0**-11
    assert kind != "Q4_0" or (packed.zero, packed.half, error.max()) == (8, None, 0)


@needs_kernels
def test_groups_of_one_value():
    """Whose scales are zero, or far below their minimum."""
    q = torch.randint(0, 16, (2, 96), dtype=torch.uint8)
    scale, minimum = (
        torch.tensor([[0.5, 0.0, 0.0], [1e-8, 0.5, 1e-3]]),
        torch.tensor([[-3.3, -1.5, 0.0], [2.0, 0.1, -1.0]]),
    )
    packed = pack_matrix([Blocks(q.clone(), scale, minimum)], DEVICE)
    assert packed is not None
    torch.testing.assert_close(
        decode_weight(packed, torch.float32).cpu(),
        Blocks(q, scale, minimum).decode(0, 2),
        rtol=1e-3,
        atol=4e-3,
    )
    for factor in (1e9, 1e-9):  # float16 has no room for such scales
        assert pack_matrix([Blocks(q, scale / 3 * factor, minimum * factor)], DEVICE) is None
