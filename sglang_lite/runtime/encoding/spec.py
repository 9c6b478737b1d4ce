"""Specification of an encoder, read from a Hugging Face or sentence-transformers folder. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import Field, Json, check, read_any_json, read_json, shown

Pooling: TypeAlias = Literal["mean", "cls", "last"]

# Architecture: prefix of its tensors, names of its classifier ("" for none), first position.
_FAMILIES: Mapping[str, tuple[str, tuple[str, str] | None]] = {
    "BertModel": ("bert.", None),
    "BertForSequenceClassification": ("bert.", ("bert.pooler.dense", "classifier")),
    "RobertaModel": ("roberta.", None),
    "RobertaForSequenceClassification": ("roberta.", ("classifier.dense", "classifier.out_proj")),
    "XLMRobertaModel": ("roberta.", None),
    "XLMRobertaForSequenceClassification": ("roberta.", ("classifier.dense", "classifier.out_proj")),
}
ARCHITECTURES = tuple(_FAMILIES)
_FIELDS = {
    "vocab_size": Field("whole", 1, 1 << 24, required=True),
    "hidden_size": Field("whole", 1, 1 << 20, required=True),
    "num_hidden_layers": Field("whole", 1, 4096, required=True),
    "num_attention_heads": Field("whole", 1, 4096, required=True),
    "intermediate_size": Field("whole", 1, 1 << 24, required=True),
    "max_position_embeddings": Field("whole", 1, 1 << 24, required=True),
    "type_vocab_size": Field("whole", 1, 1 << 16),
    "layer_norm_eps": Field("number", 0, 1),
    "hidden_act": Field("text"),
    "pad_token_id": Field("whole", 0, 1 << 24),
    "position_embedding_type": Field("text"),
    "is_decoder": Field("flag"),
    "problem_type": Field("text"),
    "id2label": Field("object"),
    "num_labels": Field("whole", 1, 1 << 20),
}
_ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}  # torch's `approximate`
_POOLINGS: Mapping[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class Classifier:
    """Head of an encoder: a layer with tanh over the first token, and one that gives a number a label.

    Attributes:
        inner, outer: names of the two layers' tensors.
        labels: by their numbers.
        several: labels don't exclude each other.
        plain: a single score is taken as it is, instead of its sigmoid.
    """

    inner: str
    outer: str
    labels: tuple[str, ...]
    several: bool
    plain: bool


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """The shape of an encoder of BERT's family.

    Attributes:
        first_position: of a text's first token.
        limit: tokens of a text, those that enclose it among them.
        gelu: torch's name of the approximation.
        prefix: of the tensors' names, where a checkpoint has one.
        pooling: how a text's vector is made of its tokens'.
        normalise: vectors have length 1.
        prompt: text that goes before each.
        classifier: None for a model that gives vectors.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    type_vocab_size: int
    first_position: int
    limit: int
    norm_eps: float
    gelu: str
    prefix: str
    pooling: Pooling
    normalise: bool
    prompt: str
    classifier: Classifier | None

    @property
    def width(self) -> int:
        """Numbers that a text gives."""
        return self.hidden_size if self.classifier is None else len(self.classifier.labels)


def is_encoder(path: Path) -> bool:
    """True for the folder of a model that gives embeddings, scores or classes."""
    return path.is_dir() and _architecture(read_json(path / "config.json")) in _FAMILIES


def _architecture(config: Mapping[str, Json]) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def encoder_spec(path: Path) -> EncoderSpec:
    """Reads a folder of an encoder: `config.json`, and what sentence-transformers puts beside it.

    Raises:
        ModelError: an option that is not supported, or a field that is missing or senseless.
    """
    file = path / "config.json"
    config = read_json(file)
    check(config, _FIELDS, str(file))
    architecture = _architecture(config)
    assert architecture is not None
    prefix, head = _FAMILIES[architecture]
    _refuse(config, file)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise ModelError(f"{file}: hidden_size {hidden} can't be shared by {heads} attention heads.")
    first = 0 if prefix == "bert." else config.get("pad_token_id", 1) + 1
    limit = config["max_position_embeddings"] - first
    if limit < 3:
        raise ModelError(f"{file}: max_position_embeddings leaves room for {limit} tokens.")
    pooling, normalise = _modules(path)
    return EncoderSpec(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        intermediate_size=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        type_vocab_size=config.get("type_vocab_size", 2),
        first_position=first,
        limit=min(limit, _own_limit(path) or limit),
        norm_eps=config.get("layer_norm_eps", 1e-12),
        gelu=_ACTIVATIONS[config.get("hidden_act", "gelu")],
        prefix=prefix,
        pooling=pooling,
        normalise=normalise,
        prompt=_prompt(path),
        classifier=None if head is None else _classifier(config, head, file),
    )


