"""Every family gives transformers' logits: whole, in chunks, in a batch, after a cache hit, beyond
the window.
"""

import json
import math
import random
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    BloomForCausalLM,
    Cohere2ForCausalLM,
    CohereForCausalLM,
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Ernie4_5ForCausalLM,
    Exaone4ForCausalLM,
    FalconForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    GemmaForCausalLM,
    Glm4ForCausalLM,
    Glm4MoeForCausalLM,
    GlmForCausalLM,
    GPT2LMHeadModel,
    GPTJForCausalLM,
    GPTNeoXForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    GraniteMoeForCausalLM,
    HeliumForCausalLM,
    Lfm2ForCausalLM,
    Lfm2MoeForCausalLM,
    LlamaForCausalLM,
    MinistralForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    MptForCausalLM,
    NemotronForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    OlmoeForCausalLM,
    OlmoForCausalLM,
    OPTForCausalLM,
    Phi3ForCausalLM,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    SeedOssForCausalLM,
    SmolLM3ForCausalLM,
    StableLmForCausalLM,
    Starcoder2ForCausalLM,
)

import sglang_lite as sgl
from sglang_lite.protocol import Generation, ModelError, ParameterError, SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.parameters import parameters
from sglang_lite.runtime.models.read_config import spec_from_config
from tests.runtime.kernels import needs_gpu, needs_kernels
from tests.runtime.models.tiny import VOCAB, randomise, save

if TYPE_CHECKING:
    from tests.runtime.models.adapters import Adapted

SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    attn_implementation="eager",
)  # fmt: skip
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=4.0)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
PHI4 = dict(tie_word_embeddings=True, original_max_position_embeddings=32, rope_parameters=dict(
    rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75, short_factor=[1.0, 1.5, 2.0],
    long_factor=[1.0, 3.0, 9.0]))  # fmt: skip
GEMMA = dict(head_dim=16, query_pre_attn_scalar=9, sliding_window=9)
GEMMA3 = GEMMA | dict(
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1e5, factor=8.0),
                         sliding_attention=dict(rope_type="default", rope_theta=100.0)))  # fmt: skip

GEMMA4 = dict(
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
    head_dim=8,
    global_head_dim=16,
    sliding_window=9,
    hidden_size_per_layer_input=0,
    rms_norm_eps=1e-3,
)

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
# With a smaller epsilon, outputs near 0 are normalised, and rounding with them: transformers' two
# ways, whole and token by token, are then up to 3e-3 apart.
DELTA = dict(
    rms_norm_eps=0.03, layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
)  # fmt: skip
MINIMAX = dict(
    rms_norm_eps=0.03,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    full_attn_alpha_factor=2.4,
    linear_attn_alpha_factor=3.6,
    mlp_alpha_factor=3.1,
)
XLSTM = dict(num_heads=4, use_cache=False)  # transformers caches states of other sizes
MAMBA = dict(
    rms_norm_eps=0.03,
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_n_groups=2,
    mamba_d_state=12,
    attn_layer_indices=[1],
)
ZAYA = dict(
    head_dim=12,
    num_experts=8,
    num_experts_per_tok=1,
    moe_intermediate_size=24,
    router_hidden_size=20,
    rms_norm_eps=0.03,
)
INKLING = dict(
    head_dim=8,
    swa_num_attention_heads=6,
    swa_num_key_value_heads=3,
    swa_head_dim=8,
    sliding_window_size=9,
    layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
    d_rel=5,
    rel_extent=12,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    route_scale=2.0,
    logits_mup_width_multiplier=0.5,
)
INKLING2 = {
    **{name: each for name, each in INKLING.items() if name != "logits_mup_width_multiplier"},
    **dict(
        unpadded_vocab_size=VOCAB,
        log_scaling_n_floor=6,
        log_scaling_alpha=0.7,
        qk_l2_clip_threshold=2.5,
        rel_l2_clip_threshold=2.0,
        n_layers_per_attn_res_block=2,
        mlp_gate_softcap=1.5,
        mlp_up_softcap=2.0,
        final_logit_softcapping=3.0,
    ),
}
ZAMBA = dict(
    num_key_value_heads=4, n_mamba_heads=4, mamba_d_state=12, mamba_dt_rank=5, rms_norm_eps=1.0
)
ZAMBA2 = dict(
    layers_block_type=["linear_attention", "hybrid", "hybrid"],
    num_key_value_heads=4,
    n_mamba_heads=8,
    mamba_d_state=12,
    rms_norm_eps=1.0,
)
GRANITE_HYBRID = MAMBA | dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    shared_intermediate_size=40,
    num_experts_per_tok=3,
)
KIMI = dict(
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=None,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    num_local_experts=8,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=24,
    n_shared_experts=2,
    linear_head_dim=8,
    linear_num_heads=4,
    rms_norm_eps=0.03,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)
BAILING = {name: KIMI[name] for name in KIMI if not name.startswith("linear_")} | dict(
    head_dim=12, n_shared_experts=1, first_k_dense_replace=1, num_mtp_layers=0
)
JAMBA = dict(
    rms_norm_eps=0.03, attn_layer_period=3, attn_layer_offset=1, mamba_d_state=12, mamba_dt_rank=8
)
ALONE = dict(
    layer_norm_epsilon=0.03, state_size=12, expand=2, time_step_min=1e-30, time_step_floor=1e-30
)
NEMOTRON = dict(
    layer_norm_epsilon=0.03,
    head_dim=12,
    mamba_num_heads=8,
    mamba_head_dim=8,
    n_groups=2,
    ssm_state_size=12,
    time_step_min=1e-30,
    time_step_floor=1e-30,
    moe_shared_expert_intermediate_size=40,
)
QUARTER = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25)
CONVOLUTIONS = ["conv", "full_attention", "conv"]
GRANITE = dict(
    embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.3, logits_scaling=2.0
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=20,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
)
DEEPSEEK = LATENT | dict(n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=24,
                         first_k_dense_replace=1, routed_scaling_factor=1.7)  # fmt: skip
SIGMOID = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=24,
    routed_scaling_factor=1.7,
    norm_topk_prob=True,
)
MSCALE = YARN | dict(mscale=0.8, mscale_all_dim=0.6)
MINICPM3 = LATENT | dict(scale_emb=3, scale_depth=1.4, dim_model_base=16, rope_parameters=dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.5, 2.0, 2.0], long_factor=[1.0, 3.0, 9.0, 9.0],
    factor=2.0, original_max_position_embeddings=256))  # fmt: skip  # transformers 5.17 asks for a factor
LLAMA4 = dict(head_dim=12, intermediate_size_mlp=40, num_local_experts=4, attention_chunk_size=9, floor_scale=8,
              no_rope_layers=[1, 0, 1])  # fmt: skip

