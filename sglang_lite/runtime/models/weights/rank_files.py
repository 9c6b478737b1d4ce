"""Files of `load_format="sharded_state"`, by rank: each rank's files hold its part of the sharded
matrices, and those of rank 0 also the unsharded ones. Together they hold each number once, so any
layout can read them. A rank of the layout that they were written for finds its part of a matrix in
one piece, in its own files.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.weights.ranges import RangeSource
from sglang_lite.runtime.models.weights.source import PlainRows

_NAME = re.compile(r"model-rank-(\d+)-part-(\d+)\.safetensors")
_BY_COLUMNS = ":columns"  # suffix of the name of a matrix whose columns are sharded


def shard_name(rank: int, part: int) -> str:
    """Returns the name of a rank's file, as in vLLM and SGLang."""
    return f"model-rank-{rank}-part-{part}.safetensors"


def stored_shard_name(name: str, axis: str) -> str:
    """Returns the name under which a rank's file stores its shard of a tensor. A suffix marks
    tensors whose inputs are sharded.
    """
    return name + _BY_COLUMNS if axis == "inputs" else name


def rank_files(folder: Path) -> set[Path]:
    """Returns the files of all ranks in a folder. Raises ModelError if there are none, or one is
    missing.
    """
    found = {path: match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    if not found:
        hint = "`sglang-lite save MODEL --sharded --out DIR` writes it."
        raise ModelError(f"{folder}: there is no {shard_name(0, 0)}.", hint=hint)
    parts = defaultdict[int, set[int]](set)
    for match in found.values():
        parts[int(match[1])].add(int(match[2]))
    for count, (rank, own) in enumerate(sorted(parts.items())):
        if rank > count:
            raise ModelError(
                f"{folder}: {shard_name(count, 0)} is missing (of {max(parts) + 1:,} ranks)."
            )
        if missing := max(own) + 1 - len(own):
            first = next(part for part in range(len(own)) if part not in own)
            raise ModelError(
                f"{folder}: {shard_name(rank, first)} is missing ({missing:,} of {max(own) + 1:,})."
            )
    for path in found:
        if not path.is_file():  # opening a pipe would block for ever
            raise ModelError(f"{path}: not a regular file.", hint="Replace it by the file itself.")
    return set(found)


class RankFilesSource(RangeSource):
    """Source of the tensors in the files of all ranks. Takes the arguments of RangeSource."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # arguments of RangeSource
        # files of a tensor, by rank
        self._parts: defaultdict[str, dict[int, Path]] = defaultdict(dict)
        self._by_columns = set[str]()
        super().__init__(*args, **kwargs, renamed=self._strip_suffix)

    def _strip_suffix(self, stored: str) -> str:
        name = stored.removesuffix(_BY_COLUMNS)
        if name != stored:
            self._by_columns.add(name)
        return name

    def _read_names(self, file: Path) -> list[str]:
        match = _NAME.fullmatch(file.name)
        new = list[str]()
        assert match is not None, "of `rank_files`"
        for name in self.read_names_in(file):
            of_tensor = self._parts[name]
            rank = int(match[1])
            if not of_tensor or rank in of_tensor:  # twice in one rank is an error
                new.append(name)
            of_tensor[rank] = file
        return new

    def open_matrix(self, name: str, file: Path) -> PlainRows:
        parts = [
            super(RankFilesSource, self).open_matrix(name, part)
            for _, part in sorted(self._parts[name].items())
        ]
        if len(parts) == 1:
            return parts[0]
        axis = int(name in self._by_columns)
        if len({(each.shape[1 - axis], each.dtype) for each in parts}) > 1:
            raise ModelError(
                f"{self.label}: {name}: the ranks' parts don't fit together.", hint="Save it again."
            )
        return _Joined(parts, axis)


class _Joined(PlainRows):
    """Matrix whose parts are in several files.

    Args:
        parts: its parts, in order.
        axis: 0 if each part has some of its rows, 1 for columns.
    """

    def __init__(self, parts: Sequence[PlainRows], axis: int) -> None:
        along = sum(each.shape[axis] for each in parts)
        across = parts[0].shape[1 - axis]
        super().__init__((across, along) if axis else (along, across), parts[0].dtype)
        self._parts = parts
        self._axis = axis

    def read_stored_rows(self, start: int, end: int) -> torch.Tensor:
        own = self._intersecting_parts(slice(start, end), slice(None))
        return torch.cat([each.read_stored_rows(0, each.shape[0]) for each in own], self._axis)

    def slice_part(self, rows: slice, columns: slice = slice(None)) -> PlainRows:
        own = self._intersecting_parts(rows, columns)
        return own[0] if len(own) == 1 else _Joined(own, self._axis)

    def _intersecting_parts(self, rows: slice, columns: slice) -> list[PlainRows]:
        """Returns the pieces of the stored parts that lie within the given rows and columns.
        Returns one empty piece if none do.
        """
        own = list[PlainRows]()
        wanted = range(self.shape[self._axis])[(rows, columns)[self._axis]]
        at = 0
        for part in self._parts:
            size = part.shape[self._axis]
            inside = slice(max(wanted.start - at, 0), max(min(wanted.stop - at, size), 0))
            if inside.start < inside.stop or (not own and part is self._parts[-1]):
                own.append(
                    part.slice_part(rows, inside)
                    if self._axis
                    else part.slice_part(inside, columns)
                )
            at += size
        return own
