"""Sums of products that are made in parts, which norms add."""

from dataclasses import replace

import numpy as np
import torch

from sglang_lite.bench.shapes import SHAPES
from sglang_lite.runtime.attention.base import AttentionRequirements
from sglang_lite.runtime.attention.triton import TritonAttention
from sglang_lite.runtime.kernels import tiled
from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.device_properties import INTERPRETER, assume_device
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.weights.dummy import DummySource
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE, close

pytestmark = needs_kernels

HALF, ROWS, PAGE = torch.float16, 33, 4


def hidden_states(model, rows=ROWS):
    """Of rows that decode their first token."""
    spec = model.spec.layers[0].attention
    backend = TritonAttention(
        AttentionRequirements(
            spec.heads, spec.kv_heads, spec.key_size, HALF, HALF, DEVICE, rows, max_chunks=0
        )
    )
    ids = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    none = torch.from_numpy(np.zeros((0, 4), dtype=np.int32)).to(DEVICE)
    plan = DevicePlan(
        ids=ids, slots=ids, positions=torch.zeros_like(ids), last_tokens=ids, page_table=ids.unsqueeze(1),
        page_size=PAGE, decoding=rows, shared=None, blocks=none, block_size=16, separate=True,
    )  # fmt: skip
    with torch.inference_mode():
        return model.run(plan, model.allocate_cache(rows * PAGE), backend.plan_step(plan))


def test_sums_in_parts_are_what_they_are_whole(monkeypatch):
    spec = SHAPES["small"]
    spec = replace(spec, layers=spec.layers[:1], vocab_size=ROWS, hidden_size=64)
    made = []
    in_parts = tiled.linear_split_k
    monkeypatch.setattr(tiled, "MIN_PART_INPUTS", 128)
    monkeypatch.setattr(tiled, "linear_split_k", lambda *a: made.append(in_parts(*a)) or made[-1])

    def states(most):
        monkeypatch.setattr(tiled, "MAX_PARTS", most)
        return hidden_states(
            GpuDecoder(spec, DummySource(DEVICE), Precision(HALF, HALF, HALF), DEVICE, 64)
        )

    parts = states(4)
    # of attention and of the feed-forward: 256 and 512 inputs
    assert [len(each) for each in made] == [2, 4]
    close(parts, states(1), HALF)
    assert len(made) == 2


def test_matrices_some_of_which_have_biases_are_stacked_without_memory():
    """As compilation ahead of time does."""
    config = {
        "architectures": ["xLSTMForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_heads": 4,
    }
    spec = spec_from_config(config, "config.json")
    nowhere = torch.device("meta")
    with assume_device(INTERPRETER):
        model = GpuDecoder(spec, DummySource(nowhere), Precision(HALF, HALF, HALF), nowhere, 64)
    assert model.layers[0].qkv.bias.shape == (16 + 16 + 32 + 32 + 4 + 4,)
