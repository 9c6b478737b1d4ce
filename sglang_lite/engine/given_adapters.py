"""Writes adapters (LoRA) that a caller passes as tensors to a folder in memory. The engine reads
the folder like any other adapter.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.core.submission import check_field_type

if TYPE_CHECKING:
    import torch


def write_adapter_folder(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],  # of peft: JSON, or sets of texts
) -> Path:
    """Writes an adapter to a new folder in peft's format, which only this user may read, and returns
    the folder.

    Args:
        tensors: matrices of the adapter, by their names in `adapter_model.safetensors`.
        config: content of the adapter's `adapter_config.json`.

    Raises:
        ParameterError: there are no tensors, an entry is not a tensor, the config can't be written
            as JSON, or there is too little space.
    """
    check_field_type("config_dict", config, dict)
    from sglang_lite.runtime.models.weights.given import (  # needs torch
        in_memory_folder,
        validate_named_tensors,
        write_tensors,
    )

    try:
        text = json.dumps(config, default=_sorted_list)
    except (TypeError, ValueError) as error:
        raise ParameterError("config_dict", f"can't be written as JSON: {error}") from error
    named = validate_named_tensors(tensors, "tensors")
    folder = Path(tempfile.mkdtemp(prefix="sglang_lite-lora-", dir=in_memory_folder()))
    try:
        write_tensors(named, folder / "adapter_model.safetensors", "tensors")
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder


def write_adapter_bytes(data: bytes, config: Mapping[str, Any]) -> Path:  # JSON
    """Writes an adapter like `write_adapter_folder`, from the content of its safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ParameterError(
            "serialized_named_tensors", f"is no safetensors file: {error}."
        ) from error
    return write_adapter_folder(tensors, config)


def _sorted_list(value: object) -> list[str]:
    """Returns a set of names as a list. Raises TypeError for anything else."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
