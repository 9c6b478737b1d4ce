"""`sglang-lite run`: runs a program of a file, with arguments from the command line or rows of a
file.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_lite.lang.backend.default import BackendLike
from sglang_lite.lang.batches.batch import allow_equal_items
from sglang_lite.lang.function import SglFunction
from sglang_lite.lang.state import ProgramState
from sglang_lite.lint.files import bind_rows, import_program_file, programs_in, read_json_lines
from sglang_lite.protocol import ParameterError, SglError
from sglang_lite.protocol.anything import Json, UserValue


def load_program(file: Path, function: str | None) -> SglFunction:
    """Imports a file and returns its program.

    Args:
        function: name of the program, if the file has several.

    Raises:
        ParameterError: the file can't be imported, has no program of this name, or has several
            programs while no name is given.
    """
    found = programs_in(import_program_file(file), function)
    if len(found) > 1:
        names = ", ".join(found)
        raise ParameterError(
            "FILE",
            f"{file} has several programs: {names}.",
            hint=f"Name one: {file}:{next(iter(found))}.",
        )
    return next(iter(found.values()))


def parse_arguments(program: SglFunction, given: Sequence[str]) -> dict[str, Json]:
    """Parses a program's arguments from texts `name=value`. A value is JSON if it can be read as
    such and the parameter is not annotated as `str`; otherwise it is text.

    Raises:
        ParameterError: a text has no `=`, or a name is given twice.
    """
    found: dict[str, Json] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or name in found:
            problem, hint = (
                ("is given twice", "Give it once.")
                if equals
                else ("has no =", "Write --arg name=value.")
            )
            raise ParameterError("--arg", f"{each!r:.80} {problem}.", hint=hint)
        parameter = program.signature.parameters.get(name)
        found[name] = (
            text
            if parameter is not None and parameter.annotation in (str, "str")
            else _json_or_text(text)
        )
    return found


def _json_or_text(text: str) -> Json:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def run_on_rows(
    program: SglFunction,
    arguments: Mapping[str, Json],
    rows: Path | None,
    backend: BackendLike | None,
    seed: int | None,
) -> Iterator[dict[str, UserValue]]:
    """Yields the `outcome_to_json_data` of each run.

    Args:
        arguments: arguments of the run, or of all runs.
        rows: JSON Lines file with additional arguments of each run; None for one run.

    Raises:
        ParameterError: arguments don't fit the program, or the file can't be read.
    """
    given = [{}] if rows is None else read_json_lines(rows, "--rows")
    items = bind_rows(
        program, [{**arguments, **row} for row in given], rows, "--rows" if rows else "--arg"
    )
    with allow_equal_items():
        outcomes = program.run_batch(
            items, backend=backend, seed=seed, on_error="return", generator_style=True
        )
    for outcome in outcomes:
        yield outcome_to_json_data(outcome)


def outcome_to_json_data(outcome: ProgramState | Exception) -> dict[str, UserValue]:
    """Returns the variables of a run as plain data, with `return` for the value that the body has
    returned. If the run has failed, returns only `error`.
    """
    if isinstance(outcome, Exception):
        name = "" if isinstance(outcome, SglError) else f"{type(outcome).__name__}: "
        return {"error": f"{name}{outcome}"}
    found = {name: _as_json_data(outcome[name]) for name in outcome.branch.names.variables}
    return (
        found
        if outcome.ret_value is None
        else {**found, "return": _as_json_data(outcome.ret_value)}
    )


def _as_json_data(value: UserValue) -> Any:
    """Converts a value to JSON data. Values without a JSON form become text."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _as_json_data(
            {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        )
    if isinstance(value, enum.Enum):
        return _as_json_data(value.value)
    if isinstance(value, Mapping):
        return {str(name): _as_json_data(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_as_json_data(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
