"""Keys of rotary embeddings, in every mixture that files may have: read as transformers reads them,
or refused by name.
"""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

import sglang_lite as sgl
from sglang_lite.runtime.models.layers.rope import RotaryTable
from sglang_lite.runtime.models.read_config import spec_from_config

# of each architecture: CONTRIBUTING.md
EXAMPLES = int(os.environ.get("SGLANG_LITE_DAMAGED_FILES", "60"))
POSITIONS = 96
BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": POSITIONS, "sliding_window": 8,
    "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Olmo3ForCausalLM": {"model_type": "olmo3", "layer_types": WINDOWS},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", "layer_types": WINDOWS},
    "LlamaForCausalLM": {"model_type": "llama", "sliding_window": None},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "sliding_window": None},
    "GptOssForCausalLM": {"model_type": "gpt_oss", "layer_types": WINDOWS, "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip
TYPES: list[dict[str, Any]] = [
    {}, {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 48, "attention_factor": 1.5, "beta_fast": 16.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
]  # fmt: skip
THETAS = [10_000.0, 500_000.0, 1_000_000.0]


def parameters(draw):
    """Parameters of one rotary embedding, as they stand in a file."""
    theta = {"rope_theta": draw.choice(THETAS)} if draw.random() < 0.6 else {}
    return {**draw.choice(TYPES), **theta}


def mixture(draw):
    """Keys of a file."""
    keys = {}
    if draw.random() < 0.4:
        keys["rope_theta"] = draw.choice(THETAS)
    if draw.random() < 0.2:
        keys["rope_local_base_freq"] = draw.choice(THETAS)
    if draw.random() < 0.4:
        keys["rope_scaling"] = (
            parameters(draw) if draw.random() < 0.9 else {"full_attention": parameters(draw)}
        )
    if draw.random() < 0.8:
        given = {}
        for layers in ("full_attention", "sliding_attention"):
            if draw.random() < 0.6:
                given[layers] = parameters(draw) if draw.random() < 0.9 else None
        flat = parameters(draw) if not given or draw.random() < 0.4 else {}
        keys["rope_parameters"] = given | (flat if draw.random() < 0.8 else parameters(draw))
    return keys


@torch.no_grad()
def theirs(config):
    """cos and sin of each layer, and None if transformers refuses the config."""
    try:
        made = AutoConfig.for_model(
            **copy.deepcopy({k: v for k, v in config.items() if k != "architectures"})
        )
        with torch.device("cpu"):
            model = transformers.AutoModel.from_config(made)
        at, x = torch.arange(POSITIONS)[None], torch.zeros(1, POSITIONS, 32)
        kinds = getattr(made, "layer_types", None) or ["full_attention"] * made.num_hidden_layers
        if config["model_type"] in ("olmo3", "gemma3_text"):
            tables = {kind: model.rotary_emb(x, at, kind) for kind in set(kinds)}
        else:
            tables = dict.fromkeys(kinds, model.rotary_emb(x, at))
    except Exception:  # transformers' own, of many kinds
        return None
    return [tuple(each[0, :, :8] for each in tables[kind]) for kind in kinds]


def ours(config):
    spec = spec_from_config(config, "config.json")
    found = []
    for layer in spec.layers:
        cos, sin = RotaryTable(
            layer.attention.rope, 16, POSITIONS, torch.float32, torch.device("cpu")
        ).tables
        found.append((cos[:, :8], sin[:, 8:]))
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_mixtures_of_keys_are_read_as_transformers_reads_them_or_refused(name):
    transformers.logging.set_verbosity_error()
    draw = random.Random(7)
    read = refused = 0
    for _ in range(EXAMPLES):
        config = {**BASE, **ARCHITECTURES[name], "architectures": [name], **mixture(draw)}
        try:
            found = ours(copy.deepcopy(config))
        except sgl.ModelError as error:
            refused += "config.json: " in str(error)
            continue
        wanted = theirs(config)
        if wanted is None:
            continue
        read += 1
        for own, each in zip(found, wanted, strict=True):
            assert torch.allclose(own[0], each[0], atol=1e-5), config
            assert torch.allclose(own[1], each[1], atol=1e-5), config
    assert read > EXAMPLES // 10
    assert refused > EXAMPLES // 20


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("Olmo3ForCausalLM", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, **TYPES[4]}},
         r"`rope_parameters.rope_type` is 'yarn', and other keys, which transformers prefers, say 'default'.*full_attention"),
        ("Olmo3ForCausalLM", {"rope_parameters": TYPES[4]}, r"`rope_parameters.rope_type` is 'yarn'"),
        ("Olmo3ForCausalLM", {"rope_theta": 1e4}, r"`rope_theta` is 10000.0, and versions of transformers differ"),
        ("LlamaForCausalLM", {"rope_parameters": {"full_attention": TYPES[4]}}, r"`rope_parameters.full_attention`: this arch"),
        ("LlamaForCausalLM", {"rope_parameters": TYPES[4], "rope_scaling": TYPES[2]}, r"`rope_parameters.rope_type` is 'yarn'"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": TYPES[2]}, r"say 10000.0"),
        ("Gemma3ForCausalLM", {"rope_scaling": {"sliding_attention": TYPES[2]}}, r"`rope_scaling.sliding_attention`"),
    ],
)  # fmt: skip
def test_keys_that_contradict_one_another_are_named(name, keys, message):
    config = {**BASE, **ARCHITECTURES[name], "architectures": [name], **keys}
    with pytest.raises(sgl.ModelError, match=message) as caught:
        spec_from_config(config, "config.json")
    assert caught.value.hint


def test_keys_that_say_the_same_twice_are_read():
    yarn = {**TYPES[4], "rope_theta": 5e5}
    config = {**BASE, **ARCHITECTURES["Olmo3ForCausalLM"], "architectures": ["Olmo3ForCausalLM"]}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    nested = {"full_attention": yarn, "sliding_attention": sliding}
    once = spec_from_config({**config, "rope_parameters": nested}, "config.json")
    twice = spec_from_config(
        {**config, "rope_theta": 5e5, "rope_parameters": {**nested, "rope_theta": 5e5}},
        "config.json",
    )
    assert once.layers == twice.layers