FAMILIES: dict[str, Any] = {
    "llama-2": (LlamaForCausalLM, dict(num_key_value_heads=4)),
    "llama-biases": (LlamaForCausalLM, dict(attention_bias=True, mlp_bias=True, head_dim=12)),
    "llama-linear": (LlamaForCausalLM, dict(rope_parameters=LINEAR)),
    "llama-dynamic": (LlamaForCausalLM, dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0))),
    "llama-3.1": (LlamaForCausalLM, dict(rope_parameters=LLAMA3)),
    "smollm2": (LlamaForCausalLM, dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e5))),
    "mistral": (MistralForCausalLM, dict(sliding_window=None, head_dim=12)),
    "mistral-window": (MistralForCausalLM, dict(sliding_window=9)),
    "qwen2": (Qwen2ForCausalLM, dict(tie_word_embeddings=True)),
    "qwen2-window": (Qwen2ForCausalLM, dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    "qwen2.5-yarn": (Qwen2ForCausalLM, dict(rope_parameters=YARN)),
    "qwen3": (Qwen3ForCausalLM, dict(head_dim=12, tie_word_embeddings=True)),
    "qwen3-biases": (Qwen3ForCausalLM, dict(head_dim=8, attention_bias=True, rope_parameters=YARN | dict(attention_factor=1.3))),
    "gemma2": (Gemma2ForCausalLM, GEMMA | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma3": (Gemma3ForCausalLM, GEMMA3),
    "phi3": (Phi3ForCausalLM, dict(sliding_window=9)),
    "phi4-mini": (Phi3ForCausalLM, PHI4),
    "gemma": (GemmaForCausalLM, dict(head_dim=16)),
    "smollm3": (SmolLM3ForCausalLM, dict(no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=9)),
    "olmo2": (Olmo2ForCausalLM, {}),
    "olmo3": (Olmo3ForCausalLM, dict(sliding_window=9, layer_types=WINDOWS)),
    "granite": (GraniteForCausalLM, GRANITE | dict(mlp_bias=True, attention_bias=True)),
    "glm": (GlmForCausalLM, dict(head_dim=16)),
    "glm4": (Glm4ForCausalLM, dict(head_dim=16)),
    "ministral": (MinistralForCausalLM, dict(head_dim=12, sliding_window=9, layer_types=WINDOWS)),
    "ministral3": ("Ministral3ForCausalLM", dict(head_dim=12, sliding_window=None, rope_parameters=YARN | dict(
        original_max_position_embeddings=16, llama_4_scaling_beta=0.5))),
    "exaone4": (Exaone4ForCausalLM, dict(sliding_window=9, layer_types=WINDOWS)),
    "exaone4-all": (Exaone4ForCausalLM, dict(sliding_window=None, layer_types=["full_attention"] * 3)),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", dict(head_dim=12, attention_bias=True, rope_parameters=dict(
        rope_type="dynamic", rope_theta=1e4, factor=1.0, alpha=50.0))),
    "seed-oss": (SeedOssForCausalLM, dict(head_dim=12)),
    "helium": (HeliumForCausalLM, dict(head_dim=8, mlp_bias=True)),
    "ernie4.5": (Ernie4_5ForCausalLM, dict(head_dim=12, use_bias=True)),
    "arcee": ("ArceeForCausalLM", dict(head_dim=12, mlp_bias=True)),
    "mixtral": (MixtralForCausalLM, dict(num_local_experts=6)),
    "mixtral-window": (MixtralForCausalLM, dict(num_local_experts=4, num_experts_per_tok=1, sliding_window=9)),
    "qwen2-moe": (Qwen2MoeForCausalLM, EXPERTS | dict(shared_expert_intermediate_size=40, mlp_only_layers=[1])),
    "qwen3-moe": (Qwen3MoeForCausalLM, EXPERTS | dict(head_dim=12, norm_topk_prob=True, decoder_sparse_step=2)),
    "olmoe": (OlmoeForCausalLM, EXPERTS),
    "olmoe-clipped": (OlmoeForCausalLM, EXPERTS | dict(clip_qkv=0.7)),
    "granite-moe": (GraniteMoeForCausalLM, GRANITE | dict(num_local_experts=8, num_experts_per_tok=3)),
    "gpt-oss": (GptOssForCausalLM, dict(num_local_experts=8, head_dim=8, sliding_window=9, swiglu_limit=1.0,
                                        rope_parameters=YARN | dict(truncate=False))),
    "glm4-moe": (Glm4MoeForCausalLM, dict(
        head_dim=16, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=24,
        routed_scaling_factor=1.7, first_k_dense_replace=1, use_qk_norm=True)),
    "solar-open": ("SolarOpenForCausalLM", SIGMOID | dict(head_dim=12)),
    "dots1": ("Dots1ForCausalLM", SIGMOID | dict(n_shared_experts=2, first_k_dense_replace=1, sliding_window=9,
                                                 max_window_layers=1)),
    "exaone-moe": ("ExaoneMoeForCausalLM", EXPERTS | dict(
        sliding_window=9, layer_types=WINDOWS, n_group=4, topk_group=2, num_shared_experts=2)),
    "minimax-m2": ("MiniMaxM2ForCausalLM", dict(
        head_dim=16, num_local_experts=8, num_experts_per_tok=3, rope_parameters=dict(
            rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))),
    "afmoe": ("AfmoeForCausalLM", EXPERTS | dict(
        head_dim=12, sliding_window=9, layer_types=WINDOWS, mup_enabled=True, route_scale=1.7, num_dense_layers=1)),
    "cohere2-moe": ("Cohere2MoeForCausalLM", dict(
        head_dim=12, sliding_window=9, num_experts=8, num_experts_per_tok=3, logit_scale=0.3, num_shared_experts=2,
        sliding_window_pattern=2, first_k_dense_replace=1, prefix_dense_intermediate_size=40)),
    "cohere2-moe-sum": ("Cohere2MoeForCausalLM", dict(
        head_dim=12, sliding_window=9, layer_types=WINDOWS, num_experts=8, num_experts_per_tok=3, rms_norm_eps=1e-5,
        num_shared_experts=1, shared_expert_combination_strategy="sum", expert_selection_fn="sigmoid")),
    "phimoe": ("PhimoeForCausalLM", dict(
        num_local_experts=8, attention_bias=True, lm_head_bias=True, router_jitter_noise=0.3,
        sliding_window=9)),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", dict(head_dim=12, num_experts=8, moe_topk=[3, 3, 2])),
    "ernie4.5-moe": ("Ernie4_5_MoeForCausalLM", dict(
        moe_num_experts=8, moe_k=3, moe_intermediate_size=24, moe_num_shared_experts=2, moe_layer_start_index=1)),
    "deepseek-v2": (DeepseekV2ForCausalLM, DEEPSEEK | dict(topk_method="group_limited_greedy", attention_bias=True)),
    "deepseek-v2-lite": (DeepseekV2ForCausalLM, DEEPSEEK | dict(q_lora_rank=None, rope_parameters=MSCALE)),
    "deepseek-v3": (DeepseekV3ForCausalLM, DEEPSEEK | dict(rope_parameters=MSCALE)),
    "deepseek-v3-halves": (DeepseekV3ForCausalLM, DEEPSEEK | dict(
        q_lora_rank=None, attention_bias=True, rope_interleave=False, n_shared_experts=2, norm_topk_prob=False)),
    "glm4-moe-lite": ("Glm4MoeLiteForCausalLM", DEEPSEEK | dict(v_head_dim=24)),
    "youtu": ("YoutuForCausalLM", LATENT),
    "minicpm3": ("MiniCPM3ForCausalLM", MINICPM3),
    "starcoder2": (Starcoder2ForCausalLM, {}),
    "starcoder2-window": (Starcoder2ForCausalLM, dict(sliding_window=9, use_bias=False, tie_word_embeddings=False)),
    "phi": (PhiForCausalLM, dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))),
    "phi-norms": (PhiForCausalLM, dict(qk_layernorm=True)),
    "stablelm": (StableLmForCausalLM, dict(use_qkv_bias=True)),
    "stablelm-norms": (StableLmForCausalLM, dict(qk_layernorm=True, num_key_value_heads=1)),
    "stablelm-parallel": (StableLmForCausalLM, dict(use_parallel_residual=True)),
    "cohere": (CohereForCausalLM, dict(logit_scale=0.3)),
    "cohere-norms": (CohereForCausalLM, dict(logit_scale=0.3, use_qk_norm=True)),
    "cohere2": (Cohere2ForCausalLM, dict(sliding_window=9, layer_types=WINDOWS, logit_scale=0.3)),
    "nemotron": (NemotronForCausalLM, dict(mlp_bias=True)),
    "gpt-neox": (GPTNeoXForCausalLM, dict(num_key_value_heads=4, rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))),
    "gpt-neox-sequential": (GPTNeoXForCausalLM, dict(
        num_key_value_heads=4, use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True)),
    "gpt2": (GPT2LMHeadModel, dict(num_key_value_heads=4, n_inner=48)),
    "gptj": (GPTJForCausalLM, dict(num_key_value_heads=4, n_inner=48, rotary_dim=4)),
    "opt": (OPTForCausalLM, dict(num_key_value_heads=4, ffn_dim=48, word_embed_proj_dim=32)),
    "opt-plain": (OPTForCausalLM, dict(
        num_key_value_heads=4, ffn_dim=48, enable_bias=False, layer_norm_elementwise_affine=False,
        activation_function="gelu")),
    "falcon": (FalconForCausalLM, dict(num_key_value_heads=1, ffn_hidden_size=48)),
    "falcon-grouped": (FalconForCausalLM, dict(
        num_key_value_heads=2, num_kv_heads=2, ffn_hidden_size=48, new_decoder_architecture=True, bias=True)),
    "falcon-sequential": (FalconForCausalLM, dict(
        num_key_value_heads=4, ffn_hidden_size=48, multi_query=False, parallel_attn=False, bias=True)),
    "falcon2": (FalconForCausalLM, dict(
        num_key_value_heads=2, num_kv_heads=2, ffn_hidden_size=48, new_decoder_architecture=True,
        num_ln_in_parallel_attn=1)),
    "falcon-alibi": (FalconForCausalLM, dict(
        num_key_value_heads=4, ffn_hidden_size=48, multi_query=False, alibi=True, bias=True,
        attn_implementation="sdpa")),  # transformers' other one adds the slopes twice
    "bloom": (BloomForCausalLM, dict(num_key_value_heads=4)),
    "bloom-6-heads": (BloomForCausalLM, dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=6)),
    "mpt": (MptForCausalLM, dict(num_key_value_heads=4, max_seq_len=256, attn_config=dict(
        clip_qkv=1.5, softmax_scale=0.5))),
    "mpt-6-heads": (MptForCausalLM, dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=6, max_seq_len=256)),
    "apertus": ("ApertusForCausalLM", dict(attention_bias=True, rope_parameters=LLAMA3)),
    "olmo": (OlmoForCausalLM, dict(clip_qkv=1.5)),
    "llama4": ("Llama4ForCausalLM", LLAMA4 | dict(attention_bias=True)),
    "llama4-dense": ("Llama4ForCausalLM", LLAMA4 | dict(
        num_experts_per_tok=2, interleave_moe_layer_step=2, use_qk_norm=False, attn_temperature_tuning=False, no_rope_layers=[1, 1, 0])),
    "lfm2": (Lfm2ForCausalLM, dict(layer_types=CONVOLUTIONS, block_multiple_of=16)),
    "lfm2-biases": (Lfm2ForCausalLM, dict(
        layer_types=["full_attention", "conv", "conv"], conv_bias=True, conv_L_cache=5, block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False)),
    "qwen3-next": ("Qwen3NextForCausalLM", DELTA | EXPERTS | dict(
        head_dim=16, shared_expert_intermediate_size=40, rope_parameters=QUARTER)),
    "qwen3.5": ("Qwen3_5ForCausalLM", DELTA | dict(head_dim=16, rope_parameters=QUARTER)),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", DELTA | EXPERTS | dict(
        head_dim=16, shared_expert_intermediate_size=40, rope_parameters=QUARTER)),
    "minimax": ("MiniMaxForCausalLM", MINIMAX | dict(
        head_dim=12, num_local_experts=8, num_experts_per_tok=3, full_attn_beta_factor=0.7,
        linear_attn_beta_factor=1.3, mlp_beta_factor=0.8)),
    "minimax-window": ("MiniMaxForCausalLM", MINIMAX | dict(
        num_local_experts=4, sliding_window=9, tie_word_embeddings=True)),
    "lara-mini": ("LaraMiniForCausalLM", DELTA | EXPERTS | dict(
        head_dim=12, shared_expert_intermediate_size=40, num_hidden_layers=4, sliding_window=9, layer_types=[
            "linear_attention", "sliding_attention", "full_attention", "linear_attention"],
        tie_word_embeddings=False)),
    "kimi-linear": ("KimiLinearForCausalLM", KIMI),
    "bailing-hybrid": ("BailingHybridForCausalLM", BAILING),
    "bailing-hybrid-low": ("BailingHybridForCausalLM", BAILING | dict(
        q_lora_rank=20, kda_safe_gate=False, attention_bias=True, n_shared_experts=2, mlp_layer_types=["sparse"] * 3)),
    # queries, keys and values alike: transformers 5.23 saves kernels of others wrongly
    "olmo-hybrid": ("OlmoHybridForCausalLM", DELTA | dict(linear_num_key_heads=4, linear_key_head_dim=12)),
    "olmo-hybrid-rope": ("OlmoHybridForCausalLM", DELTA | dict(
        linear_num_key_heads=4, linear_key_head_dim=12, linear_allow_neg_eigval=False, rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    "bamba": ("BambaForCausalLM", MAMBA),
    "bamba-biases": ("BambaForCausalLM", MAMBA | dict(
        mamba_n_groups=1, mamba_proj_bias=True, mamba_conv_bias=False, attention_bias=True, mlp_bias=True, mamba_d_conv=2,
        tie_word_embeddings=True)),
    "granite-hybrid": ("GraniteMoeHybridForCausalLM", GRANITE_HYBRID | GRANITE | dict(
        num_local_experts=8, mamba_n_groups=1)),
    "granite-hybrid-dense": ("GraniteMoeHybridForCausalLM", GRANITE_HYBRID | GRANITE | dict(
        num_local_experts=0, position_embedding_type="rope", time_step_limit=(0.2, 0.9))),
    "falcon-h1": ("FalconH1ForCausalLM", MAMBA | dict(
        mamba_d_ssm=64, lm_head_multiplier=0.7, embedding_multiplier=3.0, mlp_multipliers=[0.6, 1.3], key_multiplier=0.4,
        attention_out_multiplier=0.8, attention_in_multiplier=1.4, ssm_multipliers=[0.7, 1.2, 0.9, 1.1, 0.6],
        ssm_in_multiplier=1.3, ssm_out_multiplier=0.9)),
    "falcon-h1-norms": ("FalconH1ForCausalLM", MAMBA | dict(
        mamba_d_ssm=64, mamba_rms_norm=True, mamba_norm_before_gate=True, ssm_multipliers=[0.7, 1.2, 0.9, 1.1, 0.6],
        attention_bias=True, mlp_bias=True, projectors_bias=True, mamba_proj_bias=True, head_dim=12)),
    "falcon-h1-gated": ("FalconH1ForCausalLM", MAMBA | dict(
        mamba_d_ssm=64, mamba_n_groups=1, mamba_rms_norm=True, mamba_norm_before_gate=False)),
    "jamba": ("JambaForCausalLM", JAMBA | dict(num_experts=4, num_experts_per_tok=2, expert_layer_offset=0)),
    "jamba-dense": ("JambaForCausalLM", JAMBA | dict(num_experts=1, mamba_proj_bias=True, mamba_conv_bias=False)),
    "zamba": ("ZambaForCausalLM", ZAMBA | dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=0)),
    "zamba-biases": ("ZambaForCausalLM", ZAMBA | dict(
        layers_block_type=["hybrid", "linear_attention", "hybrid"], n_mamba_heads=8, num_key_value_heads=2,
        mamba_proj_bias=True, mamba_conv_bias=False, mamba_d_conv=3)),
    "zamba2": ("Zamba2ForCausalLM", ZAMBA2 | dict(
        num_hidden_layers=4, layers_block_type=["hybrid", "linear_attention", "hybrid", "hybrid"], mamba_ngroups=2,
        num_mem_blocks=2, use_shared_attention_adapter=True, adapter_rank=6, use_mem_rope=True, rope_parameters=LINEAR)),
    "zamba2-biases": ("Zamba2ForCausalLM", ZAMBA2 | dict(
        adapter_rank=4, add_bias_linear=True, num_key_value_heads=2)),
    "zaya": ("ZayaForCausalLM", ZAYA),
    "zaya-windows": ("ZayaForCausalLM", ZAYA | dict(
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"], sliding_window=9, lm_head_bias=True, cca_time0=3,
        cca_time1=1, num_key_value_heads=1)),
    "inkling": ("InklingForCausalLM", INKLING | dict(
        log_scaling_n_floor=6, log_scaling_alpha=0.7, mlp_layer_types=["dense", "sparse", "sparse"])),
    "inkling-heads": ("InklingForCausalLM", INKLING | dict(
        layer_types=["hybrid", "hybrid_sliding", "hybrid"], swa_num_attention_heads=2, swa_num_key_value_heads=2,
        swa_head_dim=12, conv_kernel_size=2, n_shared_experts=1, num_key_value_heads=1, hidden_act="gelu",
        mlp_layer_types=["sparse", "sparse", "dense"])),
    "inkling2": ("Inkling2ForCausalLM", INKLING2 | dict(
        num_hidden_layers=5,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"])),
    "inkling2-full": ("Inkling2ForCausalLM", INKLING2 | dict(
        layer_types=["hybrid", "hybrid_sliding", "hybrid"], n_layers_per_attn_res_block=1, conv_kernel_size=3,
        num_key_value_heads=4)),
    "inkling2-loop": ("Inkling2LoopForCausalLM", INKLING2 | dict(
        num_hidden_layers=4, layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid_sliding"],
        n_layers_per_attn_res_block=1, loop_layer_index_start=1, loop_layer_index_end=3, loop_num_passes=2,
        loop_gate_rank=7, num_experts_per_tok=8, route_scale=0.4)),
    "inkling2-loop-blocks": ("Inkling2LoopForCausalLM", INKLING2 | dict(
        num_hidden_layers=7, layer_types=[*["hybrid_sliding", "hybrid"] * 3, "hybrid_sliding"],
        loop_layer_index_start=2, loop_layer_index_end=4, loop_num_passes=3, loop_gate_rank=5,
        num_experts_per_tok=8, route_scale=0.4)),
    "nemotron-h": ("NemotronHForCausalLM", NEMOTRON | dict(
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"])),
    "nemotron-h-moe": ("NemotronHForCausalLM", NEMOTRON | SIGMOID | dict(
        layers_block_type=["moe", "linear_attention", "full_attention", "moe"], use_bias=True, use_conv_bias=False)),
    "mamba2": ("Mamba2ForCausalLM", ALONE | dict(num_heads=8, head_dim=8, n_groups=2)),
    "mamba2-biases": ("Mamba2ForCausalLM", ALONE | dict(
        num_heads=4, head_dim=16, n_groups=1, use_bias=True, use_conv_bias=False, tie_word_embeddings=True)),
    "mamba": ("MambaForCausalLM", ALONE),
    "falcon-mamba": ("FalconMambaForCausalLM", ALONE | dict(time_step_rank=5, use_bias=True, mixer_rms_eps=1e-3)),
    "rwkv": ("RwkvForCausalLM", dict(
        rescale_every=2, attention_hidden_size=40, use_cache=False)),  # transformers caches states of hidden_size
    "rwkv-plain": ("RwkvForCausalLM", dict(
        intermediate_size=None, rescale_every=0, tie_word_embeddings=True)),
    "xlstm": ("xLSTMForCausalLM", XLSTM | dict(output_logit_soft_cap=4.0, gate_soft_cap=2.0, norm_eps=1e-3)),
    "xlstm-wide": ("xLSTMForCausalLM", XLSTM | dict(
        qk_dim_factor=1.0, v_dim_factor=3.0, chunk_size=16, ffn_round_up_to_multiple_of=8, eps=0.01)),
    "recurrent-gemma": ("RecurrentGemmaForCausalLM", dict(
        block_types=["recurrent", "attention"], attention_window_size=9, attention_bias=True, intermediate_size=96,
        logits_soft_cap=3.0, tie_word_embeddings=False)),
    "recurrent-gemma-wide": ("RecurrentGemmaForCausalLM", dict(
        block_types=["attention", "recurrent", "recurrent"], attention_window_size=40, lru_width=48, conv1d_width=2)),
    "lfm3": ("Lfm3ForCausalLM", dict(
        head_dim=12, sliding_window=9, layer_types=["sliding_attention", "full_attention", "conv"],
        attention_bias=True)),
    "lfm3-plain": ("Lfm3ForCausalLM", dict(
        head_dim=8, use_sandwich_norm=False, use_attention_gate=False, conv_bias=True, sliding_window=9,
        layer_types=["conv", "full_attention", "sliding_attention"])),
    "lfm2-moe": (Lfm2MoeForCausalLM, EXPERTS | dict(layer_types=CONVOLUTIONS, num_dense_layers=1)),
    "gemma4": ("Gemma4ForCausalLM", GEMMA4 | dict(
        attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=3.0,
        use_bidirectional_attention="vision")),
    "gemma4-moe": ("Gemma4ForCausalLM", GEMMA4 | dict(
        enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=24, attention_k_eq_v=True)),
    "gemma4-e4b": ("Gemma4ForCausalLM", GEMMA4 | dict(
        num_hidden_layers=5, layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        hidden_size_per_layer_input=12, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=3,
        use_double_wide_mlp=True)),
    "gemma4-inputs": ("Gemma4ForCausalLM", GEMMA4 | dict(
        hidden_size_per_layer_input=12, vocab_size_per_layer_input=100)),
    "gemma4-values": ("Gemma4ForCausalLM", GEMMA4 | dict(attention_bias=True, tie_word_embeddings=False)),
}  # fmt: skip


# Of the later families, those that reach kernels in a way that no other does.
OTHER_KERNELS = (
    "olmo3", "granite", "qwen2-moe", "deepseek-v2-lite", "deepseek-v3", "youtu", "phi-norms", "cohere-norms", "nemotron",
    "gpt-neox", "olmo", "minimax-m2", "ernie4.5-moe", "ministral3", "hunyuan", "gpt2", "opt",
    "apertus", "afmoe", "cohere2-moe", "phimoe", "llama4", "llama4-dense", "bloom", "lfm3", "lfm2", "lfm2-biases", "lfm2-moe",
    "qwen3-next", "qwen3.5", "olmo-hybrid", "bamba", "bamba-biases", "granite-hybrid", "nemotron-h",
    "falcon-h1", "falcon-h1-norms", "zamba", "zamba2", "zaya", "zaya-windows", "jamba", "minimax", "lara-mini", "kimi-linear",
    "bailing-hybrid", "mamba2", "falcon-mamba", "rwkv", "rwkv-plain", "xlstm", "xlstm-wide",
    "recurrent-gemma", "gemma4", "gemma4-values",
    "gemma4-moe", "gemma4-e4b", "gemma4-inputs",
)  # fmt: skip


COMPUTED = (
    ".slope_rate",
    ".query_decay",
    ".key_decay",
    ".diagonal_decay",
)  # ends of names of tensors that the config determines


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(folder, transformers' model)"""
    model, changes = FAMILIES[request.param]
    if isinstance(model, str):  # one of the newest
        model = getattr(transformers, model, None) or pytest.skip(
            f"transformers {transformers.__version__} has none"
        )
    reference = randomise(model(model.config_class(**SHAPE | changes)))
    # transformers before 5.23 takes 7.0 whatever the configuration says
    for module in reference.modules():
        if hasattr(module, "limit"):
            module.limit = reference.config.swiglu_limit
    return save(reference, tmp_path_factory.mktemp("model")), reference


def engine(folder: Path, **settings) -> sgl.Engine:
    # a test may have two engines on a GPU
    size = {"max_total_tokens": 8192} if torch.cuda.is_available() else {}
    fixed = {"model": str(folder), "dtype": "float32", "max_running": 4, **size}
    return sgl.Engine(**{**fixed, **settings}, in_process=True)


def asked(*, prompt: bool = True, most: int = 6) -> SamplingParams:
    """`most` more tokens, with the log-probabilities of the whole vocabulary at each position."""
    return SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, return_logprob=True, top_logprobs_num=VOCAB,
                          logprob_start_len=1 if prompt else -1)  # fmt: skip


def ask(engine: sgl.Engine, ids: list[int], *, prompt: bool = True, most: int = 6) -> Future:
    future: Future = Future()
    engine.submit(ids, asked(prompt=prompt, most=most), sink=future.set_result)
    return future


def differences(reference: PreTrainedModel, ids: list[int], generation: Generation) -> torch.Tensor:
    """Distance of each log-probability that the engine gave is from transformers'."""
    with torch.no_grad():
        theirs = (
            reference(torch.tensor([[*ids, *generation.token_ids]])).logits[0].log_softmax(-1)[:-1]
        )
    entries = [*(generation.prompt_logprobs or ()), *generation.output_logprobs]
    ours = torch.tensor(
        [[value for value, _, _ in sorted(entry.top, key=lambda top: top[1])] for entry in entries]
    )
    return (ours - theirs[-len(entries) :]).abs()


def limit(reference: "PreTrainedModel | Adapted") -> float:
    """Largest distance that rounding explains."""
    # The last bit of an embedding moves those of linear attention by up to 7e-4, more with experts.
    # What is wrong moves them by more than 0.01; kinds.tsv has whole models within 1e-4.
    if hasattr(reference.config, "linear_num_key_heads"):
        return 2e-3
    # That bit moves Bamba by 5e-5, and its engine sums up other parts in each run.
    spaces = ("time_step_rank", "mamba_d_state")
    return 1e-3 if any(hasattr(reference.config, name) for name in spaces) else 1e-4


def keeps_states(reference: PreTrainedModel) -> bool:
    kinds = set(getattr(reference.config, "layer_types", None) or ())
    return bool({"linear_attention", "hybrid"} & kinds) or any(
        hasattr(reference.config, name) for name in ("rescale_every", "chunkwise_kernel")
    )


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("step_tokens", [512, 7])
def test_logits_equal_those_of_transformers(family, step_tokens):
    folder, reference = family
    batch = prompts(50, 33, 41, 38)
    with engine(folder, step_tokens=step_tokens) as running:
        for future, ids in [(ask(running, ids), ids) for ids in batch]:
            assert differences(reference, ids, future.result(timeout=30)).max() <= limit(reference)
        again = [*batch[0], 3, 1, 4]
        generation = ask(running, again, prompt=False).result(timeout=30)
        # states are kept before a prompt's last token
        assert generation.usage.cached_tokens >= 50 - keeps_states(reference)
        assert differences(reference, again, generation).max() <= limit(reference)


def test_the_table_of_parameters_has_each_number_of_a_checkpoint_once(family):
    folder, _ = family
    spec = spec_from_config(json.loads((folder / "config.json").read_text()), "config.json")
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 # it is no dict
    stored = {name: shape for name, shape in stored.items() if not name.endswith(COMPUTED)}
    table = list(parameters(spec))
    slices = [next(piece for piece in p.slices if piece.name in stored) for p in table]
    assert {piece.name: piece.shape for piece in slices} == stored
    parts = [(piece.name, str(piece.part)) for piece in slices]
    assert len(parts) == len(set(parts))
    assert sum(math.prod(p.shape) for p in table) == sum(map(math.prod, stored.values()))


@needs_kernels
@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((name, "triton") for name in [*FAMILIES][:16]),
        *((name, "triton") for name in OTHER_KERNELS),
        ("qwen3", "torch"),
        ("gemma2", "torch"),
        ("gpt-oss", "torch"),
        ("deepseek-v2", "torch"),
    ],
    indirect=["family"],
)
def test_fused_kernels_give_the_same(family, attention, monkeypatch):
    """The path of a GPU; without one, under Triton's interpreter."""
    folder, reference = family
    # Longer than Phi's original context, as transformers then takes its long factors; else than a
    # window and a step.
    batch = prompts(33, 36) if reference.config.model_type == "phi3" else prompts(14, 3)
    if not torch.cuda.is_available():
        monkeypatch.setattr("sglang_lite.runtime.loading.load_model.Decoder", GpuDecoder)
    with engine(
        folder,
        step_tokens=10,
        page_size=4,
        max_total_tokens=1000,
        threads=1,
        attention_backend=attention,
    ) as running:
        for future, ids in [(ask(running, ids, most=2), ids) for ids in batch]:
            assert differences(reference, ids, future.result(timeout=300)).max() <= limit(reference)
        again = [*batch[0], 3, 1, 4]
        generation = ask(running, again, prompt=False, most=1).result(timeout=300)
        assert generation.usage.cached_tokens >= len(batch[0]) - 3
        assert differences(reference, again, generation).max() <= limit(reference)


@needs_kernels
@pytest.mark.parametrize("family", ["gemma3", "gemma4"], indirect=True)
def test_a_deterministic_gpu_reads_the_pages_of_layers_with_a_window(family, monkeypatch):
    """Of a second request, whose pages of both kinds of layers have other numbers."""
    folder, reference = family
    if not torch.cuda.is_available():
        monkeypatch.setattr("sglang_lite.runtime.loading.load_model.Decoder", GpuDecoder)
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    settings = {"deterministic": True, "dtype": "float16", "page_size": 4}
    with engine(folder, max_total_tokens=1000, threads=1, **settings) as running:
        for ids in prompts(14, 3):
            found = differences(reference, ids, ask(running, ids, most=2).result(timeout=300))
            assert found.max() <= 0.1


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_lower_precision_stays_near(family, dtype):
    if dtype == "int8" and not torch.cpu._is_vnni_supported():  # noqa: SLF001 # torch has no other name for it
        pytest.skip("no VNNI")
    folder, reference = family
    (ids,) = prompts(40)
    with engine(folder, dtype=dtype) as running:
        rows = differences(reference, ids, ask(running, ids).result(timeout=30)).mean(1)
    # A token between two experts takes the other one, and what comes after it is another text's.
    experts = any(
        getattr(reference.config, name, 0) for name in ("num_local_experts", "num_experts")
    )
    assert (rows.median() if experts else rows.mean()) <= 0.15


@needs_gpu
@pytest.mark.parametrize(
    "family",
    [
        "starcoder2",
        "phi-norms",
        "stablelm-parallel",
        "cohere-norms",
        "nemotron",
        "gpt-neox",
        "olmo",
    ],
    indirect=True,
)
@pytest.mark.parametrize("settings", [{}, {"quantization": "fp8"}], ids=str)
def test_lower_precision_on_a_gpu_stays_near(family, settings):
    """Layer norms, plain feed-forwards and parallel blocks, of many rows, few and one."""
    folder, reference = family
    batch = prompts(40, 33, 21)
    # and with them what 8 bits cut off: 0.45 to 0.62 by transformers
    squares = reference.config.hidden_act == "relu2"
    limit = 0.15 if not settings else 0.8 if squares else 0.3
    with engine(folder, dtype="bfloat16", max_total_tokens=2000, **settings) as running:
        for future, ids in [(ask(running, ids), ids) for ids in batch]:
            assert differences(reference, ids, future.result(timeout=300)).mean() <= limit


@pytest.mark.parametrize("family", ["lfm2"], indirect=True)
def test_what_convolutions_read_is_not_kept_in_8_bits(family):
    with pytest.raises(ParameterError, match="kv_dtype: the model has short convolutions"):
        engine(family[0], kv_dtype="fp8")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_types": ["conv"] * 3}, "no layer has attention"),
        ({"layer_types": ["conv", "full_attention"]}, "don't fit 3 layers"),
        ({"layer_types": ["conv", "full_attention", "mamba"]}, "don't fit 3 layers"),
        ({"conv_L_cache": 0}, "`conv_L_cache`: 0 is not between 1 and 64"),
    ],
)
def test_layers_that_do_not_fit_are_told(changes, problem):
    model, settings = FAMILIES["lfm2"]
    config = model.config_class(**SHAPE | settings).to_dict() | changes
    config["architectures"] = ["Lfm2ForCausalLM"]
    with pytest.raises(ModelError, match=problem):
        spec_from_config(config, "config.json")


