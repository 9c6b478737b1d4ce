"""Configs as the hub has them, old spelling and left-out fields included, are read as transformers
reads them.
"""

import json
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.layers.rope import RotaryTable
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.transformers_config import is_natively_supported

HUB: dict[str, Any] = {
    "llama-2-7b": (LlamaConfig, "LlamaForCausalLM", dict(
        hidden_size=4096, intermediate_size=11008, max_position_embeddings=4096, num_attention_heads=32,
        num_hidden_layers=32, num_key_value_heads=32, pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=None,
        tie_word_embeddings=False, vocab_size=32000, hidden_act="silu", bos_token_id=1, eos_token_id=2)),
    # before there were key-value heads and rope_theta
    "llama-1-7b": (LlamaConfig, "LlamaForCausalLM", dict(
        hidden_size=4096, intermediate_size=11008, max_position_embeddings=2048, num_attention_heads=32,
        num_hidden_layers=32, vocab_size=32000, hidden_act="silu")),
    "llama-3.1-8b": (LlamaConfig, "LlamaForCausalLM", dict(
        attention_bias=False, mlp_bias=False, hidden_size=4096, intermediate_size=14336, max_position_embeddings=131072,
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=500000.0,
        rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_type="llama3",
                          original_max_position_embeddings=8192),
        vocab_size=128256, eos_token_id=[128001, 128008, 128009])),
    "vicuna-16k": (LlamaConfig, "LlamaForCausalLM", dict(
        hidden_size=4096, intermediate_size=11008, max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32,
        num_key_value_heads=32, rope_scaling=dict(type="linear", factor=4.0), sliding_window=512, vocab_size=32000)),
    "mistral-7b-v0.1": (MistralConfig, "MistralForCausalLM", dict(
        hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768, num_attention_heads=32,
        num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=4096,
        vocab_size=32000)),
    "mistral-nemo": (MistralConfig, "MistralForCausalLM", dict(
        head_dim=128, hidden_size=5120, intermediate_size=14336, max_position_embeddings=131072, num_attention_heads=32,
        num_hidden_layers=40, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1000000.0, sliding_window=None,
        vocab_size=131072)),
    "qwen2.5-7b": (Qwen2Config, "Qwen2ForCausalLM", dict(
        hidden_size=3584, intermediate_size=18944, max_position_embeddings=32768, max_window_layers=28,
        num_attention_heads=28, num_hidden_layers=28, num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=1000000.0,
        sliding_window=131072, use_sliding_window=False, vocab_size=152064,
        rope_scaling=dict(factor=4.0, original_max_position_embeddings=32768, type="yarn"))),
    "qwen2-window": (Qwen2Config, "Qwen2ForCausalLM", dict(
        hidden_size=3584, intermediate_size=18944, max_position_embeddings=32768, num_attention_heads=28,
        num_hidden_layers=40, num_key_value_heads=4, use_sliding_window=True, vocab_size=152064)),
    "qwen3-0.6b": (Qwen3Config, "Qwen3ForCausalLM", dict(
        attention_bias=False, hidden_size=1024, intermediate_size=3072, max_position_embeddings=40960,
        max_window_layers=28, num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8, rope_scaling=None,
        rope_theta=1000000, sliding_window=None, tie_word_embeddings=True, use_sliding_window=False, vocab_size=151936)),
    "gemma-2-2b": (Gemma2Config, "Gemma2ForCausalLM", dict(
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, head_dim=256, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", hidden_size=2304, intermediate_size=9216, max_position_embeddings=8192,
        num_attention_heads=8, num_hidden_layers=26, num_key_value_heads=4, query_pre_attn_scalar=256,
        rope_theta=10000.0, sliding_window=4096, vocab_size=256000)),
    "gemma-3-1b": (Gemma3TextConfig, "Gemma3ForCausalLM", dict(
        head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size=1152, intermediate_size=6912,
        max_position_embeddings=32768, num_attention_heads=4, num_hidden_layers=26, num_key_value_heads=1,
        query_pre_attn_scalar=256, rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
        sliding_window_pattern=6, vocab_size=262144, eos_token_id=[1, 106])),
    # says no more than this of its text part
    "gemma-3-4b": (Gemma3Config, "Gemma3ForConditionalGeneration", dict(
        eos_token_id=[1, 106], vision_config=dict(hidden_size=1152),
        text_config=dict(hidden_size=2560, intermediate_size=10240, model_type="gemma3_text", num_hidden_layers=34,
                         rope_scaling=dict(factor=8.0, rope_type="linear"), sliding_window=1024))),
    "phi-3-mini-4k": (Phi3Config, "Phi3ForCausalLM", dict(
        hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096, num_attention_heads=32,
        num_hidden_layers=32, num_key_value_heads=32, original_max_position_embeddings=4096, rms_norm_eps=1e-5,
        rope_scaling=None, rope_theta=10000.0, sliding_window=2047, vocab_size=32064)),
    "phi-3-mini-128k": (Phi3Config, "Phi3ForCausalLM", dict(
        hidden_size=3072, intermediate_size=8192, max_position_embeddings=131072, num_attention_heads=32,
        num_hidden_layers=32, num_key_value_heads=32, original_max_position_embeddings=4096,
        rope_scaling=dict(type="longrope", short_factor=[1.05] * 48, long_factor=[1.0 + i for i in range(48)]),
        sliding_window=262144, vocab_size=32064)),
    "phi-4-mini": (Phi3Config, "Phi3ForCausalLM", dict(
        hidden_size=3072, intermediate_size=8192, max_position_embeddings=131072, num_attention_heads=24,
        num_hidden_layers=32, num_key_value_heads=8, original_max_position_embeddings=4096, partial_rotary_factor=0.75,
        rope_scaling=dict(type="longrope", short_factor=[1.0] * 48, long_factor=[1.0 + i for i in range(48)]),
        rms_norm_eps=1e-5, sliding_window=262144, tie_word_embeddings=True, vocab_size=200064)),
}  # fmt: skip
POSITIONS = torch.tensor([0, 1, 2, 77, 4999])


