"""Writes plain data as bytes, for comparing it and searching its texts.

Equal values can be written differently by a template (1, 1.0 and true; dictionaries in another
order), so values are compared by their bytes in the format of `marshal`. Its version 2 writes equal
bytes for the same plain data.
"""

from __future__ import annotations

import hashlib
import marshal
from dataclasses import dataclass
from typing import Any

from sglang_lite.protocol.anything import UserValue

_MAX_CHARS = 1_000_000  # of a value, with those inside it
_MAX_VALUES = 50_000
_MAX_KEY = 256  # bytes; longer ones are replaced by a digest


@dataclass(frozen=True, slots=True)
class PlainBytes:
    """A value written as bytes.

    Attributes:
        data: the bytes, or None if the value is not plain data or too large.
        work: number of values that were looked at, plus one for every 64 characters.
        key: the bytes, or a digest if there are many; None if `data` is.
    """

    data: bytes | None
    work: int
    key: bytes | None


def write_plain(whole: UserValue) -> PlainBytes:
    """Writes plain data as bytes that differ if a template could write the values differently."""
    values = chars = 0
    stack: list[Any] = [(whole,)]
    while stack:
        inside = stack.pop()
        values += len(inside)
        for value in inside:
            kind = type(value)
            if kind is str:
                chars += len(value)
            elif kind is dict:
                stack.append((*value, *value.values()))
            elif kind is list or kind is tuple:
                stack.append(value)
            elif kind is int:
                chars += value.bit_length() // 8
            elif kind is float:
                if value != value:  # a NaN is equal to itself only if it is the same object
                    return PlainBytes(None, values + chars // 64, None)
            elif value is not None and kind is not bool:
                return PlainBytes(None, values + chars // 64, None)
        if chars > _MAX_CHARS or values > _MAX_VALUES or len(stack) > _MAX_VALUES:
            return PlainBytes(None, values + chars // 64, None)
    work = values + chars // 64
    try:
        data = marshal.dumps(whole, 2)
    except ValueError:  # nested too deeply
        return PlainBytes(None, work, None)
    if len(data) <= _MAX_KEY:
        return PlainBytes(data, work, data)
    # `marshal` begins no value with "#"
    return PlainBytes(data, work, b"#" + hashlib.blake2b(data, digest_size=16).digest())


class UnchangedDict(dict[str, Any]):
    """Dictionary that is not changed once it is made, so it is written as bytes once.

    Attributes:
        __plain__: what `write_plain` returns for it. Templates can't read names that begin with
            underscores, so the attribute can't hide a key from them.
    """

    __slots__ = ("__plain__",)

    def __init__(self, **items: UserValue) -> None:
        super().__init__(items)
        self.__plain__ = write_plain(items)
