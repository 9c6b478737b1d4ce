"""Specification of an encoder, read from a Hugging Face or sentence-transformers folder. Needs no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.embedding.sentence_transformers import (
    DenseLayer,
    Pooling,
    Prompts,
    is_sentence_transformers_folder,
    read_max_tokens,
    read_modules,
    read_prompts,
)
from sglang_lite.runtime.models.config_fields import Field, Json, abbreviate, check, read_json
from sglang_lite.runtime.models.families import ARCHITECTURES
from sglang_lite.runtime.models.folder_config import read_config
from sglang_lite.runtime.models.read_config import is_bidirectional, spec_from_config
from sglang_lite.runtime.models.spec import ModelSpec

# Architecture -> prefix of its tensor names, and names of its classifier's two layers or None.
ENCODERS: Mapping[str, tuple[str, tuple[str, str] | None]] = {
    "BertModel": ("bert.", None),
    "BertForSequenceClassification": ("bert.", ("bert.pooler.dense", "classifier")),
    "RobertaModel": ("roberta.", None),
    "RobertaForSequenceClassification": ("roberta.", ("classifier.dense", "classifier.out_proj")),
    "XLMRobertaModel": ("roberta.", None),
    "XLMRobertaForSequenceClassification": (
        "roberta.",
        ("classifier.dense", "classifier.out_proj"),
    ),
}
_ENCODER_FIELDS = {
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
}
# torch's `approximate` of each
_ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
_CAUSAL = "ForCausalLM"
# Architectures of decoders with another head or none -> architecture with the same layers and a
# language model head.
_DECODERS: Mapping[str, str] = {
    name.removesuffix(_CAUSAL).replace("Gemma3", "Gemma3Text") + head: name
    for name in ARCHITECTURES
    if name.endswith(_CAUSAL)
    for head in ("Model", "ForSequenceClassification")
}
_CLASSIFIER_FIELDS = {
    "problem_type": Field("text"),
    "id2label": Field("object"),
    "num_labels": Field("whole", 1, 1 << 20),
}


@dataclass(frozen=True, slots=True)
class BertSpec:
    """Shape of a BERT-like encoder.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: number of elements in a hidden state.
        num_layers, num_heads: numbers of layers and of attention heads.
        intermediate_size: intermediate size of the feed-forwards.
        max_positions: size of the position table.
        type_vocab_size: number of token types.
        first_position: position of a text's first token.
        norm_eps: epsilon of the layer norms.
        gelu: torch's name of the GELU approximation.
        prefix: prefix of the tensor names, which a checkpoint may omit.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    type_vocab_size: int
    first_position: int
    norm_eps: float
    gelu: str
    prefix: str

    @property
    def limit(self) -> int:
        """Maximum number of tokens in a text."""
        return self.max_positions - self.first_position


@dataclass(frozen=True, slots=True)
class Classifier:
    """Head that returns one number per label.

    Attributes:
        inner: module name of a preceding layer with tanh; "" for none.
        outer: module name of the last layer.
        bias: whether the last layer has a bias.
        labels: names of the labels, by index.
        multi_label: whether a text may have several labels.
        raw_score: whether a single score is used without a sigmoid.
    """

    inner: str
    outer: str
    bias: bool
    labels: tuple[str, ...]
    multi_label: bool
    raw_score: bool


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Specification of an encoder: its layers, and how their hidden states become the values it
    returns.

    Attributes:
        architecture: architecture in `config.json`.
        layers: specification of an encoder, or of a decoder that is used without its head.
        limit: maximum number of tokens in a text, including special tokens.
        pooling: how the hidden states of tokens become one vector per text.
        dense: linear layers that the pooled vector passes through.
        normalise: whether vectors are scaled to length 1.
        prompts: texts to add before the user's texts.
        classifier: head of a model that returns numbers by label, or None for a model that returns
            vectors.
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
    """Returns True if a folder holds a model that returns embeddings, scores or classes."""
    if not path.is_dir():
        return False
    config = read_config(path)
    name = _architecture(config)
    reads = is_sentence_transformers_folder(path) or is_bidirectional(config)
    return name in ENCODERS or name in _DECODERS or (name in ARCHITECTURES and reads)


