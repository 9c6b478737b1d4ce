"""A batch that can be stopped and run again: finished items are kept in a file, one JSON line each.

The first line says what the results depend on beside the items: the program, its settings, the backend. A file that
was made with others is refused, and so is one that another run has open; items may be added at the end. A line is
written whole when its item has finished: one that a kill cut short is dropped, and its item runs again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_lite import wire
from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.execution.run import RunSettings
from sglang_lite.lang.saved.fingerprint import Fingerprint, UnreadableError, digest
from sglang_lite.lang.saved.kept_values import named
from sglang_lite.lang.saved.runs import saved_run
from sglang_lite.lang.state import ProgramState, user_location
from sglang_lite.protocol import ParameterError, ProgramError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import given
from sglang_lite.protocol.saved import SavedRun

logger = logging.getLogger("sglang_lite")

_VERSION = 3
_HEAD = b'{"sglang_lite_batch":'  # what every line begins with
_PYTHON = sys.implementation.cache_tag or sys.version  # whose code objects are compared


def batch_parts(function: object, settings: RunSettings, identity: object, version: str | int | None) -> dict[str, str]:
    """Digests of what the results of a batch depend on beside its items, by what they are of.

    Args:
        function: the program's body.
        identity: of the backend.
        version: of the program, to be compared instead of its code and the values that it reads.

    Raises:
        ParameterError: the program reads something that can't be compared.
    """
    found = Fingerprint()
    found.add("the backend", identity)
    found.add("the setting seed", settings.seed)
    for name, value in given(settings.params).items():
        found.add(f"the setting {name}", value)
    if version is not None:
        if isinstance(version, bool) or not isinstance(version, str | int):
            raise ParameterError("version", f"{version!r} is neither text nor a whole number.", where=user_location())
        found.add("the version", str(version))
    else:
        found.add("Python", _PYTHON)
        found.add_program(function)
    for name, kind in found.unreadable.items():
        raise ParameterError(
            "checkpoint", f"{name} is a {kind}, which can't be compared between runs.",
            hint="Set `version=` to the version of the program, which is compared instead.",
            where=user_location(),
        )  # fmt: skip
    return found.parts


class _Line(msgspec.Struct):
    """A finished item: digest of its arguments, and its run as data."""

    sglang_lite_batch: int
    index: int
    arguments: str
    state: msgspec.Raw


class BatchFile:
    """A checkpoint's file, which no other run can open until it is closed or its process ends, however that ends.

    Args:
        path: of the file.
        program: name of the program.
        parts: what `batch_parts` gave.
        items: the batch's arguments, in the order of the lines' numbers; there may be more than there were.
        skip_damaged: leave out lines that can't be read.

    Attributes:
        states: by index, what the file has of these items. (Log-probabilities, scores and metadata are not kept.)

    Raises:
        ParameterError: the file can't be written, or an item can't be compared.
        ProgramError: another run has it open, or it is something else, damaged, or of another batch. It is not changed
            then.
    """

    def __init__(
        self,
        path: Path,
        program: str,
        parts: Mapping[str, str],
        items: Sequence[UserValue],
        *,
        skip_damaged: bool = False,
    ) -> None:
        self._path, self._program, self._parts, self._lock = path, program, parts, threading.Lock()
        self._arguments = [_item_digest(i, item) for i, item in enumerate(items)]
        self._skip_damaged = skip_damaged
        self.states: dict[int, ProgramState] = {}
        try:
            self._file = open(path, "a+b")  # noqa: SIM115 # closed by close
        except (OSError, ValueError) as error:
            raise ParameterError(
                "checkpoint", f"{str(path)!r} can't be written: {error}", where=user_location()
            ) from error
        self._finalizer = weakref.finalize(self, self._file.close)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets other runs have the file. Items that finish later are not kept."""
        with self._lock:
            self._finalizer()

    def _read(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ProgramError(
                f"{self._path} is being written by another run.", hint="Wait for its end, or name another file."
            ) from error
        except OSError as error:
            raise ParameterError("checkpoint", f"{self._path} can't be locked: {error}") from error
        self._file.seek(0)
        *lines, torn = self._file.read().split(b"\n")
        if lines:
            self._check_head(lines[0])
        elif torn and not (torn.startswith(_HEAD) or _HEAD.startswith(torn)):
            raise self._refusal(1, "the file is not a batch checkpoint.")
        whole = len(lines[0]) + 1 if lines else 0  # bytes that stay
        for number, line in enumerate(lines[1:], 2):
            last = number == len(lines) and not torn
            if self._read_item(number, line, last=last) or not last:
                whole += len(line) + 1
        if self._file.tell() > whole:
            logger.warning("%s: the last line was cut short, so it is dropped and its item runs again.", self._path)
            self._file.truncate(whole)
        if not lines:
            self._write({"sglang_lite_batch": _VERSION, "program": self._program, "parts": self._parts})

    def _check_head(self, line: bytes) -> None:
        try:
            head = json.loads(line)
            version = head["sglang_lite_batch"]
            if version == _VERSION:
                program, parts = head["program"], dict(head["parts"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._refusal(1, f"the file is not a batch checkpoint: {error!r}.") from error
        if version != _VERSION:
            raise self._refusal(1, f"the format has version {version}, but this package reads version {_VERSION}.")
        if program != self._program:
            raise self._refusal(1, f"the checkpoint is of the program {program!r}, but this is {self._program!r}.")
        if parts != self._parts:
            raise self._refusal(1, f"since it was made, this has changed: {_changes(parts, self._parts)}.")

    def _read_item(self, number: int, line: bytes, *, last: bool) -> bool:
        """Takes an item from a line. False: the line is damaged."""
        try:
            entry = msgspec.json.decode(line, type=_Line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if not (last or self._skip_damaged):
                raise self._refusal(
                    number,
                    "the line is damaged.",
                    hint="Set `skip_damaged=True` to run the items of damaged lines again.",
                ) from error
            if not last:
                logger.warning(
                    "%s, line %d: the line is damaged and skipped, so its item runs again.", self._path, number
                )
            return False
        index = entry.index
        if index >= len(self._arguments):
            raise self._refusal(
                number, f"the line is of item {index}, but this batch has {len(self._arguments)} items."
            )
        if entry.arguments != self._arguments[index]:
            raise self._refusal(number, f"item {index} has other arguments now.")
        try:
            self.states[index] = state_of(wire.decode(bytes(entry.state), form="json"))  # type: ignore[arg-type] # else below
        except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise self._refusal(number, f"its values can't be restored: {error!r}.") from error
        return True

    def _refusal(self, line: int, problem: str, hint: str = "Name another file, or delete this one.") -> ProgramError:
        return ProgramError(f"{self._path}, line {line}: {problem}", hint=hint, where=user_location())

    def save(self, index: int, state: ProgramState) -> None:
        """Keeps a finished item.

        Raises:
            ProgramError: a variable has a value that can't be kept.
        """
        saved = wire.encode(saved_run(state.branch, state.ret_value, again=False), form="json")
        with self._lock:
            if not self._file.closed:
                self._write(_Line(_VERSION, index, self._arguments[index], msgspec.Raw(saved)))

    def _write(self, entry: object) -> None:
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def state_of(saved: SavedRun) -> ProgramState:
    """A state of what was saved, which has nothing left to run."""
    return ProgramState.made(saved, BaseBackend(), named, None)


def _item_digest(index: int, item: Any) -> str:
    positional, named = item
    try:
        return digest((positional, sorted(named.items())))
    except UnreadableError as error:
        raise ParameterError(
            f"batch_kwargs[{index}]", f"a {error.kind} in it can't be compared between runs.",
            hint="Give plain data, or leave checkpoint out.", where=user_location(),
        ) from error  # fmt: skip


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The names of parts that differ, the first few."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if "the version" in names:
        return "the version"
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
