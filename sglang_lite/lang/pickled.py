"""Pickling of programs: by name, as functions are pickled; a program bound to an instance together with the
instance."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from sglang_lite.lang.runs.values import import_by_name
from sglang_lite.protocol import ProgramError

if TYPE_CHECKING:
    from sglang_lite.lang.function import SglFunction


def pickled(program: SglFunction, kind: type[SglFunction]) -> tuple[object, ...]:
    """Value of a program's `__reduce__`.

    Args:
        kind: class of programs.

    Raises:
        ProgramError: the program can't be found by its name, so another process could not load it.
    """
    func = program.func
    if isinstance(func, MethodType):
        return _of_instance, (func.__self__, func.__name__, program.bind_arguments)
    name = f"{func.__module__}:{func.__qualname__}"
    try:
        found = import_by_name(name)
    except (ImportError, AttributeError):
        found = None
    if found is not func and not (isinstance(found, kind) and found.func is func):
        raise ProgramError(
            f"the program {program.name!r} can't be pickled: its module has no program of this name.",
            hint="Define it at the top of a module, or as a method of a class there.",
        )
    return _of_module, (name, kind, program.bind_arguments)


def _of_module(name: str, kind: type[SglFunction], bound: dict[str, Any]) -> SglFunction:
    found = import_by_name(name)
    program = found if isinstance(found, kind) else kind(found)
    return program.bind(**bound) if bound else program


def _of_instance(instance: object, name: str, bound: dict[str, Any]) -> SglFunction:
    program: SglFunction = getattr(instance, name)
    return program.bind(**bound) if bound else program
