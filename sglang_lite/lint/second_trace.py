"""Traces a program a second time, in another process, to find texts that differ from run to run.

The other process has another hash seed, so sets have another order, and its clocks are 400 days
ahead, so dates differ.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from sglang_lite.lang.symbolic.graph import Graph
from sglang_lite.lang.tracer import NoBackend, explore_ways
from sglang_lite.protocol import SglError
from sglang_lite.protocol.anything import Json
from sglang_lite.text.chat_template import JinjaTemplate

# Jinja source, and special tokens by their names in the template
Template: TypeAlias = tuple[str, Mapping[str, str]]

_AHEAD: Final = 400 * 86_400 + 7 * 3_600 + 11 * 60 + 13  # seconds
_PATIENCE: Final = 60  # seconds
_COMMAND: Final = "import sys; from sglang_lite.lint.second_trace import main; main(*sys.argv[1:])"


def tracing_backend(template: Template | None) -> NoBackend:
    """Creates a backend for tracing with a chat template, or with ChatML if `template` is None."""
    return NoBackend(None if template is None else JinjaTemplate(*template))


def trace_in_other_process(
    file: Path, arguments: Mapping[str, Mapping[str, Json]], template: Template | None
) -> dict[str, Graph]:
    """Traces programs in another process and returns their graphs by name. Returns an empty mapping
    if that process fails.

    Args:
        file: Python file with the programs.
        arguments: arguments of each program, by name of the program.
        template: chat template of turns, or None for ChatML.
    """
    with tempfile.TemporaryDirectory() as folder:
        seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        command = [sys.executable, "-c", _COMMAND, str(file), folder]
        try:
            Path(folder, "arguments").write_text(json.dumps([arguments, template]))
            subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PATIENCE,
                check=True,
            )
            return {
                name: Graph.from_json(Path(folder, f"{name}.json").read_bytes())
                for name in arguments
            }
        except (OSError, subprocess.SubprocessError, SglError):
            return {}


def main(file: str, folder: str) -> None:
    """Traces the programs of a file, in the other process, and writes the graph of each to a file
    in `folder`.
    """
    from sglang_lite.lint.files import import_program_file, programs_in

    _put_clocks_ahead()
    module = import_program_file(Path(file))
    arguments, template = json.loads(Path(folder, "arguments").read_text())
    backend = tracing_backend(template)
    for name, row in arguments.items():
        program = programs_in(module, name)[name]
        state = explore_ways(program, {**program.bind_arguments, **row}, backend, 1)
        Path(folder, f"{name}.json").write_bytes(state.graph().to_json())


def _put_clocks_ahead() -> None:
    """Moves the clocks of `time` and `datetime` ahead in this process. Affects only modules that
    import them afterwards.
    """

    class Datetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Datetime:
            return super().now(tz) + datetime.timedelta(seconds=_AHEAD)

        @classmethod
        def today(cls) -> Datetime:
            return cls.now()

        @classmethod
        def utcnow(cls) -> Datetime:
            return cls.now(datetime.UTC).replace(tzinfo=None)

    class Date(datetime.date):
        @classmethod
        def today(cls) -> Date:
            later = Datetime.now()
            return cls(later.year, later.month, later.day)

    real = time.time
    datetime.datetime, datetime.date = Datetime, Date  # type: ignore[misc] # on purpose
    time.time = lambda: real() + _AHEAD
    for name in ("localtime", "gmtime", "ctime"):
        setattr(time, name, _default_to_moved_clock(getattr(time, name)))
    written = time.strftime
    time.strftime = lambda form, at=None: written(form, time.localtime() if at is None else at)


def _default_to_moved_clock(function: Callable[[float], Any]) -> Callable[..., Any]:
    """Wraps a function that takes a time. Without an argument, the wrapper passes the time of the
    moved clock.
    """
    return lambda at=None: function(time.time() if at is None else at)
