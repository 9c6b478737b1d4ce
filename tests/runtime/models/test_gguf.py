"""Families of GGUF files, written as llama.cpp's converter writes them, against transformers'
model.
"""

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
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
    n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, moe_intermediate_size=24, first_k_dense_replace=1,
)  # fmt: skip
# As the converter writes them: heads share one latent, which is as long as rank and turned part.
LATENT_KEYS = {
    "attention.head_count_kv": 1, "attention.key_length": 24, "attention.value_length": 16, "attention.q_lora_rank": 20,
    "attention.kv_lora_rank": 16, "attention.key_length_mla": 20, "attention.value_length_mla": 10,
    "rope.dimension_count": 8, "leading_dense_block_count": 1, "expert_count": 8, "expert_used_count": 3,
    "expert_shared_count": 2, "expert_feed_forward_length": 24, "expert_weights_scale": 1.7,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
GROUP_KEYS = {"expert_group_count": 4, "expert_group_used_count": 2}
MSCALE = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, mscale=0.8,
              mscale_all_dim=0.8)  # fmt: skip
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
HALF_TURNED = {"rope.dimension_count": 2}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
# Class in transformers, further fields of its config, and further keys of the metadata. A second
# word is a variant.
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
    "phi3": ("Phi3", {"sliding_window": 5},
             {"attention.sliding_window": 5, "rope.scaling.original_context_length": 4096}),
    "phi3 4": ("Phi3", {"sliding_window": None, "rope_parameters": dict(
                   rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75)},
               {"attention.sliding_window": 0, "rope.scaling.original_context_length": 64, "rope.dimension_count": 6}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}, {"rope.dimension_count": 8}),
    "exaone4": ("Exaone4", {"sliding_window": 5, "layer_types": WINDOWS},
                {"attention.sliding_window": 5, "attention.sliding_window_pattern": [True, True, False] * 2}),
    "exaone4 small": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 6}, {}),
    "seed_oss": ("SeedOss", {"head_dim": 16}, {}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}, {}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 5,
                           "rope_parameters": dict(rope_type="yarn", rope_theta=1e4, factor=4.0, truncate=False,
                                                   original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0)},
                {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48,
                 "attention.sliding_window": 5, **YARN_KEYS}),
    "command-r": ("Cohere", {"logit_scale": 0.3}, {"logit_scale": 0.3, **LAYER_NORM}),
    "cohere2": ("Cohere2", {"logit_scale": 0.3, "sliding_window": 5},
                {"logit_scale": 0.3, "attention.sliding_window": 5, "rope.dimension_count": 8, **LAYER_NORM}),
    "command-r plus": ("Cohere", {"logit_scale": 0.3, "use_qk_norm": True}, {"logit_scale": 0.3, **LAYER_NORM}),
    "phi2": ("Phi", {}, {**LAYER_NORM, "rope.dimension_count": 4}),
    "gptneox": ("GPTNeoX", {"num_key_value_heads": 4},
                {**LAYER_NORM, **HALF_TURNED, "attention.head_count_kv": None, "use_parallel_residual": True}),
    "nemotron": ("Nemotron", {}, {**LAYER_NORM, "rope.dimension_count": 4}),
    "olmo": ("Olmo", {"clip_qkv": 1.5}, {**LAYER_NORM, "attention.clamp_kqv": 1.5}),
    "starcoder2": ("Starcoder2", {}, LAYER_NORM),
    "stablelm": ("StableLm", {"use_qkv_bias": True}, {**LAYER_NORM, **HALF_TURNED, "use_parallel_residual": False}),
    "stablelm parallel": ("StableLm", {"use_parallel_residual": True},
                          {**LAYER_NORM, **HALF_TURNED, "use_parallel_residual": True}),
    "stablelm norms": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True},
                       {**LAYER_NORM, **HALF_TURNED, "use_parallel_residual": True}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"] * 2, "block_auto_adjust_ff_dim": False},
             {"attention.head_count_kv": [0, 2, 0] * 2, "shortconv.l_cache": 3,
              "attention.layer_norm_rms_epsilon": 1e-5}),
    "deepseek2": ("DeepseekV3", {**LATENT, **GROUPS, "rope_parameters": MSCALE, "norm_topk_prob": True},
                  {**LATENT_KEYS, **GROUP_KEYS, **YARN_KEYS, "expert_gating_func": 2, "expert_weights_norm": True,
                   "rope.scaling.yarn_log_multiplier": 0.08}),
    "deepseek2 groups": ("DeepseekV2", {**LATENT, **GROUPS, "topk_method": "group_limited_greedy"},
                         {**LATENT_KEYS, **GROUP_KEYS, "expert_gating_func": 1}),
    "deepseek2 lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1,
                                      "routed_scaling_factor": 1.0, "topk_method": "greedy"},
                       {**LATENT_KEYS, "attention.q_lora_rank": None, "expert_group_count": 1,
                        "expert_group_used_count": 1, "expert_weights_scale": 1.0}),
}  # fmt: skip
PERMUTED = ("llama", "smollm3", "granite", "olmo")


