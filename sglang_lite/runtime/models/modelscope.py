"""Downloads models from ModelScope's hub over its public HTTP API, if `SGLANG_USE_MODELSCOPE` is
set.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from sglang_lite.notebook.output import progress_bar
from sglang_lite.protocol import DownloadError

_HUB = "https://www.modelscope.cn"
_LISTED_AT_ONCE = 3000  # the hub silently truncates its list at this many files
_TIMEOUT_S = 30
_CHUNK = 1 << 20
_NOTE = ".files.json"


class _File(msgspec.Struct, frozen=True):
    """Size and SHA-256 of a file as listed by the hub."""

    size: int
    sha256: str | None


class _Note(msgspec.Struct):
    """Note in a model folder: the files that the hub last listed and those downloaded, by name."""

    listed: dict[str, _File] = {}
    fetched: dict[str, _File] = {}


def should_use_modelscope() -> bool:
    """Returns whether hub ids refer to ModelScope, which SGLang's environment variable selects."""
    return os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true", "yes")


def fetch_from_modelscope(
    model: str, revision: str | None, patterns: Iterable[str], cache: Path
) -> Path:
    """Downloads the files of a model that match `patterns`, unless the cache has them. Returns
    their folder.

    Args:
        model: id of the form owner/name.
        revision: branch or tag; None for "master".
        patterns: `fnmatch` patterns for file names. If weights come in two formats, only
            safetensors are downloaded.
        cache: folder with a folder for each model and revision.

    Raises:
        DownloadError: the hub does not have the model or can't be reached, or a file is not
            what the hub lists.
    """
    branch = revision or "master"
    folder = cache / model / urllib.parse.quote(branch, safe="")
    note = _read_note(folder)

    def missing(listed: Mapping[str, _File]) -> list[str]:
        safe = any(name.endswith(".safetensors") for name in listed)
        return [
            name
            for name, each in listed.items()
            if any(fnmatch(name, pattern) for pattern in patterns)
            and not (safe and name.endswith(".bin"))
            and (note.fetched.get(name) != each or not (folder / name).exists())
        ]

    try:
        listed = _list_files(model, branch)
    except DownloadError:
        if not note.listed or missing(note.listed):
            raise
        return folder  # complete from an earlier download
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if listed != note.listed:
            note.listed = listed
            _write_note(note, folder)
        for name in missing(listed):
            _download_file(model, branch, name, listed[name], folder)
            note.fetched[name] = listed[name]
            _write_note(note, folder)
    except (OSError, HTTPException) as error:
        raise DownloadError(
            f"{model}: can't be fetched from ModelScope: {error}", hint=_modelscope_hint()
        ) from error
    return folder


def _read_note(folder: Path) -> _Note:
    """Reads the note of a folder. Returns an empty note if there is none or it is damaged."""
    try:
        return msgspec.json.decode((folder / _NOTE).read_bytes(), type=_Note)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return _Note()


def _write_note(note: _Note, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
        part = Path(scratch, _NOTE)
        part.write_bytes(msgspec.json.encode(note))
        os.replace(part, folder / _NOTE)


def _list_files(model: str, branch: str) -> dict[str, _File]:
    """Returns the model's files on the hub by name. Raises DownloadError if the hub does not list
    them.
    """
    query = urllib.parse.urlencode({"Revision": branch, "Recursive": "True"})
    try:
        with _open(f"{model}/repo/files?{query}") as answer:
            files = json.loads(answer.read())["Data"]["Files"]
        found = {
            each["Path"]: _File(int(each["Size"]), each.get("Sha256") or None)
            for each in files
            if each["Type"] == "blob"
        }
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise DownloadError(
            f"{model}: ModelScope did not give it: {error}", hint=_modelscope_hint()
        ) from error
    outside = [
        name
        for name in found
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts
    ]
    if outside or len(files) >= _LISTED_AT_ONCE:
        raise DownloadError(
            f"{model}: ModelScope lists {outside[0] if outside else f'{len(files):,} files'!r}."
        )
    return found


def _download_file(model: str, branch: str, name: str, listed: _File, folder: Path) -> None:
    """Downloads a file from the hub. Raises OSError or HTTPException if that fails, or
    DownloadError if its size or hash is not as listed.
    """
    target = folder / name
    digest = hashlib.sha256()
    size = 0
    target.parent.mkdir(parents=True, exist_ok=True)
    query = urllib.parse.urlencode({"Revision": branch, "FilePath": name})
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as scratch:
        part = Path(scratch, target.name)
        with (
            open(part, "wb") as file,
            _open(f"{model}/repo?{query}") as answer,
            progress_bar(
                total=listed.size, unit="B", unit_scale=True, desc=f"Fetching {name}"
            ) as bar,
        ):
            while size <= listed.size and (data := answer.read(_CHUNK)):
                file.write(data)
                digest.update(data)
                size += len(data)
                bar.update(len(data))
        if size > listed.size:
            raise DownloadError(
                f"{model}: {name} came with more than {listed.size:,} bytes, which ModelScope lists."
            )
        if size != listed.size or listed.sha256 not in (None, digest.hexdigest()):
            raise DownloadError(
                f"{model}: {name} came with {size:,} bytes and the SHA-256 {digest.hexdigest()}; ModelScope lists "
                f"{listed.size:,} and {listed.sha256}.",
                hint="Try again.",
            )
        os.replace(part, target)


def _open(path: str) -> Any:  # http.client's response
    headers = (
        {"Authorization": f"Bearer {token}"}
        if (token := os.environ.get("MODELSCOPE_API_TOKEN"))
        else {}
    )
    request = urllib.request.Request(f"{_endpoint()}/api/v1/models/{path}", headers=headers)
    return urllib.request.build_opener(_Redirects()).open(request, timeout=_TIMEOUT_S)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and sends the token only to the hub's own host."""

    def redirect_request(
        self, request: urllib.request.Request, *others: Any
    ) -> urllib.request.Request | None:
        following = super().redirect_request(request, *others)
        if following is not None and (following.type, following.host) != (
            request.type,
            request.host,
        ):
            following.remove_header("Authorization")
        return following


def _endpoint() -> str:
    return os.environ.get("MODELSCOPE_ENDPOINT", _HUB).rstrip("/")


def _modelscope_hint() -> str:
    return (
        f"Check the name and the network ({_endpoint()}); MODELSCOPE_API_TOKEN is for private models, "
        "MODELSCOPE_ENDPOINT for another address; unset SGLANG_USE_MODELSCOPE for Hugging Face's hub."
    )
