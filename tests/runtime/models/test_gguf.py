"""Families of GGUF files, written as llama.cpp's converter writes them, against transformers' model."""

from typing import Any

import gguf
import pytest
import torch
import transformers

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from tests.runtime.models.tiny import VOCAB, randomise

SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
# Class in transformers, further fields of its config, and further keys of the metadata.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "qwen2": ("Qwen2", {}, {}),
    "qwen3": ("Qwen3", {"head_dim": 16}, {}),
    "qwen2moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 24},
                 {**EXPERT_KEYS, "expert_shared_feed_forward_length": 24}),
    "qwen3moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 16}, EXPERT_KEYS),
    "olmo2": ("Olmo2", {}, {}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 4}, {}),
    "granite": ("Granite", {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
                            "logits_scaling": 4.0},
                {"attention.scale": 0.3, "embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 4.0}),
    "gemma": ("Gemma", {"head_dim": 16}, {}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16},
               {"attention.sliding_window": 5, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16},
               {"attention.sliding_window": 5}),
}  # fmt: skip
PERMUTED = ("llama", "smollm3", "granite")


def pairs_side_by_side(rows, heads):
    """Rows of queries or keys as the converter stores them for interleaved pairs."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, -1).transpose(1, 2).reshape(rows.shape)


def model_of(arch):
    name, config, _ = FAMILIES[arch]
    made = {"Gemma3": "Gemma3Text"}.get(name, name)
    config = getattr(transformers, f"{made}Config")(**SIZES, **config)
    return randomise(getattr(transformers, f"{name}ForCausalLM")(config))


def write(path, arch, model, **changes):
    c = model.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    theta = c.rope_parameters.get("rope_theta") or c.rope_parameters["full_attention"]["rope_theta"]
    writer = gguf.GGUFWriter(path, arch)
    keys = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size, "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads, "attention.key_length": head_dim,
    }  # fmt: skip
    for key, value in keys.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", c.rms_norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", theta)
    for key, value in {**FAMILIES[arch][2], **changes}.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(chr(33 + i) for i in range(c.vocab_size - 1)), '!"'])
    writer.add_token_merges(['! "'])
    writer.add_eos_token_id(1)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(number, c.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        for theirs, part in converted(name, tensor, arch, c):
            writer.add_tensor(table.get_name(theirs, (".weight", ".bias")), part.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(name, tensor, arch, config):
    """A tensor as the converter writes it, by the name that it looks up."""
    if name.endswith("norm.weight") and arch.startswith("gemma"):
        tensor = tensor + 1
    if arch in PERMUTED and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        tensor = pairs_side_by_side(tensor, heads)
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}{part}.weight", half) for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1))]
    return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, tensor)]


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_family_gives_transformers_logits(tmp_path, arch):
    model = model_of(arch)
    path = write(tmp_path / "tiny.gguf", arch, model)
    ids = [5, 17, 42, 3, 80, 61, 7, 7, 30, 11, 90, 2]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    params = SamplingParams(max_tokens=1, temperature=0, return_logprob=True, logprob_start_len=1, top_logprobs_num=20)
    with sgl.Engine(path, dtype="float32", in_process=True, threads=1) as engine:
        found = engine.complete(ids, params)
    for row, entry in zip(expected, [*found.prompt_logprobs, *found.output_logprobs], strict=True):
        for value, token, _ in entry.top:
            assert row[token].item() == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize(("arch", "layers", "scale"), [("gemma2", 46, 8), ("gemma3", 62, 8), ("gemma2", 42, 16)])
def test_the_largest_gemmas_scale_by_the_share_of_a_head(arch, layers, scale):
    from sglang_lite.runtime.models.read_gguf import spec_from_gguf

    metadata = {f"{arch}.{key}": value for key, value in {
        "block_count": layers, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48,
        "attention.head_count": 4, "attention.key_length": 16, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 5, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}.items()}  # fmt: skip
    metadata |= {"general.architecture": arch, "tokenizer.ggml.tokens": ["a", "b"]}
    spec = spec_from_gguf(metadata, frozenset(), "test")
    assert spec.layers[0].attention.scale == pytest.approx(scale**-0.5)


def test_what_a_family_has_not_is_refused(tmp_path):
    path = write(tmp_path / "tiny.gguf", "olmo2", model_of("olmo2"), **{"attention.sliding_window": 16})
    with pytest.raises(sgl.ModelError, match="olmo2 with a sliding window is not supported"):
        sgl.Engine(path, in_process=True)
