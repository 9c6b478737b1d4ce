"""Linear layers of a GPU whose weights and rows are 8-bit integers."""

import pytest
import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows
from sglang_lite.runtime.loading.load_model import precision
from sglang_lite.runtime.models.layers.eight_bit_linear import GpuInt8Linear
from sglang_lite.runtime.models.layers.gpu_linear import GpuLinear, SideBySide
from sglang_lite.runtime.models.layers.linear_builder import LinearBuilder
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.weights.compressed_tensors import byte_packing
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE, normal

pytestmark = needs_kernels
HALF = torch.float16


def made(*parts, bias=None):
    linear = LinearBuilder(Precision(HALF, HALF, HALF, int8=True), DEVICE, fused=True).build_linear(
        [*parts], bias
    )
    assert isinstance(linear, GpuInt8Linear)
    return linear


def stored(rows, columns, **more):
    """Matrix of a checkpoint, as (numbers, scales, what it is read as)."""
    numbers = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    scale = torch.rand(rows, 1) / 100 + 0.001
    return (
        numbers,
        scale,
        byte_packing(integer_inputs=True).read(
            {".weight": numbers, ".weight_scale": scale, **more}
        ),
    )


def test_a_checkpoint_of_integers_keeps_what_it_has_in_sixteen_bits():
    formats = Precision(HALF, HALF, HALF, int8=True, packed=True)
    builder = LinearBuilder(formats, DEVICE, fused=True)
    assert isinstance(
        builder.build_linear([stored(48, 64)[2], stored(16, 64)[2]], None), GpuInt8Linear
    )
    assert type(builder.build_linear([torch.ones(48, 64)], None)) is GpuLinear
    assert type(builder.build_linear([stored(48, 64)[2], torch.ones(16, 64)], None)) is SideBySide


def test_integers_of_a_checkpoint_are_kept():
    (q, q_scale, first), (k, k_scale, second) = stored(48, 64), stored(16, 64)
    linear = made(first, second)
    assert torch.equal(linear.weight.cpu(), torch.cat((q, k)))
    assert torch.equal(linear.scales.cpu(), torch.cat((q_scale, k_scale))[:, 0])


def test_integers_with_a_zero_point_are_quantised_again():
    numbers, scale, part = stored(
        32, 64, **{".weight_zero_point": torch.full((32, 1), 3, dtype=torch.int8)}
    )
    linear = made(part)
    back = linear.weight.float() * linear.scales.unsqueeze(1)
    assert (
        (back.cpu() - (numbers.float() - 3) * scale).abs()
        <= 0.51 * linear.scales.cpu().unsqueeze(1)
    ).all()


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_rounded_rows_and_weights(rows, biased):
    x, weight, bias = (
        normal(rows, 512, dtype=HALF),
        normal(96, 512) / 16,
        normal(96, dtype=HALF) if biased else None,
    )
    linear = made(weight, bias=bias)
    back = linear.weight.double() * linear.scales.double().unsqueeze(1)
    assert (back - weight.double()).norm() < 0.01 * weight.norm()
    exact = x.double() @ back.T + (0 if bias is None else bias.double())
    parts, scales = linear.multiply_in_parts(x)
    assert scales is None
    for found in (
        linear(x),
        linear.multiply_into(x, torch.empty_like(exact, dtype=HALF)),
        parts.sum(0) if parts.dim() == 3 else parts,
    ):
        assert (found.double() - exact).norm() < 0.03 * exact.norm()
    gated = linear.multiply_gated(x, "silu", eight=torch.int8)
    assert isinstance(gated, EightBitRows)
    values = gated.values[:rows] * gated.scales[:rows, None]
    gate, up = exact.chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    assert (values.double() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("device", "quantization"), [("cuda", "int8"), ("cuda", "w8a8_int8"), ("cpu", "int8")]
)
def test_a_gpu_multiplies_integers_and_a_cpu_rounds_to_blocks(monkeypatch, device, quantization):
    monkeypatch.setattr(
        "sglang_lite.runtime.loading.load_model.computes_in_eight_bits", lambda _: False
    )  # looks for one
    formats = precision("bfloat16", torch.device(device), quantization=quantization)
    assert (formats.int8, formats.rounding) == (
        (True, None) if device == "cuda" else (False, "int8")
    )


def test_int8_needs_a_cpu_that_multiplies_integers(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(
        ParameterError, match=r"^dtype: int8 needs a CPU with VNNI instructions"
    ) as refused:
        precision("int8", torch.device("cpu"))
    assert refused.value.hint == "Use bfloat16 or float32."


def test_integers_go_with_sixteen_bits():
    with pytest.raises(
        ParameterError, match="quantization: 'int8' goes with 16 bits, not with dtype float32"
    ):
        precision("float32", torch.device("cuda"), quantization="int8")