PHIMOE = dict(
    num_local_experts=8,
    rope_parameters=dict(
        rope_type="longrope",
        rope_theta=1e4,
        short_factor=[1.0, 1.5, 2.0, 2.0],
        long_factor=[1.0, 3.0, 9.0, 9.0],
        short_mscale=1.1,
        long_mscale=1.3,
        original_max_position_embeddings=32,
    ),
)


@pytest.mark.parametrize(
    ("kind", "changes"), [("Phi3ForCausalLM", PHI4), ("PhimoeForCausalLM", PHIMOE)]
)
def test_longrope_is_short_where_the_context_is(kind, changes, tmp_path):
    """Within the context that Phi was first trained on, the short factors: those transformers takes
    there.
    """
    model = getattr(transformers, kind)
    reference = randomise(model(model.config_class(**SHAPE | changes)))
    (ids,) = prompts(20)
    with engine(save(reference, tmp_path), context_length=32) as running:
        assert differences(reference, ids, ask(running, ids).result(timeout=30)).max() <= limit(
            reference
        )


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("opt", "model.")])
def test_names_without_their_prefix_as_the_hub_has_them(name, prefix, tmp_path):
    model, changes = FAMILIES[name]
    reference = randomise(model(model.config_class(**SHAPE | changes)))
    file = save(reference, tmp_path) / "model.safetensors"
    tensors = {key.removeprefix(prefix): tensor for key, tensor in load_file(file).items()}
    if name == "gpt2":  # and with the masks of early versions
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 256, 256)
    save_file(tensors, file, {"format": "pt"})
    (ids,) = prompts(20)
    with engine(tmp_path) as running:
        assert differences(reference, ids, ask(running, ids).result(timeout=30)).max() <= limit(
            reference
        )


