"""Copy of pickled tensors in NumPy's format, as SGLang makes it. The folder `np` beside the pickled
files has one file per tensor.

Besides SGLang's list of names, the copy has a note of the files that it was made from. It is made
again if these have changed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import abbreviate, read_any_json
from sglang_lite.runtime.models.weights.folder import FolderSource, pickle_files, pickled_tensors
from sglang_lite.runtime.models.weights.source import Weight

_COPY = "np"
_NAMES = "weight_names.json"
_ORIGIN = "sglang_lite_origin.json"


class NumpySource(FolderSource):
    """Source of tensors in NumPy's format, one file each. Unpickles nothing."""

    def _read_names(self, file: Path) -> list[str]:
        return [file.name]

    def _read_tensor(self, name: str, file: Path) -> torch.Tensor:
        try:
            return torch.from_numpy(np.load(file, allow_pickle=False))
        except (OSError, ValueError, EOFError, TypeError) as error:
            raise ModelError(
                f"{file}: damaged: {error}", hint=f"Remove the folder {file.parent}."
            ) from error

    def _read_plain(self, name: str, file: Path) -> Weight:
        return self._read_tensor(name, file)


def prepare_numpy_files(folder: Path, *, with_list: bool = False) -> set[Path]:
    """Returns the files of the copy. Makes a new copy if there is none or the pickled tensors have
    changed.

    Args:
        folder: folder of the model.
        with_list: whether to add the list of their names.

    Raises:
        ModelError: there is neither a copy nor pickled tensors, or the copy is damaged or can't be
            made.
    """
    copy = folder / _COPY
    if not (copy / _NAMES).exists() or not _is_current(copy):
        _make_copy(copy, pickle_files(folder))
    names = read_any_json(copy / _NAMES)
    if not isinstance(names, list):
        raise ModelError(
            f"{copy / _NAMES}: not a list of names.", hint=f"Remove the folder {copy}."
        )
    for name in names:
        if not _is_file_name(name):
            raise ModelError(
                f"{copy / _NAMES}: names {abbreviate(name)}, which is no file of the folder."
            )
        if not (copy / name).is_file():
            raise ModelError(
                f"{copy}: the file {name} is missing.", hint=f"Remove the folder {copy}."
            )
    return {copy / name for name in names} | ({copy / _NAMES} if with_list else set())


def _is_file_name(name: Any) -> bool:  # from an untrusted file
    return (
        isinstance(name, str)
        and name not in ("", ".", "..", _NAMES, _ORIGIN)
        and not any(each in name for each in "/\\\0")
    )


def _origin(files: Iterable[Path]) -> dict[str, list[int]]:
    """Returns the size and modification time of files, by name."""
    stats = {file: file.stat() for file in files}
    return {file.name: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}


def _is_current(copy: Path) -> bool:
    """Returns whether a copy is up to date with the pickled tensors beside it; True if there are
    none. A copy made by SGLang does not record what it was made from, so it must not be older than
    the tensors.
    """
    try:
        files = pickle_files(copy.parent)
    except ModelError:
        return True
    if (copy / _ORIGIN).exists():
        return bool(read_any_json(copy / _ORIGIN) == _origin(files))
    made = (copy / _NAMES).stat().st_mtime_ns
    return all(file.stat().st_mtime_ns <= made for file in files)


def _make_copy(copy: Path, files: Iterable[Path]) -> None:
    if os.path.lexists(copy) and not (copy / _NAMES).exists():
        raise ModelError(
            f"{copy}: is there without {_NAMES}, so it is no whole copy in NumPy's format.",
            hint=f"Remove the folder {copy}.",
        )
    origin = _origin(files)
    _check_tensor_names(files)
    try:
        with tempfile.TemporaryDirectory(prefix=".np-", dir=copy.parent) as scratch:
            written = Path(scratch, "new")
            written.mkdir()
            _write_copy(files, written)
            (written / _ORIGIN).write_text(json.dumps(origin))
            _install_copy(written, copy, Path(scratch, "old"))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"{copy}: the copy in NumPy's format can't be made: {error}",
            hint='Use load_format="pt".',
        ) from error


def _check_tensor_names(files: Iterable[Path]) -> None:
    """Raises ModelError if a tensor's name is no valid file name, or occurs twice."""
    found: dict[str, Path] = {}
    for file in sorted(files):
        for name in pickled_tensors(file, "meta"):
            if not _is_file_name(name):
                raise ModelError(
                    f"{file}: a tensor has the name {abbreviate(name)}, of which no file can be made.",
                    hint="No model has such a tensor: remove it from the file.",
                )
            if name in found:
                raise ModelError(f"{file}: {name} is in {found[name].name}, too.")
            found[name] = file


def _write_copy(files: Iterable[Path], out: Path) -> None:
    names = []
    for file in sorted(files):
        for name, tensor in pickled_tensors(file).items():
            # NumPy has no bfloat16, but float32 holds all of its numbers.
            plain = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            with open(out / name, "xb") as opened:
                np.save(opened, plain.numpy(), allow_pickle=False)
            names.append(name)
    (out / _NAMES).write_text(json.dumps(names))


def _install_copy(made: Path, copy: Path, old: Path) -> None:
    """Moves a new copy into place. If another process has put one there in the meantime, that one
    stays.
    """
    if (copy / _NAMES).exists() and not _is_current(copy):
        os.replace(copy, old)
    try:
        os.replace(made, copy)
    except OSError:
        if not (copy / _NAMES).exists():
            raise
