"""Reads the input of the linter: a Python file with programs, and rows of arguments."""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType

from sglang_lite.lang.function import SglFunction
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Json


def import_program_file(file: Path) -> ModuleType:
    """Loads the module of a Python file. Like `import`, does not run code under `if __name__ ==
    "__main__":`.

    Raises:
        ParameterError: the file does not exist, or its code fails.
    """
    if not file.is_file():
        raise ParameterError(
            "FILE", f"there is no file {file}.", hint="Give prog.py, or prog.py:function."
        )
    name = file.stem
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise ParameterError(
            "FILE", f"{file} is no Python file.", hint="Give prog.py, or prog.py:function."
        )
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ParameterError("FILE", f"{file}:{error.lineno}: {error.msg}.") from error
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename) == file
        ]
        lines += [
            f.lineno
            for f in traceback.extract_tb(error.__traceback__)
            if f.filename == str(file.resolve())
        ]
        place = f"{file}:{lines[-1]}" if lines else str(file)
        raise ParameterError("FILE", f"{place}: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.pop(0)
        if before is not None:
            sys.modules[name] = before
    return module


def programs_in(module: ModuleType, function: str | None) -> dict[str, SglFunction]:
    """Returns the programs that a module defines, by name.

    Args:
        function: name of the only program to return, or None for all.

    Raises:
        ParameterError: the module has no programs, or none named `function`.
    """
    found = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, SglFunction) and value.func.__module__ == module.__name__
    }
    listed = ", ".join(found) or "none"
    if function is not None and function not in found:
        raise ParameterError(
            "FILE", f"{module.__file__} has no program {function!r}; it has: {listed}."
        )
    if not found:
        raise ParameterError(
            "FILE", f"{module.__file__} has no program.", hint="Decorate one with @sgl.function."
        )
    return found if function is None else {function: found[function]}


def read_json_lines(file: Path, flag: str = "--data") -> list[dict[str, Json]]:
    """Reads the rows of a JSON Lines file, one object per line. Blank lines are skipped.

    Args:
        flag: flag that named the file, for errors.

    Raises:
        ParameterError: the file can't be read, a line is not a JSON object, or the file has no
            rows.
    """
    try:
        # Not `splitlines`: U+2028, U+0085 and others need no escape in a JSON string. "utf-8-sig"
        # skips a BOM.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            flag, f"{file}: {getattr(error, 'strerror', None) or error}."
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ParameterError(
                flag, f"{file}:{number}: {error}.", hint="Give a JSON object a line."
            ) from None
        if not isinstance(row, dict):
            problem = f"{file}:{number}: {line.strip():.60} is not an object."
            raise ParameterError(flag, problem, hint='Give arguments by name: {"name": value}.')
        rows.append(row)
    if not rows:
        raise ParameterError(flag, f"{file} has no rows.")
    return rows


def bind_rows(
    program: SglFunction, rows: list[dict[str, Json]], file: Path | None, flag: str = "--data"
) -> list[dict[str, Json]]:
    """Returns the arguments of each run, including those given by `bind` and the defaults.

    Args:
        file: file of the rows, or None if there is only one row, given on the command line.
        flag: flag that gave the rows, for errors.

    Raises:
        ParameterError: a row does not match the program's signature.
    """
    found = []
    for number, row in enumerate(rows, 1):
        try:
            bound = program.signature.bind(**program.bind_call((), row, ""))
        except ParameterError as error:
            place = "" if file is None else f"{file}: row {number}: "
            problem = f"{place}{error.message.removeprefix(': ')}"
            hint = error.hint or ("" if file else _advise_flags(program))
            raise ParameterError(flag, problem, hint=hint) from None
        bound.apply_defaults()
        variable = [
            p.name
            for p in program.signature.parameters.values()
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        arguments = {name: value for name, value in bound.arguments.items() if name not in variable}
        for name in variable:
            extra = bound.arguments[name]
            arguments.update(extra if isinstance(extra, dict) else {})
        found.append(arguments)
    return found


def _advise_flags(program: SglFunction) -> str:
    """Returns advice on how to pass a program's required arguments on the command line."""
    needed = [
        f"--arg {p.name}=…"
        for p in program.signature.parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return f"Give {' '.join(needed)}." if needed else ""


def message_on_one_line(error: Exception) -> str:
    """Returns the message of an error on a single line."""
    return " ".join(str(error).split())
