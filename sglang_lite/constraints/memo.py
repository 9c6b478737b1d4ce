"""Memoized functions that share one cache. It is bounded by bytes, not entries, because the sizes
of constraints differ by six orders of magnitude.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

MAX_BYTES = 48 << 20
# bytes of a result that took much more memory to compute, which the allocator would keep
LARGE = 1 << 20

_P = ParamSpec("_P")
_R = TypeVar("_R")


class BoundedCache:
    """Least-recently-used cache, bounded by the bytes of its entries. The newest entry is kept even
    if it exceeds the bound.

    Args:
        max_bytes: maximum total size of the entries in bytes.

    Attributes:
        bytes: total size of the entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def find_entry(self, key: object) -> Any:  # the value under the key
        """Returns a cached value as a one-tuple, or None if the key is not cached."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            value, size = found
            # it has grown in the meantime
            if (now := getattr(value, "size", size)) != size and isinstance(now, int):
                self.bytes += now - size
                self._entries[key] = value, now
            self._entries.move_to_end(key)
            return (value,)

    def put_entry(self, key: object, value: object, size: int) -> None:
        with self._lock:
            self.bytes += size - self._entries.pop(key, (None, 0))[1]
            self._entries[key] = value, size
            while self.bytes > self._max_bytes and len(self._entries) > 1:
                self.bytes -= self._entries.popitem(last=False)[1][1]

    def drop_entries(self) -> None:
        with self._lock:
            self._entries.clear()
            self.bytes = 0


_cache = BoundedCache(MAX_BYTES)


def memoize(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Memoizes a function of hashable arguments in the shared cache. Errors are not cached."""

    @wraps(function)
    def call_memoized(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        key = (function, args, *kwargs.items()) if kwargs else (function, args)
        cached = _cache.find_entry(key)
        if cached is not None:
            value: _R = cached[0]
        else:
            value = function(*args, **kwargs)
            size = estimate_bytes((args, value))
            if size > LARGE:
                trim()
            _cache.put_entry(key, value, size)
        return value

    return call_memoized


def estimate_bytes(value: object) -> int:
    """Estimates the memory of a value in bytes. An object with a `size` attribute reports its own
    size, which may grow later.
    """
    total = 0
    seen = set[int]()
    stack: list[Any] = [value]
    while stack:
        each = stack.pop()
        if each is None or isinstance(each, bool | int | float) or id(each) in seen:
            continue
        seen.add(id(each))
        total += 60
        if isinstance(each, str):
            total += len(each) * (1 if each.isascii() else 3)
        elif isinstance(each, tuple):
            total += 8 * len(each)
            stack += each
        elif (read := _fields_reader(type(each))) is not None:  # type: ignore[arg-type]  # classes are hashable
            count, found = read
            total += 8 * count
            if count == 1:
                stack.append(found(each))
            else:
                stack += found(each)
        elif isinstance(each, bytes):
            total += len(each)
        elif isinstance(each, list | frozenset | set):
            total += 8 * len(each)
            stack += each
        elif isinstance(each, dict):
            total += 100 * len(each)
            stack += each.keys()
            stack += each.values()
        elif isinstance(size := getattr(each, "size", None), int):
            total += size
    return total


@cache
def _fields_reader(kind: Hashable) -> tuple[int, Callable[[object], Any]] | None:
    """Returns the number of a class's fields, and a function that reads them. Returns None if the
    class has no fields or reports its own `size`.
    """
    names: Any = (
        [field.name for field in fields(kind)]
        if is_dataclass(kind)
        else getattr(kind, "__struct_fields__", ())
    )
    return None if not names or hasattr(kind, "size") else (len(names), attrgetter(*names))


def clear() -> None:
    """Drops all entries of the shared cache and returns the freed memory to the system."""
    _cache.drop_entries()
    trim()


def trim() -> None:
    """Returns freed memory to the system if the allocator is glibc's, which otherwise keeps it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class _Mallinfo2(ctypes.Structure):
    _names = (
        "arena",
        "ordblks",
        "smblks",
        "hblks",
        "hblkhd",
        "usmblks",
        "fsmblks",
        "uordblks",
        "fordblks",
        "keepcost",
    )
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def native_bytes() -> int:
    """Returns the bytes that native code of this process has allocated according to glibc's
    `mallinfo2`, or 0 if that function is missing. May take milliseconds.
    """
    with contextlib.suppress(OSError, AttributeError):
        function = ctypes.CDLL(None).mallinfo2
        function.restype = _Mallinfo2
        found = function()
        return int(found.uordblks + found.hblkhd)
    return 0
