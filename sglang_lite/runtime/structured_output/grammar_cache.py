"""Cache of compiled grammars and of the errors of constraints that can't be enforced."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from operator import methodcaller

import msgspec

from sglang_lite.constraints.memo import estimate_bytes
from sglang_lite.protocol import Constraint, ConstraintError, JsonSchema
from sglang_lite.runtime.structured_output.base import CompiledGrammar
from sglang_lite.runtime.structured_output.worker import TransientError

CACHED = 1024  # most grammars in the cache
# most bytes of cached grammars, without the newest, whose future is not done yet
CACHED_BYTES = 128 << 20
_BLANKS = " \t\r\n"
# most characters of a schema that is cached without its blanks; longer ones would block the loop
_LONG = 1 << 15
# Strings, punctuation, and text between them. The repeats are possessive, since backtracking keeps
# 100 bytes for each character. `findall` runs in one call, since a Python callback for each match
# would block the event loop.
_PARTS = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\],:]|[^"{}\[\],:]++|"', re.DOTALL)


@dataclass(slots=True)
class _Entry:
    """Future of a grammar.

    Attributes:
        constraint_bytes: memory of the constraint, whose text may take megabytes.
        bytes: memory counted so far: the constraint's, and the grammar's when it was last measured.
    """

    future: Future[CompiledGrammar]
    constraint_bytes: int = 0
    bytes: int = 0


class GrammarCache:
    """Futures of grammars by constraint. Drops the least recently used entries first, once they are
    done.

    Attributes:
        hits, misses: numbers of constraints that were and were not found.
        bytes: approximate memory of the cached grammars and errors.
    """

    def __init__(self) -> None:
        self.hits = self.misses = 0
        self.bytes = 0
        self._entries: OrderedDict[Constraint, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def stats(self) -> dict[str, int]:
        """Returns counts for `Engine.stats`."""
        return {"grammars_compiled": self.misses, "grammars_cached": self.hits}

    def find_or_reserve(self, key: Constraint) -> tuple[Future[CompiledGrammar], bool]:
        """Returns the future of a constraint's grammar and whether it is new. If it is, the caller
        must compile the constraint and call `keep_grammar` or `keep_error`.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += 1
                entry = self._entries[key] = _Entry(Future())
                return entry.future, True
            self.hits += 1
            self._entries.move_to_end(key)
            if not entry.future.done():
                return entry.future, False
            error = entry.future.exception()
            if error is not None:
                return _failed_future(error), False
            # texts written since then may have made it grow
            self._update_size(entry, entry.future.result().size)
            return entry.future, False

    def keep_grammar(self, key: Constraint, future: Future[CompiledGrammar], size: int) -> None:
        """Keeps the grammar that the future is about to hold, and counts its bytes."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.future is future:
                entry.constraint_bytes = estimate_bytes(key)
                self._update_size(entry, size)

    def keep_error(
        self, key: Constraint, future: Future[CompiledGrammar], error: Exception
    ) -> None:
        """Keeps the error that the future is about to hold, unless another attempt may succeed."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.future is not future:
                return
            if isinstance(error, ConstraintError) and not isinstance(error, TransientError):
                self._entries[key] = entry = _Entry(_failed_future(error), estimate_bytes(key))
                self._update_size(entry, 0)
            else:
                del self._entries[key]

    def _update_size(self, entry: _Entry, size: int) -> None:
        """Updates the counted bytes of an entry and drops what no longer fits."""
        self.bytes += entry.constraint_bytes + size - entry.bytes
        entry.bytes = entry.constraint_bytes + size
        if len(self._entries) <= CACHED and self.bytes <= CACHED_BYTES:
            return
        for key, oldest in list(self._entries.items()):
            if len(self._entries) <= CACHED and self.bytes <= CACHED_BYTES:
                return
            if oldest.future.done() and oldest is not entry:
                del self._entries[key]
                self.bytes -= oldest.bytes


def _failed_future(error: BaseException) -> Future[CompiledGrammar]:
    """Returns a future that has failed with a copy of an error.

    Raising an error adds frames to its traceback; in a cached error, these would keep requests
    alive.
    """
    future: Future[CompiledGrammar] = Future()
    future.set_exception(copy(error))
    return future


def strip_schema_blanks(constraint: Constraint) -> Constraint:
    """Removes the blanks of a JSON schema that is not too long, keeping the order of members.
    Returns other constraints unchanged.
    """
    if isinstance(constraint, JsonSchema) and len(constraint.schema) <= _LONG:
        parts = map(methodcaller("strip", _BLANKS), _PARTS.findall(constraint.schema))
        return msgspec.structs.replace(constraint, schema="".join(parts))
    return constraint
