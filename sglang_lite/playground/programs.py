"""Loads the programs of a file, runs them with edited texts, and prepares their runs for the page."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import linecache
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from sglang_lite.commands.run_file import parse_arguments
from sglang_lite.lang.backend.default import BackendLike, backend_for
from sglang_lite.lang.function import SglFunction
from sglang_lite.lang.state import ProgramState
from sglang_lite.lint.files import bind_rows, import_program_file, programs_in
from sglang_lite.page.data import replace_surrogates, run_data
from sglang_lite.playground.source_texts import apply_edits, find_source_texts
from sglang_lite.protocol import ParameterError, SglError
from sglang_lite.protocol.anything import UserValue

_RUNS: Final = 20  # number of runs that can be rerun; older ones are forgotten
_TIMEOUT_S: Final = 120.0


class RunRequest(msgspec.Struct):
    """Run that the page requests.

    Attributes:
        version: version of the file that the page shows, as in `describe_programs`.
        program: name of the program.
        arguments: arguments of the program, as typed.
        edits: new texts, by their indices.
        seed: seed of the run; None for a new one each time.
    """

    version: str
    program: str
    arguments: dict[str, str] = {}
    edits: dict[int, str] = {}
    seed: int | None = None


class RerunRequest(msgspec.Struct):
    """Request to rerun a run with a new answer for one node.

    Attributes:
        run: number of the run.
        at: variable of the node.
        value: text of the new answer; None to generate a new one.
    """

    run: int
    at: str
    value: str | None = None


class _ChangedError(ParameterError):
    """Error for requests from a page that shows another version of the file."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    version: str
    source: str
    module: ModuleType