def _refuse(config: Mapping[str, Json], file: Path) -> None:
    if (activation := config.get("hidden_act", "gelu")) not in _ACTIVATIONS:
        raise ModelError(f"{file}: the activation {activation!r} is not supported (only {', '.join(_ACTIVATIONS)}).")
    if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        raise ModelError(f"{file}: position_embedding_type {kind!r} is not supported (only 'absolute').")
    if config.get("is_decoder"):
        raise ModelError(f"{file}: is_decoder is set: texts are read in both directions here.")


def _classifier(config: Mapping[str, Json], head: tuple[str, str], file: Path) -> Classifier:
    names = config.get("id2label") or {str(i): f"LABEL_{i}" for i in range(config.get("num_labels", 2))}
    labels = [names.get(str(i)) for i in range(len(names))]
    if not labels or not all(isinstance(label, str) for label in labels):
        raise ModelError(f"{file}: id2label is {shown(names)}: no text for each number from 0 on.")
    kind = config.get("problem_type")
    ours = config.get("sentence_transformers") or {}
    function = ours.get("activation_fn") or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    function = str(function).rpartition(".")[2]
    if function not in ("Sigmoid", "Identity"):
        raise ModelError(f"{file}: scores by {function} are not supported (only Sigmoid and Identity).")
    return Classifier(
        *head, labels=tuple(map(str, labels)), several=kind == "multi_label_classification",
        plain=function == "Identity" or kind == "regression",
    )  # fmt: skip


def _modules(path: Path) -> tuple[Pooling, bool]:
    """Pooling of a sentence-transformers folder, and whether vectors are normalised; the mean, as it is, by default."""
    file = path / "modules.json"
    if not file.exists():
        return "mean", False
    modules = read_any_json(file)
    pooling: Pooling = "mean"
    normalise = False
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{file}: no list of modules.")
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(path / str(module.get("path")) / "config.json")
        elif kind == "Normalize":
            normalise = True
        elif kind != "Transformer":
            raise ModelError(f"{file}: modules of type {kind!r} are not supported.")
    return pooling, normalise


def _pooling(file: Path) -> Pooling:
    config = read_json(file)
    if "pooling_mode" in config:  # since sentence-transformers 5
        chosen = [str(config["pooling_mode"])]
        chosen = ["last" if name == "lasttoken" else name for name in chosen]
    else:
        chosen = [_POOLINGS.get(name, name) for name in config if name.startswith("pooling_mode_") and config[name]]
    for pooling in _POOLINGS.values():
        if chosen == [pooling]:
            return pooling
    raise ModelError(f"{file}: pooling by {' and '.join(chosen) or 'nothing'} is not supported (mean, cls, lasttoken).")


def _own_limit(path: Path) -> int | None:
    file = path / "sentence_bert_config.json"
    if not file.exists():
        return None
    config = read_json(file)
    check(config, {"max_seq_length": Field("whole", 3, 1 << 24)}, str(file))
    limit: int | None = config.get("max_seq_length")
    return limit


def _prompt(path: Path) -> str:
    """The text that sentence-transformers puts before each, where a folder names one."""
    file = path / "config_sentence_transformers.json"
    config = read_json(file) if file.exists() else {}
    name = config.get("default_prompt_name")
    if name is None:
        return ""
    prompt = (config.get("prompts") or {}).get(name)
    if not isinstance(prompt, str):
        raise ModelError(f"{file}: default_prompt_name is {shown(name)}, and prompts has no text of that name.")
    return prompt
