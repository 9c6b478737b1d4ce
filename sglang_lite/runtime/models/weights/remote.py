"""Models at addresses that fsspec knows. The files that describe a model are copied to the cache;
weights are read by byte ranges.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from sglang_lite.protocol import DownloadError, ModelError
from sglang_lite.runtime.models.config_fields import MAX_BYTES

if TYPE_CHECKING:
    from sglang_lite.runtime.models.weights.ranges import Bytes

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://.+")
_NOT_HERE = ("redis",)  # SGLang's schemes without a file system in fsspec
_DESCRIBING = (".json", ".jinja", ".model", ".txt")  # suffixes of files that are copied
_COPIED = ".copied"  # list of the copied files, with keys that change when they do


def is_address(model: str) -> bool:
    """Returns whether a model's name is an address, such as `s3://bucket/model`."""
    return _ADDRESS.fullmatch(model) is not None


def download_description_files(address: str, cache: Path) -> Path:
    """Copies the files that describe a model if they have changed, and returns their folder.

    Args:
        address: address of a folder.
        cache: folder with a subfolder for each address.

    Raises:
        ModelError: the address can't be read: its package is missing, its scheme is unknown, or it
            has no model.
        DownloadError: a file can't be fetched.
    """
    system, root = _open(address)
    folder = cache / hashlib.sha256(address.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / _COPIED
    known = json.loads(note.read_text()) if note.exists() else {}
    try:
        entries = {PurePosixPath(each["name"]).name: each for each in system.ls(root, detail=True)}
        if "config.json" not in entries:
            found = ", ".join(sorted(entries)[:8]) or "nothing"
            raise ModelError(f"{address}: the folder has no config.json (found: {found}).")
        now = {}
        for name, entry in entries.items():
            if PurePosixPath(name).suffix in _DESCRIBING and entry["type"] == "file":
                if entry["size"] is not None and entry["size"] > MAX_BYTES:
                    raise ModelError(
                        f"{address}/{name}: has {entry['size']:,} bytes, more than {MAX_BYTES:,}."
                    )
                now[name] = system.ukey(entry["name"])
                if known.get(name) != now[name]:
                    (folder / name).write_bytes(system.cat_file(entry["name"]))
        for name in known.keys() - now.keys():
            (folder / name).unlink(missing_ok=True)
        note.write_text(json.dumps(now))
    except OSError as error:
        raise DownloadError(
            f"{address}: can't be read: {error}", hint="Check the address and the network."
        ) from error
    return folder


def _open(address: str) -> tuple[Any, str]:  # fsspec's file system, and the path in it
    import fsspec

    match = _ADDRESS.fullmatch(address)
    assert match is not None
    if match[1] in _NOT_HERE:
        raise ModelError(
            f"{address}: {match[1]}:// is SGLang's, and not here.", hint="Use a folder, or s3://."
        )
    try:
        system, path = fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise ModelError(
            f"{address}: a package is missing: {error}", hint="Install what it names."
        ) from error
    except ValueError as error:
        raise ModelError(
            f"{address}: {error}", hint="fsspec's addresses are read: s3://, gs://, file:// …"
        ) from error
    return system, path


class RemoteRanges:
    """Byte ranges of the files at an address.

    Args:
        address: address of the folder.
        folder: folder of its copy, whose paths stand for the files at the address.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self._system, self._root = _open(address)
        self._folder = folder

    def has_remote_file(self, file: Path) -> bool:
        return bool(self._system.isfile(self._remote_path(file)))

    def size(self, file: Path) -> int:
        return int(self._system.size(self._remote_path(file)))

    def read_bytes_into(self, file: Path, start: int, out: memoryview) -> None:
        data = (
            self._system.cat_file(self._remote_path(file), start, start + len(out))
            if len(out)
            else b""
        )
        if len(data) != len(out):
            raise OSError(f"it ends at {start + len(data):,}")
        out[:] = data

    def read_rows(self, file: Path, start: int, stride: int, out: Bytes) -> None:
        whole = bytearray(len(out) * stride)  # by one request
        self.read_bytes_into(
            file, start, memoryview(whole)[: (len(out) - 1) * stride + out.shape[1]]
        )
        for i, row in enumerate(out):
            row.data[:] = whole[i * stride : i * stride + len(row)]

    def _remote_path(self, file: Path) -> str:
        return f"{self._root.rstrip('/')}/{file.relative_to(self._folder).as_posix()}"
