"""Compiles constraints off the event loop: chooses the engine and the process, enforces limits, and
compiles each constraint only once.

Small and plain constraints (simple.py) are compiled in this process. All others are first prepared
by a worker process, which can be killed, and then only loaded here. The two paths don't wait for
each other.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from sglang_lite.constraints.json_schema.mask_rules import RulePosition
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.memo import trim
from sglang_lite.constraints.number_text import PATTERNS
from sglang_lite.constraints.reader import (
    AfterText,
    ByteLanguage,
    LanguageBytes,
    TextReader,
    TextTree,
)
from sglang_lite.protocol import (
    Choices,
    Constraint,
    ConstraintError,
    Continuation,
    EngineClosedError,
    JsonSchema,
    Number,
    Regex,
    SglError,
)
from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.structured_output.base import (
    CompiledGrammar,
    GrammarEngine,
    Mask,
    PreparedGrammar,
)
from sglang_lite.runtime.structured_output.disk_cache import SLOW_S, GrammarDiskCache
from sglang_lite.runtime.structured_output.ending_tokens import EndingTokens
from sglang_lite.runtime.structured_output.grammar_cache import GrammarCache, strip_schema_blanks
from sglang_lite.runtime.structured_output.number import NumberGrammar
from sglang_lite.runtime.structured_output.open_end import (
    EndTokens,
    OpenEndGrammar,
    find_end_rule,
    may_begin_with_tokens,
)
from sglang_lite.runtime.structured_output.outcomes import (
    Outcomes,
    SortedVocabulary,
    TokenOutcomes,
)
from sglang_lite.runtime.structured_output.prefixed import ContinuedGrammar
from sglang_lite.runtime.structured_output.registry import make_engine
from sglang_lite.runtime.structured_output.ruled_grammar import (
    extract_mask_rules,
    unpack_mask_rules,
    with_mask_rules,
)
from sglang_lite.runtime.structured_output.simple import can_compile_in_process
from sglang_lite.runtime.structured_output.spelling_tokens import find_spelling_tokens
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary, build_token_mask
from sglang_lite.runtime.structured_output.worker import Worker

if TYPE_CHECKING:
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

logger = logging.getLogger("sglang_lite")

WORKERS = 2
_READERS = 16  # most text readers that are cached
# Most texts whose spelling tokens are cached; each takes up to 600 kB with 50,000 tokens.
_TEXT_ENDS = 64
_SMALL = Regex("a")


class Compiler:
    """Compiles an engine's constraints, each only once, and caches the grammars.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: number of the model's tokens, padding included.
        eos_ids: tokens that may end a complete text.
        threads: number of threads that compute masks concurrently.
        backend: name of the grammar engine.
        timeout_s: seconds of CPU time that compiling a constraint may take.
        memory_mb: memory limit of a worker process, in MB.
        tracked: as for `make_engine`.

    Attributes:
        cache: compiled grammars.
        disk_hits: number of grammars that were found on disk.
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
        tracked: bool = False,
    ) -> None:
        self.cache = GrammarCache()
        self.disk_hits = 0
        self._tokenizer = tokenizer
        self._backend = backend
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._threads = threads
        self._tracked = tracked
        self._timeout = timeout_s
        self._memory = memory_mb
        self._end = build_token_mask(self._eos_ids, vocab_size)
        self._outcomes: dict[Hashable, TokenOutcomes] = {}
        self._reading = threading.Lock()  # guards the outcomes
        self._made: GrammarEngine | None = None
        self._creating = threading.Lock()  # guards the creation of the engine and of workers
        self._loading = threading.Lock()
        self._pending_in_workers = 0  # constraints being compiled by workers, or waiting for one
        self._pending = 0  # all constraints being compiled or waiting
        self._warming: list[Future[object]] | None = None
        self._lock = threading.Lock()
        self._closed = False
        # One thread, as compiling in Python slows the event loop.
        self._local_pool = ThreadPoolExecutor(1, "sglang_lite-grammar")
        self._worker_pool = ThreadPoolExecutor(WORKERS, "sglang_lite-worker")
        self._on_disk: GrammarDiskCache | None = None
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []

    def is_busy(self) -> bool:
        """Returns True while constraints are being compiled, which competes with everything else
        for CPU time.
        """
        return self._pending > 0

    def warm_up(self) -> list[Future[object]]:
        """Starts the engine and the worker process that the first constraint would otherwise wait
        for. Does nothing if called before or if the compiler is closed.
        """
        with self._lock:
            if self._warming is None and self._tokenizer.knows_text and not self._closed:
                with contextlib.suppress(RuntimeError):  # the pools are being shut down
                    self._warming = [
                        self._local_pool.submit(self.build, _SMALL),
                        self._worker_pool.submit(self._prepare, _SMALL),
                    ]
            return self._warming or []

    def compile_in_background(self, constraint: Constraint) -> Future[CompiledGrammar]:
        """Starts compiling a constraint, unless it has been compiled or is being compiled.

        The future raises ConstraintError if the constraint can't be enforced, and EngineClosedError
        if `close` comes first.
        """
        if not self._tokenizer.knows_text:
            failed: Future[CompiledGrammar] = Future()
            failed.set_exception(
                ConstraintError("the model has no tokenizer, so its tokens have no text.")
            )
            return failed
        if isinstance(constraint, Continuation):
            return self._compile_continuation(constraint)
        key = strip_schema_blanks(constraint)
        future, is_new = self.cache.find_or_reserve(key)
        if not is_new:
            return future
        self.warm_up()
        with self._lock:
            self._pending += 1
        try:
            if can_compile_in_process(constraint):
                self._local_pool.submit(self._resolve_locally, key, future, constraint)
            else:
                with self._lock:
                    self._pending_in_workers += 1
                self._worker_pool.submit(self._resolve_in_worker, key, future, constraint)
        except RuntimeError:  # the pool has been shut down meanwhile
            future.set_exception(EngineClosedError("the engine is closed."))
        return future

    def _compile_continuation(self, constraint: Continuation) -> Future[CompiledGrammar]:
        """Compiles the grammar of a text's continuation. This takes the grammar of the whole text
        and, if the part has a constraint of its own, the grammar of the part. The remainder of the
        whole is never compiled separately.
        """
        future: Future[CompiledGrammar] = Future()
        whole = self.compile_in_background(constraint.whole)
        part = None if constraint.part is None else self.compile_in_background(constraint.part)

        def ready(_: object) -> None:
            try:
                own = None if part is None else part.result()
                future.set_result(self.continuation_grammar(whole.result(), constraint.text, own))
            except SglError as error:
                future.set_exception(error)

        whole.add_done_callback(ready if part is None else lambda _: part.add_done_callback(ready))
        return future

    def continuation_grammar(
        self, whole: CompiledGrammar, text: str, part: CompiledGrammar | None
    ) -> ContinuedGrammar:
        """Returns the grammar of what may follow `text` in a text of `whole`. If `part` is given,
        it must allow the continuation, too.
        """
        return ContinuedGrammar(whole, text, part, self._end)

    def build(self, constraint: Constraint) -> CompiledGrammar:
        """Compiles in the calling thread, without limits and without the cache.

        Raises:
            ConstraintError: the constraint can't be enforced.
        """
        if isinstance(constraint, Number):
            return NumberGrammar(
                constraint, self._vocabulary, partial(self.build, Regex(PATTERNS[constraint.kind]))
            )
        return self._engine().compile(constraint)

    def find_text_outcomes(self, texts: tuple[str, ...]) -> TokenOutcomes:
        """Returns the outcomes of the model's tokens for a reader of some texts. Cached."""
        return self._find_outcomes(texts, lambda: TextTree(texts))

    def find_language_outcomes(self, constraint: Constraint, before: str = "") -> TokenOutcomes:
        """Returns the outcomes of the model's tokens for a reader of a constraint's texts. Cached.

        Args:
            constraint: the constraint.
            before: text that comes before each of the constraint's texts.

        Raises:
            ConstraintError: the constraint is not valid, or its language is too large.
            RecursionError: a rule of the constraint refers to itself before any character.
        """

        def build() -> ByteLanguage:
            language = LanguageBytes(language_for_constraint(constraint))
            return AfterText(before.encode(), language) if before else language

        return self._find_outcomes((constraint, before), build)

    def _find_outcomes(self, key: Hashable, build: Callable[[], ByteLanguage]) -> TokenOutcomes:
        with self._reading:
            found = self._outcomes.pop(key, None)
        if found is None or found.reader.is_full:
            found = TokenOutcomes(TextReader(build()), self._sorted_vocabulary)
        with self._reading:
            self._outcomes[key] = found  # at the end, as the most recently used
            if len(self._outcomes) > _READERS:
                del self._outcomes[next(iter(self._outcomes))]
        return found

    def find_spelling_tokens(self, text: bytes) -> Outcomes:
        """Returns the outcomes of the tokens that may spell the remainder of a text. Cached.

        Args:
            text: the remainder.
        """
        return self._spelling_tokens(text)

    @cached_property
    def _spelling_tokens(self) -> Callable[[bytes], Outcomes]:
        return lru_cache(_TEXT_ENDS)(partial(find_spelling_tokens, self._sorted_vocabulary))

    @cached_property
    def _sorted_vocabulary(self) -> SortedVocabulary:
        return SortedVocabulary(self._vocabulary.tokens)

    def close(self) -> None:
        """Kills the workers and fails all constraints that are being compiled or waiting."""
        with self._creating:
            self._closed = True
            for worker in self._workers:
                worker.close()
        self._local_pool.shutdown()  # runs the waiting tasks, which fail immediately
        self._worker_pool.shutdown()

    # ------------------------------------------------------------------------ on the pools' threads

    def _compile_into_future(
        self, key: Constraint, future: Future[CompiledGrammar], build: Callable[[], CompiledGrammar]
    ) -> None:
        try:
            if self._closed:
                raise EngineClosedError("the engine is closed.")
            grammar = build()
            grammar = self._allow_other_end_tokens(key, grammar)
        except Exception as error:  # any error, as it must not vanish in the pool
            self._resolve_with_error(key, future, error)
        else:
            self.cache.keep_grammar(key, future, grammar.size)
            future.set_result(grammar)

    def _allow_other_end_tokens(
        self, constraint: Constraint, grammar: CompiledGrammar
    ) -> CompiledGrammar:
        """Wraps a grammar so that other tokens may end its texts, unless none of its complete texts
        can be continued.
        """
        rule = find_end_rule(constraint)
        if rule is None or (
            isinstance(constraint, JsonSchema)
            and not may_begin_with_tokens(grammar, self._digit_start_mask)
        ):
            return grammar
        if isinstance(constraint, Choices):
            # else "J" could continue to "Java" but not, in one token, to "JavaScript"
            grammar = grammar.as_combinable()
        return OpenEndGrammar(grammar, self._end_tokens, rule)

    def _resolve_with_error(
        self, key: Constraint, future: Future[CompiledGrammar], error: Exception
    ) -> None:
        if self._closed:
            error = EngineClosedError("the engine is closed.")
        elif not isinstance(error, SglError):
            error = ConstraintError(f"the constraint could not be compiled: {error!r}")
        # the frames of the traceback refer to the future and to all intermediate results
        error.__traceback__ = None
        self.cache.keep_error(key, future, error)
        future.set_exception(error)

    def _resolve_locally(
        self, key: Constraint, future: Future[CompiledGrammar], constraint: Constraint
    ) -> None:
        self._compile_into_future(
            key,
            future,
            lambda: self._with_mask_rules(self.build(constraint), extract_mask_rules(constraint)),
        )
        with self._lock:
            self._pending -= 1

    def _resolve_in_worker(
        self, key: Constraint, future: Future[CompiledGrammar], constraint: Constraint
    ) -> None:
        self._compile_into_future(key, future, partial(self._build_in_worker, key, constraint))
        with self._lock:
            self._pending -= 1
            self._pending_in_workers -= 1
            last = not self._pending_in_workers
        # compiling may take many times the memory that is kept; without trimming, this would add up
        if last:
            trim()

    def _with_mask_rules(
        self, grammar: CompiledGrammar, positions: tuple[RulePosition, ...] | None
    ) -> CompiledGrammar:
        return (
            grammar
            if positions is None
            else with_mask_rules(grammar, self._ending_tokens, positions)
        )

    def _build_in_worker(self, key: Constraint, constraint: Constraint) -> CompiledGrammar:
        disk_cache = self.disk_cache()
        found = disk_cache.read_grammar(key)
        if found is not None:
            try:
                prepared, positions = found
                grammar = self._with_mask_rules(
                    self._load_one_at_a_time(prepared), unpack_mask_rules(positions)
                )
            except Exception as error:  # raised by a library if the file was changed
                logger.warning(
                    "a compiled grammar of %s can't be loaded: %s", self._engine().name, error
                )
            else:
                self.disk_hits += 1
                return grammar
        (prepared, positions), seconds = self._prepare(constraint)
        grammar = self._load_one_at_a_time(prepared)
        if seconds > SLOW_S:
            disk_cache.store_grammar(key, (prepared, positions))
        return self._with_mask_rules(grammar, unpack_mask_rules(positions))

    def _load_one_at_a_time(self, prepared: PreparedGrammar) -> CompiledGrammar:
        """Loads a prepared grammar. Only one is loaded at a time, because a slow load takes a CPU
        core away from the event loop.
        """
        with self._loading:
            return self._engine().load_prepared(prepared)

    def _prepare(self, constraint: Constraint) -> tuple[tuple[Any, bytes], float]:
        """Prepares a constraint in a worker and returns the result of `Worker.prepare`."""
        worker = self._take_worker()
        try:
            return worker.prepare(constraint)
        finally:
            self._idle.append(worker)

    def disk_cache(self) -> GrammarDiskCache:
        """Returns the disk cache of prepared grammars, creating it on first use."""
        with self._creating:
            if self._on_disk is None:
                self._on_disk = GrammarDiskCache(
                    cache_folder() / "grammars", self._vocabulary, self._backend
                )
            return self._on_disk

    def _take_worker(self) -> Worker:
        """Returns an idle worker or a new one; there is at most one per thread of the pool."""
        with self._creating:
            if self._idle:
                return self._idle.pop()
            if self._closed:
                raise EngineClosedError("the engine is closed.")
            self._workers.append(
                Worker(self._vocabulary, self._backend, self._timeout, self._memory)
            )
            return self._workers[-1]

    def _engine(self) -> GrammarEngine:
        with self._creating:
            if self._made is None:
                self._made = make_engine(
                    self._backend,
                    self._vocabulary,
                    self._tokenizer,
                    self._threads,
                    tracked=self._tracked,
                )
            return self._made

    @cached_property
    def _digit_start_mask(self) -> Mask:
        """Mask of the tokens that begin with a digit."""
        return build_token_mask(
            (i for i, token in enumerate(self._vocabulary.tokens) if token[:1].isdigit()),
            self._vocab_size,
        )

    @cached_property
    def _end_tokens(self) -> EndTokens:
        return EndTokens(self._vocabulary)

    @cached_property
    def _ending_tokens(self) -> EndingTokens:
        special = {*self._eos_ids, *self._tokenizer.special_ids}
        return EndingTokens(self._tokenizer.token_bytes, special)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.from_tokenizer(self._tokenizer, self._vocab_size, self._eos_ids)
