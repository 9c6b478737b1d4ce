"""Finds the model to verify, and rejects what can't be verified before anything is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from sglang_lite.commands.verify.records import Subject
from sglang_lite.protocol import CapabilityError, ModelError, ParameterError
from sglang_lite.runtime.embedding.spec import is_encoder
from sglang_lite.runtime.loading.description import describe
from sglang_lite.runtime.loading.model_files import open_model_files
from sglang_lite.runtime.models import memory_check
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.transformers_config import TransformersSpec
from sglang_lite.runtime.models.weights.remote import is_address

# File name endings of the files that determine what a model computes or reads.
_HASHED: Final = (".safetensors", ".bin", ".pt", ".json", ".jinja", ".model", ".txt")


def find_subject(name: str, settings: Mapping[str, str]) -> Subject:
    """Finds a model and hashes its files.

    Args:
        name: alias, folder, GGUF file or hub id, as for `Engine`.
        settings: settings of the served engine.

    Raises:
        ModelError: there is no such model, it can't run here, or it is larger than the free memory.
        DownloadError: it could not be fetched.
        CapabilityError: the model does not generate text from text.
        ParameterError: the name is an address, or `Engine` rejects the value of a setting.
    """
    if "://" in name or is_address(name):
        raise ParameterError(
            "NAME",
            f"{name!r} is an address, and transformers reads files.",
            hint="Copy the model to a folder.",
        )
    path = resolve(name)
    if is_encoder(path):
        raise CapabilityError(
            f"{name}: an embedding model, a reranker or a classifier generates nothing, and verify compares what "
            "models generate.",
            hint=f"`sglang-lite models {name}` tells what it serves; docs/embeddings.md, how to compare its vectors.",
        )
    found = describe(str(path), **settings)  # a name would cause more requests to the hub
    if found.refused:
        raise ModelError(f"{name}: {found.refused[0]}")
    files = open_model_files(path)
    if isinstance(files.spec, TransformersSpec) and files.spec.sound is not None:
        raise CapabilityError(
            f"{name}: it reads sounds and no text, and verify has prompts of text.",
            hint="docs/images.md tells how to try it with a sound.",
        )
    device = torch.device(found.device or "cpu")
    memory_check.check_free_memory(
        {"weights": found.loaded_bytes or 0},
        device,
        name,
        "Verify it on a machine with more memory, or a file of the model with fewer bits.",
    )
    return Subject(name, path, files, found, _hash_files(path), settings)


def min_float32_weight_bytes(subject: Subject) -> int:
    """Returns a lower bound on the bytes of the model's weights in float32."""
    spec = subject.files.spec
    if isinstance(spec, ModelSpec):
        return memory_check.weight_bytes(spec, 4)
    item = getattr(torch, subject.description.dtype or "float32").itemsize
    return (subject.description.loaded_bytes or 0) * 4 // int(item)


def min_float32_engine_bytes(subject: Subject) -> int:
    """Returns a lower bound on the bytes of the model's weights when an engine computes in float32.
    Weights that the engine multiplies in their stored format are not expanded.
    """
    in_blocks = subject.description.products.startswith("as they are stored")
    return (
        min(min_float32_weight_bytes(subject), subject.description.loaded_bytes or 0)
        if in_blocks
        else min_float32_weight_bytes(subject)
    )


def explain_memory_shortage(subject: Subject, needed: int, use: str) -> str:
    """Returns the reason why `needed` bytes of memory are not available, or "" if they are. The
    reason has the needed and the free memory in GiB.

    Args:
        use: what the memory is for, as the subject of the sentence.
    """
    free = memory_check.free_bytes(torch.device(subject.description.device or "cpu"))
    if free is None or needed <= free:
        return ""
    return f"{use} needs {needed / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free"


def _hash_files(path: Path) -> dict[str, str]:
    files = (
        [path]
        if path.is_file()
        else [each for each in sorted(path.iterdir()) if each.suffix in _HASHED]
    )
    sums = {}
    for file in files:
        if file.is_file():
            with file.open("rb") as opened:
                sums[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return sums