def test_the_text_part_of_qwen35(tmp_path, caplog):
    """Without its images, and without the layers that draft."""
    vision = dict(
        hidden_size=16, intermediate_size=16, depth=1, num_heads=2, out_hidden_size=32, patch_size=4
    )
    _, changes = FAMILIES["qwen3.5"]
    model = transformers.Qwen3_5ForConditionalGeneration
    config = model.config_class(
        text_config=SHAPE | changes,
        vision_config=vision,
        attn_implementation="eager",
        eos_token_id=[1, 7],
    )
    reference = randomise(model(config))
    file = save(reference, tmp_path) / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    (ids,) = prompts(40)
    caplog.set_level("INFO", "sglang_lite")
    with engine(tmp_path) as running:
        found = differences(reference, ids, ask(running, ids).result(timeout=30))
        assert found.max() <= limit(reference)


def test_the_text_part_of_gemma4(tmp_path):
    """With the encoder's own names, and with the sizes of heads as configs of the hub have them."""
    vision = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        patch_size=4,
        position_embedding_size=8,
    )
    model = transformers.Gemma4ForConditionalGeneration
    text = SHAPE | FAMILIES["gemma4"][1] | {"pad_token_id": 0}
    config = model.config_class(
        text_config=text, vision_config=vision, attn_implementation="eager", eos_token_id=[1, 7]
    )
    reference = randomise(model(config))
    file = save(reference, tmp_path) / "config.json"
    whole = json.loads(file.read_text())
    del whole["text_config"]["per_layer_config"]
    whole["text_config"] |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    file.write_text(json.dumps(whole))
    (ids,) = prompts(40)
    with engine(tmp_path) as running:
        assert isinstance(running.core.runner.model, Decoder)
        found = differences(reference, ids, ask(running, ids).result(timeout=30))
        assert found.max() <= limit(reference)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention "all" is not'),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "that end with sliding"),
        (
            {"per_layer_config": {"0": {"sliding_window": 4}}},
            "per_layer_config with sliding_window",
        ),
        ({"per_layer_config": {"0": {"head_dim": "8"}}}, "per_layer_config with other values"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 3}}}, "can't share 3 key-value heads"),
        ({"num_kv_shared_layers": 3}, "leaves no layer of full_attention with keys"),
        (
            {"num_kv_shared_layers": 2, "per_layer_config": {"3": {"head_dim": 16}}},
            "layer 3 reads the keys of layer 1, whose heads differ",
        ),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 20},
            "vocab_size_per_layer_input 20 is below vocab_size",
        ),
    ],
)
def test_what_gemma4_has_not_here_is_told(changes, problem):
    model = transformers.Gemma4ForCausalLM
    config = model.config_class(**SHAPE | FAMILIES["gemma4"][1]).to_dict()
    whole = config | changes | {"architectures": [model.__name__]}
    with pytest.raises(ModelError, match=problem):
        spec_from_config(whole, "config.json")


