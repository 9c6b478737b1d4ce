"""Journal of a run: a file of JSON lines to which the run's log is written while it runs, so that a
run that was killed can be resumed.

The first line identifies the run. If the process is killed while it writes, the incomplete last
line is dropped later. Each line has a code that also depends on all lines before it. The codes
reveal damage and, with a secret, edits. They do not reveal that the last lines were removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
import weakref

from sglang_lite import wire
from sglang_lite.errors import short_repr
from sglang_lite.lang.execution.run import BoundCall, RunSettings
from sglang_lite.lang.execution.run_log import JournalOptions, RunLog
from sglang_lite.lang.runs import files
from sglang_lite.lang.runs.line_codes import LineCodes, check_secret
from sglang_lite.lang.runs.values import to_json_data
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.protocol import ParameterError, ProgramError, WireError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.run_log import (
    CallDecision,
    LoggedAnswer,
    LoggedCall,
    LoggedResult,
    LoggedTools,
    LoggedTurn,
    LogRecord,
)
from sglang_lite.protocol.sampling import given_values
from sglang_lite.protocol.saved import JournalHead, SavedVariable

_log = logging.getLogger("sglang_lite")
_HEAD = b'{"version":1,"type":"JournalHead",'  # beginning of a journal
_RECORDS = (LoggedAnswer, LoggedCall, LoggedResult, LoggedTools, LoggedTurn, CallDecision)
_RESTORE = "Restore the file, or begin a new run with another: journal=…."


def read_journal_options(path: UserValue, secret: UserValue) -> JournalOptions | None:
    """Checks and returns the journal options of a run, or returns None if the run has no journal.
    Raises ParameterError if the options are invalid.
    """
    if path is None:
        if secret is not None:
            raise ParameterError(
                "secret", "it has no effect without a journal.", hint="Give journal=…, too."
            )
        return None
    if not isinstance(path, str | os.PathLike):
        raise ParameterError("journal", f"{path!r:.60} is not a path.")
    if secret is not None:
        check_secret(secret)
    return JournalOptions(path, secret)


class Journal:
    """Journal file, locked against other runs until it is closed or its process ends.

    Args:
        options: path and secret.
        called: the program and its arguments.
        settings: settings of the run.

    Attributes:
        log: log of the run, which is written to the file.

    Raises:
        ParameterError: the file can't be written, or an argument is not plain data.
        ProgramError: the file is open in another run, is not a journal, is damaged, or belongs to
            another run. The file is left unchanged then.
    """

    def __init__(
        self,
        options: JournalOptions,
        called: BoundCall,
        settings: RunSettings,
    ) -> None:
        self._options = options
        self._path = options.path
        self._codes = LineCodes(options.secret)
        program = called.program.name
        try:
            arguments = SavedVariable("", _arguments_data(called))
        except ProgramError as error:
            raise ParameterError(
                "journal",
                f"the run can't be resumed later: {error.message}",
                hint=f"Give {program} plain data.",
            ) from error
        head = JournalHead(
            program,
            uuid.uuid4().hex,
            arguments,
            settings.params,
            settings.seed,
            options.secret is not None,
        )
        try:
            self._file = open(options.path, "a+b", buffering=0)  # noqa: SIM115 # closed by close
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                raise files.file_error(options.path, "written", error, "journal") from error
            raise ParameterError(
                "journal", f"{str(options.path)!r} can't be written: {error}."
            ) from error
        self._finalizer = weakref.finalize(self, self._file.close)
        try:
            self.log = self._lock_and_read(head)
        except BaseException:
            self.close()
            files.remove_if_empty(options.path)
            raise

    def close(self) -> None:
        """Unlocks the file."""
        self._finalizer()

    def _lock_and_read(self, head: JournalHead) -> RunLog:
        files.lock(self._file, self._path, "journal")
        self._file.seek(0)
        *lines, torn = self._file.read().split(b"\n")
        if not lines and torn and not (torn.startswith(_HEAD) or _HEAD.startswith(torn)):
            raise self._journal_error(1, "the file is not a journal.")
        identity = head.identity
        records = list[LogRecord]()
        if lines:
            identity = self._read_head(lines[0], head)
            records = [self._read_record(i, line) for i, line in enumerate(lines[1:], 2)]
        if torn:
            _log.warning("%s: the last line was cut short, so it is dropped.", self._path)
            self._file.truncate(self._file.tell() - len(torn))
        if not lines:
            self._append(head, durable=True)
            with contextlib.suppress(OSError):  # some file systems can't do it
                files.sync_folder(self._path)
        return RunLog(identity, records, self._append, self.close, self._options)

    def _read_head(self, line: bytes, now: JournalHead) -> str:
        """Checks that a journal belongs to this run, and returns the identity in its first line."""
        try:
            head = wire.decode(line)
        except WireError as error:
            raise self._journal_error(
                1, f"the file is not a journal, or is damaged: {error.message}."
            ) from error
        if not isinstance(head, JournalHead):
            raise self._journal_error(
                1, f"the file is not a journal, but begins with a {type(head).__name__}."
            )
        if head.secret != now.secret:
            under = "a secret" if head.secret else "no secret"
            hint = "Give it: secret=…." if head.secret else "What is in this file is not proved."
            raise self._journal_error(1, f"the file was written under {under}.", hint)
        if not self._codes.matches_code(line, head):
            what = "is of another secret, or was changed" if head.secret else "was changed"
            raise self._journal_error(1, f"the line {what}.")
        self._codes.chain(line)
        if head.program != now.program:
            problem = f"the journal is of the program {head.program!r}, not of {now.program!r}."
            raise self._journal_error(1, problem)
        before, given = _describe_run(head), _describe_run(now)
        for name in {**before, **given}:
            if before.get(name) != given.get(name):
                raise self._journal_error(
                    1,
                    f"the run began with {name}={short_repr(before.get(name))}, "
                    f"and is resumed with {short_repr(given.get(name))}.",
                    "Give the same, or begin a new run with another file: journal=….",
                )
        return head.identity

    def _read_record(self, number: int, line: bytes) -> LogRecord:
        try:
            record = wire.decode(line)
        except WireError as error:
            raise self._journal_error(number, "the line is damaged.") from error
        if not isinstance(record, _RECORDS) or not self._codes.matches_code(line, record):
            raise self._journal_error(
                number, "the line was changed, or is damaged, or one is missing."
            )
        self._codes.chain(line)
        return record

    def _append(self, record: JournalHead | LogRecord, durable: bool) -> None:
        if self._file.closed:  # the run has ended, and this record came later
            return
        line = self._codes.encode_line(record)
        files.append(self._file, self._path, line + b"\n", parameter="journal", durable=durable)
        self._codes.chain(line)  # reached only if the line was written

    def _journal_error(self, line: int, problem: str, hint: str = _RESTORE) -> ProgramError:
        return ProgramError(
            f"{os.fspath(self._path)}, line {line}: {problem}", hint=hint, where=user_location()
        )


def _describe_run(head: JournalHead) -> dict[str, UserValue]:
    """Returns the arguments, seed and sampling parameters of a run, by name."""
    settings = {"seed": head.seed, **given_values(head.params)}
    return {**head.arguments.value, **settings}


def _arguments_data(called: BoundCall) -> dict[str, UserValue]:
    """Returns the arguments of a call by name, as JSON data. Defaults that are not plain data are
    left out. Raises ProgramError if an argument given by the caller is not plain data.
    """
    bound = called.program.signature.bind(*called.args, **called.kwargs)
    given = set(bound.arguments)
    bound.apply_defaults()
    found = dict[str, UserValue]()
    for name, value in bound.arguments.items():
        with contextlib.suppress(*([] if name in given else [ProgramError])):
            found[name] = to_json_data(value, f"the argument {name}")
    return found
