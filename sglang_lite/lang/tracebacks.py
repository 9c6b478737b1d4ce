"""Locations in the user's program, and tracebacks that show only the user's frames."""

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
)  # packages whose frames only pass errors on to the user

# By the code's id, since hashing code is slow, and the offset of an instruction. The code object is
# kept so its id is not reused. Shared because runs and rows of a batch reach the same locations.
_locations: dict[tuple[int, int], tuple[CodeType, Location]] = {}
_MAX_LOCATIONS = 4096
_last_lines: dict[Location, int] = {}  # last lines of multi-line statements


def user_location() -> Location | None:
    """Returns the location of the innermost frame outside this package, or None if all frames are
    in it. The caller's own frame is not considered.
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


def choose_error_location(statement: Location | None, made: Location | None) -> Location | None:
    """Chooses the location that an error about a node reports.

    Args:
        statement: location of the statement that adds the node.
        made: location where the node was created.

    Returns:
        `made` if it is on a later line of the statement, in the same function or in one defined
        there; else `statement`.
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
    """Removes this package's frames from the tracebacks of an error and its causes. Errors caused
    by a bug in this package keep their frames.
    """
    seen = set[int]()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, SglError) or not _failed_in_this_package(link.__traceback__):
            link.__traceback__ = _drop_carrier_frames(link.__traceback__)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def is_library(trace: TracebackType) -> bool:
    """Returns whether a frame is in the standard library or an installed package."""
    return trace.tb_frame.f_code.co_filename.startswith(LIBRARIES)


def _top_level_package(trace: TracebackType) -> str:
    name: str = trace.tb_frame.f_globals.get("__name__") or ""
    return name.partition(".")[0]


def _failed_in_this_package(trace: TracebackType | None) -> bool:
    """Returns whether the innermost frame that is not in a library belongs to this package."""
    found = False
    while trace is not None:
        if _top_level_package(trace) == "sglang_lite":
            found = True
        elif not is_library(trace):
            found = False
        trace = trace.tb_next
    return found


def _drop_carrier_frames(trace: TracebackType | None) -> TracebackType | None:
    frames = []
    while trace is not None:
        if _top_level_package(trace) not in _CARRIERS:
            frames.append(trace)
        trace = trace.tb_next
    following: TracebackType | None = None
    for each in reversed(frames):
        following = TracebackType(following, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return following


class _TracebackTrimmer:
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


trimmed = _TracebackTrimmer()


# Warnings already shown, by file and in the format of Python's filters, which know lines alone.
_seen: dict[str, dict[Any, Any]] = {}


def warn_here(message: str) -> None:
    """Warns about the current line of the user's program. Each message is given only once for each
    line.
    """
    warn_at(user_location() or Location("<unknown>", 0, ""), message)


def warn_at(where: Location, message: str) -> None:
    """Warns about a line of the user's program. Each message is given only once for each line."""
    seen = _seen.setdefault(where.file, {})
    warnings.warn_explicit(message, UserWarning, where.file, where.line, registry=seen)
