"""Weights of a GGUF file (gguf_file.py) as tensors, by Hugging Face's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.weights.gguf_file import GgufFile, GgufTensor
from sglang_lite.runtime.models.weights.source import Blocks4, Encoded, Weight, WeightSource

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufSource(WeightSource):
    """The tensors of a GGUF file by Hugging Face name.

    llama.cpp stores the rows of q and k of `llama` models for interleaved rotary pairs; they are put back into the
    halves-apart order that the decoder uses.

    Args:
        file: the opened file.
        num_heads, num_kv_heads: for undoing that order.
    """

    def __init__(self, file: GgufFile, num_heads: int, num_kv_heads: int) -> None:
        self._tensors = {hugging_face_name(name, str(file.path)): tensor for name, tensor in file.tensors.items()}
        interleaved = file.metadata["general.architecture"] == "llama"
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads} if interleaved else {}
        super().__init__(str(file.path), dict.fromkeys(self._tensors, file.path))

    def _read(self, name: str, file: Path) -> Weight:
        tensor = self._tensors[name]
        heads = next((n for part, n in self._heads.items() if f".{part}." in name), None)
        rows = tensor.shape[0]
        # take() refuses a shape that the heads don't divide.
        order = _halves_apart(rows, heads) if heads and rows % (2 * heads) == 0 else slice(None)
        data = tensor.data()
        if len(tensor.shape) == 1:
            return _Rows(data, tensor).decode(0, 1)[0][order]
        if tensor.kind in ("Q4_0", "Q4_1"):
            return _blocks4(data[order], with_minimum=tensor.kind == "Q4_1")
        return _Rows(data[order], tensor)


class _Rows(Encoded):
    """Rows of bytes of any kind."""

    def __init__(self, data: np.ndarray[Any, Any], tensor: GgufTensor) -> None:
        super().__init__(tensor.shape)
        self._data, self._kind = data, tensor.kind

    def decode(self, start: int, end: int) -> torch.Tensor:
        data = self._data[start:end]
        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        if self._kind in plain:
            return torch.from_numpy(np.array(data)).view(plain[self._kind]).float()
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(data, GGMLQuantizationType[self._kind]))


def hugging_face_name(name: str, label: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_BLOCK:
        return f"model.layers.{parts[1]}.{_IN_BLOCK[parts[2]]}.{parts[3]}"
    raise ModelError(f"{label}: the tensor {name!r} is of no supported architecture.")


def _halves_apart(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """The order that brings rows [heads, half, 2] to [heads, 2, half]."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _blocks4(data: np.ndarray[Any, np.dtype[np.uint8]], *, with_minimum: bool) -> Blocks4:
    """Q4_0: 2 bytes scale d, 16 bytes of nibbles, value d*(q-8). Q4_1: 2 bytes d, 2 bytes m, nibbles, d*q+m.
    The low nibbles are the block's first 16 values, the high ones its last 16."""
    header = 4 if with_minimum else 2
    rows = data.shape[0]
    blocks = torch.from_numpy(np.array(data)).view(rows, -1, header + 16)
    head = blocks[:, :, :header].contiguous().view(torch.float16).float()
    scale = head[:, :, 0].contiguous()
    minimum = head[:, :, 1].contiguous() if with_minimum else -8.0 * scale
    nibbles = blocks[:, :, header:]
    q = torch.cat((nibbles & 0x0F, nibbles >> 4), dim=-1).reshape(rows, -1)
    return Blocks4(q, scale, minimum)
