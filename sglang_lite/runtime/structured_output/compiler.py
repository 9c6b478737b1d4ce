"""Compiling constraints off the loop: which engine, where, within which limits, and each of them once.

What is small and plain (simple.py) is compiled in this process. Anything else is first prepared by a worker, which can
be killed; here it is only loaded. Neither waits for the other.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cached_property, partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_lite.constraints.free_numbers import PATTERNS
from sglang_lite.constraints.json_schema.watched import Watched
from sglang_lite.constraints.memo import size_of, trim
from sglang_lite.protocol import (
    Constraint,
    ConstraintError,
    Continuation,
    EngineClosedError,
    JsonSchema,
    Number,
    Regex,
    SglError,
)
from sglang_lite.runtime.models.resolve import cache_folder
from sglang_lite.runtime.structured_output.base import CompiledGrammar, GrammarEngine, Mask, PreparedGrammar
from sglang_lite.runtime.structured_output.disk_cache import SLOW_S, GrammarDiskCache
from sglang_lite.runtime.structured_output.fastest import fastest
from sglang_lite.runtime.structured_output.json_number import JsonNumberGrammar, may_be_number
from sglang_lite.runtime.structured_output.number import NumberGrammar
from sglang_lite.runtime.structured_output.prefixed import ContinuedGrammar
from sglang_lite.runtime.structured_output.registry import make_engine
from sglang_lite.runtime.structured_output.simple import is_simple
from sglang_lite.runtime.structured_output.unique_names import EndingTokens, distinct, unpacked, watched_in
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary, mask_of
from sglang_lite.runtime.structured_output.worker import OverBudgetError, Worker

if TYPE_CHECKING:
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

logger = logging.getLogger("sglang_lite")

CACHED = 1024  # grammars
CACHED_BYTES = 128 << 20  # of all but the newest, whose future is not done yet
WORKERS = 2
_SMALL = Regex("a")
_BLANKS = " \t\r\n"
_LONG = 1 << 15  # characters of a schema that is compared as it is written: to find its blanks would hold up the loop
# Strings, punctuation and what stands between them. Possessive, as 100 bytes are kept for each character that a repeat
# may be taken back to; found as a whole, not one by one, as what calls back into Python would hold up the loop.
_PARTS = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\],:]|[^"{}\[\],:]++|"', re.DOTALL)


class Compiler:
    """Compiled grammars of an engine's constraints, each compiled once.

    Args:
        tokenizer: the model's.
        vocab_size: the model's, padding included.
        eos_ids: tokens that may end a complete text.
        threads: that make masks at a time.
        backend: the engine's name; "auto": the fastest for each constraint.
        timeout_s: seconds on the CPU that compiling a constraint may take.
        memory_mb: most memory of a process that compiles.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: Collection[int],
        threads: int,
        *,
        backend: str,
        timeout_s: float,
        memory_mb: int,
    ) -> None:
        self.hits = self.misses = self.kept = 0
        self._tokenizer, self._backend = tokenizer, backend
        self._vocab_size, self._eos_ids = vocab_size, sorted(eos_ids)
        self._threads = threads
        self._timeout, self._memory = timeout_s, memory_mb
        self._end = mask_of(self._eos_ids, vocab_size)
        self._engines: dict[str, GrammarEngine] = {}
        self._making = threading.Lock()  # of engines and workers
        self._loading = threading.Lock()
        self._cache: OrderedDict[Constraint, Future[CompiledGrammar]] = OrderedDict()
        self._bytes = 0  # of what is in it
        self._being_made = 0  # with the help of workers
        self._under_way = 0  # all that are being made, or wait for it
        self._lock = threading.Lock()
        self._closed = False
        self._here = ThreadPoolExecutor(1, "sglang_lite-grammar")  # one in Python at a time: each holds up the loop
        self._apart = ThreadPoolExecutor(WORKERS, "sglang_lite-worker")
        self._on_disk: GrammarDiskCache | None = None
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []

    @property
    def cached_bytes(self) -> int:
        """Memory of the grammars and errors that are kept, roughly, in bytes."""
        return self._bytes

    def is_busy(self) -> bool:
        """True while constraints are being compiled, which takes processors from whatever else computes."""
        return self._under_way > 0

    def warm_up(self) -> list[Future[object]]:
        """Starts what the first constraint would wait for: its engine, and a process that prepares for it."""
        if not self._tokenizer.knows_text:
            return []
        return [self._here.submit(self.build, _SMALL), self._apart.submit(self._prepare, _SMALL)]

    def request(self, constraint: Constraint) -> Future[CompiledGrammar]:
        """Starts compiling a constraint, unless that was done or is being done. The future raises ConstraintError for
        what can't be enforced, and EngineClosedError when `close` comes first."""
        if not self._tokenizer.knows_text:
            refused: Future[CompiledGrammar] = Future()
            refused.set_exception(ConstraintError("the model has no tokenizer, so its tokens have no text."))
            return refused
        if isinstance(constraint, Continuation):
            return self._continued(constraint)
        key = without_blanks(constraint)
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self.hits += 1
                self._cache.move_to_end(key)
                error = known.exception() if known.done() else None
                return known if error is None else _failed(error)
            self.misses += 1
            future = self._cache[key] = Future()
            self._under_way += 1
        try:
            if is_simple(constraint):
                self._here.submit(self._settle_here, key, future, constraint)
            else:
                with self._lock:
                    self._being_made += 1
                self._apart.submit(self._settle_apart, key, future, constraint)
        except RuntimeError:  # closed meanwhile
            future.set_exception(EngineClosedError("the engine is closed."))
        return future

    def request_all(self, constraints: Collection[Constraint]) -> Future[dict[Constraint, CompiledGrammar]]:
        """`request` for each of them; raises what the first one does that fails."""
        together: Future[dict[Constraint, CompiledGrammar]] = Future()
        futures = {constraint: self.request(constraint) for constraint in constraints}
        left, lock = len(futures), threading.Lock()

        def one_more(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            try:
                together.set_result({constraint: future.result() for constraint, future in futures.items()})
            except SglError as error:
                together.set_exception(error)

        for future in futures.values():
            future.add_done_callback(one_more)
        return together

    def _continued(self, constraint: Continuation) -> Future[CompiledGrammar]:
        """Compiles the whole grammar, and the part's own, but never the rest of the whole."""
        future: Future[CompiledGrammar] = Future()
        whole, part = constraint.whole, constraint.part

        def ready(compiled: Future[dict[Constraint, CompiledGrammar]]) -> None:
            try:
                grammars = compiled.result()
            except SglError as error:
                future.set_exception(error)
            else:
                own = None if part is None else grammars[part]
                future.set_result(self.continued(grammars[whole], constraint.text, own))

        self.request_all({whole} if part is None else {whole, part}).add_done_callback(ready)
        return future

    def continued(self, whole: CompiledGrammar, text: str, part: CompiledGrammar | None) -> ContinuedGrammar:
        """A grammar that continues a text."""
        return ContinuedGrammar(whole, text, part, self._end)

    def build(self, constraint: Constraint) -> CompiledGrammar:
        """Compiles in the calling thread, without limits and whatever is cached.

        Raises:
            ConstraintError: it can't be enforced.
        """
        if isinstance(constraint, Number):
            return NumberGrammar(constraint, self._vocabulary, partial(self.build, Regex(PATTERNS[constraint.kind])))
        name = fastest(constraint) if self._backend == "auto" else self._backend
        return self._engine(name).compile(constraint)

    def close(self) -> None:
        """Ends what is being compiled, and fails what waits to be."""
        with self._making:
            self._closed = True
            for worker in self._workers:
                worker.close()
        self._here.shutdown()  # which runs what waits: it fails at once
        self._apart.shutdown()

    # --------------------------------------------------------------------------------- on threads of its own

    def _settle(self, key: Constraint, future: Future[CompiledGrammar], build: Callable[[], CompiledGrammar]) -> None:
        try:
            if self._closed:
                raise EngineClosedError("the engine is closed.")
            grammar = build()
            if isinstance(key, JsonSchema) and may_be_number(grammar, self._digits):
                grammar = JsonNumberGrammar(grammar, self._vocabulary.tokens, ~self._digits)
        except Exception as error:  # whatever it is, it must not vanish in the pool
            self._fail(key, future, error)
            return
        with self._lock:
            self._count(key, future, grammar.size)
        future.set_result(grammar)

    def _settle_here(self, key: Constraint, future: Future[CompiledGrammar], constraint: Constraint) -> None:
        self._settle(key, future, partial(self._build_here, constraint))
        with self._lock:
            self._under_way -= 1

    def _settle_apart(self, key: Constraint, future: Future[CompiledGrammar], constraint: Constraint) -> None:
        self._settle(key, future, partial(self._build_apart, key, constraint))
        with self._lock:
            self._under_way -= 1
            self._being_made -= 1
            last = not self._being_made
        if last:  # it may have taken many times the memory that it keeps; the next one would take that again
            trim()

    def _fail(self, key: Constraint, future: Future[CompiledGrammar], error: Exception) -> None:
        if self._closed:
            error = EngineClosedError("the engine is closed.")
        elif not isinstance(error, SglError):
            error = ConstraintError(f"the constraint could not be compiled: {error!r}")
        with self._lock:
            known = self._cache.get(key) is future
            if known and isinstance(error, ConstraintError) and not isinstance(error, OverBudgetError):
                self._cache[key] = kept = _failed(error)
                self._count(key, kept, 0)
            elif known:  # another time it may be in time
                del self._cache[key]
        future.set_exception(error)

    def _count(self, key: Constraint, future: Future[CompiledGrammar], size: int) -> None:
        """Counts the bytes of a cache entry: the grammar's, and the constraint's, which may be megabytes of text."""
        if self._cache.get(key) is future:
            self._bytes += size_of(key) + size
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        for key, future in list(self._cache.items()):
            if len(self._cache) <= CACHED and self._bytes <= CACHED_BYTES:
                return
            if future.done():
                del self._cache[key]
                self._bytes -= size_of(key) + (future.result().size if future.exception() is None else 0)

    def _build_here(self, constraint: Constraint) -> CompiledGrammar:
        return self._distinct(self.build(constraint), watched_in(constraint))

    def _distinct(self, grammar: CompiledGrammar, places: tuple[Watched, ...] | None) -> CompiledGrammar:
        return grammar if places is None else distinct(grammar, self._ending, places)

    def _build_apart(self, key: Constraint, constraint: Constraint) -> CompiledGrammar:
        kept = self.disk_cache()
        found = kept.get(key)
        if found is not None:
            try:
                name, (prepared, places) = found
                grammar = self._distinct(self._load(name, prepared), unpacked(places))
            except Exception as error:  # a library's, of a file that was changed
                logger.warning("a compiled grammar of %s can't be loaded: %s", found[0], error)
            else:
                self.kept += 1
                return grammar
        name, (prepared, places), seconds = self._prepare(constraint)
        grammar = self._load(name, prepared)
        if seconds > SLOW_S:
            kept.put(key, name, (prepared, places))
        return self._distinct(grammar, unpacked(places))

    def _load(self, name: str, prepared: PreparedGrammar) -> CompiledGrammar:
        """Loads what was prepared: one at a time, as what takes long takes a core from the loop."""
        with self._loading:
            return self._engine(name).load(prepared)

    def _prepare(self, constraint: Constraint) -> tuple[str, tuple[Any, bytes], float]:
        """Prepares a constraint in a worker, as `Worker.prepare`."""
        worker = self._worker()
        try:
            return worker.prepare(constraint)
        finally:
            self._idle.append(worker)

    def disk_cache(self) -> GrammarDiskCache:
        """The grammars that are on disk."""
        with self._making:
            if self._on_disk is None:
                self._on_disk = GrammarDiskCache(cache_folder() / "grammars", self._vocabulary, self._backend)
            return self._on_disk

    def _worker(self) -> Worker:
        """An idle worker: there are as many as threads that ask for one."""
        with self._making:
            if self._idle:
                return self._idle.pop()
            if self._closed:
                raise EngineClosedError("the engine is closed.")
            self._workers.append(Worker(self._vocabulary, self._backend, self._timeout, self._memory))
            return self._workers[-1]

    def _engine(self, name: str) -> GrammarEngine:
        with self._making:
            if name not in self._engines:
                self._engines[name] = make_engine(name, self._vocabulary, self._tokenizer, self._threads)
            return self._engines[name]

    @cached_property
    def _digits(self) -> Mask:
        """The mask of the tokens that begin with a digit."""
        return mask_of((i for i, token in enumerate(self._vocabulary.tokens) if token[:1].isdigit()), self._vocab_size)

    @cached_property
    def _ending(self) -> EndingTokens:
        special = {*self._eos_ids, *self._tokenizer.special_ids}
        return EndingTokens(self._tokenizer.token_bytes, special)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._tokenizer, self._vocab_size, self._eos_ids)


def _failed(error: BaseException) -> Future[CompiledGrammar]:
    """A future that has failed with a copy of an error: whoever raises an error adds to its traceback, whose frames
    hold requests, and what is cached would keep them."""
    future: Future[CompiledGrammar] = Future()
    future.set_exception(copy(error))
    return future


def without_blanks(constraint: Constraint) -> Constraint:
    """A schema without its blanks, unless it is long; another constraint as it is. Members' order has a meaning."""
    if isinstance(constraint, JsonSchema) and len(constraint.schema) <= _LONG:
        parts = map(methodcaller("strip", _BLANKS), _PARTS.findall(constraint.schema))
        return msgspec.structs.replace(constraint, schema="".join(parts))
    return constraint
