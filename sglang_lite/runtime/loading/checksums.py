"""Compares SHA-256 sums of a model's files with a list."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import abbreviate, read_text

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")  # line of sha256sum
_SUM = re.compile(r"[0-9a-f]{64}")


def check_files(path: Path, listed: Path, read: Collection[Path]) -> None:
    """Compares the files of a model with a list of SHA-256 sums.

    Args:
        path: folder or file of the model.
        read: its weight files, which must be listed.
        listed: list with lines of `sha256sum`, or JSON: sums by file name, optionally as
            `{"sha256": …}` and inside `files`, as SGLang's verifier writes them.

    Raises:
        ModelError: a sum differs, a file is missing or not listed, or the list can't be read.
    """
    folder = path.parent if path.is_file() else path
    sums = _read_sums(listed)
    weights = [each.relative_to(folder).as_posix() for each in read]
    if unlisted := sorted(name for name in weights if name not in sums):
        raise ModelError(
            f"{listed}: has no sum of {unlisted[0]} ({len(unlisted)} of {len(weights)} files).",
            hint="List all files of weights, those of folders, too.",
        )
    chosen = {name: each for name, each in sums.items() if folder == path or name == path.name}
    chosen = {
        name: each for name, each in chosen.items() if (folder / name).resolve() != listed.resolve()
    }
    if missing := sorted(name for name in chosen if not (folder / name).is_file()):
        raise ModelError(f"{folder}: {missing[0]} is missing, which {listed} lists.")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = dict(zip(chosen, pool.map(lambda name: _sha256_of(folder / name), chosen)))
    if different := sorted(name for name in chosen if found[name] != chosen[name]):
        name = different[0]
        raise ModelError(
            f"{folder / name}: its SHA-256 is {found[name]}, and {listed} says {chosen[name]} "
            f"({len(different)} of {len(chosen)} files differ).",
            hint="Fetch the file again.",
        )


def _sha256_of(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read_sums(listed: Path) -> Mapping[str, str]:
    """Returns the listed sums by file name, relative to the folder."""
    text = read_text(listed)
    try:
        content: Any = json.loads(
            text, object_pairs_hook=lambda pairs: _dict_without_conflicts(listed, pairs)
        )
    except (ValueError, RecursionError):
        lines = [_LINE.fullmatch(line) for line in text.splitlines() if line.strip()]
        content = (
            _dict_without_conflicts(listed, [(match[2], match[1]) for match in lines if match])
            if all(lines)
            else None
        )
    if isinstance(content, dict) and isinstance(content.get("files"), dict):
        content = content["files"]
    if not isinstance(content, dict) or not content:
        raise ModelError(
            f"{listed}: no list of SHA-256 sums.", hint="Write one: sha256sum * > sums.txt"
        )
    sums: dict[str, str] = {}
    for name, said in content.items():
        found = said.get("sha256") if isinstance(said, dict) else said
        if not isinstance(found, str) or not _SUM.fullmatch(found.lower()):
            raise ModelError(f"{listed}: {abbreviate(said)} is no SHA-256 of {name}.")
        if not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts or "\0" in name:
            raise ModelError(f"{listed}: names {abbreviate(name)}, which is no file of the folder.")
        if sums.setdefault(PurePath(name).as_posix(), found.lower()) != found.lower():
            raise ModelError(f"{listed}: has two sums of {name}.")
    return sums


def _dict_without_conflicts(
    listed: Path, pairs: Sequence[tuple[str, Any]]
) -> dict[str, Any]:  # JSON
    found: dict[str, Any] = {}
    for name, value in pairs:
        if found.setdefault(name, value) != value:
            raise ModelError(f"{listed}: has two sums of {name}.")
    return found
