"""Reads the files that sentence-transformers adds to a model, which define how it computes vectors.
Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import (
    Field,
    Json,
    abbreviate,
    check,
    read_any_json,
    read_json,
)

Pooling: TypeAlias = Literal["mean", "cls", "last"]

_POOLINGS: Mapping[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_DENSE = {
    "in_features": Field("whole", 1, 1 << 20, required=True),
    "out_features": Field("whole", 1, 1 << 20, required=True),
    "bias": Field("flag"),
    "activation_function": Field("text"),
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")  # class names in torch.nn
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Linear layer that a pooled vector passes through.

    Attributes:
        folder: folder that holds the weights.
        inputs, outputs: shape of the layer.
        bias: whether the layer has a bias.
        activation: class name in torch.nn of the activation that follows.
    """

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class Modules:
    """How an embedding is computed from hidden states, as `modules.json` defines it.

    Attributes:
        pooling: pooling of hidden states, or None if the folder does not define it.
        dense: linear layers that a pooled vector passes through.
        normalise: whether vectors are scaled to length 1.
    """

    pooling: Pooling | None = None
    dense: tuple[DenseLayer, ...] = ()
    normalise: bool = False


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts to add before the user's texts.

    Attributes:
        named: prompts by name.
        default: prompt for texts without a prompt name; "" for none.
    """

    named: Mapping[str, str]
    default: str


def is_sentence_transformers_folder(path: Path) -> bool:
    """Returns True if the folder has a `modules.json`, which sentence-transformers writes."""
    return (path / "modules.json").exists()


def read_modules(path: Path, hidden_size: int) -> Modules:
    """Reads `modules.json` and the files that it names. Returns empty `Modules` if the folder has
    none.

    Args:
        path: folder of the model.
        hidden_size: number of elements in the model's hidden states.

    Raises:
        ModelError: a module or pooling is not supported, or sizes don't match.
    """
    if not is_sentence_transformers_folder(path):
        return Modules()
    file = path / "modules.json"
    modules = read_any_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{file}: no list of modules.")
    pooling: Pooling | None = None
    dense: list[DenseLayer] = []
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in _ORDER]:
        raise ModelError(f"{file}: modules of type {unknown[0]!r} are not supported.")
    if kinds != sorted(kinds, key=_ORDER.index):
        raise ModelError(f"{file}: modules in the order {', '.join(kinds)} are not supported.")
    for kind, module in zip(kinds, modules):
        folder = path / str(module.get("path"))
        if kind == "Pooling":
            pooling = _read_pooling(folder / "config.json")
        elif kind == "Dense":
            dense.append(_read_dense(folder, dense[-1].outputs if dense else hidden_size))
    return Modules(pooling, tuple(dense), "Normalize" in kinds)


def _read_pooling(file: Path) -> Pooling:
    config = read_json(file)
    if config.get("include_prompt") is False:
        raise ModelError(f"{file}: include_prompt false is not supported.")
    if "pooling_mode" in config:  # written by sentence-transformers 5 and later
        chosen = [str(config["pooling_mode"])]
        chosen = ["last" if name == "lasttoken" else name for name in chosen]
    else:
        chosen = [
            _POOLINGS.get(name, name)
            for name in config
            if name.startswith("pooling_mode_") and config[name]
        ]
    for pooling in _POOLINGS.values():
        if chosen == [pooling]:
            return pooling
    raise ModelError(
        f"{file}: pooling by {' and '.join(chosen) or 'nothing'} is not supported (mean, cls, lasttoken)."
    )


def _read_dense(folder: Path, inputs: int) -> DenseLayer:
    file = folder / "config.json"
    config = read_json(file)
    check(config, _DENSE, str(file))
    if config["in_features"] != inputs:
        raise ModelError(
            f"{file}: in_features is {config['in_features']}, and what comes has {inputs} numbers."
        )
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh").rpartition(
        "."
    )[2]
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"{file}: the activation {activation} is not supported (only {', '.join(ACTIVATIONS)})."
        )
    return DenseLayer(folder, inputs, config["out_features"], config.get("bias", True), activation)


def read_max_tokens(path: Path) -> int | None:
    """Returns the maximum number of tokens in a text, or None if the folder does not define it."""
    file = path / "sentence_bert_config.json"
    if not file.exists():
        return None
    config = read_json(file)
    check(config, {"max_seq_length": Field("whole", 3, 1 << 24)}, str(file))
    limit: int | None = config.get("max_seq_length")
    return limit


def read_prompts(path: Path) -> Prompts:
    """Reads the prompts of a folder.

    Raises:
        ModelError: a prompt is not text, or the default prompt does not exist.
    """
    file = path / "config_sentence_transformers.json"
    config: Mapping[str, Json] = read_json(file) if file.exists() else {}
    named = config.get("prompts") or {}
    if not isinstance(named, dict) or not all(isinstance(text, str) for text in named.values()):
        raise ModelError(f"{file}: `prompts`: {abbreviate(named)} is no object of texts.")
    name = config.get("default_prompt_name")
    if name is not None and named.get(name) is None:
        raise ModelError(
            f"{file}: default_prompt_name is {abbreviate(name)}, and prompts has no text of that name."
        )
    return Prompts(named, "" if name is None else named[name])
