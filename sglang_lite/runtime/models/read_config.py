"""Reader of Hugging Face `config.json` files, driven by the table in `families.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models import config_fields
from sglang_lite.runtime.models.config_fields import Config, Json
from sglang_lite.runtime.models.families import (
    ARCHITECTURES,
    FAMILIES,
    TEXT_PARTS,
    WITH_ENCODER,
    Family,
)
from sglang_lite.runtime.models.spec import (
    NO_FEED_FORWARD,
    NO_ROPE,
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    MixerSpec,
    ModelSpec,
    RopeSpec,
)

# read before all others
_FIRST = {name: config_fields.CONFIG[name] for name in ("architectures", "text_config")}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
# config field -> type of layer that only a model with this field has
_MIXER_KINDS = {"conv_L_cache": "conv", "linear_conv_kernel_dim": "linear_attention"}
# Parameters that each kind of frequency scaling requires.
_ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("factor", "short_factor", "long_factor"),
    "ntk": ("alpha",),
    "proportional": (),
}


def spec_from_config(config: Config, source: str) -> ModelSpec:
    """Returns the specification of a decoder from a Hugging Face config. For a vision-language
    model, this is its text decoder.

    Args:
        config: parsed `config.json`.
        source: name of the file, for messages.

    Raises:
        ModelError: the architecture or an option is not supported, or a field is missing or
            invalid.
    """
    config_fields.check(
        {"architectures": config.get("architectures"), "text_config": config.get("text_config")},
        _FIRST,
        source,
    )
    names = config.get("architectures") or []
    names = [names] if isinstance(names, str) else names
    if any(name in WITH_ENCODER for name in names):
        return spec_from_config(_text_config(config, source), source)
    family = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if family is None:
        raise ModelError(
            f"{source}: architecture {', '.join(names) or 'not named'} is not supported.",
            hint=f"Supported: {', '.join(ARCHITECTURES)}.",
        )
    stated = {**(config.get("text_config") or {}), **config}
    given = _rename_layer_kinds(FAMILIES[family].layer_kinds, stated)
    if reason := FAMILIES[family].left_out(given):
        raise ModelError(
            f"{source}: {reason} is not supported by our code.",
            hint='Use model_impl="auto": transformers\' own code may run it.',
        )
    whole = _complete_config(FAMILIES[family], given, source)
    if given.get("rope_scaling") and not given.get("rope_parameters"):
        whole.pop("rope_parameters", None)  # the family default, overridden by rope_scaling
    config_fields.check(whole, config_fields.CONFIG, source)
    for name in ("rope_parameters", "rope_scaling"):
        _check_rope(whole.get(name) or {}, source)
    _reject_contradictory_rope(FAMILIES[family], whole, source)
    try:
        spec = _read_model_spec(family, whole)
    except KeyError as error:
        raise _missing_error(error, source) from error
    except TypeError as error:  # of a field that is null
        raise _null_error(whole, source) from error
    except (ValueError, ArithmeticError) as error:
        raise ModelError(
            f"{source}: {error}", hint="Correct it, or fetch the file again."
        ) from error
    if _has_null(spec):
        raise _null_error(whole, source)
    config_fields.parse_token_ids(list(spec.eos_ids), spec.vocab_size, source, "eos_token_id")
    config_fields.parse_token_ids(spec.bos_id, spec.vocab_size, source, "bos_token_id")
    return spec


def _rename_layer_kinds(kinds: Mapping[str, str], config: Config) -> Config:
    """Returns a config with types of layers renamed, in their list and in the rotary parameters."""
    ropes = config.get("rope_parameters")
    types = config.get("layer_types")
    renamed: dict[str, Json] = {}
    if kinds and isinstance(types, list):
        renamed["layer_types"] = [kinds.get(each, each) for each in types]
    if kinds and isinstance(ropes, Mapping):
        renamed["rope_parameters"] = {kinds.get(name, name): each for name, each in ropes.items()}
    return {**config, **renamed}


def _complete_config(family: Family, given: Config, source: str) -> dict[str, Json]:
    """Returns a config with the fields added that it omits. Raises ModelError if a field from which
    the family computes others is missing or invalid.
    """
    named = {
        ours: given[theirs]
        for ours, theirs in family.aliases.items()
        if given.get(theirs) is not None
    }
    whole = {**family.defaults, **named, **given}
    present = {name for name, value in whole.items() if value is not None}
    fields = {name: field for name, field in config_fields.CONFIG.items() if name in present}
    config_fields.check(whole, fields, source)
    try:
        computed = family.computed(whole)
    except KeyError as error:
        raise _missing_error(error, source) from error
    except TypeError as error:
        raise ModelError(
            f"{source}: {error}, in the fields that tell the layers.",
            hint="Correct them, or fetch the file again.",
        ) from error
    told = {
        name: value for name, value in given.items() if value is not None or name not in computed
    }
    return {**family.defaults, **computed, **named, **told}


def _missing_error(error: KeyError, source: str) -> ModelError:
    return ModelError(
        f"{source}: the field {error} is missing.", hint="Correct it, or fetch the file again."
    )


def _null_error(config: Config, source: str) -> ModelError:
    names = [
        f"`{name}`" for name in config_fields.CONFIG if name in config and config[name] is None
    ]
    which = (
        f"one of {', '.join(names)} is" if len(names) > 1 else f"{''.join(names) or 'a field'} is"
    )
    return ModelError(
        f"{source}: {which} null, and the architecture needs a value.",
        hint="Give it one, or leave it out for the default.",
    )


def _has_null(spec: object) -> bool:
    """Returns whether a specification, or one nested in it, contains None for a number that may not
    be None.
    """
    if isinstance(spec, tuple):
        return any(map(_has_null, spec))
    if not is_dataclass(spec):
        return False
    each = ((field.type, getattr(spec, field.name)) for field in fields(spec))
    return any(
        (kind in ("int", "float") and value is None) or _has_null(value) for kind, value in each
    )


def _text_config(config: Config, source: str) -> Config:
    """Returns the config of a vision-language model's decoder. Raises ModelError if it belongs to
    no supported family.
    """
    text = config.get("text_config") or ({} if "hidden_size" not in config else config)
    name = text.get("model_type", "llama")
    family, omitted = TEXT_PARTS.get(name, (name, {}))
    if family not in FAMILIES:
        raise ModelError(
            f"{source}: its text part, {short_repr(family)}, is not supported.",
            hint=f"Supported: {', '.join(FAMILIES)}.",
        )
    whole = {**omitted, **text, "architectures": list(FAMILIES[family].architectures[:1])}
    tied = config.get("tie_word_embeddings")
    return whole if tied is None else {**whole, "tie_word_embeddings": tied}


def _check_rope(parameters: Mapping[str, Json], source: str) -> None:
    config_fields.check(parameters, config_fields.ROPE, source)
    for name in _LAYER_TYPES:
        config_fields.check(parameters.get(name) or {}, config_fields.ROPE, source)


def _read_model_spec(name: str, config: Config) -> ModelSpec:
    family = FAMILIES[name]
    eos = config.get("eos_token_id")
    layers = family.unroll(config, _read_layer_specs(family, config))
    return ModelSpec(
        architecture=name,
        hidden_size=config["hidden_size"],
        max_positions=_max_positions(config, layers),
        layers=layers,
        tied_embeddings=config.get("tie_word_embeddings", False),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos_id=config.get("bos_token_id"),
        **{
            "vocab_size": config["vocab_size"],
            "rms_eps": config.get("rms_norm_eps", 1e-6),
            **family.model_fields(config),
        },
    )


def _read_layer_specs(family: Family, config: Config) -> tuple[LayerSpec, ...]:
    heads = config["num_attention_heads"]
    hidden_size = config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads can't share {kv_heads} key-value heads")
    head_dim = config.get("head_dim") or hidden_size // heads
    if family.latent:
        head_dim = config["qk_rope_head_dim"]  # some configs call this size `head_dim`
    if head_dim < 1:
        raise ValueError(f"hidden_size {hidden_size} is too small for {heads} attention heads")
    qkv_bias, output_bias, mlp_bias = (
        config.get(bias, False) if isinstance(bias, str) else bias for bias in family.biases
    )
    size = config.get(family.dense_size) or config["intermediate_size"]
    activation = _read_activation(family, config)
    dense = DenseSpec(size, activation, mlp_bias, family.gated, **family.dense_fields(config))
    causal = _is_causal(family, config)
    changes = {
        "scale": head_dim**-0.5,
        "qk_norm": family.qk_norm,
        "causal": causal,
        **family.attention_fields(config),
    }
    latent = (
        _read_latent_spec(
            config,
            _read_rope_specs(family, config, head_dim)[0],
            bias=qkv_bias,
            output_bias=output_bias,
            output_gate=family.latent_gate,
        )
        if family.latent
        else None
    )
    layers = []
    feed_forward: FeedForwardSpec
    for i, window in enumerate(_read_layer_windows(family, config)):
        own = {"key_size": head_dim, **family.layer_attention(config, i)}
        rope, local = _read_rope_specs(family, config, own["key_size"])
        layer_rope = (
            NO_ROPE if not family.has_rope(config, i, window) else rope if window is None else local
        )
        attention: MixerSpec = latent or AttentionSpec(
            chunked=family.chunked and window is not None,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            **{
                "heads": heads,
                "rope": layer_rope,
                "kv_heads": kv_heads,
                "value_size": head_dim,
                "window": window,
                **changes,
                **own,
            },
        )
        if layer_rope is NO_ROPE and latent is not None:
            attention = replace(latent, rope=replace(NO_ROPE, rotary_dim=latent.rope_size))
        elif layer_rope is NO_ROPE and (more := family.nope_fields(config)):
            attention = replace(attention, **more)
        norms = family.norms
        if (mixer := family.mixer(config, i)) is not None:
            attention = mixer
            norms = family.mixer_norms or norms
        fields = family.experts_fields(config, i)
        feed_forward = (
            replace(dense, **family.layer_dense(config, i))
            if fields is None
            else _experts(config, {"activation": dense.activation, **fields})
        )
        if not family.has_feed_forward(config, i):
            feed_forward = NO_FEED_FORWARD
        layers.append(
            LayerSpec(attention, feed_forward, **{"norms": norms, **family.layer_fields(config, i)})
        )
    return tuple(layers)


def is_bidirectional(config: Config) -> bool:
    """Returns whether the model's tokens attend to later tokens. Such a model can't generate."""
    text = config.get("text_config")
    whole = {**(text if isinstance(text, Mapping) else {}), **config}
    return _looks_both_ways(whole) or whole.get("is_causal") is False


def _looks_both_ways(config: Config) -> bool:
    return config.get("use_bidirectional_attention") not in (None, False, "vision")  # of images


def _is_causal(family: Family, config: Config) -> bool:
    if (
        config.get("use_bidirectional_attention")
        and "use_bidirectional_attention" not in family.defaults
    ):
        raise ValueError("use_bidirectional_attention is not supported for this architecture")
    both = is_bidirectional(config)
    if both and family.latent:
        raise ValueError("is_causal false is not supported with latent attention")
    return not both


def _read_latent_spec(
    config: Config, rope: RopeSpec, *, bias: bool, output_bias: bool, output_gate: bool
) -> LatentSpec:
    heads = config["num_attention_heads"]
    nope = config["qk_nope_head_dim"]
    rope_size = config["qk_rope_head_dim"]
    if rope.rotary_dim != rope_size:
        raise ValueError("partial_rotary_factor is not supported with latent attention")
    stretch = rope.params.get("factor", 1.0)
    weight = rope.params.get("mscale_all_dim") or 0.0
    amplitude = (
        1.0 if rope.kind == "default" or stretch <= 1 else 0.1 * weight * math.log(stretch) + 1.0
    )
    return LatentSpec(
        heads,
        config["kv_lora_rank"],
        config["q_lora_rank"],
        nope,
        rope_size,
        config["v_head_dim"] or config["hidden_size"] // heads,
        (nope + rope_size) ** -0.5 * amplitude**2,
        rope,
        bias=bias,
        output_bias=output_bias,
        output_gate=output_gate,
    )


def _experts(config: Config, fields: Mapping[str, Any]) -> ExpertsSpec:
    top_k = {} if "top_k" in fields else {"top_k": config["num_experts_per_tok"]}
    spec = ExpertsSpec(**top_k, **fields)
    if spec.top_k > spec.count:
        raise ValueError(f"num_experts_per_tok is {spec.top_k}, and there are {spec.count} experts")
    if spec.count % spec.groups or spec.kept_groups > spec.groups:
        raise ValueError(
            f"n_group {spec.groups} and topk_group {spec.kept_groups} don't fit {spec.count} experts"
        )
    kept = spec.kept_groups * (spec.count // spec.groups)
    if spec.top_k > kept or spec.group_top > spec.count // spec.groups:
        raise ValueError(
            f"num_experts_per_tok is {spec.top_k}, and topk_group leaves {kept} experts to choose from"
        )
    return spec


def _read_activation(family: Family, config: Config) -> str:
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    name = family.activations.get(name, name)
    if name not in _ACTIVATIONS or (family.gated and name in ("relu", "relu2", "xielu")):
        raise ValueError(
            f"the activation {name!r} is not supported (only {', '.join(_ACTIVATIONS)})"
        )
    return _ACTIVATIONS[name]


def _max_positions(config: Config, layers: tuple[LayerSpec, ...]) -> int:
    """Returns the length of the longest sequence: the larger of the config's limit and YaRN's.
    Users often add YaRN without raising `max_position_embeddings`.
    """
    stretched = [
        layer.attention.rope.params for layer in layers if layer.attention.rope.kind == "yarn"
    ]
    limits: list[int] = [config["max_position_embeddings"]]
    limits += [
        int(params["factor"] * params["original_max_position_embeddings"])
        for params in stretched[:1]
    ]
    return max(limits)


def _read_rope_specs(family: Family, config: Config, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Returns two rotary embeddings: one for layers without a window, and one for layers with a
    window.
    """
    full, local = _rope_parameters(family, config)
    rope = _read_rope_spec(family, full, config, head_dim)
    return (
        (rope, _read_rope_spec(family, local, config, head_dim))
        if family.layer_ropes
        else (rope, rope)
    )


