"""Config of a model folder: its `config.json`, or Mistral's `params.json` converted to the same
fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import CONFIG as FIELDS
from sglang_lite.runtime.models.config_fields import Json, check, read_json

_CONFIG = "config.json"
PARAMS = "params.json"
# ids of `<s>` and `</s>` in all of Mistral's tokenizers
_BOS = 1
_EOS = 2
_NAMES: Mapping[str, str] = {  # of Mistral's fields
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "head_dim": "head_dim", "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size", "rope_theta": "rope_theta", "max_position_embeddings": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings", "activation": "hidden_act",
}  # fmt: skip
_EXPERTS = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_DEFAULTS: Mapping[str, Json] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "sliding_window": None,
}
_WITHOUT_EFFECT = ("dtype", "max_seq_len", "max_batch_size")


def has_config(folder: Path) -> bool:
    """Returns whether a folder has a config file."""
    return (folder / _CONFIG).exists() or (folder / PARAMS).exists()


def config_file(folder: Path) -> Path:
    """Returns the path of the config file in a model folder."""
    params = folder / PARAMS
    return params if params.exists() and not (folder / _CONFIG).exists() else folder / _CONFIG


def read_config(folder: Path) -> dict[str, Json]:
    """Reads the config of the model in a folder, in Hugging Face's `config.json` format.

    Raises:
        ModelError: the file is missing or damaged, or Mistral's has a field that is not supported.
    """
    file = config_file(folder)
    content = read_json(file)
    return config_of_params(content, str(file)) if file.name == PARAMS else content


def config_of_params(params: Mapping[str, Json], source: str) -> dict[str, Json]:
    """Converts Mistral's `params.json` to Hugging Face's `config.json` format.

    Args:
        params: parsed file.
        source: name of the file, for messages.

    Raises:
        ModelError: a field is not supported.
    """
    check(
        params,
        {ours: FIELDS[theirs] for ours, theirs in _NAMES.items() if theirs not in _DEFAULTS},
        source,
    )
    left = {
        name: value
        for name, value in params.items()
        if value is not None and name not in _WITHOUT_EFFECT
    }
    config = {theirs: left.pop(ours) for ours, theirs in _NAMES.items() if ours in left}
    config = {**_DEFAULTS, **config, "bos_token_id": _BOS, "eos_token_id": _EOS}
    experts = _pop_renamed_object(left, "moe", _EXPERTS, source)
    yarn = _pop_renamed_object(left, "yarn", _YARN, source)
    kind = "mixtral" if experts else "mistral"
    config |= {**experts, "model_type": kind, "architectures": [f"{kind.title()}ForCausalLM"]}
    if yarn:
        theta = config.pop("rope_theta")
        config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": theta, **yarn}
    if (window := left.pop("sliding_window", None)) is not None:
        config |= _window_fields(window, config["num_hidden_layers"], source)
    if left.pop("model_type", "transformer") != "transformer" or left:
        name = next(iter(left), "model_type")
        raise ModelError(
            f"{source}: {name}={short_repr(params[name])} is not supported.",
            hint='Use the model\'s own config.json with load_format="auto", if the folder or the hub has it.',
        )
    return config


def _pop_renamed_object(
    left: dict[str, Json], name: str, names: Mapping[str, str], source: str
) -> dict[str, Json]:
    """Removes a nested object from the fields yet to be converted. Returns it with its fields
    renamed to those of `config.json`.
    """
    given = left.pop(name, {})
    if not isinstance(given, dict) or given.keys() - names.keys():
        raise ModelError(
            f"{source}: {name}={short_repr(given)} is not supported: it may have {', '.join(names)}.",
            hint="Correct it, or fetch the file again.",
        )
    return {theirs: given[ours] for ours, theirs in names.items() if ours in given}


def _window_fields(window: Json, layers: int, source: str) -> dict[str, Json]:
    """Converts Mistral's `sliding_window` to fields of `config.json`. It is one size for all
    layers, or a list that is repeated over the layers, with null for full attention.
    """
    if isinstance(window, int):
        return {"sliding_window": window}
    sizes = (
        {each for each in window if each is not None}
        if isinstance(window, list) and window
        else set()
    )
    if len(sizes) != 1 or not all(isinstance(each, int) for each in sizes) or layers % len(window):
        raise ModelError(
            f"{source}: sliding_window is {short_repr(window)}: neither a size, nor one for each layer.",
            hint="Correct it, or fetch the file again.",
        )
    kinds = ["full_attention" if each is None else "sliding_attention" for each in window]
    return {"sliding_window": sizes.pop(), "layer_types": kinds * (layers // len(window))}
