"""Scans of serialised data, before anything is built from it: for limits, names that occur twice, invalid texts, wide
integers. Time and memory are linear in the number of bytes, up to the limit of items. JSON's syntax is left to the
decoder."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, Final

from sglang_lite.errors import WireError
from sglang_lite.wire.limits import (
    INTEGERS,
    Limits,
    depth_error,
    duplicate_name_error,
    item_limit_error,
    pointer_to,
    truncated_error,
    wide_integer_error,
)

FLOAT: Final = "$float"  # name of the object that stands for a number which JSON lacks

# Possessive quantifiers: no text causes backtracking. An unterminated string has a group of its own for the same
# reason.
_JSON: Final = re.compile(
    r"""("[^"\\]*+(?:\\.[^"\\]*+)*+") ([ \t\r\n]*+:)?+
    |   (")
    |   ([\[{])
    |   ([\]}])
    |   (,[, \t\r\n]*+)
    |   ([-0-9a-z][-+.0-9a-zA-Z, \t\r\n]*+)  # all of a list of numbers
    |   [^-0-9a-z"\[\]{},]++
    """,
    re.VERBOSE | re.DOTALL,
)
_TEXT, _NAME, _CUT, _OPEN, _CLOSE, _COMMA, _SCALARS = range(1, 8)
_BLANKS: Final = " \t\r\n"
_DIGITS: Final = re.compile(r"[0-9]{19}")
_INTEGER: Final = re.compile(r"(?<![-+.0-9eE])-?[0-9]{19,}(?![.0-9eE])")

# The open containers are kept in stacks, outermost first: the names seen so far (None in a list), the name or index of
# the current item, and in msgpack the numbers of items.


def scan_json(text: str, limits: Limits) -> bool:
    """Scans JSON.

    Returns:
        True if the name `$float` occurs in the data.
    """
    items, floats = 0, False
    wide = _DIGITS.search(text) is not None  # somewhere, perhaps only in a string
    path: list[Any] = []
    names: set[str] | None = None  # names seen in the innermost container
    outer: list[set[str] | None] = []
    for token in _JSON.finditer(text):
        kind = token.lastindex
        if kind == _NAME and names is not None:
            name = token[1]
            path[-1] = name = _unescaped(name) if "\\" in name else name[1:-1]
            if name in names:
                raise duplicate_name_error(path)
            names.add(name)
            floats = floats or name == FLOAT
            items += 1
        elif kind in (_TEXT, _NAME):
            items += 1
        elif kind == _SCALARS:
            run = token[0]
            if wide:
                _check_integers(run, path)
            if "," in run:
                commas = run.count(",")
                items += commas - run.rstrip(_BLANKS).endswith(",")
                if path and names is None:
                    path[-1] += commas
            items += 1
        elif kind == _COMMA:
            if path and names is None:
                path[-1] += token[0].count(",")
        elif kind == _OPEN:
            items += 1
            if len(path) >= limits.depth:
                raise depth_error(path, limits)
            outer.append(names)
            names = set() if token[0] == "{" else None
            path.append(0)
        elif kind == _CLOSE:
            if not path:
                raise WireError("no message: a bracket that closes nothing")
            path.pop()
            names = outer.pop()
        elif kind == _CUT:
            raise truncated_error(path)
        if items > limits.items:
            raise item_limit_error(path, limits)
    return floats


def _check_integers(run: str, path: list[Any]) -> None:
    for found in _INTEGER.finditer(run):
        if len(found[0]) > 20 or int(found[0]) not in INTEGERS:
            before = run.count(",", 0, found.start())
            raise wide_integer_error([*path[:-1], path[-1] + before] if before and isinstance(path[-1], int) else path)


def _unescaped(name: str) -> str:
    try:
        return str(json.loads(name))
    except ValueError:
        return name  # malformed: the decoder will report that


_STRINGS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def is_shallow(data: bytes, depth: int) -> bool:
    """True if well-formed JSON is nested no deeper than `depth`."""
    if data.count(b"[") + data.count(b"{") <= depth:
        return True
    brackets = _STRINGS.sub(b"", data).translate(None, _NO_BRACKETS)
    return max(itertools.accumulate(1 if each in b"[{" else -1 for each in brackets)) <= depth


# --------------------------------------------------------------------------------------------------- msgpack

_SCALAR: Final = (  # scalars of a fixed width
    rb"[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1]..|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8}"
)
_RUN: Final = 64
_SCALARS_RUN: Final = re.compile(rb"(?:" + _SCALAR + rb"){%d}" % _RUN, re.DOTALL)
_WIDTHS: Final = [  # bytes of these scalars by their first byte; 0 for other kinds
    *([1] * 0x80), *([0] * 0x40), 1, 0, 1, 1, *([0] * 6), 5, 9, 2, 3, 5, 9, 2, 3, 5, 9, *([0] * 12), *([1] * 0x20),
]  # fmt: skip
# Other kinds, by their first byte: (kind, number of bytes of the length that follows, length in the first byte itself).
_STRING, _BYTES, _LIST, _OBJECT = range(4)
_KINDS: Final = {
    **{head: (_STRING, 0, head & 31) for head in range(0xA0, 0xC0)},
    **{head: (_LIST, 0, head & 15) for head in range(0x90, 0xA0)},
    **{head: (_OBJECT, 0, head & 15) for head in range(0x80, 0x90)},
    **{0xD9: (_STRING, 1, 0), 0xDA: (_STRING, 2, 0), 0xDB: (_STRING, 4, 0)},
    **{0xC4: (_BYTES, 1, 0), 0xC5: (_BYTES, 2, 0), 0xC6: (_BYTES, 4, 0)},
    **{0xDC: (_LIST, 2, 0), 0xDD: (_LIST, 4, 0), 0xDE: (_OBJECT, 2, 0), 0xDF: (_OBJECT, 4, 0)},
}


def scan_msgpack(data: bytes, limits: Limits) -> bool:
    """Scans msgpack. Data that passes is well-formed.

    Returns:
        True if bytes, or the name `$float`, occur in the data.
    """
    at, size, items, special = 0, len(data), 1, False
    path: list[str | int] = []
    # Of the innermost container: the names seen, its number of items (`count`), and the items not read yet (`left`).
    names: set[str] | None = None
    count = left = 1
    outer: list[tuple[set[str] | None, int, int]] = []
    while left or outer:
        if not left:
            names, count, left = outer.pop()
            path.pop()
            continue
        left -= 1
        if names is not None:
            if at < size and _KINDS.get(data[at], (None,))[0] != _STRING:
                raise WireError("a name that is not a text", pointer=pointer_to(path[:-1]))
            _, at, end = _head(data, at, path)
            path[-1] = name = _text(data, at, end, path)
            at = end
            if name in names:
                raise duplicate_name_error(path)
            names.add(name)
            special = special or name == FLOAT
        elif path:
            while left > _RUN and (run := _SCALARS_RUN.match(data, at)) is not None:
                at = run.end()
                left -= _RUN
            path[-1] = count - left - 1
        if at < size and (width := _WIDTHS[data[at]]):
            at += width
            continue
        kind, at, end = _head(data, at, path)
        if kind == _STRING:
            _text(data, at, end, path)
            at = end
        elif kind == _BYTES:
            special = True
            at = end
        else:
            inside = end - at  # number of items, or of pairs
            if len(path) >= limits.depth:
                raise depth_error(path, limits)
            items += inside if kind == _LIST else 2 * inside
            if items > limits.items:
                raise item_limit_error(path, limits)
            outer.append((names, count, left))
            path.append(0)
            names = None if kind == _LIST else set()
            count = left = inside
    if at > size:
        raise truncated_error(path)
    if at < size:
        raise WireError(f"{size - at} bytes follow the message", hint="Send one message at a time.")
    return special


def _head(data: bytes, at: int, path: list[str | int]) -> tuple[int, int, int]:
    """Kind of the value that begins at `at`, start of its content, and end of its content if each item takes one
    byte."""
    try:
        kind, width, length = _KINDS[data[at]]
    except IndexError:
        raise truncated_error(path) from None
    except KeyError:
        raise WireError(f"a value of no known kind ({data[at]:#04x})", pointer=pointer_to(path)) from None
    at += 1
    if width:
        length = int.from_bytes(data[at : at + width], "big")
        at += width
    if at + length > len(data):  # each item takes at least one byte
        raise truncated_error(path)
    return kind, at, at + length


def _text(data: bytes, at: int, end: int, path: list[str | int]) -> str:
    try:
        return str(data[at:end], "utf-8")
    except UnicodeDecodeError:
        raise WireError("a text that is not UTF-8", pointer=pointer_to(path)) from None