def _architecture(config: Mapping[str, Json]) -> str:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def encoder_spec(path: Path) -> EncoderSpec:
    """Reads the specification of an encoder from its folder, for which `is_encoder` must be True.

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
        layers = _bert_spec(config, architecture, file)
        limit = layers.limit
        pooling = "mean"
        if names := ENCODERS[architecture][1]:
            classifier = _read_classifier(config, names, file)
            pooling = "cls"
    else:
        layers = _decoder_layers(config, architecture, file)
        limit = layers.max_positions
        pooling = "last"
        if architecture.endswith("ForSequenceClassification"):
            classifier = _read_classifier(config, ("", "score"), file)
    modules = read_modules(path, layers.hidden_size)
    if classifier is not None and (modules.pooling or modules.dense):
        raise ModelError(
            f"{path}/modules.json: {architecture} gives a number for each label, no vectors to pool."
        )
    return EncoderSpec(
        architecture=architecture,
        layers=layers,
        limit=min(limit, read_max_tokens(path) or limit),
        pooling=modules.pooling or pooling,
        dense=modules.dense,
        normalise=modules.normalise,
        prompts=read_prompts(path),
        classifier=classifier,
    )


def _bert_spec(config: Mapping[str, Json], architecture: str, file: Path) -> BertSpec:
    check(config, _ENCODER_FIELDS, str(file))
    if (activation := config.get("hidden_act", "gelu")) not in _ACTIVATIONS:
        raise ModelError(
            f"{file}: the activation {activation!r} is not supported (only {', '.join(_ACTIVATIONS)})."
        )
    if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        raise ModelError(
            f"{file}: position_embedding_type {kind!r} is not supported (only 'absolute')."
        )
    if config.get("is_decoder"):
        raise ModelError(f"{file}: is_decoder is set: texts are read in both directions here.")
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    if hidden % heads:
        raise ModelError(
            f"{file}: hidden_size {hidden} can't be shared by {heads} attention heads."
        )
    prefix, _ = ENCODERS[architecture]
    spec = BertSpec(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        intermediate_size=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        type_vocab_size=config.get("type_vocab_size", 2),
        first_position=0 if prefix == "bert." else config.get("pad_token_id", 1) + 1,
        norm_eps=config.get("layer_norm_eps", 1e-12),
        gelu=_ACTIVATIONS[activation],
        prefix=prefix,
    )
    if spec.limit < 3:
        raise ModelError(f"{file}: max_position_embeddings leaves room for {spec.limit} tokens.")
    return spec


def _decoder_layers(config: Mapping[str, Json], architecture: str, file: Path) -> ModelSpec:
    """Returns the specification of a decoder whose language model head is not used."""
    found = spec_from_config(
        {**config, "architectures": [_DECODERS.get(architecture, architecture)]}, str(file)
    )
    return replace(found, tied_embeddings=True, logit_scale=1.0, logit_softcap=None)


def _read_classifier(config: Mapping[str, Json], layers: tuple[str, str], file: Path) -> Classifier:
    check(config, _CLASSIFIER_FIELDS, str(file))
    names = config.get("id2label") or {
        str(i): f"LABEL_{i}" for i in range(config.get("num_labels", 2))
    }
    labels = [names.get(str(i)) for i in range(len(names))]
    if not labels or not all(isinstance(label, str) for label in labels):
        raise ModelError(
            f"{file}: id2label is {abbreviate(names)}: no text for each number from 0 on."
        )
    kind = config.get("problem_type")
    ours = config.get("sentence_transformers") or {}
    function = (
        ours.get("activation_fn") or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    )
    function = str(function).rpartition(".")[2]
    if function not in ("Sigmoid", "Identity"):
        raise ModelError(
            f"{file}: scores by {function} are not supported (only Sigmoid and Identity)."
        )
    inner, outer = layers
    return Classifier(
        inner,
        outer,
        bias=bool(inner),
        labels=tuple(map(str, labels)),
        multi_label=kind == "multi_label_classification",
        raw_score=function == "Identity" or kind == "regression",
    )
