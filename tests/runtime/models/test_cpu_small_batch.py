"""Few tokens on a CPU have the hidden states of torch's operators, whichever way they are computed."""

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendGroup, ExtendRow
from sglang_lite.runtime.kernels.block_product import is_supported
from sglang_lite.runtime.kernels.cpu_small_batch import SmallBatchOps
from sglang_lite.runtime.kernels.cpu_small_batch_step import PRODUCTS, ThreadedSmallBatchOps
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models import cpu_small_batch, decoder, weight_reader
from sglang_lite.runtime.models.layers import linear
from sglang_lite.runtime.models.layers.linear_builder import LinearBuilder
from sglang_lite.runtime.models.lora.adapter import Adapter, ProductDelta, product_shapes
from sglang_lite.runtime.models.lora.cpu_step import AdapterSet, CpuLoraStep
from sglang_lite.runtime.models.weights.blocks import Blocks
from tests.runtime.models.tiny import VOCAB, randomise, save
from tests.runtime.models.zoo import tiny

# with biases, norms of heads, a window of 4 tokens, and convolutions
COMMON = ("llama", "qwen2", "qwen3", "mistral", "lfm2")
SETTINGS: dict[str, dict[str, Any]] = {"lfm2": {"layer_types": ["conv", "full_attention"]}}
OTHERS = ("gemma2", "mixtral", "phi", "starcoder2", "olmo2")
SLOTS = 40

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="compiled operators need a C++ compiler",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        kind: save(randomise(tiny(kind, **SETTINGS.get(kind, {}))), tmp_path_factory.mktemp(kind))
        for kind in (*COMMON, *OTHERS)
    }


@pytest.fixture
def steps(monkeypatch):
    """Activations that compiled operators have computed."""
    sizes = []

    def silu_mul(self, gate_up):
        sizes.append(gate_up.shape[1])
        return compiled(self, gate_up)

    compiled = SmallBatchOps.silu_mul
    monkeypatch.setattr(SmallBatchOps, "silu_mul", silu_mul)
    return sizes


def hidden(folder, dtype, slots, adapters=(), **settings):
    """Of eight tokens in one step, and of four in one each; token i has the adapter i % (adapters +
    1), the last of which is none.
    """
    model = load_model(
        EngineConfig(str(folder), device="cpu", dtype=dtype, **settings), folder, iter
    ).model
    cache = model.allocate_cache(SLOTS)
    ids = torch.arange(12) * 7 % VOCAB
    found = []
    with torch.inference_mode():
        for start, end in ((0, 8), (8, 9), (9, 10), (10, 11), (11, 12)):
            read_at = (
                slice(slots.start, slots.start + end) if isinstance(slots, slice) else slots[:end]
            )
            store_at = torch.arange(SLOTS)[slots][start:end]
            plan = AttentionPlan(store_at, (), (ExtendRow(0, end - start, read_at),))
            if adapters:
                of_token = np.arange(start, end) % (len(adapters) + 1)
                made = AdapterSet([random_adapter(model, *each) for each in adapters])
                plan = replace(
                    plan, lora=CpuLoraStep(made, np.where(of_token < len(adapters), of_token, -1))
                )
            found.append(
                model.forward(ids[start:end], torch.arange(start, end), plan, cache).float()
            )
    return torch.cat(found)


