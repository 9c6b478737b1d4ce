"""Kinds of causal language models that transformers' code does not run here: what is said of each.
Those that keep more than keys and values, or whose attention can't be replaced, stay here; the
others can leave.
"""

import pytest
import transformers

# The tables are of two versions: others have other kinds and reasons.
of_this_version = pytest.mark.skipif(
    not transformers.__version__.startswith(("5.23.", "5.24.")),
    reason="transformers is neither 5.23 nor 5.24",
)
REFUSED = {
    "axk2": "it has layers of indexed_attention.",
    "bailing_hybrid": "it has layers of linear_attention.",
    "bamba": "it has layers of linear_attention.",
    "bart": "its code has no decoder that runs by itself, at positions that it is given.",
    "big_bird": "its attention can't be replaced.",
    "bigbird_pegasus": "its code has no decoder that runs by itself, at positions that it is given.",
    "blenderbot": "its code has no decoder that runs by itself, at positions that it is given.",
    "blenderbot-small": "its code has no decoder that runs by itself, at positions that it is given.",
    "bloom": "its code has no decoder that runs by itself, at positions that it is given.",
    "blt": "it has attention that is not causal.",
    "camembert": "its positions do not count from 0.",
    "cpmant": "its code has no decoder that runs by itself, at positions that it is given.",
    "data2vec-text": "its positions do not count from 0.",
    "deepseek_v32": "it has layers of indexed_attention.",
    "deepseek_v4": "it has layers of heavily_compressed_attention.",
    "doge": "its hidden states differ from transformers', so it keeps other state than keys and values, or has its own form of attention.",
    "dots3_note": "it has layers of indexed_attention.",
    "dots3_note_text": "it has layers of indexed_attention.",
    "falcon": "its attention can't be replaced.",
    "falcon_h1": "it has layers of hybrid.",
    "falcon_mamba": "its code has no decoder that runs by itself, at positions that it is given.",
    "git": "its attention can't be replaced.",
    "glm_moe_dsa": "it has layers of indexed_attention.",
    "gpt_neo": "its attention can't be replaced.",
    "gpt_neox_japanese": "its attention can't be replaced.",
    "granitemoehybrid": "it has layers of linear_attention.",
    "hy_v4": "it has layers of indexed_attention.",
    "inkling2_text": "it has layers of hybrid, hybrid_sliding.",
    "inkling_text": "it has layers of hybrid, hybrid_sliding.",
    "inkling2_loop_text": "it has layers of hybrid, hybrid_sliding.",
    "jamba": "it has layers of linear_attention.",
    "kimi_linear": "it has layers of linear_attention.",
    "lara_mini": "it has layers of linear_attention.",
    "lfm2_moe": "it has layers of conv.",
    "lfm3": "it has layers of conv.",
    "llama4": "its code has no decoder that runs by itself, at positions that it is given.",
    "llama4_text": "its code has no decoder that runs by itself, at positions that it is given.",
    "mamba": "its code has no decoder that runs by itself, at positions that it is given.",
    "mamba2": "its code has no decoder that runs by itself, at positions that it is given.",
    "marian": "its code has no decoder that runs by itself, at positions that it is given.",
    "mbart": "its code has no decoder that runs by itself, at positions that it is given.",
    "megatron-bert": "its attention can't be replaced.",
    "minimax": "it has layers of linear_attention.",
    "mllama": "its code has no decoder that runs by itself, at positions that it is given.",
    "modernbert-decoder": "its code has no decoder that runs by itself, at positions that it is given.",
    "mpt": "its code has no decoder that runs by itself, at positions that it is given.",
    "musicgen": "its code has no decoder that runs by itself, at positions that it is given.",
    "musicgen_melody": "its code has no decoder that runs by itself, at positions that it is given.",
    "mvp": "its code has no decoder that runs by itself, at positions that it is given.",
    "nemotron_h": "it has layers of linear_attention, mlp, moe.",
    "olmo_hybrid": "it has layers of linear_attention.",
    "openai-gpt": "its attention can't be replaced.",
    "pegasus": "its code has no decoder that runs by itself, at positions that it is given.",
    "phimoe": "its hidden states differ from transformers', so it keeps other state than keys and values, or has its own form of attention.",
    "plbart": "its code has no decoder that runs by itself, at positions that it is given.",
    "prophetnet": "its code has no decoder that runs by itself, at positions that it is given.",
    "qwen3_5": "it has layers of linear_attention.",
    "qwen3_5_moe": "it has layers of linear_attention.",
    "qwen3_5_moe_text": "it has layers of linear_attention.",
    "qwen3_5_text": "it has layers of linear_attention.",
    "qwen3_next": "it has layers of linear_attention.",
    "qwen4_exp": "it has layers of indexed_attention, linear_attention.",
    "qwen4_exp_text": "it has layers of indexed_attention, linear_attention.",
    "recurrent_gemma": "it has layers of linear_attention.",
    "reformer": "its attention can't be replaced.",
    "rembert": "its attention can't be replaced.",
    "roberta": "its positions do not count from 0.",
    "roberta-prelayernorm": "its positions do not count from 0.",
    "roformer": "its code has no decoder that runs by itself, at positions that it is given.",
    "rwkv": "its code has no decoder that runs by itself, at positions that it is given.",
    "trocr": "its code has no decoder that runs by itself, at positions that it is given.",
    "xglm": "its attention can't be replaced.",
    "xlm": "its attention can't be replaced.",
    "xlm-roberta": "its positions do not count from 0.",
    "xlm-roberta-xl": "its positions do not count from 0.",
    "xlnet": "its code has no decoder that runs by itself, at positions that it is given.",
    "xlstm": "its code has no decoder that runs by itself, at positions that it is given.",
    "xmod": "its positions do not count from 0.",
    "zamba": "it has layers of hybrid, linear_attention.",
    "zamba2": "it has layers of hybrid, linear_attention.",
    "zaya": "it has layers of hybrid.",
}
# Kinds that run as long as no text is longer than their limits, or are refused for those where the
# limits are set.
BEYOND_LIMITS = {
    "doge": "its hidden states differ from transformers' beyond its limits (keep_window_size, sliding_window).",
    "phimoe": "its hidden states differ from transformers' beyond its limits (sliding_window).",
    "qwen2_moe": "its layers have a sliding window of unknown size.",
}
# Kinds of which no model can be made here.
NOT_MADE = {
    "gemma3n": "requires the timm library",
}
# Of one version alone.
if transformers.__version__.startswith("5.23."):
    _LATER = ("inkling2_loop_text", "lara_mini")
    REFUSED = {kind: reason for kind, reason in REFUSED.items() if kind not in _LATER}
    REFUSED |= dict.fromkeys(("codegen", "gptj"), "its attention can't be replaced.")
    NOT_MADE |= dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "The set of layer types producing a cache is different than the set of layer types using",
    )
else:
    REFUSED |= dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "needs more than an attention over cached keys and values",
    )
