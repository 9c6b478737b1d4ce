"""Pickling of programs: by name, as functions are pickled; a program bound to an instance together with the
instance."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from sglang_lite.lang.saved.kept_values import import_by_name
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
    more = program.bind_arguments, program.compiled is not None
    func = program.func
    if isinstance(func, MethodType):
        return _of_instance, (func.__self__, func.__name__, *more)
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
    return _of_module, (name, kind, *more)


def _of_module(name: str, kind: type[SglFunction], bound: dict[str, Any], compiled: bool) -> SglFunction:
    found = import_by_name(name)
    return _as_it_was(found if isinstance(found, kind) else kind(found), bound, compiled)


def _of_instance(instance: object, name: str, bound: dict[str, Any], compiled: bool) -> SglFunction:
    return _as_it_was(getattr(instance, name), bound, compiled)


def _as_it_was(program: SglFunction, bound: dict[str, Any], compiled: bool) -> SglFunction:
    if bound:
        program = program.bind(**bound)
    return program.compile() if compiled and program.compiled is None else program