def random_adapter(model, rank, *products):
    """An adapter of these products, all with the same numbers for the same arguments."""
    torch.manual_seed(rank)
    layers = []
    for layer in product_shapes(model.spec):
        deltas = {}
        for name, shape in layer.items():
            a = torch.randn(len(shape.outputs), rank, shape.inputs) / shape.inputs**0.5
            b = torch.randn(rank, sum(shape.outputs)) / rank**0.5
            if name in products:
                a, b = (each.to(model.precision.compute) for each in (a, b))
                deltas[name] = ProductDelta(a, b, shape.outputs)
        layers.append(deltas)
    return Adapter(str(rank), rank, rank, tuple(layers), "")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "slots",
    [slice(5, SLOTS), torch.arange(SLOTS).int() * 7 % SLOTS],
    ids=["side by side", "anywhere"],
)
@pytest.mark.parametrize(
    ("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 3e-2), ("int8", 1e-1)]
)
@pytest.mark.parametrize("kind", COMMON)
def test_tokens_have_the_hidden_states_of_torch_operators(
    folders, steps, monkeypatch, kind, dtype, limit, slots
):
    if dtype == "int8" and not torch.cpu._is_vnni_supported():  # noqa: SLF001 # torch has no other name for it
        pytest.skip("int8 needs VNNI")
    found = hidden(folders[kind], dtype, slots)
    assert len(steps) == 5 * 2
    monkeypatch.setattr(decoder, "small_batch_step", lambda *_: None)
    expected = hidden(folders[kind], dtype, slots)
    assert len(steps) == 5 * 2
    assert (found - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("threaded", [True, False])
def test_long_rows_are_read_by_all_threads(folders, steps, monkeypatch, threaded):
    whole = hidden(folders["qwen3"], "float32", slice(0, SLOTS))
    monkeypatch.setattr(cpu_small_batch, "MAX_SINGLE_THREAD_READS", 0)
    monkeypatch.delattr(SmallBatchOps, "attend")
    if not threaded:
        monkeypatch.setattr(cpu_small_batch, "ThreadedSmallBatchOps", lambda *_: None)
    assert torch.allclose(hidden(folders["qwen3"], "float32", slice(0, SLOTS)), whole, atol=1e-4)
    assert len(steps) == 2 * 5 * 2


def test_many_tokens_have_torch_operators(folders, steps, monkeypatch):
    monkeypatch.setattr(cpu_small_batch, "MAX_GATE_ELEMENTS", 0)
    hidden(folders["llama"], "float32", slice(0, SLOTS))
    assert len(steps) == 4 * 2


@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_other_kinds_have_torch_operators(folders, steps, kind):
    hidden(folders[kind], "float32", slice(0, SLOTS))
    assert not steps


def test_rows_that_must_not_depend_on_others_have_torch_operators(folders, steps):
    hidden(folders["llama"], "float32", slice(0, SLOTS), deterministic=True)
    assert not steps


SHAPE = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": VOCAB,
    "num_hidden_layers": 2, "initializer_range": 0.1,
}  # fmt: skip
IN_BLOCKS = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen2": transformers.Qwen2Config(**SHAPE),  # with biases
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=64),  # with norms of heads
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=4),
}


@pytest.fixture(scope="module")
def folders_of_blocks(tmp_path_factory):
    torch.manual_seed(0)
    return {
        kind: save(
            randomise(transformers.AutoModelForCausalLM.from_config(config)),
            tmp_path_factory.mktemp(kind),
        )
        for kind, config in IN_BLOCKS.items()
    }


def in_blocks(matrix, bits):
    """A matrix in blocks of 32 inputs, as GGUF files have them."""
    whole = linear.stack_weights([matrix], torch.float32)
    of, most = whole.view(len(whole), -1, 32), 2**bits - 1
    minimum = of.amin(-1)
    scale = ((of.amax(-1) - minimum) / most).half().float()
    q = (
        ((of - minimum.unsqueeze(-1)) / scale.unsqueeze(-1))
        .round()
        .clamp(0, most)
        .view(whole.shape)
    )
    if bits == 4:
        return Blocks(q.to(torch.uint8), scale, minimum)
    return Blocks((q - 128).to(torch.int8), scale, minimum + 128 * scale)