@pytest.mark.parametrize("family", ["qwen3.5", "bamba", "jamba"], indirect=True)
def test_states_of_16_bits_take_half_of_the_memory(family):
    """So twice as many fit, but for the tails of convolutions, and answers stay near."""
    folder, reference = family
    (ids,) = prompts(40)
    totals = []
    for dtype in ("float32", "bfloat16"):
        with engine(folder, mamba_ssm_dtype=dtype) as running:
            found = differences(reference, ids, ask(running, ids).result(timeout=30))
            totals.append(running.stats()["states_total"])
    assert found.mean() <= 0.05
    assert totals[1] > 1.3 * totals[0]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"deterministic": True}, "deterministic: the model has recurrent layers"),
        ({"kv_dtype": "fp8"}, "kv_dtype: the model has recurrent layers"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3.5"], indirect=True)
def test_settings_that_do_not_go_with_states_are_told(family, settings, problem):
    with pytest.raises(ParameterError, match=problem):
        engine(family[0], **settings)


def test_layers_that_read_other_layers_keys_may_have_some_in_files(tmp_path):
    model = transformers.Gemma4ForCausalLM
    reference = randomise(model(model.config_class(**SHAPE | FAMILIES["gemma4-e4b"][1])))
    file = save(reference, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    unused = {
        f"model.layers.4.self_attn.{name}.weight": torch.ones(2) for name in ("k_proj", "k_norm")
    }
    save_file(tensors | unused, file, {"format": "pt"})
    (ids,) = prompts(40)
    with engine(tmp_path) as running:
        found = differences(reference, ids, ask(running, ids).result(timeout=30))
        assert found.max() <= limit(reference)


@pytest.mark.parametrize("family", ["gemma4-e4b"], indirect=True)
def test_other_layers_keys_are_not_kept_in_8_bits(family):
    with pytest.raises(ParameterError, match="kv_dtype: the model has layers that read other"):
        engine(family[0], kv_dtype="fp8")


def test_files_may_repeat_the_weights_that_layers_share(tmp_path):
    model = transformers.ZambaForCausalLM
    reference = randomise(model(model.config_class(**SHAPE | FAMILIES["zamba"][1])))
    file = save(reference, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    block = "model.layers.{}.shared_transf."
    again = {
        name.replace(block.format(2), block.format(3)): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(block.format(2))
    }
    save_file(tensors | again, file, {"format": "pt"})
    (ids,) = prompts(40)
    with engine(tmp_path) as running:
        lender, borrower = running.core.runner.model.layers[2:]
        assert borrower.qkv is lender.qkv
        found = differences(reference, ids, ask(running, ids).result(timeout=30))
        assert found.max() <= limit(reference)


@pytest.mark.parametrize("family", ["zamba2"], indirect=True)
def test_layers_that_share_weights_stay_on_the_device(family):
    with pytest.raises(ParameterError, match="cpu_offload_gb: the model has layers that share"):
        engine(family[0], cpu_offload_gb=1)


@pytest.mark.parametrize("family", ["gemma4-moe"], indirect=True)
def test_replicas_do_not_share_experts_with_norms_of_their_own(family):
    sizes = {"enable_dp_attention": True, "dp_size": 2, "tp_size": 2}
    config = EngineConfig.make(model=str(family[0]), device="cpu", **sizes)
    with pytest.raises(ParameterError, match="enable_dp_attention: the model has experts beside"):
        load_model(config, family[0])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "no layer has full_attention"),
        ({"layer_types": ["linear_attention", "mamba", "full_attention"]}, "don't fit 3 layers"),
        ({"linear_num_value_heads": 3}, "2 linear_num_key_heads can't serve 3 value heads"),
        ({"linear_conv_kernel_dim": 0}, "`linear_conv_kernel_dim`: 0 is not between 1 and 64"),
    ],
)
def test_linear_attention_that_does_not_fit_is_told(changes, problem):
    config = transformers.Qwen3_5ForCausalLM.config_class(**SHAPE | FAMILIES["qwen3.5"][1])
    whole = config.to_dict() | changes | {"architectures": ["Qwen3_5ForCausalLM"]}
    with pytest.raises(ModelError, match=problem):
        spec_from_config(whole, "config.json")


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("bamba", {"mamba_n_heads": 5}, "5 mamba_n_heads of 8 don't make 64 elements"),
        ("bamba", {"attn_layer_indices": [7]}, "attn_layer_indices names no layer with attention"),
        ("bamba", {"mamba_n_groups": 3}, "8 mamba_n_heads can't be divided into 3 mamba_n_groups"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act other than silu is not supported"),
        ("bamba", {"mamba_d_conv": 0}, "`mamba_d_conv`: 0 is not between 1 and 17"),
        ("bamba", {"time_step_limit": [0.5, 0.1]}, r"time_step_limit \[0.5, 0.1\] is no range"),
        (
            "falcon-h1",
            {"ssm_multipliers": [1.0]},
            "ssm_multipliers has 1 numbers, for 5 projections",
        ),
        ("falcon-h1", {"mlp_multipliers": [0.0, 1.0]}, "`mlp_multipliers`"),
        ("falcon-h1", {"attention_bias": True}, "attention_bias with attention_in_multiplier"),
        ("granite-hybrid", {"layer_types": ["mamba"] * 3}, "no layer has full_attention"),
        ("granite-hybrid", {"layer_types": ["mamba", "mlp", "attention"]}, "don't fit 3 layers"),
        ("zaya", {"attention_bias": True}, "attention_bias is not supported by our code"),
        ("zaya", {"cca_time0": 0}, "`cca_time0`: 0 is not between 1 and 8"),
        ("zamba", {"n_mamba_heads": 5}, "64 channels can't be divided into 5 n_mamba_heads"),
        ("zamba", {"n_mamba_heads": 1}, "n_mamba_heads 1 is not supported by our code"),
        (
            "zamba",
            {"attention_hidden_size": 32},
            "attention_hidden_size is not 64, twice hidden_size",
        ),
        ("zamba", {"hidden_mamba_act": "gelu"}, "hidden_act other than silu is not supported"),
        ("zamba2", {"layers_block_type": ["mamba"] * 4}, "no layer has hybrid"),
        ("zamba2", {"use_long_context": True}, "use_long_context is not supported by our code"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings false is not supported"),
        ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset 3 names none"),
        ("xlstm", {"weight_mode": "fused"}, "weight_mode fused is not supported"),
        ("xlstm", {"use_bias": True}, "use_bias true is not supported"),
        ("xlstm", {"num_blocks": 4}, "num_blocks 4 differs from num_hidden_layers 3"),
        ("xlstm", {"num_heads": 5}, "don't make 5 num_heads"),
        ("rwkv", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon other than 1e-05 is not"),
        ("jamba", {"hidden_act": "gelu"}, "hidden_act other than silu is not supported"),
        ("minimax", {"hidden_act": "gelu"}, "hidden_act other than silu is not supported"),
        ("minimax", {"layer_types": ["linear_attention"] * 3}, "no layer has full_attention"),
        (
            "minimax",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is not supported by our",
        ),
        ("minimax", {"rotary_dim": 6}, "rotary_dim is not supported by our"),
        ("bailing-hybrid", {"kda_lower_bound": 1.0}, "`kda_lower_bound`: 1.0 is not between"),
        (
            "recurrent-gemma",
            {"block_types": ["conv"]},
            r"block_types \['conv'\] are not of attention",
        ),
        ("recurrent-gemma", {"lru_width": 30}, "lru_width 30 can't be divided into 4 blocks"),
        ("recurrent-gemma", {"hidden_activation": "silu"}, "other than gelu_pytorch_tanh is not"),
        ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope false is not supported"),
        ("kimi-linear", {"layer_types": ["linear_attention"] * 3}, "no layer has full_attention"),
        (
            "kimi-linear",
            {"moe_router_activation_func": "softmax"},
            "activation_func 'softmax' is not",
        ),
        ("nemotron-h", {"layers_block_type": ["mlp", "x"]}, "don't fit 2 layers of full_attention"),
        ("nemotron-h-moe", {"moe_latent_size": 8}, "moe_latent_size is not supported by our code"),
        ("nemotron-h-moe", {"mlp_bias": True}, "mlp_bias with experts is not supported"),
        ("nemotron-h", {"hidden_act": "silu"}, "hidden_act beside another mlp_hidden_act is not"),
        (
            "nemotron-h",
            {"rms_norm_eps": 0.5},
            "rms_norm_eps beside another layer_norm_epsilon is not",
        ),
        ("nemotron-h", {"mamba_n_groups": 1}, "n_groups beside another mamba_n_groups is not"),
    ],
)
def test_state_spaces_that_do_not_fit_are_told(name, changes, problem):
    model, settings = FAMILIES[name]
    config = getattr(transformers, model).config_class(**SHAPE | settings)
    whole = config.to_dict() | changes | {"architectures": [model]}
    with pytest.raises(ModelError, match=problem):
        spec_from_config(whole, "config.json")


KIMI_HUB = {
    "layer_types": None,
    "linear_head_dim": None,
    "linear_num_heads": None,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "head_dim": 8,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "mlp_layer_types": None,
    "first_k_dense_replace": 1,
}


# sizes of linear attention only where those of attention are
BAILING_HUB = {
    "linear_head_dim": None,
    "linear_num_heads": None,
    "linear_conv_kernel_dim": None,
    "head_dim": 12,
    "mlp_layer_types": None,
}


def test_early_names_of_layers_in_configs():
    """Letters of Nemotron-H, Granite's names, Kimi Linear's layers counted from 1, and Ling's
    sizes.
    """
    for name, changes in (
        ("nemotron-h", {"hybrid_override_pattern": "M-*-M", "layers_block_type": None}),
        ("granite-hybrid", {"layer_types": ["mamba", "attention", "mamba"]}),
        ("kimi-linear", KIMI_HUB),
        ("bailing-hybrid", BAILING_HUB),
    ):
        model, settings = FAMILIES[name]
        config = getattr(transformers, model).config_class(**SHAPE | settings).to_dict()
        config["architectures"] = [model]
        early = {field: value for field, value in (config | changes).items() if value is not None}
        specs = [spec_from_config(each, "config.json") for each in (config, early)]
        assert specs[0] == specs[1]


@pytest.mark.parametrize(
    ("name", "dropped", "changes"),
    [
        ("nemotron-h", ["n_groups"], {"mamba_n_groups": 1}),
        ("nemotron-h", ["conv_kernel", "use_conv_bias"], {"mamba_d_conv": 3, "mamba_conv_bias": False}),
        ("nemotron-h", ["time_step_limit"], {"mamba_dt_limit": [0.1, 2.0]}),
        ("bamba", [], {"mamba_d_ssm": 48}),
        ("granite-hybrid", ["layer_types"], {"layers_block_type": ["mamba", "attention", "mamba"]}),
        ("granite-hybrid", [], {"mamba_d_ssm": 48}),
        ("kimi-linear", [], {"linear_attn_config": {"head_dim": 16, "num_heads": 2, "short_conv_kernel_size": 3}}),
    ],
    ids=str,
)  # fmt: skip
def test_earlier_and_other_names_mean_what_they_mean_to_transformers(name, dropped, changes):
    model, settings = FAMILIES[name]
    made = getattr(transformers, model).config_class
    config = made(**SHAPE | settings).to_dict()
    raw = {field: value for field, value in config.items() if field not in dropped} | changes
    raw["architectures"] = [model]
    known = made(**raw).to_dict() | {"architectures": [model]}
    known = {field: value for field, value in known.items() if field not in changes}
    assert spec_from_config(raw, "config.json") == spec_from_config(known, "config.json")


@needs_kernels
@pytest.mark.parametrize("family", ["nemotron-h-moe"], indirect=True)
def test_experts_without_gates_do_not_run_on_a_gpu(family, monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr("sglang_lite.runtime.loading.load_model.Decoder", GpuDecoder)
    with pytest.raises(ModelError, match="experts without gates don't run on a GPU"):
        engine(family[0])


def test_the_text_part_of_a_vision_language_model(tmp_path, caplog):
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16,
                  patch_size=8)  # fmt: skip
    config = Gemma3ForConditionalGeneration.config_class(
        text_config=SHAPE | GEMMA3, vision_config=vision, mm_tokens_per_image=1, image_token_index=95,
        attn_implementation="eager", eos_token_id=[1, 7],
    )  # fmt: skip
    reference = randomise(Gemma3ForConditionalGeneration(config))
    (ids,) = prompts(40)
    caplog.set_level("INFO", "sglang_lite")
    with engine(save(reference, tmp_path)) as running:
        assert differences(reference, ids, ask(running, ids).result(timeout=30)).max() <= limit(
            reference
        )
    assert "tensors of an encoder of images or sounds are not loaded" in caplog.text
