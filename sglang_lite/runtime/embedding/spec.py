"""Specification of a model that reads texts, from a Hugging Face or sentence-transformers folder. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.embedding.bert_spec import FAMILIES as ENCODERS
from sglang_lite.runtime.embedding.bert_spec import BertSpec, bert_spec
from sglang_lite.runtime.embedding.sentence_transformers import (
    DenseLayer,
    Pooling,
    Prompts,
    has_modules,
    read_limit,
    read_modules,
    read_prompts,
)
from sglang_lite.runtime.models.config_fields import Field, Json, check, read_json, shown
from sglang_lite.runtime.models.families import ARCHITECTURES
from sglang_lite.runtime.models.read_config import is_bidirectional, spec_from_config
from sglang_lite.runtime.models.spec import ModelSpec

_CAUSAL = "ForCausalLM"
# Architectures of decoders with another head or none -> architecture with the same layers and a language model head.
_DECODERS: Mapping[str, str] = {
    name.removesuffix(_CAUSAL).replace("Gemma3", "Gemma3Text") + head: name
    for name in ARCHITECTURES
    if name.endswith(_CAUSAL)
    for head in ("Model", "ForSequenceClassification")
}
_FIELDS = {
    "problem_type": Field("text"),
    "id2label": Field("object"),
    "num_labels": Field("whole", 1, 1 << 20),
}


@dataclass(frozen=True, slots=True)
class Classifier:
    """Head that gives a number for each label.

    Attributes:
        inner: module name of a layer before it, with tanh; "" for none.
        outer: module name of the last layer.
        bias: whether the last layer has a bias.
        labels: names of the labels, by index.
        multi_label: whether a text may have several labels.
        raw_score: whether a single score is used as it is, without a sigmoid.
    """

    inner: str
    outer: str
    bias: bool
    labels: tuple[str, ...]
    multi_label: bool
    raw_score: bool


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Specification of a model that reads texts: layers, and the steps from hidden states to numbers.

    Attributes:
        architecture: architecture in `config.json`.
        layers: specification of an encoder, or of a decoder that is used without its head.
        limit: largest number of tokens of a text, special tokens included.
        pooling: way in which hidden states of tokens become one vector per text.
        dense: linear layers that the pooled vector passes through.
        normalise: whether vectors are scaled to length 1.
        prompts: texts to be put before the user's texts.
        classifier: head of a model that gives numbers by label, or None for a model that gives vectors.
    """

    architecture: str
    layers: BertSpec | ModelSpec
    limit: int
    pooling: Pooling
    dense: tuple[DenseLayer, ...]
    normalise: bool
    prompts: Prompts
    classifier: Classifier | None

    @property
    def vocab_size(self) -> int:
        return self.layers.vocab_size

    @property
    def width(self) -> int:
        """Number of values that the model returns for a text."""
        if self.classifier is not None:
            return len(self.classifier.labels)
        return self.dense[-1].outputs if self.dense else self.layers.hidden_size


def is_encoder(path: Path) -> bool:
    """True if a folder holds a model that gives embeddings, scores or classes."""
    if not path.is_dir():
        return False
    config = read_json(path / "config.json")
    name = _architecture(config)
    reads = has_modules(path) or is_bidirectional(config)
    return name in ENCODERS or name in _DECODERS or (name in ARCHITECTURES and reads)


def _architecture(config: Mapping[str, Json]) -> str:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def encoder_spec(path: Path) -> EncoderSpec:
    """Reads the specification from a folder for which `is_encoder` is True.

    Raises:
        ModelError: an option is not supported, or a field is missing or invalid.
    """
    file = path / "config.json"
    config = read_json(file)
    architecture = _architecture(config)
    layers: BertSpec | ModelSpec
    pooling: Pooling
    classifier = None
    if architecture in ENCODERS:
        layers = bert_spec(config, architecture, file)
        limit, pooling = layers.limit, "mean"
        if names := ENCODERS[architecture][1]:
            classifier, pooling = _classifier(config, names, file), "cls"
    else:
        layers = _layers(config, architecture, file)
        limit, pooling = layers.max_positions, "last"
        if architecture.endswith("ForSequenceClassification"):
            classifier = _classifier(config, ("", "score"), file)
    modules = read_modules(path, layers.hidden_size)
    if classifier is not None and (modules.pooling or modules.dense):
        raise ModelError(f"{path}/modules.json: {architecture} gives a number for each label, no vectors to pool.")
    return EncoderSpec(
        architecture=architecture,
        layers=layers,
        limit=min(limit, read_limit(path) or limit),
        pooling=modules.pooling or pooling,
        dense=modules.dense,
        normalise=modules.normalise,
        prompts=read_prompts(path),
        classifier=classifier,
    )


def _layers(config: Mapping[str, Json], architecture: str, file: Path) -> ModelSpec:
    """Specification of a decoder's layers, without the settings of its language model head."""
    found = spec_from_config({**config, "architectures": [_DECODERS.get(architecture, architecture)]}, str(file))
    return replace(found, tied_embeddings=True, logit_scale=1.0, logit_softcap=None)


def _classifier(config: Mapping[str, Json], layers: tuple[str, str], file: Path) -> Classifier:
    check(config, _FIELDS, str(file))
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
    inner, outer = layers
    return Classifier(
        inner, outer, bias=bool(inner), labels=tuple(map(str, labels)),
        multi_label=kind == "multi_label_classification", raw_score=function == "Identity" or kind == "regression",
    )  # fmt: skip
