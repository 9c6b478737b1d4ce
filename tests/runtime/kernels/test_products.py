"""Products of few rows, against float64's."""

import pytest
import torch

from sglang_lite.runtime.kernels.eight_bits import quantise_rows
from sglang_lite.runtime.kernels.gemv import SmallBatchLinear, linear_single_row
from sglang_lite.runtime.kernels.int8_product import int8_linear
from sglang_lite.runtime.kernels.tiled import can_tile, linear_by_tiles
from tests.counts import some
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE, GPU, apply_activation, close, normal

pytestmark = needs_kernels


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("outputs", "inputs"), [(130, 48), (70, 2100), (5000 if GPU else 200, 40)])
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_products_of_few_rows(rows, outputs, inputs):
    x, weight, bias = normal(rows, inputs), normal(outputs, inputs), normal(outputs)
    few = SmallBatchLinear(DEVICE)
    for b in (bias, None):
        expected = torch.nn.functional.linear(
            x.double(), weight.double(), None if b is None else b.double()
        )
        for _ in range(2):  # the counters are left as they were found
            close(few(x, weight, b), expected)
        if rows == 1:
            close(linear_single_row(x, weight, b)[0], expected)


@pytest.mark.parametrize(("outputs", "inputs"), [(26, 2100)] + [(4100, 2048)] * GPU)
def test_a_row_meets_small_matrices_in_eight_bits(outputs, inputs):
    x, weight, by = (
        normal(1, inputs),
        normal(outputs, inputs).to(torch.float8_e4m3fn),
        normal(outputs),
    )
    close(
        linear_single_row(x, weight, None, scales=by)[0],
        (x.double() @ weight.double().T) * by.double(),
    )


def test_long_sums_of_many_outputs_are_not_split(monkeypatch):
    monkeypatch.setattr("sglang_lite.runtime.kernels.gemv.SPLIT_OUTPUTS", SmallBatchLinear.BLOCK_N)
    x, weight = normal(2, 2100), normal(SmallBatchLinear.BLOCK_N + 6, 2100)
    close(
        SmallBatchLinear(DEVICE)(x, weight, None),
        torch.nn.functional.linear(x.double(), weight.double()),
    )


@pytest.mark.parametrize("gate", ["", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(2, 130, 264), (33, 64, 136), (64, 200, 48)]
)
def test_products_by_tiles(rows, outputs, inputs, biased, gate):
    x, weight = (
        normal(rows, inputs, dtype=torch.float16),
        normal(outputs, inputs, dtype=torch.float16) * 0.1,
    )
    bias = normal(outputs, dtype=torch.float16) if biased else None
    assert can_tile(weight)
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    close(
        linear_by_tiles(x, weight, bias, gate),
        apply_activation(expected, gate) if gate else expected,
        torch.float16,
    )


@pytest.mark.parametrize("gate", ["", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_single_row_with_its_norm_and_gate(gate, biased):
    x, residual, norm, weight = normal(1, 600), normal(1, 600), normal(600), normal(100, 600) * 0.03
    bias = normal(100) if biased else None
    y, total = linear_single_row(x, weight, bias, residual=residual, norm=norm, eps=1e-5, gate=gate)
    assert torch.equal(total, x + residual)
    expected = torch.nn.functional.linear(
        torch.nn.functional.rms_norm(total, (600,), norm, 1e-5), weight, bias
    )
    close(y, apply_activation(expected, gate) if gate else expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("inputs", [512, 600])
@pytest.mark.parametrize("kind", ["wide", "eight bits", "head"])
def test_a_row_meets_large_matrices(monkeypatch, kind, inputs, gate):
    """Launched as those of a model of some 8B parameters are."""
    monkeypatch.setattr("sglang_lite.runtime.kernels.gemv.SMALL", 0)
    monkeypatch.setattr("sglang_lite.runtime.kernels.gemv.HEAD", 50 if kind == "head" else 1 << 16)
    x, residual, norm, weight = (
        normal(1, inputs),
        normal(1, inputs),
        normal(inputs),
        normal(70, inputs) * 0.03,
    )
    scales = None
    if kind == "eight bits":
        eight = quantise_rows(weight, torch.float8_e4m3fn)
        weight, scales = eight.values, eight.scales
    full = weight.double() * (1.0 if scales is None else scales.double().unsqueeze(1))
    for add, by in ((None, None), (residual, norm)):
        total = x if add is None else x + add
        row = total if by is None else torch.nn.functional.rms_norm(total, (inputs,), by, 1e-5)
        expected = torch.nn.functional.linear(row.double(), full)
        y, _ = linear_single_row(
            x, weight, None, scales=scales, residual=add, norm=by, eps=1e-5, gate=gate
        )
        close(y, apply_activation(expected, gate) if gate else expected)


def test_products_with_weights_in_eight_bits():
    x, full = normal(1, 256), normal(96, 256)
    eight = quantise_rows(full, torch.float8_e4m3fn)
    weight, scales = eight.values, eight.scales
    assert (
        (weight.float() * scales.unsqueeze(1) - full).abs() <= full.abs().amax(1, keepdim=True) / 7
    ).all()
    expected = torch.nn.functional.linear(
        x.double(), weight.double() * scales.double().unsqueeze(1)
    )
    close(linear_single_row(x, weight, None, scales=scales)[0], expected)
    close(
        linear_single_row(x, weight, None, scales=scales, gate="silu")[0],
        apply_activation(expected, "silu"),
    )


@pytest.mark.parametrize(
    ("rows", "inputs"),
    [(2, 272), (65, 144), (130, 128)]
    + ([(257, 4096), (2000, 512)] + [(i, 1024) for i in range(1, some(1, 257))]) * GPU,
)
def test_products_of_integers(rows, inputs):
    x, full, bias = normal(rows, inputs), normal(200, inputs), normal(200)
    eight, own = quantise_rows(x, torch.int8), quantise_rows(full, torch.int8)
    values, scales = eight.values[:rows].double(), eight.scales[:rows, None].double()
    assert ((values * scales - x).abs() <= 0.501 * scales).all()
    weight = own.values.double() * own.scales[:, None].double()
    y = int8_linear(eight, own.values, own.scales, bias, torch.float32)
    close(y, (values * scales) @ weight.T + bias.double())
