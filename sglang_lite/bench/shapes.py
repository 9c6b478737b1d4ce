"""Shapes of real models, to be filled with random weights."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from sglang_lite.runtime.load import LoadedModel, precision
from sglang_lite.runtime.models.device_decoder import DeviceDecoder
from sglang_lite.runtime.models.kv_scales import kv_scales
from sglang_lite.runtime.models.spec import ModelSpec, RopeSpec
from sglang_lite.runtime.models.weights.dummy import DummySource
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


def _spec(
    hidden: int, layers: int, heads: int, inner: int, vocab: int, *, qk_norm: bool = False, tied: bool = False
) -> ModelSpec:
    return ModelSpec(
        architecture="llama", vocab_size=vocab, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=8,
        head_dim=128, intermediate_size=inner, max_positions=16384, rms_eps=1e-5, rope=RopeSpec(theta=5e5),
        scale=128**-0.5, windows=(None,) * layers, qk_norm=qk_norm, tied_embeddings=tied,
    )  # fmt: skip


SHAPES = {
    "llama-3.1-8b": _spec(4096, 32, 32, 14336, 128_256),
    "qwen3-0.6b": _spec(1024, 28, 16, 3072, 151_936, qk_norm=True, tied=True),
    "qwen3-14b": _spec(5120, 40, 40, 17408, 151_936, qk_norm=True),
}


def hf_config(name: str) -> dict[str, object]:
    """The `config.json` that a model of this shape would have on the hub."""
    spec = SHAPES[name]
    family = "Qwen3" if spec.qk_norm else "Llama"
    return {
        "architectures": [f"{family}ForCausalLM"], "model_type": family.lower(),
        "vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "hidden_act": spec.activation,
        "max_position_embeddings": spec.max_positions, "rms_norm_eps": spec.rms_eps, "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tied_embeddings,
    }  # fmt: skip


def load_shape(name: str, *, fp8: bool = False) -> LoadedModel:
    """A model of this shape on the first GPU, and a tokenizer whose tokens are words without meaning.

    Args:
        fp8: weights, keys and values in 8 bits; else bfloat16.
    """
    spec, device = SHAPES[name], torch.device("cuda:0")
    with torch.inference_mode():
        model = DeviceDecoder(
            spec, DummySource(device), precision("auto", device, fp8=fp8, kv_fp8=fp8), device, spec.max_positions
        )
    if fp8:
        model.kv_scales = kv_scales(model, {}, bos=None)
    words = [f"t{i} " for i in range(spec.vocab_size)]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer = Tokenizer(backend, [word.encode() for word in words], [], eos_ids=[])
    return LoadedModel(name, model, tokenizer, spec.vocab_size, frozenset(), spec.max_positions)
