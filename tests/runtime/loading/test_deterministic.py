"""What a deterministic engine refuses on a GPU."""

import pytest
import torch

from sglang_lite.bench.shapes import SHAPES
from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading.load_model import check_deterministic

HOPPER, GPU = (9, 0), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("shape", "settings", "capability", "message"),
    [
        ("qwen3-0.6b", {}, (8, 0), "deterministic: needs a CPU or a Hopper GPU"),
        (
            "qwen3-0.6b",
            {"dtype": "float32"},
            HOPPER,
            "dtype: 'float32' does not go with deterministic on a GPU",
        ),
        ("qwen3-0.6b", {"quantization": "fp8"}, HOPPER, "quantization: 'fp8' does not go"),
        ("qwen3-0.6b", {"kv_dtype": "fp8"}, HOPPER, "kv_dtype: 'fp8' does not go"),
        (
            "qwen3-0.6b",
            {"attention_backend": "torch"},
            HOPPER,
            "attention_backend: 'torch' does not go",
        ),
        ("qwen3-30b-a3b", {}, HOPPER, "deterministic: the model has a mixture of experts"),
        ("deepseek-v2-lite", {}, HOPPER, "deterministic: the model has latent attention"),
    ],
)
def test_what_has_no_fixed_order_of_summation_is_refused(
    shape, settings, capability, message, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = EngineConfig(deterministic=True, **settings)
    with pytest.raises(ParameterError, match=message):
        check_deterministic(config, SHAPES[shape], GPU)
    check_deterministic(config, SHAPES[shape], torch.device("cpu"))
    check_deterministic(EngineConfig(**settings), SHAPES[shape], GPU)


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.1-8b"])
def test_dense_models_in_16_bits_are_taken(shape, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    for dtype in ("auto", "bfloat16", "float16"):
        check_deterministic(EngineConfig(deterministic=True, dtype=dtype), SHAPES[shape], GPU)
