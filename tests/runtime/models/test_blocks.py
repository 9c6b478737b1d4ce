"""Where a CPU multiplies with a checkpoint's own blocks."""

import shutil

import pytest
import torch

from sglang_lite.runtime.kernels.block_product import BlockProduct, is_supported
from sglang_lite.runtime.loading.load_model import precision
from sglang_lite.runtime.models.layers import linear
from sglang_lite.runtime.models.layers.linear import (
    MULTIPLIED_ROWS,
    Bf16Linear,
    BlockLinear,
    DenseLinear,
    StackedProducts,
    block_products_in,
    build_bf16_linear,
    build_block_head,
    build_block_linear,
    many_rows_library,
)
from sglang_lite.runtime.models.layers.linear_builder import LinearBuilder
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.gguf_blocks import READERS, GgufBlocks
from tests.runtime.models.test_gguf_blocks import random_blocks

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    not is_supported() or not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="needs AVX2 and a C++ compiler",
)

needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(),  # noqa: SLF001 # torch has no other name for it
    reason="oneDNN packs bfloat16 with AVX-512",
)


def four(outputs=32, inputs=64):
    generator = torch.Generator().manual_seed(outputs)
    q = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    return Blocks(
        q, torch.full((outputs, inputs // 32), 0.5), torch.full((outputs, inputs // 32), -3.0)
    )


def eight(outputs=32, inputs=64):
    generator = torch.Generator().manual_seed(outputs)
    q = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
    return Blocks(q, torch.full((outputs, inputs // 32), 0.5))


def made(parts, bias=None, **settings):
    precision = Precision(torch.float32, torch.float32, torch.float32, **settings)
    return LinearBuilder(precision, CPU, fused=False).build_linear(parts, bias)


@needs_compiler
@pytest.mark.parametrize("kind", [four, eight])
def test_matrices_in_blocks_of_one_kind_are_stacked(kind):
    parts, x = [kind(32), kind(16)], torch.randn(3, 64)
    found = made(parts, blocks=True)
    assert isinstance(found, BlockProduct)
    assert torch.allclose(found(x), made(parts)(x), rtol=1e-3, atol=0.1)


@needs_compiler
def test_matrices_in_blocks_of_two_kinds_are_multiplied_apart():
    """As files of some 4 bits a weight have them: values of attention, and half of the matrices
    down, take more.
    """
    parts, x, bias = [four(32), four(16), eight(32)], torch.randn(3, 64), torch.randn(80)
    found = made(parts, bias, blocks=True)
    assert not isinstance(found, DenseLinear)
    plain = made(parts, bias)
    assert torch.allclose(found(x), plain(x), rtol=1e-3, atol=0.1)


@pytest.mark.parametrize(
    "parts",
    [[four(), torch.ones(32, 64)], [torch.ones(32, 64)], [four(24)], [four(32), eight(24)]],
    ids=["beside a plain one", "plain", "too few outputs", "too few outputs of a kind"],
)
def test_others_are_decoded(parts):
    assert build_block_linear(parts, None) is None
    assert isinstance(made(parts, blocks=True), DenseLinear)


def test_without_a_compiler_they_are_decoded(monkeypatch):
    monkeypatch.setattr(linear, "load_cpu_library", lambda *_: None)
    assert isinstance(made([four()], blocks=True), DenseLinear)
    assert build_block_head(eight()) is None


@needs_compiler
@pytest.mark.parametrize("has_bf16", [True, False])
def test_many_rows_of_bfloat16_are_multiplied_without_a_decoded_copy(has_bf16, monkeypatch):
    """Of matrices of two kinds here, with AVX512_BF16 and without."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    if not has_bf16:
        monkeypatch.setattr(linear, "many_rows_library", lambda: None)
    parts, bias = [four(160), eight(96)], torch.randn(256).bfloat16()
    found = build_bf16_linear(parts, bias, blocks=True)
    assert isinstance(found, BlockLinear if many_rows_library() and has_bf16 else StackedProducts)
    matrix = torch.cat([part.decode(0, len(part.q)) for part in parts])
    for rows in (1, MULTIPLIED_ROWS, MULTIPLIED_ROWS + 1, 600):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).bfloat16()
        expected = x.float() @ matrix.t() + bias.float()
        assert (found(x) - expected).norm() <= 4e-3 * expected.norm()


@needs_compiler
@pytest.mark.parametrize("kind", READERS)
def test_matrices_of_a_file_are_packed_without_a_reading_of_torch(kind, monkeypatch):
    """Which takes ten times as long, at each start."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    data = torch.from_numpy(random_blocks(kind, 32, 24))
    columns = READERS[kind](data).shape[1]
    monkeypatch.setitem(READERS, kind, None)
    found = build_bf16_linear(
        [GgufBlocks(data, kind, columns), GgufBlocks(data[:16], kind, columns)], None, blocks=True
    )
    assert block_products_in(found)
    assert found(torch.zeros(300, columns, dtype=torch.bfloat16)).shape == (300, 48)


@needs_compiler
@needs_avx512
def test_units_for_tiles_are_worth_a_decoded_copy(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    found = build_bf16_linear([four()], None, blocks=True)
    assert isinstance(found, Bf16Linear)
    assert isinstance(found.few, BlockProduct)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.allclose(found(x).float(), found.few(x).float(), rtol=0.02, atol=0.2)


@needs_compiler
def test_logits_are_float32():
    head, x = build_block_head(eight()), torch.randn(3, 64).bfloat16()
    assert head is not None
    assert torch.allclose(head(x), made([eight()])(x), rtol=1e-3, atol=0.1)


def test_float32_that_was_asked_for_and_determinism_decode():
    assert precision("auto", CPU).blocks
    assert precision("bfloat16", CPU).blocks
    assert not precision("float32", CPU).blocks
    assert not precision("auto", CPU, batch_invariant=True).blocks


@pytest.mark.parametrize("kind", [four, eight])
def test_rows_by_their_indices(kind):
    blocks, ids = kind(32), torch.tensor([3, 31, 0, 3])
    assert blocks[ids].equal(blocks.decode(0, 32)[ids])
    assert blocks[ids[:0]].shape == (0, 64)