def pairs_side_by_side(rows, heads):
    """Rows of queries or keys as the converter stores them for interleaved pairs."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, -1).transpose(1, 2).reshape(rows.shape)


def model_of(arch):
    name, config, _ = FAMILIES[arch]
    made = {"Gemma3": "Gemma3Text"}.get(name, name)
    config = getattr(transformers, f"{made}Config")(**SIZES | config)
    return randomise(getattr(transformers, f"{name}ForCausalLM")(config))


def write(path, family, model, **changes):
    c, arch = model.config, family.partition(" ")[0]
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    theta = c.rope_parameters.get("rope_theta") or c.rope_parameters["full_attention"]["rope_theta"]
    writer = gguf.GGUFWriter(path, arch)
    keys = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size, "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads, "attention.key_length": head_dim,
    }  # fmt: skip
    keys |= {
        "attention.layer_norm_rms_epsilon": getattr(c, "rms_norm_eps", None),
        "rope.freq_base": float(theta),
    }
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}  # fmt: skip
    for key, value in {**keys, **FAMILIES[family][2], **changes}.items():
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(chr(33 + i) for i in range(c.vocab_size - 1)), '!"'])
    writer.add_token_merges(['! "'])
    writer.add_eos_token_id(1)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(number, c.num_hidden_layers)
    for name, tensor in stacked_norms(model.state_dict()).items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        for theirs, part in converted(name, tensor, arch, c):
            writer.add_tensor(
                table.get_name(theirs, (".weight", ".bias")), part.contiguous().numpy()
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked_norms(weights):
    """Weights of which norms of one head each are stacked, as [heads, head_dim]."""
    found = {name: tensor for name, tensor in weights.items() if ".norms." not in name}
    for stem in dict.fromkeys(name.partition("norms.")[0] for name in weights if ".norms." in name):
        heads = sum(name.startswith(stem) for name in weights)
        found[f"{stem}weight"] = torch.stack(
            [weights[f"{stem}norms.{head}.weight"] for head in range(heads)]
        )
    return found


def converted(name, tensor, arch, config):
    """A tensor as the converter writes it, by the name that it looks up."""
    if name.endswith("norm.weight") and arch.startswith(("gemma", "nemotron")):
        tensor = tensor + 1
    if ".query_key_value." in name:
        tensor = (
            tensor.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        )
    if ".conv.conv." in name:
        tensor = tensor.squeeze(1)
    if arch in PERMUTED and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        tensor = pairs_side_by_side(tensor, heads)
    if arch == "gpt-oss" and ".experts." in name:
        return converted_experts(name, tensor)
    if name.endswith("kv_b_proj.weight"):
        heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = heads.split_with_sizes((config.qk_nope_head_dim, config.v_head_dim), 1)
        return [
            (name.replace("kv_b", "k_b"), keys.transpose(1, 2)),
            (name.replace("kv_b", "v_b"), values),
        ]
    if name.endswith("sinks"):
        name += ".weight"
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        return [
            (f"{stem}{part}.weight", half)
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1))
        ]
    return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, tensor)]


def converted_experts(name, tensor):
    """gpt-oss's stacks, in which inputs lie before outputs, and a gate beside each up."""
    stem, _, last = name.rpartition(".")
    kind = "bias" if last.endswith("_bias") else "weight"
    part = last.removesuffix("_bias")
    rows = tensor if kind == "bias" else tensor.transpose(1, 2)
    if part == "down_proj":
        return [(f"{stem}.down_proj.{kind}", rows)]
    return [(f"{stem}.gate_proj.{kind}", rows[:, ::2]), (f"{stem}.up_proj.{kind}", rows[:, 1::2])]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("arch", FAMILIES)