def _rope_parameters(family: Family, config: Config) -> tuple[dict[str, Json], dict[str, Json]]:
    """Returns rotary parameters as transformers reads them, first for layers without a window, then
    for layers with one.

    transformers 5 writes `rope_parameters`, for some families one entry for each type of layer.
    Older files have `rope_theta`, `rope_scaling` and `rope_local_base_freq`.
    """
    given = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    flat = _common_rope_parameters(given)
    theta = config.get("rope_theta", 10_000.0)
    if not family.layer_ropes:
        whole = {"rope_theta": theta, **(scaling or flat)}
        return whole, whole
    full = {"rope_theta": theta, **(given.get("full_attention") or {}), **scaling}
    return full, {
        "rope_theta": config.get("rope_local_base_freq", theta),
        **(given.get("sliding_attention") or {}),
    }


def _common_rope_parameters(parameters: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the rotary parameters except the entries for single types of layers."""
    return {name: value for name, value in parameters.items() if name not in _LAYER_TYPES}


def _reject_contradictory_rope(family: Family, config: Config, source: str) -> None:
    """Rejects a config whose keys for the rotary embedding contradict each other, because it is
    unclear which of them apply.
    """
    given = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    used = _rope_parameters(family, config)
    by_layer = [f"rope_scaling.{name}" for name in _LAYER_TYPES if scaling.get(name) is not None]
    if not family.layer_ropes:
        by_layer += [
            f"rope_parameters.{name}" for name in _LAYER_TYPES if given.get(name) is not None
        ]
    if by_layer:
        raise ModelError(
            f"{source}: `{by_layer[0]}`: this architecture has no rotary embedding for a type of layer there.",
            hint="Write its parameters into rope_parameters itself."
            if not family.layer_ropes
            else "Write it into rope_parameters.",
        )
    if (
        family.layer_ropes
        and "rope_type" not in scaling
        and scaling.get("type") not in (None, "default")
    ):
        raise ModelError(
            f"{source}: `rope_scaling.type` is {short_repr(scaling['type'])}, which transformers 5 does not "
            "read of this architecture.",
            hint="Name it rope_type.",
        )
    for name, value in _common_rope_parameters(given).items():
        if value is not None and all(_rope_value(name, each) != value for each in used):
            other = _rope_value(name, used[0])
            raise ModelError(
                f"{source}: `rope_parameters.{name}` is {short_repr(value)}, and other keys, which transformers "
                f"prefers, say {short_repr(other)}.",
                hint="Say it once: in rope_parameters.full_attention and rope_parameters.sliding_attention."
                if family.layer_ropes
                else "Say it once: in rope_parameters, without rope_scaling.",
            )
    _check_local_theta(family, config, source)


def _check_local_theta(family: Family, config: Config, source: str) -> None:
    """Rejects a config that doesn't state clearly which `rope_theta` applies to layers with a
    window. transformers 5 applies a `rope_theta` for all layers only to those without a window.
    """
    if not family.layer_ropes or "rope_local_base_freq" in family.defaults:
        return
    own = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    if config.get("rope_local_base_freq") not in (None, own.get("rope_theta")):
        raise ModelError(
            f"{source}: `rope_local_base_freq` is {short_repr(config['rope_local_base_freq'])}: "
            "this architecture has none.",
            hint="Write it as the rope_theta in rope_parameters.sliding_attention.",
        )
    usual = family.defaults["rope_theta"]
    if "rope_theta" not in own and config["rope_theta"] != usual:
        raise ModelError(
            f"{source}: `rope_theta` is {short_repr(config['rope_theta'])}, and versions of transformers differ "
            f"in whether layers with a window have it, or {usual:g}.",
            hint="Write rope_parameters.full_attention and rope_parameters.sliding_attention, each with its own "
            "rope_theta.",
        )


def _rope_value(name: str, parameters: Mapping[str, Json]) -> Json:
    """Returns a rotary parameter, or None if it is missing. A missing rope type counts as
    "default".
    """
    if name in ("rope_type", "type"):
        return parameters.get("rope_type") or parameters.get("type") or "default"
    return parameters.get(name)


def _read_rope_spec(
    family: Family, parameters: Mapping[str, Json], config: Config, head_dim: int
) -> RopeSpec:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    # "mrope" only states sections, and "dynamic" changes nothing within the model's limit of
    # positions
    kind = {"mrope": "default", "dynamic": "default", **family.rope_aliases}.get(kind, kind)
    if kind not in _ROPE_KINDS:
        raise ValueError(f"rope type {kind!r} is not supported (only {', '.join(_ROPE_KINDS)})")
    limit = config["max_position_embeddings"]
    # If a config has the field outside the rope parameters, too (Phi-3), that one takes precedence.
    original = config.get("original_max_position_embeddings") or parameters.get(
        "original_max_position_embeddings"
    )
    params = {
        name: value
        for name, value in parameters.items()
        if name not in ("rope_type", "type", "rope_theta")
    }
    params["original_max_position_embeddings"] = original or limit
    if kind in ("yarn", "longrope") and params.get("factor") is None:
        params["factor"] = limit / params["original_max_position_embeddings"]
    part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * part)
    for name in _ROPE_KINDS[kind]:
        count = rotary_dim // 2 if name in ("short_factor", "long_factor") else 1
        numbers = params[name] if isinstance(params[name], list) else [params[name]]
        if len(numbers) != count or not all(isinstance(n, int | float) and n > 0 for n in numbers):
            raise ValueError(f"rope's {name} is {params[name]!r}, not {count} positive numbers")
    if kind == "ntk" and rotary_dim == 2:
        raise ValueError("rope's alpha stretches no frequency of 2 elements")
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"{rotary_dim} elements of a head can't be rotated in pairs: head_dim * partial_rotary_factor (or "
            "qk_rope_head_dim) must be an even number from 2 to head_dim"
        )
    interleaved = (
        config[family.interleaved] if isinstance(family.interleaved, str) else family.interleaved
    )
    sections = parameters.get("mrope_section") or config.get("mrope_section")
    axes = (
        ()
        if sections is None
        else _rope_axes_by_pair(
            sections, rotary_dim // 2, alternating=config.get("mrope_interleaved", False)
        )
    )
    growth = parameters.get("llama_4_scaling_beta") if family.query_growth else None
    return RopeSpec(
        float(parameters["rope_theta"]),
        kind,
        rotary_dim,
        params,
        interleaved,
        axes,
        *((growth, params["original_max_position_embeddings"]) if growth else ()),
    )


def _rope_axes_by_pair(
    sections: Sequence[int], pairs: int, *, alternating: bool
) -> tuple[int, ...]:
    """Returns `RopeSpec.axes`, given the number of rotary pairs for time, rows and columns. Each
    axis has consecutive pairs. With `alternating`, the axes take turns until each has all of its
    pairs, and the remaining pairs are for time (Qwen3-VL).
    """
    if len(sections) != 3 or sum(sections) != pairs:
        raise ValueError(f"mrope_section {sections} doesn't fit {pairs} rotary pairs")
    if alternating:
        return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(pairs))
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def _read_layer_windows(family: Family, config: Config) -> tuple[int | None, ...]:
    layers: int = config["num_hidden_layers"]
    window = config.get("attention_chunk_size" if family.chunked else "sliding_window")
    local = "chunked_attention" if family.chunked else "sliding_attention"
    optional = "use_sliding_window" in family.defaults
    if not window or family.has_window is None or (optional and not config["use_sliding_window"]):
        return (None,) * layers
    kinds = config.get("layer_types") or [
        local if family.has_window(config, i) else "full_attention" for i in range(layers)
    ]
    known = {local, "full_attention"}
    known |= {kind for field, kind in _MIXER_KINDS.items() if config.get(field)}
    if len(kinds) != layers or set(kinds) - known:
        raise ValueError(
            f"layer_types {kinds} don't fit {layers} layers of full_attention or {local}"
        )
    if _looks_both_ways(config):
        window = window // 2 + 1  # positions in each direction, as transformers counts
    elif config.get("is_causal") is False:
        window = window + 1
    return tuple(window if kind == local else None for kind in kinds)
