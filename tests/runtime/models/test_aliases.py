"""Short names of hub models: their numbers of weights and their caches follow from their configs,
which are written down here as published, as no hub is reached.
"""

import math

import pytest

from sglang_lite.runtime.config import DEFAULT_MODEL
from sglang_lite.runtime.loading.model_files import read_spec
from sglang_lite.runtime.models.aliases import ALIASES, PROPOSED, HubFile, HubModel
from sglang_lite.runtime.models.parameters import parameters
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.spec import ModelSpec

LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
# Architecture, layers, hidden and intermediate size, heads of queries, of keys, their size,
# vocabulary; whether the head is tied.
SHAPES = {
    "qwen2.5-coder-0.5b": (QWEN2, 24, 896, 4864, 14, 2, 64, 151_936, True),
    "qwen2.5-coder-1.5b": (QWEN2, 28, 1536, 8960, 12, 2, 128, 151_936, True),
    "gemma-3-270m": ("Gemma3ForCausalLM", 18, 640, 2048, 4, 1, 256, 262_144, True),
    "smollm2-360m": (LLAMA, 32, 960, 2560, 15, 5, 64, 49_152, True),
    "smollm2-1.7b": (LLAMA, 24, 2048, 8192, 32, 32, 64, 49_152, True),
    "smollm3-3b": ("SmolLM3ForCausalLM", 36, 2048, 11_008, 16, 4, 128, 128_256, True),
    "qwen2.5-0.5b": (QWEN2, 24, 896, 4864, 14, 2, 64, 151_936, True),
    "qwen2.5-1.5b": (QWEN2, 28, 1536, 8960, 12, 2, 128, 151_936, True),
    "qwen3-0.6b": (QWEN3, 28, 1024, 3072, 16, 8, 128, 151_936, True),
    "qwen3-1.7b": (QWEN3, 28, 2048, 6144, 16, 8, 128, 151_936, True),
    "qwen3-4b": (QWEN3, 36, 2560, 9728, 32, 8, 128, 151_936, True),
    "llama-3.2-1b": (LLAMA, 16, 2048, 8192, 32, 8, 64, 128_256, True),
    "llama-3.2-3b": (LLAMA, 28, 3072, 8192, 24, 8, 128, 128_256, True),
    "gemma-3-1b": ("Gemma3ForCausalLM", 26, 1152, 6912, 4, 1, 256, 262_144, True),
    "phi-4-mini": ("Phi3ForCausalLM", 32, 3072, 8192, 24, 8, 128, 200_064, True),
    "olmo-2-1b": ("Olmo2ForCausalLM", 16, 2048, 8192, 16, 16, 128, 100_352, False),
    "granite-3.3-2b": ("GraniteForCausalLM", 40, 2048, 8192, 32, 8, 64, 49_159, True),
    "qwen3-embedding-0.6b": (QWEN3, 28, 1024, 3072, 16, 8, 128, 151_669, True),
}
HUB = {name: alias for name, alias in ALIASES.items() if isinstance(alias, HubModel | HubFile)}


def test_every_model_has_a_config():
    assert SHAPES.keys() == HUB.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_are_those_of_the_config(name):
    architecture, layers, hidden, intermediate, heads, kv_heads, size, vocabulary, tied = SHAPES[
        name
    ]
    config = {
        "architectures": [architecture], "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "rope_theta": 1e6,
        "hidden_act": "silu",
    }  # fmt: skip
    spec = spec_from_config(config, name)
    assert HUB[name].parameters == sum(math.prod(each.shape) for each in parameters(spec))
    assert HUB[name].token_numbers == (0 if "embedding" in name else spec.kv_layout.numbers)


def test_the_default_model_keeps_what_its_file_says(model_file):
    spec = read_spec(model_file)
    assert isinstance(spec, ModelSpec)
    assert ALIASES["smollm2-135m"].token_numbers == spec.kv_layout.numbers
    assert ALIASES["smollm2-135m"].parameters == sum(
        math.prod(each.shape) for each in parameters(spec)
    )


def test_what_is_proposed_needs_no_account_and_is_ordered_by_size():
    models = [ALIASES[name] for name in PROPOSED]
    assert PROPOSED[-1] == DEFAULT_MODEL
    assert all("gated" not in model.description for model in models)
    assert sorted(models, key=lambda model: -model.parameters) == models
