"""Compiled products of many rows with blocks against float64's with the decoded matrix, and against
themselves.
"""

import pytest
import torch

from sglang_lite.runtime.kernels.block_product import pack_blocks
from sglang_lite.runtime.kernels.block_product_many import ManyRowsProduct
from sglang_lite.runtime.models.layers.linear import load_block_library, many_rows_library
from sglang_lite.runtime.models.weights.blocks import Blocks
from tests.runtime.kernels.test_block_product import KINDS

# Tiles of 64 outputs, some whole, some not; inputs that are decoded at once (up to 1,536), or in
# parts of two sizes.
SIZES = [(16, 32), (48, 160), (64, 1536), (80, 1568), (112, 4864), (272, 96)]


@pytest.fixture(scope="module")
def library():
    return many_rows_library() or pytest.skip("needs AVX512_BF16 and a C++ compiler")


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random_blocks(kind, outputs, inputs):
    bits, columns, has_minimum = kind
    draw = torch.Generator().manual_seed(outputs + inputs)
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    q = torch.randint(low, high, (outputs, inputs), dtype=dtype, generator=draw)
    scale = torch.rand(outputs, inputs // columns, generator=draw).half().float()
    minimum = (
        torch.randn(outputs, inputs // columns, generator=draw).mul(8).half().float()
        if has_minimum
        else None
    )
    return Blocks(q, scale, minimum)


def multiplied(library, blocks, bias, x):
    packing = load_block_library()
    assert packing is not None
    product = ManyRowsProduct(
        library, pack_blocks(packing, blocks.q, blocks.scale, blocks.minimum), bias
    )
    wide = torch.full((len(x), blocks.shape[0] + 32), float("nan"), dtype=torch.bfloat16)
    product.multiply(x, wide[:, 16:-16])
    assert wide[:, :16].isnan().all()
    assert wide[:, -16:].isnan().all()
    return wide[:, 16:-16]


def check(found, x, blocks, bias):
    """Weights are rounded to bfloat16, then sums in float32, then results to bfloat16."""
    weight = blocks.decode(0, blocks.shape[0]).bfloat16().double()
    expected = x.double() @ weight.t()
    terms = x.double().abs() @ weight.abs().t()
    if bias is not None:
        expected, terms = expected + bias.double(), terms + bias.double().abs()
    assert ((found - expected).abs() <= expected.abs() * 2.0**-8 + terms * 2.0**-18).all()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products(library, kind, size):
    blocks, draw = random_blocks(kind, *size), torch.Generator().manual_seed(0)
    bias = torch.randn(size[0], generator=draw).bfloat16()
    # rows are multiplied six at a time, up to 768 by a decoded tile
    for rows in (*range(1, 14), 95, 600, 769, 1600):
        x = torch.randn(rows, size[1], generator=draw).bfloat16()
        given = bias if rows % 2 else None
        check(multiplied(library, blocks, given, x), x, blocks, given)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_has_the_same_bits_with_any_rows_and_threads(library, kind, threads):
    blocks, draw = random_blocks(kind, 80, 1568), torch.Generator().manual_seed(0)
    x = torch.randn(700, 1568, generator=draw).bfloat16()
    one_by_one = torch.cat([multiplied(library, blocks, None, row.unsqueeze(0)) for row in x[:20]])
    for rows in (20, 33, 192, 700):
        assert multiplied(library, blocks, None, x[:rows])[:20].equal(one_by_one)