def rotary(config, text, kind):
    """transformers' cos and sin [positions, dim], for a type of layer."""
    if isinstance(text, Gemma3TextConfig):
        return Gemma3RotaryEmbedding(text)(torch.ones(1), POSITIONS[None], kind)
    table = Phi3RotaryEmbedding if isinstance(config, Phi3Config) else LlamaRotaryEmbedding
    return table(text)(torch.ones(1), POSITIONS[None])


def windows(config, text):
    if isinstance(config, LlamaConfig):
        return (None,) * text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return tuple(text.sliding_window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HUB)
def test_a_config_is_read_as_transformers_reads_it(name):
    kind, architecture, content = HUB[name]
    config = kind(**content)
    text = config.get_text_config()
    saved = json.loads(json.dumps(config.to_dict(), default=str))
    for spelling in (content, saved):  # the hub's, and that of transformers 5
        spec = spec_from_config(spelling | {"architectures": [architecture]}, "config.json")
        assert spec.vocab_size == text.vocab_size
        assert spec.hidden_size == text.hidden_size
        attention = [layer.attention for layer in spec.layers]
        first = attention[0]
        assert spec.layers[0].feed_forward.size == text.intermediate_size
        assert first.heads == text.num_attention_heads
        assert first.kv_heads == text.num_key_value_heads
        assert first.key_size == (
            getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        )
        assert spec.rms_eps == text.rms_norm_eps
        assert first.scale == getattr(text, "query_pre_attn_scalar", first.key_size) ** -0.5
        assert spec.tied_embeddings == config.tie_word_embeddings
        assert tuple(layer.window for layer in attention) == windows(config, text)
        assert spec.max_positions == (
            131072 if name == "qwen2.5-7b" else text.max_position_embeddings
        )
        if "eos_token_id" in content:
            eos = content["eos_token_id"]
            assert spec.eos_ids == (tuple(eos) if isinstance(eos, list) else (eos,))
        ropes = {
            ("full_attention" if layer.window is None else "sliding_attention"): layer.rope
            for layer in attention
        }
        for layer, rope in ropes.items():
            cos, sin = rotary(config, text, layer)
            ours, turned = RotaryTable(
                rope, first.key_size, 5000, torch.float32, torch.device("cpu")
            ).cos_sin_at(POSITIONS)
            torch.testing.assert_close(ours[:, 0], cos[0], atol=2e-3, rtol=0)
            half = sin.shape[-1] // 2
            torch.testing.assert_close(turned[:, 0, half:], sin[0, :, half:], atol=2e-3, rtol=0)


