"""Rows with adapters get what a model gives into whose weights the adapter is merged, whatever the
other rows have.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_lite.bench.shapes import SHAPES
from sglang_lite.runtime.attention.base import AttentionRequirements
from sglang_lite.runtime.attention.triton import TritonAttention
from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.lora import lora_rows
from sglang_lite.runtime.kernels.lora_few import join_ranks
from sglang_lite.runtime.kernels.lora_own import own_ranks
from sglang_lite.runtime.kernels.lora_weights import RANKS
from sglang_lite.runtime.kernels.reference.lora import lora_add
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.layers.adapted_linear import AdaptedLinear
from sglang_lite.runtime.models.layers.eight_bit_linear import Fp8Linear
from sglang_lite.runtime.models.layers.gpu_linear import as_gpu_product
from sglang_lite.runtime.models.layers.linear_builder import LinearBuilder
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import AttentionSpec, DenseSpec, RopeSpec
from sglang_lite.runtime.models.weights.dummy import DummySource
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.adapters import lora_step, lora_weights
from tests.runtime.kernels.test_kernels import DEVICE, close

pytestmark = needs_kernels

PAGE, RANKS_OF = 4, (8, 24)
FLOAT = Precision(torch.float32, torch.float32, torch.float32)
BASE = replace(SHAPES["small"], hidden_size=32, vocab_size=40)
ATTENTION = AttentionSpec(4, 2, 16, 16, 0.25, RopeSpec(theta=1e4))
LAYER = replace(BASE.layers[0], attention=ATTENTION, feed_forward=DenseSpec(48))
LAYERS = {
    "llama": LAYER,
    "biases": replace(LAYER, attention=replace(ATTENTION, qkv_bias=True, output_bias=True)),
    "plain": replace(LAYER, feed_forward=DenseSpec(48, gated=False, activation="gelu")),
    "normed queries": replace(LAYER, attention=replace(ATTENTION, qk_norm="whole", clip=2.0)),
    "parallel": replace(LAYER, parallel="one norm"),
    "norms after": replace(LAYER, norms="after"),
}


def made(name):
    spec = replace(BASE, layers=(LAYERS[name],) * 2)
    return GpuDecoder(spec, DummySource(DEVICE), FLOAT, DEVICE, 64)


def products(layer):
    fed = layer.feed_forward
    return {"qkv": layer.qkv, "output": layer.output, "gate_up": fed.gate_up, "down": fed.down}


def parts_of(name, outputs):
    if name == "qkv":
        return tuple(
            heads * ATTENTION.key_size
            for heads in (ATTENTION.heads, ATTENTION.kv_heads, ATTENTION.kv_heads)
        )
    return (outputs // 2, outputs // 2) if name == "gate_up" and outputs > 48 else (outputs,)


def merged(linear, weights, step, adapter):
    """Adds an adapter to a layer's weights."""
    at = 0
    for part, size in enumerate(weights.outputs):
        for page in step.pages[adapter][: int(step.ranks[adapter]) // RANKS].tolist():
            linear.weight[at : at + size] += (
                weights.b[page, :, at : at + size].t() @ weights.a[page, part]
            )
        at += size


def hidden(model, slots, lora):
    """Hidden states of rows that decode their first token, each in its slot."""
    spec, rows = model.spec.layers[0].attention, len(slots)
    backend = TritonAttention(
        AttentionRequirements(
            spec.heads,
            spec.kv_heads,
            spec.key_size,
            torch.float32,
            torch.float32,
            DEVICE,
            rows,
            max_chunks=0,
        )
    )
    numbers = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    pages = torch.zeros(
        (lora.of_slot.numel() if lora else rows, 1), dtype=torch.int32, device=DEVICE
    )
    pages[slots] = numbers.unsqueeze(1)
    plan = DevicePlan(
        ids=numbers % 40, slots=slots, positions=torch.zeros_like(numbers), last_tokens=numbers, page_table=pages,
        page_size=PAGE, decoding=rows, shared=None, blocks=torch.zeros((0, 4), dtype=torch.int32, device=DEVICE),
        block_size=16, separate=True, lora=lora,
    )  # fmt: skip
    with torch.inference_mode():
        return model.run(plan, model.allocate_cache(rows * PAGE), backend.plan_step(plan))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_row_is_computed_as_by_the_merged_model(name, own, rows):
    model, step = made(name), lora_step(RANKS_OF)
    layers = []
    for layer in model.layers:
        shapes = {product: linear.weight.shape for product, linear in products(layer).items()}
        layers.append({
            product: lora_weights(step, inputs, parts_of(product, outputs))
            for product, (outputs, inputs) in shapes.items()
        })  # fmt: skip
    of_slot = torch.tensor([1, 0, 2, 1, 0], dtype=torch.int32, device=DEVICE)  # 2 is none
    step = replace(step, of_slot=of_slot, layers=tuple(layers), own=own)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    found = hidden(model, slots, step)
    for adapter in range(3):
        other = made(name)
        for layer, weights in zip(other.layers, layers):
            for product, linear in products(layer).items() if adapter < 2 else ():
                merged(as_gpu_product(linear), weights[product], step, adapter)
        its = of_slot[:rows] == adapter
        if its.any():
            close(found[its], hidden(other, slots, None)[its])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("kind", ["half", "packed", "int8", "fp8"])
def test_weights_of_any_format_have_adapters_in_sixteen_bits(kind, rows):
    if kind == "fp8" and (DEVICE.type == "cpu" or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("needs a GPU with 8-bit products")
    half = torch.bfloat16 if kind == "fp8" else torch.float16
    precision = Precision(
        half,
        half,
        half,
        int8=kind == "int8",
        fp8=kind == "fp8",
        rounding="int4" if kind == "packed" else None,
    )
    torch.manual_seed(0)
    weight, bias = (torch.randn(shape, device=DEVICE) / 16 for shape in ((192, 256), (192,)))
    own = as_gpu_product(LinearBuilder(precision, DEVICE, fused=True).build_linear([weight], bias))
    assert isinstance(own, Fp8Linear) == (kind == "fp8")
    step = lora_step(RANKS_OF)
    weights, slots = lora_weights(step, 256, (96, 96), half), torch.arange(rows, device=DEVICE) % 3
    sorted_rows = lora_rows(step, slots)
    as_taken = join_ranks(step, slots) if kind == "half" else sorted_rows
    x = torch.randn(rows, 256, device=DEVICE).to(half)
    base = own(x)
    expected = lora_add(x, weights, sorted_rows, base.float())
    gate, up = expected.to(half).float().chunk(2, 1)
    for linear in (
        AdaptedLinear(own, weights, each) for each in (as_taken, own_ranks(step, slots))
    ):
        assert linear.eight_bit_input_type(rows) is None
        close(linear(x), expected, half)
        summed, _ = linear.multiply_in_parts(x)
        close(summed if summed.dim() == 2 else summed.sum(0), expected, half)
        close(linear.multiply_into(x, torch.empty_like(base)), expected, half)
        close(
            linear.multiply_gated(x, "silu", eight=None), torch.nn.functional.silu(gate) * up, half
        )
        np.testing.assert_array_equal(linear.multiply_unscaled(x)[0].isfinite().cpu(), True)
