"""Specification of a BERT-like encoder, read from its config. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import Field, Json, check

# Architecture -> prefix of its tensor names, and names of its classifier's two layers or None.
FAMILIES: Mapping[str, tuple[str, tuple[str, str] | None]] = {
    "BertModel": ("bert.", None),
    "BertForSequenceClassification": ("bert.", ("bert.pooler.dense", "classifier")),
    "RobertaModel": ("roberta.", None),
    "RobertaForSequenceClassification": ("roberta.", ("classifier.dense", "classifier.out_proj")),
    "XLMRobertaModel": ("roberta.", None),
    "XLMRobertaForSequenceClassification": ("roberta.", ("classifier.dense", "classifier.out_proj")),
}
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
}
_ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}  # torch's `approximate` of each


@dataclass(frozen=True, slots=True)
class BertSpec:
    """Shape of a BERT-like encoder.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: elements of a hidden state.
        num_layers, num_heads: number of layers, and of attention heads.
        intermediate_size: intermediate size of the feed-forwards.
        max_positions: size of the position table.
        type_vocab_size: number of token types.
        first_position: position of a text's first token.
        norm_eps: epsilon of the layer norms.
        gelu: torch's name of the GELU approximation.
        prefix: prefix of the tensor names, which a checkpoint may leave out.
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
        """Largest number of tokens of a text."""
        return self.max_positions - self.first_position


def bert_spec(config: Mapping[str, Json], architecture: str, file: Path) -> BertSpec:
    """Returns the specification of an encoder from its config.

    Args:
        config: parsed `config.json`.
        architecture: key of `FAMILIES`.
        file: path of the config, for messages.

    Raises:
        ModelError: an option is not supported, or a field is missing or invalid.
    """
    check(config, _FIELDS, str(file))
    if (activation := config.get("hidden_act", "gelu")) not in _ACTIVATIONS:
        raise ModelError(f"{file}: the activation {activation!r} is not supported (only {', '.join(_ACTIVATIONS)}).")
    if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        raise ModelError(f"{file}: position_embedding_type {kind!r} is not supported (only 'absolute').")
    if config.get("is_decoder"):
        raise ModelError(f"{file}: is_decoder is set: texts are read in both directions here.")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise ModelError(f"{file}: hidden_size {hidden} can't be shared by {heads} attention heads.")
    prefix, _ = FAMILIES[architecture]
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
