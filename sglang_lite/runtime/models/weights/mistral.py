"""Weights in the files that Mistral publishes beside `params.json`: under Mistral's own names, and
with the rows of queries and keys ordered in rotary pairs.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.models.folder_config import PARAMS, config_of_params
from sglang_lite.runtime.models.weights.quantised_formats import Matrices
from sglang_lite.runtime.models.weights.ranges import LocalRanges, RangeSource
from sglang_lite.runtime.models.weights.source import EncodedMatrix, EncodedStack, Stored

_FILE = re.compile(r"consolidated(?:-(\d+)-of-(\d+))?\.safetensors")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_OF_MODEL = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attention.w{part}": f"self_attn.{part}_proj" for part in "qkvo"},
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_OF_EXPERTS = "feed_forward.", "block_sparse_moe."  # for other modules: the router and the experts
_ROTATED = re.compile(r"\.self_attn\.[qk]_proj\.weight$")


def mistral_files(folder: Path) -> set[Path]:
    """Returns the files `consolidated*.safetensors` of a folder. Raises ModelError if there are
    none, or one is missing.
    """
    found = {
        path: match for path in sorted(folder.iterdir()) if (match := _FILE.fullmatch(path.name))
    }
    whole = {path for path, match in found.items() if match[1] is None}
    parts = {int(match[1]) for match in found.values() if match[1]}
    counts = {int(match[2]) for match in found.values() if match[2]}
    if not found:
        raise ModelError(
            f"{folder}: there is no consolidated.safetensors.", hint='Use load_format="auto".'
        )
    if not whole and (
        len(counts) > 1 or len(parts) < max(counts) or parts != {*range(1, len(parts) + 1)}
    ):
        raise ModelError(
            f"{folder}: of the files consolidated-*.safetensors, {len(parts)} of {max(counts)} are there."
        )
    for path in whole or found:
        if not path.is_file():  # opening a pipe would block for ever
            raise ModelError(f"{path}: not a regular file.", hint="Replace it by the file itself.")
    return whole or set(found)


class MistralSource(RangeSource):
    """Source of the tensors of Mistral's files.

    Args:
        folder: folder of the model, with its `params.json`.
        matrices: as for FolderSource.
        threads, pinned: as for RangeSource.
    """

    def __init__(self, folder: Path, matrices: Matrices, threads: int, *, pinned: bool) -> None:
        file = folder / PARAMS
        config = config_of_params(read_json(file), str(file))
        self._head_size: int = (
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        )
        files = mistral_files(folder)
        super().__init__(
            folder,
            files,
            matrices,
            LocalRanges(),
            threads,
            pinned=pinned,
            renamed=_huggingface_name,
        )

    def take_tensor_or_stack(self, name: str, shape: tuple[int, ...]) -> Stored:
        weight = super().take_tensor_or_stack(name, shape)
        if not _ROTATED.search(name) or isinstance(weight, EncodedStack):
            return weight
        whole = weight.decode(0, shape[0]) if isinstance(weight, EncodedMatrix) else weight
        rows, columns = shape
        if rows % self._head_size:
            raise ModelError(
                f"{self.label}: {name} has {rows} rows, not a multiple of the head size "
                f"{self._head_size}."
            )
        pairs: torch.Tensor = whole.view(-1, self._head_size // 2, 2, columns)
        return pairs.transpose(1, 2).reshape(rows, columns)


def _huggingface_name(name: str) -> str:
    """Returns a tensor's name in Hugging Face's files. Names that those files don't have are kept."""
    module, _, kind = name.rpartition(".")
    if match := _LAYER.fullmatch(module):
        inner = match[2].replace(*_OF_EXPERTS) if match[2] not in _OF_LAYER else _OF_LAYER[match[2]]
        return f"model.layers.{match[1]}.{inner}.{kind}"
    return f"{_OF_MODEL.get(module, module)}.{kind}"
