"""Compiled products with blocks against float64's with the decoded matrix."""

import pytest
import torch

from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.host.cpu_library import load_cpu_library
from sglang_lite.runtime.kernels.block_product import (
    SOURCE,
    BlockProduct,
    decode_blocks,
    is_supported,
    pack_blocks,
    supports_shape,
)
from sglang_lite.runtime.models.weights.blocks import Blocks, Format

OUTPUTS, INPUTS = 48, 160
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 4e-3}  # of the error, as a part of the result


@pytest.fixture(scope="module")
def library():
    if not is_supported():
        pytest.skip("the processor lacks AVX2")
    found = load_cpu_library(SOURCE, cache_folder() / "compiled")  # where engines find theirs
    if found is None:
        pytest.skip("no C++ compiler")
    return found


KINDS = [(4, 32, True), (8, 32, False), (8, 32, True), (8, 16, False)]


@pytest.fixture(params=KINDS, ids=str)
def blocks(request):
    bits, columns, has_minimum = request.param
    torch.manual_seed(0)
    scale = torch.rand(OUTPUTS, INPUTS // columns).half().float()
    minimum = torch.randn(OUTPUTS, INPUTS // columns).mul(8).half().float() if has_minimum else None
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    made = Blocks(torch.randint(low, high, (OUTPUTS, INPUTS), dtype=dtype), scale, minimum)
    assert made.format == Format(*request.param)
    return made


@pytest.mark.parametrize("group", [16, 32, 160])
@pytest.mark.parametrize("minimum", [torch.randn(OUTPUTS, 160) * 8, None], ids=["minimum", "none"])
@pytest.mark.parametrize(("low", "high", "dtype"), [(0, 16, torch.uint8), (-128, 128, torch.int8)])
def test_blocks_are_decoded_to_the_nearest_bfloat16(library, group, minimum, low, high, dtype):
    q = torch.randint(low, high, (OUTPUTS, INPUTS), dtype=dtype)
    scale = torch.rand(OUTPUTS, INPUTS // group)
    minimum = None if minimum is None else minimum[:, : INPUTS // group].contiguous()
    found = torch.empty(OUTPUTS, INPUTS, dtype=torch.bfloat16)
    decode_blocks(library, q, scale, minimum, found)
    exact = (q.double().view(OUTPUTS, -1, group) * scale.double().unsqueeze(-1)).flatten(1)
    exact += 0 if minimum is None else minimum.double().repeat_interleave(group, 1)
    # A sum that is near 0 has the error of its terms.
    assert (found - exact).abs().le(exact.abs() / 256 + 1e-4).all()
    assert (found == exact.bfloat16()).float().mean() > 0.999


def product(library, blocks, bias=None):
    return BlockProduct(library, pack_blocks(library, blocks.q, blocks.scale, blocks.minimum), bias)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_with_the_decoded_matrix(library, blocks, dtype, biased):
    x = (torch.randn(23, INPUTS) * torch.randn(23, 1).exp()).to(dtype)
    bias = torch.randn(OUTPUTS).to(dtype) if biased else None
    expected = x.double() @ blocks.decode(0, OUTPUTS).double().T + (bias.double() if biased else 0)
    found = product(library, blocks, bias)(x)
    assert found.dtype == dtype
    assert (found - expected).norm() <= LIMITS[dtype] * expected.norm()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_same_bits_beside_others_and_on_any_number_of_threads(
    library, blocks, threads
):
    x, run, before = torch.randn(31, INPUTS), product(library, blocks), torch.get_num_threads()
    whole = run(x)
    try:
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 7, 8, 15, 30):
            assert run(x[:rows]).equal(whole[:rows])
    finally:
        torch.set_num_threads(before)
    assert run(x[:0]).shape == (0, OUTPUTS)


def test_rows_that_do_not_lie_side_by_side(library, blocks):
    x, run = torch.randn(4, 2 * INPUTS), product(library, blocks)
    assert run(x[:, ::2]).equal(run(x[:, ::2].contiguous()))


def test_largest_integers_do_not_overflow(library, blocks):
    blocks.q.fill_(blocks.q.max())
    x = torch.full((2, INPUTS), 3.0)
    expected = x.double() @ blocks.decode(0, OUTPUTS).double().T
    assert torch.allclose(product(library, blocks)(x).double(), expected, rtol=1e-4)


def test_zeros_stay_zeros(library, blocks):
    assert not product(library, blocks)(torch.zeros(3, INPUTS)).any()


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(library, blocks, value, dtype):
    """In its row alone: the draw looks for it, and names the position."""
    x = torch.randn(10, INPUTS).to(dtype)
    x[4, 77] = value
    found = product(library, blocks)(x)
    assert not found[4].isfinite().any()
    assert found[torch.arange(10) != 4].isfinite().all()


def test_matrices_that_fit():
    assert supports_shape(48, 64)
    assert not supports_shape(40, 64)
    assert not supports_shape(48, 48)
