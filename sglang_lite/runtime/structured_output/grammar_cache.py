"""Cache of compiled grammars, and of the errors of constraints that can't be enforced."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from copy import copy
from operator import methodcaller

import msgspec

from sglang_lite.constraints.memo import size_of
from sglang_lite.protocol import Constraint, ConstraintError, JsonSchema
from sglang_lite.runtime.structured_output.base import CompiledGrammar
from sglang_lite.runtime.structured_output.worker import TransientError

CACHED = 1024  # most grammars in the cache
CACHED_BYTES = 128 << 20  # most bytes of cached grammars, without the newest, whose future is not done yet
_BLANKS = " \t\r\n"
_LONG = 1 << 15  # most characters of a schema that is cached without its blanks; longer ones would block the loop
# Strings, punctuation, and text between them. The repeats are possessive, as backtracking keeps 100 bytes for each
# character. `findall` finds all at once, as a Python callback for each would block the loop.
_PARTS = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\],:]|[^"{}\[\],:]++|"', re.DOTALL)


class GrammarCache:
    """Futures of grammars by constraint. What was used least recently is dropped first, once it is done.

    Attributes:
        hits, misses: numbers of constraints that were found, and that were not.
        bytes: approximate memory of the cached grammars and errors.
    """

    def __init__(self) -> None:
        self.hits = self.misses = 0
        self.bytes = 0
        self._entries: OrderedDict[Constraint, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Constraint) -> tuple[Future[CompiledGrammar], bool]:
        """Returns the future of a constraint's grammar, and whether it is new: the caller then compiles the constraint,
        and calls `keep` or `keep_error`."""
        with self._lock:
            cached = self._entries.get(key)
            if cached is None:
                self.misses += 1
                future = self._entries[key] = Future()
                return future, True
            self.hits += 1
            self._entries.move_to_end(key)
            error = cached.exception() if cached.done() else None
            return cached if error is None else _failed(error), False

    def keep(self, key: Constraint, future: Future[CompiledGrammar], size: int) -> None:
        """Counts the bytes of a grammar, which the future is about to have."""
        with self._lock:
            self._count(key, future, size)

    def keep_error(self, key: Constraint, future: Future[CompiledGrammar], error: Exception) -> None:
        """Keeps the error that the future is about to have, unless another attempt may succeed."""
        with self._lock:
            if self._entries.get(key) is not future:
                return
            if isinstance(error, ConstraintError) and not isinstance(error, TransientError):
                self._entries[key] = cached = _failed(error)
                self._count(key, cached, 0)
            else:
                del self._entries[key]

    def _count(self, key: Constraint, future: Future[CompiledGrammar], size: int) -> None:
        """Adds the bytes of an entry: the grammar, and the constraint, whose text may take megabytes."""
        if self._entries.get(key) is future:
            self.bytes += size_of(key) + size
        for oldest, done in list(self._entries.items()):
            if len(self._entries) <= CACHED and self.bytes <= CACHED_BYTES:
                return
            if done.done():
                del self._entries[oldest]
                self.bytes -= size_of(oldest) + (done.result().size if done.exception() is None else 0)


def _failed(error: BaseException) -> Future[CompiledGrammar]:
    """Returns a future that has failed with a copy of an error.

    Raising an error adds frames to its traceback; in a cached error, these would keep requests alive.
    """
    future: Future[CompiledGrammar] = Future()
    future.set_exception(copy(error))
    return future


def without_blanks(constraint: Constraint) -> Constraint:
    """Returns a schema without blanks unless it is long, and other constraints unchanged. Keeps the order of
    members."""
    if isinstance(constraint, JsonSchema) and len(constraint.schema) <= _LONG:
        parts = map(methodcaller("strip", _BLANKS), _PARTS.findall(constraint.schema))
        return msgspec.structs.replace(constraint, schema="".join(parts))
    return constraint
