"""Checkpoint of a batch that can be interrupted and run again: finished items are stored in a file
of JSON lines.

The first line identifies everything that the results depend on besides the items: the program, its
settings, the backend. A file with other values is refused, and so is a file that another run has
open. Items may be added at the end. The line of an item is written when the item has finished. If
the process is killed while it writes, the incomplete line is dropped later, and its item runs
again. Each line has a code, which reveals damage and, with a secret, also edits.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_lite import wire
from sglang_lite.lang.execution.run import RunSettings
from sglang_lite.lang.load_state import load_finished_run
from sglang_lite.lang.runs import files
from sglang_lite.lang.runs.fingerprint import Fingerprint, UnreadableError, digest
from sglang_lite.lang.runs.line_codes import LineCodes
from sglang_lite.lang.runs.saving import to_saved_run
from sglang_lite.lang.state import ProgramState
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.protocol import ParameterError, ProgramError, SglError, WireError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import given_values
from sglang_lite.protocol.saved import CheckpointHead, CheckpointRow

logger = logging.getLogger("sglang_lite")

_HEAD = b'{"version":1,"type":"CheckpointHead",'  # beginning of a checkpoint
_EARLIER = b'{"sglang_lite_batch":'  # beginning of one in the format of earlier versions
# version of Python: code objects are compared, which differ between versions
_PYTHON = sys.implementation.cache_tag or sys.version


def compute_batch_digests(
    function: object, settings: RunSettings, identity: object, version: str | int | None
) -> dict[str, str]:
    """Returns digests of everything that the results of a batch depend on, except its items. The
    keys describe what was digested, such as "the backend".

    Args:
        function: body of the program.
        settings: settings of each run.
        identity: identity of the backend.
        version: version of the program, compared instead of its code and the values that it reads;
            None to compare those.

    Raises:
        ParameterError: the program reads a value that can't be compared, or `version` is neither
            text nor a whole number.
    """
    found = Fingerprint()
    found.add_digest("the backend", identity)
    found.add_digest("the setting seed", settings.seed)
    for name, value in given_values(settings.params).items():
        found.add_digest(f"the setting {name}", value)
    if version is not None:
        if isinstance(version, bool) or not isinstance(version, str | int):
            raise ParameterError("version", f"{version!r} is neither text nor a whole number.")
        found.add_digest("the version", str(version))
    else:
        found.add_digest("Python", _PYTHON)
        found.add_program(function)
    for name, kind in found.unreadable.items():
        raise ParameterError(
            "checkpoint",
            f"{name} is a {kind}, which can't be compared between runs.",
            hint="Set `version=` to the version of the program, which is compared instead.",
        )
    return found.parts


class BatchFile:
    """Checkpoint file, locked against other runs until it is closed or its process ends.

    Args:
        path: path of the file.
        program: name of the program.
        parts: result of `compute_batch_digests`.
        items: arguments of the batch's items, in the order of the indices in the file; items may
            have been added at the end.
        skip_damaged: whether to skip lines that can't be read, instead of refusing the file.
        secret: text that every reader of the file must have; None for checksums.

    Attributes:
        states: states of the items that the file contains, by index. (Log-probabilities, scores and
            metadata are not stored.)

    Raises:
        ParameterError: the file can't be written, or an item can't be compared.
        ProgramError: the file is open in another run, is not a checkpoint, is damaged, or belongs
            to another batch. The file is left unchanged then.
    """

    def __init__(
        self,
        path: Path,
        program: str,
        parts: Mapping[str, str],
        items: Sequence[UserValue],
        *,
        skip_damaged: bool = False,
        secret: str | None = None,
    ) -> None:
        self._codes = LineCodes(secret)
        self._has_secret = secret is not None
        self._has_codes = False  # files of earlier versions have none
        self._path = path
        self._program = program
        self._parts = parts
        self._lock = threading.Lock()
        self._arguments = [_item_digest(i, item) for i, item in enumerate(items)]
        self._skip_damaged = skip_damaged
        self.states: dict[int, ProgramState] = {}
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 # closed by close
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                raise files.file_error(path, "written", error, "checkpoint") from error
            raise ParameterError(
                "checkpoint", f"{str(path)!r} can't be written: {error}."
            ) from error
        self._finalizer = weakref.finalize(self, self._file.close)
        try:
            self._lock_and_read()
        except BaseException:
            self.close()
            files.remove_if_empty(path)
            raise

    def close(self) -> None:
        """Unlocks the file. Items that finish later are not stored."""
        with self._lock:
            self._finalizer()

    def _lock_and_read(self) -> None:
        files.lock(self._file, self._path, "checkpoint")
        self._file.seek(0)
        *lines, torn = self._file.read().split(b"\n")
        if lines:
            self._check_head(lines[0])
        elif torn and not (torn.startswith(_HEAD) or _HEAD.startswith(torn)):
            raise self._checkpoint_error(1, "the file is not a batch checkpoint.")
        whole = len(lines[0]) + 1 if lines else 0  # length in bytes of the valid lines
        for number, line in enumerate(lines[1:], 2):
            last = number == len(lines) and not torn
            if self._read_item(number, line, last=last) or not last:
                whole += len(line) + 1
        if self._file.tell() > whole:
            logger.warning(
                "%s: the last line was cut short, so it is dropped and its item runs again.",
                self._path,
            )
            self._file.truncate(whole)
        if not lines:
            self._write(CheckpointHead(self._program, tuple(self._parts.items()), self._has_secret))

    def _check_head(self, line: bytes) -> None:
        if line.startswith(_EARLIER):
            raise self._checkpoint_error(
                1,
                "the checkpoint was made by an earlier version of sglang_lite, in another format.",
            )
        try:
            head = wire.decode(line)
        except WireError as error:
            raise self._checkpoint_error(
                1, f"the file is not a batch checkpoint: {error.message}."
            ) from error
        if not isinstance(head, CheckpointHead):
            raise self._checkpoint_error(
                1, f"the file is not a batch checkpoint, but begins with a {type(head).__name__}."
            )
        self._check_head_code(head, line)
        if head.program != self._program:
            problem = (
                f"the checkpoint is of the program {head.program!r}, but this is {self._program!r}."
            )
            raise self._checkpoint_error(1, problem)
        if changes := _describe_changes(dict(head.parts), self._parts):
            raise self._checkpoint_error(1, f"since it was made, this has changed: {changes}.")

    def _check_head_code(self, head: CheckpointHead, line: bytes) -> None:
        if head.secret != self._has_secret:
            under = "a secret" if head.secret else "no secret"
            hint = (
                "Give it: secret=…."
                if head.secret
                else "Name another file: what is in this one is not proved."
            )
            raise self._checkpoint_error(1, f"the file was written under {under}.", hint)
        if (head.code or head.secret) and not self._codes.matches_code(line, head):
            what = (
                "it is of another secret, or was changed."
                if head.secret
                else "the line was changed, or is damaged."
            )
            raise self._checkpoint_error(1, what)
        self._has_codes = bool(head.code)

    def _has_valid_line_code(self, row: CheckpointRow, line: bytes) -> bool:
        """Returns True if a row has the right code. In a file of an earlier version, which has no
        codes, rows without a code are also valid.
        """
        if not row.code and not self._has_codes:
            return True
        return self._codes.matches_code(line, row)

    def _read_item(self, number: int, line: bytes, *, last: bool) -> bool:
        """Reads an item from a line. Returns False if the line is damaged."""
        try:
            row = wire.decode(line)
        except WireError:
            row = None
        changed = isinstance(row, CheckpointRow) and not self._has_valid_line_code(row, line)
        if changed or not isinstance(row, CheckpointRow):
            last = last and not changed
            if not (last or self._skip_damaged):
                hint = "Set `skip_damaged=True` to run the items of damaged lines again."
                raise self._checkpoint_error(
                    number, f"the line {'was changed, or ' if changed else ''}is damaged.", hint
                )
            if not last:
                logger.warning(
                    "%s, line %d: the line is damaged and skipped, so its item runs again.",
                    self._path,
                    number,
                )
            return False
        if row.index >= len(self._arguments):
            raise self._checkpoint_error(
                number,
                f"the line is of item {row.index}, but this batch has {len(self._arguments)} items.",
            )
        if row.arguments != self._arguments[row.index]:
            raise self._checkpoint_error(number, f"item {row.index} has other arguments now.")
        try:
            self.states[row.index] = load_finished_run(row.run)
        except (ValueError, KeyError, TypeError, AttributeError, ImportError, SglError) as error:
            raise self._checkpoint_error(
                number, f"its values can't be restored: {error!r}."
            ) from error
        return True

    def _checkpoint_error(
        self, line: int, problem: str, hint: str = "Name another file, or delete this one."
    ) -> ProgramError:
        return ProgramError(
            f"{self._path}, line {line}: {problem}", hint=hint, where=user_location()
        )

    def save_item(self, index: int, state: ProgramState) -> None:
        """Stores a finished item."""
        run = to_saved_run(state.branch, state.ret_value, again=False)
        self._write(CheckpointRow(index, self._arguments[index], run))

    def _write(self, record: CheckpointHead | CheckpointRow) -> None:
        line = self._codes.encode_line(record) + b"\n"
        with self._lock:
            if not self._file.closed:
                files.append(self._file, self._path, line, parameter="checkpoint", durable=True)


def _item_digest(index: int, item: Any) -> str:
    positional, named = item
    try:
        return digest((positional, sorted(named.items())))
    except UnreadableError as error:
        raise ParameterError(
            f"batch_kwargs[{index}]",
            f"a {error.kind} in it can't be compared between runs.",
            hint="Give plain data, or leave checkpoint out.",
        ) from error


def _describe_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Lists the parts that differ, as text with at most four names. If the version differs, returns
    only "the version".
    """
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if "the version" in names:
        return "the version"
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
