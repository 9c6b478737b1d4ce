"""Products with matrices of 4-bit numbers, against decoding and multiplying."""

import pytest
import torch

from sglang_lite.runtime.kernels.packed_products import decode_weight, packed_rows, parts_of
from sglang_lite.runtime.kernels.packed_row import packed_row
from sglang_lite.runtime.kernels.packed_weight import (
    PackedWeight,
    can_pack,
    pack_weight,
    shortest_exact_dtype,
)
from sglang_lite.runtime.kernels.reference import packed_products as twin
from sglang_lite.runtime.models.layers.packed_linear import PackedLinear
from tests.counts import some
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE, GPU, apply_activation, close, normal

pytestmark = needs_kernels
KINDS = ("integers", "integers with zeros", "integers and what is between", "e2m1", "table")


def made(
    outputs: int, inputs: int, group: int, kind: str = "integers"
) -> tuple[PackedWeight, torch.Tensor]:
    """A packed matrix, and its values in float64."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scales = torch.rand(outputs, inputs // group, generator=generator).add(0.5).div(8).half()
    zeros = torch.randint(0, 170, scales.shape, generator=generator)
    zeros = zeros / 10 if kind.endswith("between") else zeros // 10
    own = kind.endswith(("zeros", "between"))
    table = torch.linspace(-1, 1, 16)
    if kind == "e2m1":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    elif kind != "table":
        table = torch.arange(16) - (0.0 if own else 8.0)
    values = table.double()[numbers.int()]
    if own:
        values -= zeros.half().double().repeat_interleave(group, 1)
    values *= scales.double().repeat_interleave(group, 1)
    weight = pack_weight(
        numbers.to(DEVICE), scales.to(DEVICE), zeros=zeros.to(DEVICE) if own else None,
        zero=8 if kind == "integers" else 0, kind=kind.partition(" ")[0],  # type: ignore[arg-type]  # one of the kinds
        table=table.to(DEVICE) if kind == "table" else None,
    )  # fmt: skip
    return weight, values.to(DEVICE)


SHAPES = [
    (70, 2048, 128),
    (130, 1152, 64),
    (70, 96, 32),
    (33, 80, 16),
    (20, 576, 576),
    (40, 704, 64),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_decoding(kind, outputs, inputs, group):
    weight, values = made(outputs, inputs, group, kind)
    assert weight.words.numel() * 8 <= outputs * max(inputs * 17 / 16, inputs + 127)
    # the interpreter cuts to bfloat16
    for dtype in (torch.float32, torch.bfloat16 if GPU else torch.float16):
        assert torch.equal(decode_weight(weight, dtype), twin.decode_weight(weight, dtype))
        assert torch.allclose(decode_weight(weight, dtype).double(), values, rtol=2**-8, atol=1e-6)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 17, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products(rows, outputs, inputs, group, kind, dtype):
    x, bias = normal(rows, inputs, dtype=dtype), normal(outputs, dtype=dtype)
    weight, values = made(outputs, inputs, group, kind)
    for b in (bias, None):
        expected = torch.nn.functional.linear(x.double(), values, None if b is None else b.double())
        found = packed_rows(x, weight, b)
        assert ((found - expected).abs().max() / expected.abs().max()).item() < 2**-9
    parts = packed_rows(x, weight, None, parts=3)
    assert parts.shape == (3, rows, outputs)
    close(parts.sum(0) / 16, x.double() @ values.T / 16, dtype)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 18, 70])
def test_rows_with_their_gate(gate, kind, biased, rows):
    x, bias = normal(rows, 640) / 32, normal(100) if biased else None
    weight, values = made(100, 640, 64, kind)
    expected = torch.nn.functional.linear(
        x.double(), values, None if bias is None else bias.double()
    )
    close(packed_rows(x, weight, bias, gate), apply_activation(expected, gate))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [*SHAPES, (20, 4160, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_single_row(outputs, inputs, group, kind, dtype):
    x, bias = normal(1, inputs, dtype=dtype), normal(outputs, dtype=dtype)
    weight, values = made(outputs, inputs, group, kind)
    y, total = packed_row(x, weight, bias)
    assert total is x
    close(y / 16, torch.nn.functional.linear(x.double(), values, bias.double()) / 16, dtype)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("gate", ["", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS[:4])
def test_a_single_row_with_its_norm_and_gate(gate, biased, kind):
    x, residual, norm, bias = (
        normal(1, 640),
        normal(1, 640),
        normal(640) / 16,
        normal(100) if biased else None,
    )
    weight, values = made(100, 640, 64, kind)
    y, total = packed_row(x, weight, bias, residual=residual, norm=norm, eps=1e-5, gate=gate)
    assert torch.equal(total, x + residual)
    normed = torch.nn.functional.rms_norm(total.double(), (640,), norm.double(), 1e-5)
    expected = torch.nn.functional.linear(normed, values, None if bias is None else bias.double())
    close(y, apply_activation(expected, gate) if gate else expected)


def test_a_row_of_huge_and_tiny_inputs():
    weight, values = made(16, 256, 64)
    for size in (1e-12, 1e9):
        x = normal(1, 256) * size
        close(packed_row(x, weight, None)[0] / size, x.double() @ values.T / size)


@pytest.mark.skipif(not GPU, reason="interprets for minutes")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [32, 128])
def test_large_products_in_bfloat16(kind, group):
    """By the kernel that a layer takes for so many rows."""
    weight, values = made(14336, 4096, group, kind)
    x = normal(257, 4096, dtype=torch.bfloat16)
    expected, layer = x.double() @ values.T, PackedLinear(weight, None, None)
    # two units in the last place of a row's largest
    limit = expected.abs().amax(1, keepdim=True) * 2**-7
    for rows in range(1, 258) if some(0, 1) else (1, 2, 16, 64, 65, 256, 257):
        assert ((layer(x[:rows]) - expected[:rows]).abs() <= limit[:rows]).all(), rows


def test_what_can_be_packed_and_is_split():
    assert not can_pack(96, 24)
    assert not can_pack(100, 64)
    assert parts_of(made(64, 2048, 128)[0], 1, torch.float32) == 4
    assert parts_of(made(64, 512, 128)[0], 1, torch.float32) == 1


def test_the_shortest_dtype_that_loses_nothing():
    ones = torch.ones(4)
    assert shortest_exact_dtype(ones / 3) == torch.float32
    assert shortest_exact_dtype((ones / 3).half().float()) == torch.float16
    assert shortest_exact_dtype(ones * 1e9) == torch.float32
    assert shortest_exact_dtype(ones * 2.0**40) == torch.bfloat16
