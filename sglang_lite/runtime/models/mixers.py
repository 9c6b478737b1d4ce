"""Reads from configs which mixers layers have in place of attention. The functions are for rows of
`families.py`: they take a config and a layer's index, and return None for a layer with attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from sglang_lite.runtime.models.config_fields import Config, Json
from sglang_lite.runtime.models.spec import (
    BlockSpec,
    ConvSpec,
    DeltaSpec,
    LightningSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    MlstmSpec,
    NoMixerSpec,
    RgLruSpec,
    WkvSpec,
)

_ATTENTION = "full_attention"
_WINDOW = "sliding_attention"
_STATE = "linear_attention"
_RWKV_EPSILON = 1e-5  # of the last norm, whatever the config says
_BLOCK = "hybrid"
_EARLIER_NAMES = {"attention": _ATTENTION, "mamba": _STATE}  # of types of layers
_NEMOTRON_LETTERS = {"M": _STATE, "E": "moe", "*": _ATTENTION, "-": "mlp"}


def lfm2_mixer(config: Config, layer: int) -> ConvSpec | None:
    count = config["num_hidden_layers"]
    with_attention = config.get("full_attn_idxs")
    if with_attention is None:
        with_attention = range(count)
    kinds = config.get("layer_types") or [
        "full_attention" if i in with_attention else "conv" for i in range(count)
    ]
    if len(kinds) != count or set(kinds) - {"full_attention", "conv"}:
        raise ValueError(f"layer_types {kinds} don't fit {count} layers of attention or conv")
    if "full_attention" not in kinds:
        raise ValueError("no layer has attention")
    if kinds[layer] == "full_attention":
        return None
    return ConvSpec(config["hidden_size"], config["conv_L_cache"], config["conv_bias"])


def _is_linear_attention(config: Config, layer: int) -> bool:
    count = config["num_hidden_layers"]
    interval = int(config["full_attention_interval"])
    kinds = config.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)
    ]
    if len(kinds) != count or set(kinds) - {"full_attention", "linear_attention"}:
        raise ValueError(
            f"layer_types {kinds} don't fit {count} layers of full_attention or linear_attention"
        )
    if "full_attention" not in kinds:
        raise ValueError("no layer has full_attention")
    return bool(kinds[layer] == "linear_attention")


def qwen_mixer(config: Config, layer: int) -> DeltaSpec | None:
    if not _is_linear_attention(config, layer):
        return None
    keys = config["linear_num_key_heads"]
    values = config["linear_num_value_heads"]
    if values % keys:
        raise ValueError(f"{keys} linear_num_key_heads can't serve {values} value heads")
    if config["hidden_act"] not in ("silu", "swish"):
        raise ValueError("hidden_act other than silu is not supported with linear attention")
    return DeltaSpec(
        key_heads=keys,
        value_heads=values,
        key_size=config["linear_key_head_dim"],
        value_size=config["linear_value_head_dim"],
        taps=config["linear_conv_kernel_dim"],
        norm_eps=config["rms_norm_eps"],
    )


def olmo_mixer(config: Config, layer: int) -> DeltaSpec | None:
    heads = config["num_attention_heads"]
    keys = config.get("linear_num_key_heads") or heads
    values = config.get("linear_num_value_heads") or heads
    size = config.get("linear_key_head_dim") or int(0.75 * config["hidden_size"] / keys)
    filled = {
        **config,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": size,
        "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * size,
    }
    scale = 2.0 if config["linear_allow_neg_eigval"] else 1.0
    delta = qwen_mixer(filled, layer)
    return delta and replace(delta, norm_eps=1e-5, beta_scale=scale)


def lara_kinds(config: Config) -> list[str]:
    """Returns the type of each layer."""
    period = (_STATE, _WINDOW, _STATE, _ATTENTION, _WINDOW)
    count = config["num_hidden_layers"]
    return config.get("layer_types") or [period[i % len(period)] for i in range(count)]


def lara_mixer(config: Config, layer: int) -> DeltaSpec | None:
    return qwen_mixer({**config, "layer_types": _without_windows(lara_kinds(config))}, layer)


def _without_windows(kinds: Sequence[str]) -> list[str]:
    return [_ATTENTION if kind == _WINDOW else kind for kind in kinds]


def lfm3_kinds(config: Config) -> list[str]:
    """Returns the type of each layer."""
    return config.get("layer_types") or [
        "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i > 0 else "conv"
        for i in range(config["num_hidden_layers"])
    ]


def lfm3_mixer(config: Config, layer: int) -> ConvSpec | None:
    return lfm2_mixer({**config, "layer_types": _without_windows(lfm3_kinds(config))}, layer)


def minimax_mixer(config: Config, layer: int) -> LightningSpec | None:
    count = config["num_hidden_layers"]
    usual = [_STATE if i % 2 else _ATTENTION for i in range(count)]
    if _layer_types(config, config.get("layer_types") or usual)[layer] == _ATTENTION:
        return None
    if config["hidden_act"] not in ("silu", "swish"):
        raise ValueError("hidden_act other than silu is not supported with linear attention")
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    factor = 1 - layer / (count - 1 + 1e-5) + 1e-5
    return LightningSpec(
        size,
        tuple(factor * 2 ** (-8 * (head + 1) / heads) for head in range(heads)),
        norm_size=heads * size,
        norm_eps=1e-6,
        output_scale=float(config["linear_attn_beta_factor"]),
    )


def bamba_mixer(config: Config, layer: int) -> Mamba2Spec | None:
    given = config.get("attn_layer_indices") or ()
    if not set(given) & set(range(config["num_hidden_layers"])):
        raise ValueError("attn_layer_indices names no layer with attention")
    return None if layer in given else _mamba2(config)


def granite_mixer(config: Config, layer: int) -> Mamba2Spec | None:
    count = config["num_hidden_layers"]
    kinds = _layer_types(config, config.get("layer_types") or [_STATE] * count)
    return None if kinds[layer] == _ATTENTION else _mamba2(config)


def falcon_h1_mixer(config: Config) -> Mamba2Spec:
    """Returns the state space that each layer has beside its attention."""
    mamba = _mamba2(config, config.get("mamba_d_ssm"))
    factors = config.get("ssm_multipliers") or [1.0] * 5
    if len(factors) != 5:
        raise ValueError(f"ssm_multipliers has {len(factors)} numbers, for 5 projections")
    norm: Literal["before", "after"] = "before" if config["mamba_norm_before_gate"] else "after"
    return replace(
        mamba,
        norm=norm if config["mamba_rms_norm"] else "",
        output_bias=config["projectors_bias"],
        scales=tuple(each * config["ssm_in_multiplier"] for each in factors),
        output_scale=float(config["ssm_out_multiplier"]),
    )


def jamba_mixer(config: Config, layer: int) -> Mamba1Spec | None:
    period = config["attn_layer_period"]
    offset = config["attn_layer_offset"]
    if offset >= min(period, config["num_hidden_layers"]):
        raise ValueError(f"no layer has attention: attn_layer_offset {offset} names none")
    if layer % period == offset:
        return None
    _reject_activation(config)
    return Mamba1Spec(
        size=config["mamba_expand"] * config["hidden_size"],
        state_size=config["mamba_d_state"],
        rank=_step_rank(config, "mamba_dt_rank"),
        taps=config["mamba_d_conv"],
        norm_eps=config["rms_norm_eps"],
        conv_bias=config["mamba_conv_bias"],
        bias=config["mamba_proj_bias"],
    )


def mamba1_mixer(config: Config, layer: int) -> Mamba1Spec:
    _reject_activation(config)
    return Mamba1Spec(
        size=config["intermediate_size"],
        state_size=config["state_size"],
        rank=_step_rank(config, "time_step_rank"),
        taps=config["conv_kernel"],
        norm_eps=config.get("mixer_rms_eps"),
        norm_weight=False,
        conv_bias=config["use_conv_bias"],
        bias=config["use_bias"],
    )


def mamba1_size(config: Config) -> dict[str, Json]:
    """Returns the number of channels for configs that omit it. A config that states the number
    may have an `expand` that does not match.
    """
    return {"intermediate_size": config["expand"] * config["hidden_size"]}


def mamba2_mixer(config: Config, layer: int) -> Mamba2Spec:
    named = {
        "mamba_expand": config["expand"],
        "mamba_n_heads": config["num_heads"],
        "mamba_d_head": config["head_dim"],
        "mamba_n_groups": config["n_groups"],
        "mamba_d_state": config["state_size"],
        "mamba_d_conv": config["conv_kernel"],
        "mamba_conv_bias": config["use_conv_bias"],
        "mamba_proj_bias": config["use_bias"],
    }
    return _mamba2({**config, **named})


def recurrent_gemma_mixer(config: Config, layer: int) -> RgLruSpec | None:
    kinds = config["block_types"]
    if not kinds or set(kinds) - {"attention", "recurrent"}:
        raise ValueError(f"block_types {kinds} are not of attention or recurrent")
    if kinds[layer % len(kinds)] == "attention":
        return None
    if config["hidden_activation"] not in ("gelu_pytorch_tanh", "gelu_new"):
        raise ValueError("hidden_activation other than gelu_pytorch_tanh is not supported")
    width = config.get("lru_width") or config["hidden_size"]
    blocks = config["num_attention_heads"]
    if width % blocks:
        raise ValueError(f"lru_width {width} can't be divided into {blocks} blocks")
    return RgLruSpec(blocks, width // blocks, config["conv1d_width"])


def rwkv_mixer(config: Config, layer: int) -> WkvSpec:
    if config["rms_norm_eps"] != _RWKV_EPSILON:
        raise ValueError(f"layer_norm_epsilon other than {_RWKV_EPSILON:g} is not supported")
    hidden = config["hidden_size"]
    return WkvSpec(hidden, config.get("attention_hidden_size") or hidden)


def rwkv_layer(config: Config, layer: int) -> dict[str, Any]:  # fields of any type
    """Returns fields of LayerSpec. The hidden states are halved after every few layers, and what
    later layers add to them is scaled to match. This changes the effect of the norms' epsilons.
    """
    period = config["rescale_every"]
    if period <= 0:
        return {}
    ends = (layer + 1) % period == 0
    return {"residual_scale": 0.5 ** (layer // period), "result_scale": 0.5 if ends else 1.0}


def rwkv_size(config: Config) -> dict[str, Json]:
    """Returns the size of channel mixing for configs that omit it."""
    return {"intermediate_size": 4 * config["hidden_size"]}


def xlstm_mixer(config: Config, layer: int) -> MlstmSpec:
    for ours, theirs in (("hidden_size", "embedding_dim"), ("num_hidden_layers", "num_blocks")):
        if config.get(theirs) not in (None, config[ours]):
            raise ValueError(f"{theirs} {config[theirs]} differs from {ours} {config[ours]}")
    hidden = config["hidden_size"]
    heads = config["num_heads"]
    keys = int(hidden * config["qk_dim_factor"])
    values = int(hidden * config["v_dim_factor"])
    if keys < heads or values < heads or keys % heads or values % heads:
        raise ValueError(f"{keys} key and {values} value elements don't make {heads} num_heads")
    return MlstmSpec(
        heads,
        keys // heads,
        values // heads,
        gate_cap=float(config["gate_soft_cap"]),
        eps=float(config["eps"]),
        norm_eps=float(config["norm_eps"]),
    )


def xlstm_size(config: Config) -> dict[str, Json]:
    """Returns the size of feed-forwards, a rounded multiple of the hidden size."""
    unit = config["ffn_round_up_to_multiple_of"]
    size = int((config["hidden_size"] * config["ffn_proj_factor"] + unit - 1) // unit) * unit
    return {"rounded_size": size, "intermediate_size": size}


def _step_rank(config: Config, field: str) -> int:
    """Returns the size of the low-rank vectors from which steps are projected."""
    rank = config[field]
    return -(-config["hidden_size"] // 16) if rank in ("auto", None) else int(rank)


def kimi_mixer(config: Config, layer: int) -> DeltaSpec | None:
    own = config.get("linear_attn_config") or {}  # transformers prefers its fields
    heads = own.get("num_heads") or config["linear_num_heads"]
    size = own.get("head_dim") or config["linear_head_dim"]
    named = {
        "full_attention_interval": 1,  # not used: the types of all layers are known
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), size),
    }
    if "short_conv_kernel_size" in own:
        named["linear_conv_kernel_dim"] = own["short_conv_kernel_size"]
    delta = qwen_mixer({**config, **named}, layer)
    return delta and replace(delta, by_element=True, gate_rank=size)


def bailing_mixer(config: Config, layer: int) -> DeltaSpec | None:
    heads = config.get("linear_num_heads") or config["num_attention_heads"]
    size = config.get("linear_head_dim") or config["head_dim"]
    named = {
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), size),
    }
    delta = qwen_mixer({**config, **named}, layer)
    bound = float(config["kda_lower_bound"]) if config["kda_safe_gate"] else None
    return delta and replace(delta, by_element=True, decay_bound=bound)


def kimi_layer_types(config: Config) -> dict[str, Json]:
    """Returns the types of the layers, which early configs have in a nested object."""
    full = (config.get("linear_attn_config") or {}).get("full_attn_layers")
    kinds = [
        _ATTENTION if (i and i % 4 == 0 if full is None else i + 1 in full) else _STATE
        for i in range(config["num_hidden_layers"])
    ]
    return {"layer_types": kinds}


def nemotron_mixer(config: Config, layer: int) -> MixerSpec | None:
    kinds = _layer_types(config, config["layer_types"], "mlp", "moe")
    if kinds[layer] != _STATE:
        return None if kinds[layer] == _ATTENTION else NoMixerSpec()
    heads = config["mamba_num_heads"]
    size = config["mamba_head_dim"]
    named = {
        "hidden_act": config["mamba_hidden_act"],
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_n_groups": config["n_groups"],
        "mamba_d_state": config["ssm_state_size"],
        "mamba_d_conv": config["conv_kernel"],
        "mamba_conv_bias": config["use_conv_bias"],
        "mamba_proj_bias": config["use_bias"],
    }
    return _mamba2({**config, **named}, heads * size)


def nemotron_layer_types(config: Config) -> dict[str, Json]:
    """Returns the types of the layers, and the number of layers. Early configs write the types as
    letters.
    """
    pattern = config.get("hybrid_override_pattern") or ""
    kinds = config.get("layer_types")
    if not kinds:
        kinds = [_NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def zamba_kinds(config: Config) -> list[str]:
    """Returns the type of each layer: "hybrid" for one with a block."""
    return _layer_types(config, config["layer_types"], attention=_BLOCK)


def zamba_mixer(config: Config, layer: int) -> Mamba1Spec | None:
    return None if zamba_kinds(config)[layer] == _BLOCK else _zamba_mamba(config)


def zamba2_mixer(config: Config, layer: int) -> Mamba2Spec | None:
    return None if zamba_kinds(config)[layer] == _BLOCK else _zamba2_mamba(config)


def zamba_layer(config: Config, layer: int) -> dict[str, Any]:  # fields of any type
    """Returns fields of LayerSpec."""
    if zamba_kinds(config)[layer] != _BLOCK:
        return {}
    return {"block": BlockSpec(_lender(config, layer, 1)), "beside": _zamba_mamba(config)}


def zamba2_layer(config: Config, layer: int) -> dict[str, Any]:  # fields of any type
    """Returns fields of LayerSpec."""
    if zamba_kinds(config)[layer] != _BLOCK:
        return {}
    rank = config["adapter_rank"]
    block = BlockSpec(
        weights_of=_lender(config, layer, config["num_mem_blocks"]),
        attention_rank=rank if config["use_shared_attention_adapter"] else 0,
        feed_forward_rank=rank,
    )
    return {"block": block, "beside": _zamba2_mamba(config)}


def _lender(config: Config, layer: int, blocks: int) -> int | None:
    """Returns the earlier layer that has the weights of a layer's block, or None. The layers use
    the blocks in turn.
    """
    with_block = [i for i, kind in enumerate(zamba_kinds(config)) if kind == _BLOCK]
    number = with_block.index(layer)
    return None if number < blocks else with_block[number % blocks]


def zamba_fields(config: Config) -> dict[str, Json]:
    """Returns the fields that transformers computes. Attention reads two hidden states."""
    heads = config["num_attention_heads"]
    period = config["attn_layer_period"]
    offset = config["attn_layer_offset"]
    later = [i % period == offset for i in range(config["num_hidden_layers"] - 3)]
    return {
        "head_dim": config.get("attention_head_dim") or 2 * config["hidden_size"] // heads,
        "layer_types": [_BLOCK if each else _STATE for each in (False, False, True, *later)],
    }


def zamba2_fields(config: Config) -> dict[str, Json]:
    """Returns the sizes that transformers computes. Attention reads two hidden states."""
    hidden = config["hidden_size"]
    return {
        "intermediate_size": 4 * hidden,
        "head_dim": 2 * hidden // config["num_attention_heads"],
    }


def _zamba_mamba(config: Config) -> Mamba1Spec:
    _reject_activation({"hidden_act": config["hidden_mamba_act"]})
    size = config["mamba_expand"] * config["hidden_size"]
    groups = config["n_mamba_heads"]
    if size % groups:
        raise ValueError(f"{size} channels can't be divided into {groups} n_mamba_heads")
    return Mamba1Spec(
        size=size,
        state_size=config["mamba_d_state"],
        rank=_step_rank(config, "mamba_dt_rank"),
        taps=config["mamba_d_conv"],
        norm_eps=None,
        conv_bias=config["mamba_conv_bias"],
        bias=config["mamba_proj_bias"],
        groups=groups,
    )


def _zamba2_mamba(config: Config) -> Mamba2Spec:
    named = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "mamba_n_heads": config["n_mamba_heads"],
        "mamba_d_head": "auto",
        "mamba_n_groups": config["mamba_ngroups"],
        "mamba_conv_bias": True,
        "mamba_proj_bias": config["add_bias_linear"],
        "time_step_limit": (config["time_step_min"], math.inf),
    }
    return _mamba2({**config, **named})


def _layer_types(
    config: Config, kinds: Sequence[str], *others: str, attention: str = _ATTENTION
) -> list[str]:
    """Returns each layer's type under its current name. Raises ValueError if one is unknown, or
    none is `attention`.
    """
    named = [_EARLIER_NAMES.get(kind, kind) for kind in kinds]
    known = (attention, _STATE, *others)
    count = config["num_hidden_layers"]
    if len(named) != count or set(named) - set(known):
        raise ValueError(f"layer_types {named} don't fit {count} layers of {', '.join(known)}")
    if attention not in named:
        raise ValueError(f"no layer has {attention}")
    return named


def _mamba2(config: Config, inner: int | None = None) -> Mamba2Spec:
    """Returns the state space of a layer. `inner` is the number of elements of x; None to compute
    it from the config.
    """
    inner = inner or config["mamba_expand"] * config["hidden_size"]
    heads = config["mamba_n_heads"]
    groups = config["mamba_n_groups"]
    size = config["mamba_d_head"]
    size = inner // heads if size in ("auto", None) else size
    if heads * size != inner:
        raise ValueError(f"{heads} mamba_n_heads of {size} don't make {inner} elements")
    if heads % groups:
        raise ValueError(f"{heads} mamba_n_heads can't be divided into {groups} mamba_n_groups")
    _reject_activation(config)
    return Mamba2Spec(
        heads=heads,
        groups=groups,
        head_size=size,
        state_size=config["mamba_d_state"],
        taps=config["mamba_d_conv"],
        norm_eps=config["rms_norm_eps"],
        conv_bias=config["mamba_conv_bias"],
        bias=config["mamba_proj_bias"],
        output_bias=config["mamba_proj_bias"],
        step_limits=_step_limits(config),
    )


def _reject_activation(config: Config) -> None:
    if config["hidden_act"] not in ("silu", "swish"):
        raise ValueError("hidden_act other than silu is not supported with state spaces")


def _step_limits(config: Config) -> tuple[float, float]:
    """Returns the smallest and the largest step. transformers writes infinity as an object."""
    given = config.get("time_step_limit") or (0.0, math.inf)
    low, high = (float(each["__float__"] if isinstance(each, Mapping) else each) for each in given)
    if not 0 <= low < high:
        raise ValueError(f"time_step_limit [{low:g}, {high:g}] is no range of positive numbers")
    return low, high
