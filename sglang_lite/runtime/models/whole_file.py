"""Checks of downloaded files: their hash, and the disk space for them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from sglang_lite.protocol import DownloadError


def has_expected_hash(path: Path, sha256: str, note: Path | None = None) -> bool:
    """Returns whether a file, or a folder's `model.safetensors`, has this hash.

    The result is recorded in a note with the file's size and modification time, because computing
    the hash would take a twentieth of each start.

    Args:
        path: the file or folder.
        sha256: the hash, in hexadecimal.
        note: path of the note; None for one beside `path`.
    """
    weights = path / "model.safetensors" if path.is_dir() else path
    if not weights.exists():
        return False
    stat = weights.stat()
    note = note or path.with_name(f".{path.name}.checked")
    checked = f"{sha256} {stat.st_size} {stat.st_mtime_ns}".encode()
    with contextlib.suppress(OSError):
        if note.read_bytes() == checked:
            return True
    if hash_file(weights) != sha256:
        return False
    with contextlib.suppress(OSError):  # a folder that can't be written
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_bytes(checked)
    return True


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_disk_space(folder: Path, needed: int, what: str, setting: str) -> None:
    """Checks that a disk has room for a download.

    Args:
        folder: folder for the file; it need not exist.
        needed: bytes of the download.
        what: description of the file, for the message.
        setting: environment variable that names another folder.

    Raises:
        DownloadError: less is free than needed; the message has both numbers.
    """
    around = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    free = shutil.disk_usage(around).free
    if free < needed:
        raise DownloadError(
            f"{folder}: {free / 1e6:,.0f} MB free, {needed / 1e6:,.0f} MB needed for {what}.",
            hint=f"Free some space, or set {setting} to a folder on another disk.",
        )


def describe_proxies() -> str:
    """Returns the names of the environment variables that set a proxy, as part of a sentence, or ""
    if there are none.
    """
    names = [
        name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")
    ]
    return f", the proxy ({', '.join(names)})" if names else ""
