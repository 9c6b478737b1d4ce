"""Locations in the user's program, and tracebacks reduced to the user's frames."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from itertools import islice
from types import CodeType, FrameType, TracebackType
from typing import Any

from sglang_lite.protocol import Location, SglError

LIBRARIES = (
    "<frozen ",
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
_CARRIERS = (
    "sglang_lite",
    "asyncio",
    "concurrent",
    "contextlib",
    "threading",
)  # packages whose frames only pass an error on to its reader

# By the id of the code, whose hash reads all of it, and the offset of an instruction. The code is
# kept, so that no other one gets its id. Shared, as runs and rows of a batch come to the same ones.
_locations: dict[tuple[int, int], tuple[CodeType, Location]] = {}
_MAX_LOCATIONS = 4096
_last_lines: dict[Location, int] = {}  # of statements that have several lines


def user_location() -> Location | None:
    """Location of the innermost frame outside this package, or None if all frames are in it. The
    caller's own frame is not considered.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("sglang_lite."):
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    known = _locations.get((id(code), frame.f_lasti))
    return known[1] if known is not None else _new_location(code, frame)


def _new_location(code: CodeType, frame: FrameType) -> Location:
    if len(_locations) >= _MAX_LOCATIONS:
        _locations.clear()
        _last_lines.clear()
    found = Location(code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_qualname)
    _locations[id(code), frame.f_lasti] = code, found
    _, last, _, _ = next(islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    if last is not None and last > found.line:
        _last_lines[found] = max(last, _last_lines.get(found, 0))
    return found


def own_line(statement: Location | None, made: Location | None) -> Location | None:
    """Chooses the line that an error of a node names.

    Args:
        statement: location of the statement that adds it.
        made: location at which it was made.

    Returns:
        `made` if it is a later line of the statement, also of a function that is defined in it;
        else `statement`.
    """
    if (
        made is None
        or statement is None
        or made.line <= statement.line
        or made.file != statement.file
    ):
        return statement
    if made.line > _last_lines.get(statement, 0):
        return statement
    within = made.function == statement.function or made.function.startswith(
        f"{statement.function}.<locals>."
    )
    return made if within else statement


def trim(error: BaseException) -> None:
    """Removes this package's frames from the tracebacks of an error and of its causes. An error
    that is a bug of this package keeps its traceback.
    """
    seen = set[int]()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, SglError) or not _is_ours(link.__traceback__):
            link.__traceback__ = _without_carriers(link.__traceback__)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def is_library(trace: TracebackType) -> bool:
    """True if a frame is in the standard library or an installed package."""
    return trace.tb_frame.f_code.co_filename.startswith(LIBRARIES)


def _module(trace: TracebackType) -> str:
    name: str = trace.tb_frame.f_globals.get("__name__") or ""
    return name.partition(".")[0]


def _is_ours(trace: TracebackType | None) -> bool:
    """True if the innermost frame outside of libraries belongs to this package."""
    found = False
    while trace is not None:
        if _module(trace) == "sglang_lite":
            found = True
        elif not is_library(trace):
            found = False
        trace = trace.tb_next
    return found


def _without_carriers(trace: TracebackType | None) -> TracebackType | None:
    frames = []
    while trace is not None:
        if _module(trace) not in _CARRIERS:
            frames.append(trace)
        trace = trace.tb_next
    following: TracebackType | None = None
    for each in reversed(frames):
        following = TracebackType(following, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return following


class _Trimmed:
    """Context manager that removes this package's frames from the traceback of an exception raised
    inside.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is not None:
            trim(error)


trimmed = _Trimmed()


_seen: dict[Any, Any] = {}  # warnings that were shown, as Python's filters keep them


def warn_here(message: str) -> None:
    """Warns about the line of the user's program that is being run, once for each line."""
    where = user_location() or Location("<unknown>", 0, "")
    warnings.warn_explicit(message, UserWarning, where.file, where.line, registry=_seen)
