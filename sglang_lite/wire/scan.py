"""Scans JSON for limits, duplicate names and wide integers before anything is built from it. Time
and memory are linear in the number of bytes, up to the limit of items. JSON's syntax is left to the
decoder.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, Final

from sglang_lite.errors import WireError
from sglang_lite.wire.limits import INTEGERS, Limits, depth_error, pointer_to

FLOAT: Final = "$float"  # only name in an object that stands for a number JSON lacks

# Possessive quantifiers: no text causes backtracking. An unterminated string has a separate group
# for the same reason.
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


def scan_json(text: str, limits: Limits) -> bool:
    """Scans JSON. Raises WireError if it exceeds a limit, repeats a name or has an integer of more
    than 64 bits.

    Returns:
        True if the name `$float` occurs in the data.
    """
    items = 0
    floats = False
    wide = _DIGITS.search(text) is not None  # somewhere, perhaps only in a string
    # The open containers, outermost first: the name or index of the current item. `outer` has the
    # names seen so far (None for a list); those of the innermost container are in `names`.
    path: list[Any] = []
    outer: list[set[str] | None] = []
    names: set[str] | None = None
    for token in _JSON.finditer(text):
        kind = token.lastindex
        if kind == _NAME and names is not None:
            name = token[1]
            path[-1] = name = _unescape_name(name) if "\\" in name else name[1:-1]
            if name in names:
                raise WireError(
                    "a name occurs twice", pointer=pointer_to(path), hint="Give each name once."
                )
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
            raise WireError(
                "the data is cut short", pointer=pointer_to(path), hint="Send the whole message."
            )
        if items > limits.items:
            hint = "Send less, or raise the limit."
            raise WireError(
                f"more than {limits.items} values and names", pointer=pointer_to(path), hint=hint
            )
    return floats


def _check_integers(run: str, path: list[Any]) -> None:
    for found in _INTEGER.finditer(run):
        if len(found[0]) > 20 or int(found[0]) not in INTEGERS:
            before = run.count(",", 0, found.start())
            place = (
                [*path[:-1], path[-1] + before] if before and isinstance(path[-1], int) else path
            )
            hint = "Use a float or a text."
            raise WireError("an integer of more than 64 bits", pointer=pointer_to(place), hint=hint)


def _unescape_name(name: str) -> str:
    try:
        return str(json.loads(name))
    except ValueError:
        return name  # malformed; the decoder will report it


_STRINGS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def is_shallow(data: bytes, depth: int) -> bool:
    """Returns True if well-formed JSON is nested no deeper than `depth`."""
    if data.count(b"[") + data.count(b"{") <= depth:
        return True
    brackets = _STRINGS.sub(b"", data).translate(None, _NO_BRACKETS)
    return max(itertools.accumulate(1 if each in b"[{" else -1 for each in brackets)) <= depth