def test_a_family_gives_transformers_logits(tmp_path, arch):
    model = model_of(arch)
    path = write(tmp_path / "tiny.gguf", arch, model)
    ids = [5, 17, 42, 3, 80, 61, 7, 7, 30, 11, 90, 2]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    params = SamplingParams(
        max_tokens=1, temperature=0, return_logprob=True, logprob_start_len=1, top_logprobs_num=20
    )
    with sgl.Engine(
        path, dtype="float32", quantization="gguf", in_process=True, threads=1
    ) as engine:
        found = engine.complete(ids, params)
    for row, entry in zip(expected, [*found.prompt_logprobs, *found.output_logprobs], strict=True):
        for value, token, _ in entry.top:
            assert row[token].item() == pytest.approx(value, abs=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("arch", FAMILIES)
def test_a_file_takes_the_place_of_another_in_a_running_engine(tmp_path, arch):
    def told(engine):
        engine.flush_cache()
        answer = engine.complete(
            [5, 17, 42, 3, 80], SamplingParams(max_tokens=4, temperature=0, return_logprob=True)
        )
        return answer.token_ids, answer.output_logprobs

    model = model_of(arch)
    old = write(tmp_path / "old.gguf", arch, model)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(0.8)
    new = write(tmp_path / "new.gguf", arch, model)
    settings = {
        "dtype": "float32",
        "quantization": "gguf",
        "in_process": True,
        "threads": 1,
        "enable_memory_saver": True,
    }
    with sgl.Engine(new, **settings) as engine:
        expected = told(engine)
    with sgl.Engine(old, **settings) as engine:
        before = told(engine)
        assert before != expected
        for path, found in ((new, expected), (old, before)):
            engine.update_weights(str(path))
            assert told(engine) == found
        engine.sleep(2)
        engine.wake()
        assert told(engine) == before


@pytest.mark.parametrize(
    ("arch", "layers", "scale"), [("gemma2", 46, 8), ("gemma3", 62, 8), ("gemma2", 42, 16)]
)
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
    path = write(
        tmp_path / "tiny.gguf", "olmo2", model_of("olmo2"), **{"attention.sliding_window": 16}
    )
    with pytest.raises(sgl.ModelError, match="olmo2 with a sliding window is not supported"):
        sgl.Engine(path, in_process=True)


def test_another_format_is_refused_by_name(tmp_path):
    path = write(tmp_path / "tiny.gguf", "qwen2", model_of("qwen2"))
    with pytest.raises(sgl.ParameterError, match="quantization: 'awq' is not for GGUF files"):
        sgl.Engine(path, quantization="awq", in_process=True)


@pytest.mark.parametrize(
    ("arch", "change", "message"),
    [
        ("gpt-oss", {"rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        (
            "gpt-oss",
            {"rope.scaling.yarn_log_multiplier": 0.1},
            "gpt-oss.rope.scaling.yarn_log_multiplier",
        ),
        (
            "gpt-oss",
            {"expert_count": 5},
            "blk.0.ffn_gate_exps.weight has the shape .4, 48, 32., and 5 parts are",
        ),
        (
            "gpt-oss",
            {"expert_count": 3},
            "blk.0.ffn_gate_exps.weight has the shape .4, 48, 32., and 3 parts are",
        ),
        ("gpt-oss", {"expert_used_count": 5}, "num_experts_per_tok is 5, and there are 4 experts"),
        ("exaone4", {"attention.sliding_window_pattern": [True] * 5}, "don't fit 6 layers"),
        ("deepseek2", {"expert_group_count": None}, "'deepseek2.expert_group_count' is missing"),
        (
            "deepseek2",
            {"nextn_predict_layers": 1},
            "layers that draft tokens are not supported here",
        ),
        (
            "deepseek2",
            {"attention.kv_lora_rank": 12},
            r"has shape \(24, 32\), the config says \(20, 32\)",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_its_key(tmp_path, arch, change, message):
    path = write(tmp_path / "tiny.gguf", arch, model_of(arch), **change)
    with pytest.raises(sgl.ModelError, match=message):
        sgl.Engine(path, in_process=True)
