"""Matrices packed straight from a GGUF file's bytes against those that are packed by way of torch's
reading, and against the `gguf` package's values.
"""

import gguf
import pytest
import torch
from gguf.quants import dequantize

from sglang_lite.runtime.kernels.block_product import BlockProduct, pack_blocks
from sglang_lite.runtime.kernels.gguf_packing import PACKED_KINDS, pack_gguf
from sglang_lite.runtime.models.layers.linear import load_block_library, load_gguf_library
from sglang_lite.runtime.models.weights.gguf_blocks import READERS
from tests.runtime.models.test_gguf_blocks import random_blocks

ROWS, COLUMNS = 48, 768


@pytest.fixture(scope="module")
def library():
    return load_gguf_library() or pytest.skip("needs AVX2 and a C++ compiler")


@pytest.fixture(scope="module")
def products():
    return load_block_library() or pytest.skip("needs AVX2 and a C++ compiler")


def matrix(kind, rows=ROWS):
    columns, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return torch.from_numpy(random_blocks(kind, rows, COLUMNS // columns))


def values(kind, data):
    return torch.from_numpy(dequantize(data.numpy(), gguf.GGMLQuantizationType[kind]))


def test_each_type_that_is_read_in_blocks_is_packed():
    assert PACKED_KINDS.keys() == READERS.keys()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("kind", READERS)
def test_blocks_are_bit_for_bit_those_that_torch_has_read(library, products, kind, threads):
    data, before = matrix(kind), torch.get_num_threads()
    blocks = READERS[kind](data)
    expected = pack_blocks(products, blocks.q, blocks.scale, blocks.minimum)
    try:
        torch.set_num_threads(threads)
        found = pack_gguf(library, [(kind, data[:16]), (kind, data[16:])], COLUMNS)
    finally:
        torch.set_num_threads(before)
    assert (found.kind, found.outputs, found.inputs) == (expected.kind, ROWS, COLUMNS)
    assert found.data.equal(expected.data)


def test_types_with_one_kind_of_blocks_are_stacked(library, products):
    """As the queries and values of a file are, of five bits and of eight."""
    five, eight = matrix("Q5_0", 32), matrix("Q8_0", 16)
    found = pack_gguf(library, [("Q5_0", five), ("Q8_0", eight)], COLUMNS)
    x = torch.randn(3, COLUMNS)
    expected = x.double() @ torch.cat((values("Q5_0", five), values("Q8_0", eight))).double().t()
    result = BlockProduct(products, found, None)(x)
    assert (result - expected).norm() <= 1e-4 * expected.norm()
