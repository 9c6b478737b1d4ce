"""Products of adapters against one product for each token."""

import pytest
import torch

from sglang_lite.runtime.kernels.activation import apply_gated
from sglang_lite.runtime.kernels.lora import lora_add, lora_add_and_gate, lora_rows
from sglang_lite.runtime.kernels.lora_few import join_ranks, shrink
from sglang_lite.runtime.kernels.lora_own import own_expand, own_ranks, own_shrink
from sglang_lite.runtime.kernels.lora_weights import RANKS
from sglang_lite.runtime.kernels.tiled import can_fuse_adapters, linear_by_tiles, linear_split_k
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.adapters import DEVICE, first, lora_step, lora_weights
from tests.runtime.kernels.test_kernels import close

pytestmark = needs_kernels
GPU = DEVICE.type == "cuda"
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]


def by_token(x, weights, step, slots, out):
    """`out` with the product of each token's adapter, one token and one part at a time."""
    out = out.double()
    for token, slot in enumerate(slots.tolist()):
        adapter = int(step.of_slot[slot])
        if adapter == len(step.ranks):
            continue
        pages, at = step.pages[adapter][: int(step.ranks[adapter]) // RANKS].long(), 0
        for part, size in enumerate(weights.outputs):
            for page in pages:
                a, b = weights.a[page, part].double(), weights.b[page, :, at : at + size].double()
                out[token, at : at + size] += (a @ x[token].double()) @ b
            at += size
    return out


def drawn(rows, ranks, inputs, outputs, dtype):
    step = lora_step(ranks, longest=256)
    weights = lora_weights(step, inputs, outputs, dtype)
    slots = torch.randint(0, len(ranks) + 1, (rows,), device=DEVICE, dtype=torch.int32)
    x, product = (torch.randn(rows, n, device=DEVICE).to(dtype) for n in (inputs, sum(outputs)))
    return step, weights, slots, x, product


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 64, 256, 257])
def test_ragged_ranks_are_added_for_each_tokens_own_adapter(rows, dtype):
    ranks = (8, 256, 16, 0, 40) if GPU or rows < 64 else (8, 24, 0)
    step, weights, slots, x, product = drawn(rows, ranks, 264, (130, 24, 24), dtype)
    expected = by_token(x, weights, step, slots, product)
    close(lora_add(x, weights, first(lora_rows(step, slots)), product), expected, dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 17, 257])
def test_a_gated_pair_gets_its_adapters_before_the_activation(rows, dtype):
    step, weights, slots, x, product = drawn(rows, (16, 8), 72, (130, 130), dtype)
    expected = apply_gated(by_token(x, weights, step, slots, product).to(dtype), "silu")
    close(
        lora_add_and_gate(x, weights, first(lora_rows(step, slots)), product, "silu"),
        expected,
        dtype,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("inputs", [256, 4096] if GPU else [256])
def test_a_product_by_tiles_adds_adapters_where_its_sums_end(rows, inputs):
    half = torch.bfloat16 if GPU else torch.float16
    ranks = (8, 64, 16, 0, 40) * (12 if GPU else 1)  # several tiles of ranks
    step, weights, slots, x, _ = drawn(rows, ranks, inputs, (96, 96), half)
    weight = (torch.randn(192, inputs, device=DEVICE) / inputs**0.5).to(half)
    expected = by_token(x, weights, step, slots, x.double() @ weight.double().T)
    joined = first(join_ranks(step, slots))
    assert can_fuse_adapters(weight, weights.outputs)
    for _ in range(2):  # the counters are left as they were found
        close(linear_by_tiles(x, weight, None, shrunk=shrink(x, weights, joined)), expected, half)
    close(linear_split_k(x, weight, 2, shrink(x, weights, joined)).sum(0), expected, half)
    found = linear_by_tiles(x, weight, None, "silu", shrunk=shrink(x, weights, joined))
    close(found, apply_gated(expected.to(half), "silu"), half)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("outputs", [(130,), (1030, 24, 24), (520, 520)])
def test_each_token_gets_the_products_of_its_own_adapter_alone(rows, dtype, outputs):
    ranks = (8, 256, 16, 0, 40) if GPU else (8, 24, 0)
    step, weights, slots, x, product = drawn(rows, ranks, 1100, outputs, dtype)
    expected, low = (
        by_token(x, weights, step, slots, product),
        own_shrink(x, weights, first(own_ranks(step, slots))),
    )
    if len(outputs) == 2:
        close(own_expand(low, product, "silu"), apply_gated(expected.to(dtype), "silu"), dtype)
    close(own_expand(low, product), expected, dtype)


@pytest.mark.skipif(not GPU, reason="the interpreter runs nothing at the same time")
@pytest.mark.parametrize("outputs", [4096, 28_672])
def test_a_product_runs_beside_that_of_each_tokens_own_adapter(outputs):
    """With large matrices, and again in the same memory, as each kernel starts before the one
    before it has ended.
    """
    step, weights, slots, _, _ = drawn(64, (16,) * 64, 4096, (outputs,), torch.bfloat16)
    weight = (torch.randn(outputs, 4096, device=DEVICE) / 64).bfloat16()
    ranks, y = (
        first(own_ranks(step, slots)),
        torch.empty(64, outputs, device=DEVICE, dtype=torch.bfloat16),
    )
    for _ in range(20):
        x = torch.randn(64, 4096, device=DEVICE).bfloat16()
        expected = by_token(x, weights, step, slots, (x @ weight.T))
        copied = torch.empty_like(x).copy_(x)
        low = own_shrink(copied, weights, ranks)
        close(
            own_expand(low, linear_by_tiles(copied, weight, None, out=y, shrunk=low)),
            expected,
            torch.bfloat16,
        )


def test_tokens_without_an_adapter_are_left_alone():
    step, weights, _, x, product = drawn(20, (8,), 40, (40,), torch.float32)
    slots = torch.full((20,), 1, device=DEVICE)
    assert torch.equal(
        lora_add(x, weights, first(lora_rows(step, slots)), product.clone()), product
    )
    assert torch.equal(
        own_expand(own_shrink(x, weights, first(own_ranks(step, slots))), product.clone()), product
    )