class Playground:
    """Programs of a file. The file is reloaded when it has changed.

    Args:
        file: Python file.
        function: name of the only program to show; None for all.
        backend: backend of the runs; None for the one that the file sets, or the default.
    """

    def __init__(
        self, file: Path, function: str | None = None, backend: BackendLike | None = None
    ) -> None:
        self._file = file
        self._function = function
        self._backend = backend
        self._loaded: _Loaded | None = None
        self._runs: dict[int, ProgramState] = {}
        self._last = 0
        self._lock = threading.Lock()  # one run at a time, since they share the file's names

    def prepare(self) -> None:
        """Loads the file and creates the backend in advance, so that the first run starts sooner.
        Ignores errors, since the first run reports them.
        """
        with contextlib.suppress(Exception):
            with self._lock:
                self._load_program_file()
            backend_for(self._backend)

    def describe_programs(self) -> dict[str, object]:
        """Describes the programs with their parameters, and the texts that can be edited. If the
        file can't be loaded, returns the `error`.
        """
        try:
            with self._lock:
                loaded = self._load_program_file()
            programs = programs_in(loaded.module, self._function)
            _, texts = find_source_texts(loaded.source, loaded.module)
        except Exception as error:
            return {"error": self._describe_error(error)}
        return {
            "version": loaded.version,
            "programs": [
                {"name": name, "parameters": _typed_parameters(each)}
                for name, each in programs.items()
            ],
            "texts": [
                {
                    "kind": each.kind,
                    "line": each.line,
                    "program": each.program,
                    "text": replace_surrogates(each.text),
                }
                for each in texts
            ],
        }

    def run(self, asked: RunRequest) -> dict[str, object]:
        """Runs a program. If the run fails, the result's `error` has the message and the line."""
        return self._run_for_page(lambda: self._run_edited_program(asked))

    def rerun(self, changed: RerunRequest) -> dict[str, object]:
        """Reruns a program with another answer for one of its nodes."""

        def again() -> ProgramState:
            earlier = self._runs.get(changed.run)
            if earlier is None:
                raise ParameterError(
                    "run", f"run {changed.run} is forgotten.", hint="Run the program again."
                )
            return earlier.rerun(changed.at, changed.value)

        return self._run_for_page(again)

    def _run_edited_program(self, asked: RunRequest) -> ProgramState:
        loaded = self._load_program_file()
        if asked.version != loaded.version:
            raise _ChangedError(
                "FILE",
                f"{self._file} has changed.",
                hint="The page has its new texts now: run again.",
            )
        if asked.program not in programs_in(loaded.module, self._function):
            raise ParameterError("program", f"there is no program {asked.program!r:.60}.")
        found = apply_edits(loaded.source, loaded.module, asked.edits)[asked.program]
        assert isinstance(found, SglFunction)
        given = [f"{name}={text}" for name, text in asked.arguments.items()]
        [arguments] = bind_rows(found, [parse_arguments(found, given)], None, "argument")
        backend = backend_for(self._backend)
        takes = backend.capabilities.params
        told: dict[str, Any] = {
            "return_logprob": True,
            "top_logprobs_num": 5,
            "return_text_in_logprobs": True,
        }
        options = {**arguments, **(told if takes is None or told.keys() <= takes else {})}
        run: Callable[..., ProgramState] = found.run
        # A streamed run returns its state immediately, so the part that a failed body has played is
        # also shown.
        return run(backend=backend, seed=asked.seed, timeout=_TIMEOUT_S, stream=True, **options)

    def _run_for_page(self, run: Callable[[], ProgramState]) -> dict[str, object]:
        """Executes a run and returns its number and data for the page, and its error or None."""
        began = time.perf_counter()
        with self._lock:
            try:
                state = run()
                error = state.error()
            except Exception as failure:  # also those of the user's program
                return {
                    "error": self._describe_error(failure),
                    "changed": isinstance(failure, _ChangedError),
                }
            self._last += 1
            self._runs[self._last] = state
            self._runs.pop(self._last - _RUNS, None)
        trace = state.trace()
        return {
            "run": self._last,
            "seconds": time.perf_counter() - began,
            "data": run_data(trace.head, trace.nodes),
            "error": None if error is None else self._describe_error(error),
        }

    def _load_program_file(self) -> _Loaded:
        try:
            source = self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError("FILE", f"{self._file}: {error}.") from error
        if self._loaded is None or self._loaded.source != source:
            self._loaded = None
            linecache.checkcache(str(self._file.resolve()))
            self._loaded = _Loaded(
                hashlib.sha256(source.encode()).hexdigest(), source, import_program_file(self._file)
            )
        return self._loaded

    def _describe_error(self, error: BaseException) -> dict[str, object]:
        """Returns the message of an error, and the number and text of the line in the file where it
        happened.
        """
        text = str(error) if isinstance(error, SglError) else f"{type(error).__name__}: {error}"
        line = self._line_of_error(error)
        code = (
            "" if line is None else linecache.getline(str(self._file.resolve()), line).rstrip("\n")
        )
        return {"text": replace_surrogates(text), "line": line, "code": replace_surrogates(code)}

    def _line_of_error(self, error: BaseException | None) -> int | None:
        file = str(self._file.resolve())
        while error is not None:
            if isinstance(error, SyntaxError) and error.filename == file:
                return error.lineno
            if isinstance(error, SglError) and error.where is not None and error.where.file == file:
                return error.where.line
            frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
            lines = [frame.lineno for frame in frames if frame.filename == file]
            if lines:
                return lines[-1]
            error = error.__cause__
        return None


def _typed_parameters(program: SglFunction) -> list[dict[str, str]]:
    """Returns the parameters of a program, each with the text that the page shows for its value:
    the value given by `bind`, or the default.
    """
    found = []
    for each in program.signature.parameters.values():
        default = program.bind_arguments.get(each.name, each.default)
        found.append(
            {
                "name": each.name,
                "text": ""
                if default is each.empty
                else replace_surrogates(_as_typed_text(default)),
            }
        )
    return found


def _as_typed_text(value: UserValue) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