def test_early_phi_3_files_call_longrope_su_or_yarn():
    _, architecture, content = HUB["phi-3-mini-128k"]
    named = [
        spec_from_config(
            content
            | {
                "architectures": [architecture],
                "rope_scaling": content["rope_scaling"] | {"type": name},
            },
            "",
        )
        for name in ("longrope", "su", "yarn")
    ]
    assert named[0].ropes[0].kind == "longrope"
    assert named[0] == named[1] == named[2]


# As the hub has Pythia-70m's.
PYTHIA = dict(
    architectures=["GPTNeoXForCausalLM"], bos_token_id=0, eos_token_id=0, hidden_act="gelu", hidden_size=512,
    intermediate_size=2048, layer_norm_eps=1e-5, max_position_embeddings=2048, model_type="gpt_neox",
    num_attention_heads=8, num_hidden_layers=6, rotary_emb_base=20000, rotary_pct=0.5, tie_word_embeddings=False,
    use_parallel_residual=True, vocab_size=50304,
)  # fmt: skip


def test_pythia_has_fields_of_its_own_for_the_rotary_embedding():
    saved = GPTNeoXConfig(**PYTHIA).to_dict() | {"architectures": PYTHIA["architectures"]}
    for spelling in (PYTHIA, saved):
        rope = spec_from_config(spelling, "config.json").layers[0].attention.rope
        assert (rope.theta, rope.rotary_dim) == (20000.0, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_pct": 1.5}, "config.json: `rotary_pct`: 1.5 is not between"),
        ({"rotary_pct": 0.01}, "0 elements of a head can't be rotated in pairs"),
        ({"rotary_emb_base": "x"}, "`rotary_emb_base`: 'x' is no number"),
        (
            {"num_key_value_heads": 4},
            "num_key_value_heads is 4, and each of 8 heads has its own keys and values",
        ),
        ({"hidden_act": "tanh"}, "the activation 'tanh' is not supported"),
        ({"architectures": ["OlmoForCausalLM"], "clip_qkv": 0}, "`clip_qkv`: 0 is not between"),
    ],
)
def test_what_such_a_model_can_not_have_is_refused_by_its_field(change, message):
    with pytest.raises(ModelError, match=message):
        spec_from_config(PYTHIA | change, "config.json")


def test_fields_that_a_config_omits_are_computed_from_others():
    gpt2 = dict(
        architectures=["GPT2LMHeadModel"],
        vocab_size=50257,
        n_embd=768,
        n_layer=12,
        n_head=12,
        n_positions=1024,
        n_inner=None,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
    )
    spec = spec_from_config(gpt2, "config.json")
    assert (spec.learned_positions, spec.layers[0].feed_forward.size) == (1024, 3072)
    gptj = gpt2 | {
        "architectures": ["GPTJForCausalLM"],
        "n_embd": 4096,
        "n_head": 16,
        "rotary_dim": 64,
    }
    first = spec_from_config(gptj, "config.json").layers[0]
    assert (first.attention.rope.rotary_dim, first.attention.key_size) == (64, 256)
    falcon = dict(
        architectures=["FalconForCausalLM"],
        vocab_size=65024,
        hidden_size=4544,
        num_hidden_layers=2,
        num_attention_heads=71,
        multi_query=True,
        new_decoder_architecture=False,
        parallel_attn=True,
        bias=False,
    )
    first = spec_from_config(falcon, "config.json").layers[0]
    assert (first.attention.kv_heads, first.feed_forward.size, first.parallel) == (
        1,
        18176,
        "one norm",
    )
    grouped = {
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    }
    first = spec_from_config(falcon | grouped, "config.json").layers[0]
    assert (first.attention.kv_heads, first.parallel) == (8, "two norms")


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before false is not"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 512}, "word_embed_proj_dim 512 is not"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_lay"),
        (
            "BloomForCausalLM",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is not supported by our code",
        ),
        (
            "MptForCausalLM",
            {"attn_config": {"qk_ln": True}},
            "attn_config.qk_ln is not supported by our code",
        ),
    ],
)
def test_what_a_row_leaves_out_is_left_to_transformers_code(architecture, change, message):
    config = {"architectures": [architecture], "hidden_size": 1024, **change}
    assert not is_natively_supported(config)
    with pytest.raises(ModelError, match=message):
        spec_from_config(config, "config.json")
