"""Converts a Whisper of CTranslate2 to a folder of Hugging Face's layout.

CTranslate2 keeps `model.bin` (a version, a kind of model, its revision, and arrays by name),
`config.json` and `tokenizer.json`. It stacks what is multiplied together: queries, keys and values,
and keys and values of a sound.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import WhisperConfig, WhisperFeatureExtractor

END, START = 50_257, 50_258
KINDS = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}  # of numbers


def whisper_config(
    width: int, layers: int, decoder_layers: int, heads: int, bins: int, vocab: int
) -> WhisperConfig:
    """Returns the config of a Whisper by its sizes."""
    return WhisperConfig(
        vocab_size=vocab, d_model=width, encoder_layers=layers, decoder_layers=decoder_layers, num_mel_bins=bins,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, bos_token_id=END, eos_token_id=END, pad_token_id=END, decoder_start_token_id=START,
        architectures=["WhisperForConditionalGeneration"],
    )  # fmt: skip


def save_rest(folder: Path, config: WhisperConfig) -> None:
    """Saves all that belongs to a model but weights and tokenizer."""
    config.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(folder)
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def read_weights(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the arrays in a `model.bin` by name."""
    with open(file, "rb") as data:

        def number(kind: str) -> int:
            found: int = struct.unpack(f"<{kind}", data.read(struct.calcsize(kind)))[0]
            return found

        def text() -> str:
            return data.read(number("H")).rstrip(b"\0").decode()

        number("I"), text(), number("I")  # version, kind of model, and its revision
        found = {}
        for _ in range(number("I")):
            name, shape = text(), [number("I") for _ in range(number("B"))]
            kind, size = number("B"), number("I")
            found[name] = np.frombuffer(data.read(size), KINDS[kind]).reshape(shape)
    return found


def rename(given: dict[str, np.ndarray[Any, Any]]) -> dict[str, torch.Tensor]:
    """Returns the arrays as transformers names and cuts them, in float32."""
    found: dict[str, torch.Tensor] = {}

    def put(name: str, whose: str, part: slice = slice(None)) -> None:
        found[name] = torch.from_numpy(np.array(given[whose][part], dtype=np.float32))

    def linear(name: str, whose: str, parts: str = "") -> None:
        """Puts a product, or those that are stacked in it, each with a letter instead of "?" in its
        name.
        """
        size = len(given[f"{whose}/weight"]) // max(len(parts), 1)
        for i, letter in enumerate(parts or " "):
            part, at = slice(i * size, (i + 1) * size), name.replace("?", letter)
            put(f"{at}.weight", f"{whose}/weight", part)
            if letter != "k":
                put(f"{at}.bias", f"{whose}/bias", part)

    def norm(name: str, whose: str) -> None:
        put(f"{name}.weight", f"{whose}/gamma")
        put(f"{name}.bias", f"{whose}/beta")

    for side in ("encoder", "decoder"):
        put(f"model.{side}.embed_positions.weight", f"{side}/position_encodings/encodings")
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for i in range(count_layers(given, side)):
            name, whose = f"model.{side}.layers.{i}", f"{side}/layer_{i}"
            norm(f"{name}.self_attn_layer_norm", f"{whose}/self_attention/layer_norm")
            linear(f"{name}.self_attn.?_proj", f"{whose}/self_attention/linear_0", "qkv")
            linear(f"{name}.self_attn.out_proj", f"{whose}/self_attention/linear_1")
            if side == "decoder":
                norm(f"{name}.encoder_attn_layer_norm", f"{whose}/attention/layer_norm")
                linear(f"{name}.encoder_attn.?_proj", f"{whose}/attention/linear_0", "q")
                linear(f"{name}.encoder_attn.?_proj", f"{whose}/attention/linear_1", "kv")
                linear(f"{name}.encoder_attn.out_proj", f"{whose}/attention/linear_2")
            norm(f"{name}.final_layer_norm", f"{whose}/ffn/layer_norm")
            linear(f"{name}.fc1", f"{whose}/ffn/linear_0")
            linear(f"{name}.fc2", f"{whose}/ffn/linear_1")
    linear("model.encoder.conv1", "encoder/conv1")
    linear("model.encoder.conv2", "encoder/conv2")
    put("model.decoder.embed_tokens.weight", "decoder/embeddings/weight")
    return found


def count_layers(given: dict[str, np.ndarray[Any, Any]], side: str) -> int:
    return sum(
        name.startswith(f"{side}/layer_") and name.endswith("/ffn/linear_0/weight")
        for name in given
    )


def convert(source: Path, folder: Path) -> None:
    """Saves a folder of CTranslate2 as transformers has it."""
    given = read_weights(source / "model.bin")
    found = rename(given)
    vocab, width = found["model.decoder.embed_tokens.weight"].shape
    bins = found["model.encoder.conv1.weight"].shape[1]
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    layers, decoder_layers = (count_layers(given, side) for side in ("encoder", "decoder"))
    save_rest(folder, whisper_config(width, layers, decoder_layers, width // 64, bins, vocab))
    shutil.copy(source / "tokenizer.json", folder)
    saved, tokenizer = (
        json.loads((source / name).read_text()) for name in ("config.json", "tokenizer.json")
    )
    ids = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    rules = {
        "suppress_tokens": saved["suppress_ids"], "begin_suppress_tokens": saved["suppress_ids_begin"],
        "max_initial_timestamp_index": 50, "is_multilingual": vocab > 51_864, "max_length": 448,
        "no_timestamps_token_id": ids["<|notimestamps|>"], "decoder_start_token_id": START, "eos_token_id": END,
        "pad_token_id": END, "lang_to_id": {text: at for text, at in ids.items() if at in set(saved["lang_ids"])},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(rules))