@pytest.fixture
def blocks(monkeypatch):
    """Matrices of layers in blocks, those behind the second of a product in other ones."""

    class InBlocks(LinearBuilder):
        def __init__(self, precision, *rest, **settings):
            super().__init__(replace(precision, blocks=True), *rest, **settings)

        def build_linear(self, parts, *rest, **settings):
            parts = [in_blocks(part, 4 if i < 2 else 8) for i, part in enumerate(parts)]
            return super().build_linear(parts, *rest, **settings)

    monkeypatch.setattr(weight_reader, "LinearBuilder", InBlocks)


@pytest.fixture
def calls(monkeypatch):
    """Tokens of the steps that were one call."""
    tokens = []

    def run(self, model, x, *rest):
        tokens.append(len(x))
        return in_one_call(self, model, x, *rest)

    in_one_call = ThreadedSmallBatchOps.run
    monkeypatch.setattr(ThreadedSmallBatchOps, "run", run)
    return tokens


@pytest.mark.sampled(4)
@pytest.mark.skipif(not is_supported(), reason="products with blocks need AVX2")
@pytest.mark.parametrize(
    "slots", [slice(5, SLOTS), torch.arange(SLOTS).int() * 7 % SLOTS], ids=["slice", "anywhere"]
)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_with_blocks_all_layers_are_one_call(
    folders_of_blocks, blocks, calls, monkeypatch, kind, dtype, limit, slots
):
    found = hidden(folders_of_blocks[kind], dtype, slots)
    assert calls == [8, 1, 1, 1, 1]
    monkeypatch.setattr(decoder, "small_batch_step", lambda *_: None)
    expected = hidden(folders_of_blocks[kind], dtype, slots)
    assert (found - expected).norm() <= limit * expected.norm()


@pytest.mark.sampled(4)
@pytest.mark.skipif(not is_supported(), reason="products with blocks need AVX2")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_so_they_are_with_adapters(
    folders_of_blocks, blocks, calls, monkeypatch, kind, dtype, limit, threads
):
    adapters = (8, "qkv", "down"), (24, *PRODUCTS), (16, "output", "gate_up")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = hidden(folders_of_blocks[kind], dtype, slice(0, SLOTS), adapters)
    finally:
        torch.set_num_threads(before)
    assert calls == [8, 1, 1, 1, 1]
    monkeypatch.setattr(decoder, "small_batch_step", lambda *_: None)
    expected = hidden(folders_of_blocks[kind], dtype, slice(0, SLOTS), adapters)
    assert (found - expected).norm() <= limit * expected.norm()
    without = hidden(folders_of_blocks[kind], dtype, slice(0, SLOTS))
    assert (expected - without).norm() > 5 * limit * expected.norm()


def branches(folder):
    """Hidden states of three tokens that each follow the same eight."""
    model = load_model(EngineConfig(str(folder), device="cpu", dtype="float32"), folder, iter).model
    cache, ids = model.allocate_cache(SLOTS), torch.arange(12) * 7 % VOCAB
    rows = tuple(ExtendRow(i, i + 1, torch.tensor([*range(8), 10 + i])) for i in range(3))
    with torch.inference_mode():
        model.forward(
            ids[:8],
            torch.arange(8),
            AttentionPlan(torch.arange(8), (), (ExtendRow(0, 8, slice(0, 8)),)),
            cache,
        )
        plan = AttentionPlan(torch.arange(10, 13), (), rows, (ExtendGroup.from_rows(rows, 8),))
        return model.forward(ids[8:11], torch.full((3,), 8), plan, cache)


@pytest.mark.skipif(not is_supported(), reason="products with blocks need AVX2")
def test_rows_that_share_little_are_one_call_too(folders_of_blocks, blocks, calls, monkeypatch):
    found = branches(folders_of_blocks["llama"])
    assert calls == [8, 3]
    monkeypatch.setattr(cpu_small_batch, "MAX_REPEATED_READS", 2 * 8 * 128 - 1)
    expected = branches(folders_of_blocks["llama"])
    assert calls == [8, 3, 8]
    assert (found - expected).norm() <= 1e-3 * expected.norm()
