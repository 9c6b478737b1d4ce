"""Weights of a Hugging Face folder: safetensors or PyTorch `.bin`, in one file or sharded.

Each tensor is read through its own memory map: touched pages count as memory until the whole map is
closed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from pickle import UnpicklingError

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import abbreviate, read_any_json
from sglang_lite.runtime.models.weights.fp8 import ScaledRows
from sglang_lite.runtime.models.weights.packing import Packed, Packing, match_packings
from sglang_lite.runtime.models.weights.quantised_formats import PLAIN, Matrices
from sglang_lite.runtime.models.weights.source import (
    PlainRows,
    Stored,
    Weight,
    WeightSource,
    canonical_name,
)

KINDS = ("safetensors", "bin")  # kinds of weight files; the first that exists is read


def index_file_name(kind: str) -> str:
    """Returns the name of the index file that lists the shards of a format, "safetensors" or "bin"."""
    return f"{'model' if kind == 'safetensors' else 'pytorch_model'}.{kind}.index.json"


def open_weight_folder(folder: Path, matrices: Matrices = PLAIN) -> WeightSource:
    """Opens the weights in `folder`; safetensors take precedence over `.bin`.

    Args:
        folder: folder of the model.
        matrices: how its matrices are declared to be stored.

    Raises:
        ModelError: the folder has no weights, a shard is missing, or a file is damaged.
    """
    kind, files = weight_files(folder)
    return (SafetensorsSource if kind == "safetensors" else TorchSource)(folder, files, matrices)


def weight_files(
    folder: Path, kinds: Sequence[str] = KINDS, exists: Callable[[Path], bool] = Path.exists
) -> tuple[str, set[Path]]:
    """Returns the format of the weights and their files. The format is the first of `kinds` that
    exists.

    Args:
        folder: folder of the model.
        kinds: "safetensors", "bin".
        exists: function that checks whether a file exists.

    Raises:
        ModelError: as `open_weight_folder`.
    """
    for suffix in kinds:
        index = folder / index_file_name(suffix)
        single = folder / index.name.removesuffix(".index.json")
        if index.exists():
            return suffix, _read_shard_index(index, exists)
        if exists(single):
            return suffix, {_require_regular_file(single)}
    hint = "Supported: model.safetensors, pytorch_model.bin (sharded too), or a .gguf file given by its path."
    if any(folder.glob("model-rank-*-part-*.safetensors")):
        hint = 'Its files are those of ranks: load_format="sharded_state".'
    elif any(folder.glob("consolidated*.safetensors")):
        hint = 'Its files are in Mistral\'s own format: load_format="mistral".'
    elif any(
        (folder / index_file_name(kind).removesuffix(end)).exists()
        for kind in KINDS
        for end in ("", ".index.json")
    ):
        hint = 'There are weights of another format: load_format="auto".'
    raise ModelError(
        f"{folder}: no weights found" + (f" in the format {kinds[0]}." if len(kinds) == 1 else "."),
        hint=hint,
    )


def pickle_files(folder: Path) -> set[Path]:
    """Returns the files of pickled tensors: `pytorch_model.bin`, its shards, or `.pt`. Raises
    ModelError if there are none.
    """
    try:
        return weight_files(folder, ("bin",))[1]
    except ModelError:
        if found := {path for path in folder.glob("*.pt") if path.is_file()}:
            return found
        raise


def _read_shard_index(index: Path, exists: Callable[[Path], bool]) -> set[Path]:
    content = read_any_json(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise ModelError(
            f"{index}: not a weight index: it has no weight_map.", hint="Fetch the file again."
        )
    for name in files.values():
        if (
            not isinstance(name, str)
            or not name
            or "\0" in name
            or PurePath(name).is_absolute()
            or ".." in PurePath(name).parts
        ):
            raise ModelError(
                f"{index}: weight_map names {abbreviate(name)}, which is no file of the folder.",
                hint="Fetch the file again.",
            )
    names = set(files.values())
    try:
        missing = sorted(name for name in names if not exists(index.parent / name))
    except OSError as error:  # a name is too long
        raise ModelError(
            f"{index}: weight_map names no files: {error!s:.200}", hint="Fetch the file again."
        ) from error
    if missing:
        raise ModelError(
            f"{index.parent}: the shard {missing[0]} is missing ({len(missing)} of {len(names)}).",
            hint="Fetch the folder again.",
        )
    return {_require_regular_file(index.parent / name) for name in names}


def _require_regular_file(file: Path) -> Path:
    if file.exists() and not file.is_file():  # opening a pipe would block for ever
        raise ModelError(f"{file}: not a regular file.", hint="Replace it by the file itself.")
    return file


class FolderSource(WeightSource):
    """Base of the sources that read several files.

    Args:
        folder: folder of the model, for messages.
        files: files to read.
        matrices: as for `open_weight_folder`.

    Raises:
        ModelError: a file is damaged, a tensor occurs twice, or a part of one is missing.
    """

    def __init__(self, folder: Path, files: set[Path], matrices: Matrices) -> None:
        self._block = matrices.block
        stored: dict[str, Path] = {}
        for file in sorted(files):
            for name in self._read_names(file):
                if name in stored:
                    raise ModelError(
                        f"{file}: {name} is in {stored[name].name}, too.",
                        hint="Move the file elsewhere that is not the model's.",
                    )
                stored[name] = file
        self._stored_as = {canonical_name(name): name for name in stored}
        if len(self._stored_as) < len(stored):
            twice = next(name for name in stored if self._stored_as[canonical_name(name)] != name)
            raise ModelError(
                f"{stored[twice]}: {twice} and {self._stored_as[canonical_name(twice)]} are the same tensor.",
                hint="Take one of them out.",
            )
        self._files = {name: stored[stored_as] for name, stored_as in self._stored_as.items()}
        self._packed = find_packed_matrices(str(folder), self._files, matrices.packings)
        super().__init__(str(folder), merge_packed_names(self._files, self._packed))

    @property
    def has_packed_matrices(self) -> bool:
        return bool(self._packed)

    def _read_stored(self, name: str, file: Path) -> Stored:
        if name not in self._packed:
            return self._read_plain(name, file)
        each = self._packed[name]
        parts = {
            part: self._read_tensor(each.module + part, self._files[each.module + part])
            for part in each.parts
        }
        try:
            return each.packing.read(parts)
        except (
            ValueError,
            IndexError,
            TypeError,
            ArithmeticError,
            RuntimeError,
        ) as error:  # torch's: shapes and dtypes
            if "memory" in str(error):  # out of memory
                raise
            why = str(error).partition("\n")[0].rstrip(".")
            raise ModelError(
                f"{file}: {name}: {why}.", hint="Fetch the checkpoint again."
            ) from error

    @abstractmethod
    def _read_names(self, file: Path) -> list[str]: ...

    @abstractmethod
    def _read_tensor(self, name: str, file: Path) -> torch.Tensor:
        """Returns a tensor as stored."""

    @abstractmethod
    def _read_plain(self, name: str, file: Path) -> Weight:
        """Returns a tensor that is not packed."""

    def _with_scales(
        self,
        name: str,
        shape: tuple[int, ...],
        read: Callable[[int, int], torch.Tensor],
        file: Path,
    ) -> ScaledRows:
        """Returns an 8-bit matrix with its scales, and marks the tensor of scales as used."""
        scale = next(
            (other for other in (f"{name}_scale_inv", f"{name}_scale") if self.has_tensor(other)),
            None,
        )
        if scale is None:
            raise ModelError(
                f"{file}: {name} is in 8 bits, but {name}_scale or {name}_scale_inv is missing.",
                hint="Fetch the checkpoint again.",
            )
        scales = self._read_tensor(scale, self._unused.pop(scale))
        try:
            return ScaledRows(shape, read, scales, self._block)
        except ValueError as error:
            raise ModelError(
                f"{file}: {name}: {error}.", hint="Fetch the checkpoint again."
            ) from error


def find_packed_matrices(
    label: str, files: Mapping[str, Path], packings: Sequence[Packing]
) -> dict[str, Packed]:
    """Returns the packed matrices among a checkpoint's tensors, like `match_packings`. Raises
    ModelError if one of them lacks a tensor.
    """
    try:
        return match_packings(files.keys(), packings)
    except ValueError as error:
        raise ModelError(f"{label}: {error}.", hint="Fetch the checkpoint again.") from error


def merge_packed_names(files: Mapping[str, Path], packed: Mapping[str, Packed]) -> dict[str, Path]:
    """Returns the file of each tensor by name. A packed matrix has one entry, under the name by
    which a model takes it, instead of one for each of its tensors.
    """
    names = {each.module + part for each in packed.values() for part in each.parts}
    used = names.union(*(each.ignored for each in packed.values()))
    plain = {name: file for name, file in files.items() if name not in used}
    return plain | {name: files[each.module + each.parts[0]] for name, each in packed.items()}


class SafetensorsSource(FolderSource):
    def _read_names(self, file: Path) -> list[str]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as handle:
                return list(handle.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file}: damaged or truncated: {error}", hint="Fetch the file again."
            ) from error

    def _read_tensor(self, name: str, file: Path) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(file, framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(self._stored_as[name]).clone()
            return tensor

    def _read_plain(self, name: str, file: Path) -> Weight:
        from safetensors import safe_open

        with safe_open(file, framework="pt") as handle:
            part = handle.get_slice(self._stored_as[name])
            shape = part.get_shape()
            if len(shape) == 2:
                rows = _SafetensorsRows(file, self._stored_as[name], shape, part[:0].dtype)
                return (
                    self._with_scales(name, rows.shape, rows.read_stored_rows, file)
                    if rows.dtype == torch.float8_e4m3fn
                    else rows
                )
        return self._read_tensor(name, file)


class _SafetensorsRows(PlainRows):
    def __init__(self, file: Path, name: str, shape: list[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self._file = file
        self._name = name

    def read_stored_rows(self, start: int, end: int) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self._file, framework="pt") as handle:
            rows: torch.Tensor = handle.get_slice(self._name)[start:end]
        return rows


class TensorSource(FolderSource):
    """Source of tensors in memory.

    Args:
        label: where they come from, for messages.
        tensors: tensors by their names in a checkpoint.
        matrices: as for `open_weight_folder`.
        copies: whether to copy each tensor when it is taken; if not, the model may keep the tensor
            itself.
    """

    def __init__(
        self,
        label: str,
        tensors: Mapping[str, torch.Tensor],
        matrices: Matrices = PLAIN,
        *,
        copies: bool = True,
    ) -> None:
        self._tensors = tensors
        self._copies = copies
        super().__init__(Path(label), {Path(label)}, matrices)

    def _read_names(self, file: Path) -> list[str]:
        return list(self._tensors)

    def _read_tensor(self, name: str, file: Path) -> torch.Tensor:
        tensor = self._tensors[self._stored_as[name]]
        return tensor.clone() if self._copies else tensor

    def _read_plain(self, name: str, file: Path) -> Weight:
        tensor = self._read_tensor(name, file)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        return self._with_scales(
            name, tuple(tensor.shape), lambda start, end: tensor[start:end], file
        )


class TorchSource(FolderSource):
    """Source of pickled tensors. Reads with `weights_only=True`, so no code in the file is run."""

    def _read_names(self, file: Path) -> list[str]:
        return list(pickled_tensors(file))

    def _read_tensor(self, name: str, file: Path) -> torch.Tensor:
        return pickled_tensors(file)[self._stored_as[name]].clone()

    def _read_plain(self, name: str, file: Path) -> Weight:
        return self._read_tensor(name, file)


def pickled_tensors(file: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Returns the tensors of a `.bin` file by name.

    Args:
        file: file to read.
        device: device of the tensors; "meta" for tensors without values, in which case no values
            are read.

    Raises:
        ModelError: the file is damaged, or holds anything but a dict of tensors.
    """
    try:
        content = torch.load(file, map_location=device, weights_only=True, mmap=True)
    except UnpicklingError as error:  # its text advises running the file's code
        raise ModelError(
            f"{file}: can't be read as tensors: it is damaged, or holds more than tensors, which is not loaded.",
            hint="Fetch the file again, or take safetensors.",
        ) from error
    except Exception as error:  # torch raises many types for a file that is not a checkpoint
        raise ModelError(
            f"{file}: can't be read as tensors: {error}", hint="Fetch the file again."
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(value, torch.Tensor) for value in content.values()
    ):
        raise ModelError(
            f"{file}: can't be read as tensors: it is no dict of tensors.",
            hint="Move it elsewhere if it holds no weights of the model.",
        )
    return content
