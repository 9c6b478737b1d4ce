"""The engine: a model, its cache and its step loop, behind calls that any thread may make."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_lite.protocol import (
    Constraint,
    ConstraintError,
    EngineClosedError,
    Generation,
    OverloadedError,
    ParameterError,
    Prompt,
    SamplingParams,
    Selection,
    SglError,
    Span,
)
from sglang_lite.runtime.cache.eviction import EVICTION
from sglang_lite.runtime.cache.store import KVStore
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.execute.runner import Runner
from sglang_lite.runtime.execute.sampler import SamplingTable
from sglang_lite.runtime.grammar.base import GrammarEngine
from sglang_lite.runtime.load import LoadedModel, load_model
from sglang_lite.runtime.loop import StepLoop
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.request import Event, Request, Sink
from sglang_lite.runtime.sampling_params import resolve_params
from sglang_lite.runtime.schedule.scheduler import Scheduler
from sglang_lite.runtime.selecting import Selecting
from sglang_lite.runtime.tokens.token_log import tokenise
from sglang_lite.text.chat_template import JinjaTemplate

logger = logging.getLogger("sglang_lite")


class Ticket:
    """A submitted request: its events go to the sink it was submitted with."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request = engine, request

    def abort(self) -> None:
        """Ends the request with RequestAbortedError, unless it has ended."""
        self._engine._loop.abort(self._request)


class Engine:
    """
    Args:
        **config: the fields of EngineConfig.

    Raises:
        ParameterError: an unknown parameter or a bad value.
        ModelError: the model can't be found, read or run.
    """

    def __init__(self, **config: Any) -> None:
        settings = EngineConfig.make(**config)
        path = resolve(settings.model, settings.revision)
        started = time.perf_counter()
        self._launch(settings, lambda: load_model(settings, path))
        logger.info("%s loaded in %.1f s", self.model_name, time.perf_counter() - started)

    @classmethod
    def of(cls, loaded: LoadedModel, **config: Any) -> Engine:
        """An engine around a model that is already there."""
        engine = cls.__new__(cls)
        engine._launch(EngineConfig.make(**config), lambda: loaded)
        return engine

    def _launch(self, config: EngineConfig, load: Callable[[], LoadedModel]) -> None:
        """Starts the engine's thread and waits until it is ready.

        All work with tensors, loading too, is done on that one thread: OpenMP keeps a team of threads for every thread
        that computes, and with more teams than cores each product waits for sleeping threads (measured: 13 ms a token
        instead of 8).
        """
        ready: Future[StepLoop] = Future()

        def main() -> None:
            try:
                if config.threads is not None:
                    torch.set_num_threads(config.threads)
                loop = self._build(config, load())
            except BaseException as error:  # raised again in the constructor
                ready.set_exception(error)
                return
            ready.set_result(loop)
            loop.run()

        self._thread = threading.Thread(target=main, name="sglang_lite-engine", daemon=True)
        self._thread.start()
        self._loop = ready.result()

    def _build(self, config: EngineConfig, loaded: LoadedModel) -> StepLoop:
        self.config = config
        self.model_name = loaded.name
        self.tokenizer = loaded.tokenizer
        self.vocab_size = loaded.vocab_size
        self.context_length = min(config.context_length or loaded.context_length, loaded.context_length)
        if config.context_length is not None and config.context_length > loaded.context_length:
            raise ParameterError(
                "context_length", f"{config.context_length} is more than the model's {loaded.context_length}."
            )
        self._eos = loaded.eos_ids
        pool = config.max_total_tokens or max(self.context_length, config.max_running * 512)
        pages = -(-pool // config.page_size)
        longest = min(self.context_length, pages * config.page_size)
        store = KVStore(
            pages,
            config.page_size,
            config.max_running,
            longest,
            reuse=config.prefix_cache,
            priority=EVICTION["lru"],
        )
        sampling = SamplingTable(config.max_running)
        runner = Runner(loaded.model, store.table, sampling, pages * config.page_size)
        self._longest = longest
        self._scheduler = Scheduler(store, config.step_tokens)
        self._ids = itertools.count()
        self._draws = itertools.count()
        self._closed = False
        self._open = 0  # requests that have not ended
        self._lock = threading.Lock()
        self._grammars: GrammarEngine | None = None
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="sglang_lite-grammar")
        return StepLoop(self._scheduler, runner, sampling, self._eos, loaded.vocab_size)

    # --------------------------------------------------------------------------------------- one request

    def submit(
        self,
        prompt: Prompt | str | Sequence[int],
        params: SamplingParams = SamplingParams(),
        constraint: Constraint | None = None,
        *,
        sink: Sink,
        stream: bool = False,
        namespace: str = "",
    ) -> Ticket:
        """Starts a generation and returns at once. One sample: `n` is the caller's to spread over requests.

        Args:
            prompt: spans, text, or token ids.
            params: UNSET fields take the engine's defaults.
            constraint: what the output must be.
            sink: called on the engine's thread with each Delta (if `stream`), then once with the Generation or an
                SglError. It must not block.
            namespace: requests of different namespaces never share cached prefixes.

        Raises:
            ParameterError: a bad parameter, or a prompt that does not fit.
            OverloadedError: too many requests are waiting.
            EngineClosedError: the engine is closed.
        """
        ids = self._prompt_ids(prompt)
        request = self._request(ids, params, sink, stream=stream, namespace=namespace)
        if constraint is None:
            self._submit(request)
        else:
            self._check_open()
            self._compilers.submit(self._compile, request, constraint)
        return Ticket(self, request)

    def complete(
        self,
        prompt: Prompt | str | Sequence[int],
        params: SamplingParams = SamplingParams(),
        constraint: Constraint | None = None,
    ) -> Generation:
        """Like `submit`, and waits for the result."""
        future: Future[Generation] = Future()
        self.submit(prompt, params, constraint, sink=_into(future))
        return future.result()

    def _prompt_ids(self, prompt: Prompt | str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            ids = tokenise(self.tokenizer, [Span(prompt)])
        elif isinstance(prompt, Prompt):
            if prompt.images:
                raise ParameterError("prompt", f"{self.model_name} can't see images.")
            ids = tokenise(self.tokenizer, prompt.spans)
        else:
            ids = list(prompt)
            for i in ids:
                if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.vocab_size:
                    raise ParameterError("input_ids", f"{i!r} is no token id (0 to {self.vocab_size - 1:,}).")
        if not ids:
            raise ParameterError("prompt", "is empty.", hint="A model continues text: give it at least one token.")
        return ids

    def _request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        stream: bool = False,
        namespace: str = "",
        score_from: int | None = None,
    ) -> Request:
        resolved = resolve_params(params, self.vocab_size)
        room = self._longest - len(ids)
        if room < (1 if resolved.max_tokens else 0):
            raise ParameterError(
                "prompt",
                f"{len(ids):,} tokens long; {self.model_name} takes {self._longest:,}, the answer included.",
                hint="Shorten it, or raise context_length and max_total_tokens.",
            )
        start = resolved.logprob_start_len if resolved.return_logprob else -1
        return Request(
            id=next(self._ids),
            tokens=np.array(ids, dtype=np.int32),
            prompt_len=len(ids),
            limit=len(ids) + min(resolved.max_tokens, room),
            params=resolved,
            seed=self._seed() if resolved.seed is None else resolved.seed,
            sink=sink,
            tokenizer=self.tokenizer,
            ends=frozenset(resolved.stop_token_ids) | (frozenset() if resolved.ignore_eos else self._eos),
            stream=stream,
            namespace=namespace,
            score_from=score_from if score_from is not None else start if start >= 0 else None,
        )

    def _seed(self) -> int:
        if self.config.seed is None:
            return secrets.randbits(64)
        return (self.config.seed << 32) + next(self._draws)

    def _submit(self, request: Request) -> None:
        with self._lock:
            if self._open >= self.config.max_queued + self.config.max_running:
                raise OverloadedError(
                    f"{self._open:,} requests are waiting or running.",
                    hint="Try again later, or raise max_queued.",
                )
            self._open += 1
        request.sink = self._counted(request.sink)
        self._loop.submit(request)

    def _counted(self, sink: Sink) -> Sink:
        def counted(event: Event) -> None:
            if isinstance(event, Generation | SglError):
                with self._lock:
                    self._open -= 1
            sink(event)

        return counted

    def _compile(self, request: Request, constraint: Constraint) -> None:
        try:
            request.matcher = self._grammar_engine().compile(constraint).matcher()
            self._submit(request)
        except SglError as error:
            request.sink(error)
        except Exception as error:  # an engine's failure must end the request, not vanish in the pool
            request.sink(ConstraintError(f"the constraint could not be compiled: {error!r}"))

    def _grammar_engine(self) -> GrammarEngine:
        with self._lock:
            if self._grammars is None:
                from sglang_lite.runtime.grammar.llguidance import LlguidanceEngine

                self._grammars = LlguidanceEngine(self.tokenizer, self.vocab_size, sorted(self._eos))
            return self._grammars

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed.")

    # ----------------------------------------------------------------------------------------- selection

    def submit_select(
        self,
        prompt: Prompt | str,
        choices: Sequence[str],
        *,
        sink: Callable[[Selection | SglError], None],
        unconditional: bool = False,
        namespace: str = "",
    ) -> None:
        """Scores every choice as a continuation of the prompt: all in one batched forward over the shared prefix.

        Args:
            choices: at least one, none empty.
            unconditional: score them without the prompt, too.
            sink: called once, on the engine's thread.

        Raises:
            ParameterError, OverloadedError, EngineClosedError: as `submit`.
        """
        if not choices or not all(choices):
            raise ParameterError("choices", "at least one, and none empty.")
        spans = prompt.spans if isinstance(prompt, Prompt) else (Span(prompt),)
        selecting = Selecting(self, tuple(choices), sink)
        selecting.start(spans, unconditional=unconditional, namespace=namespace)

    def select(self, prompt: Prompt | str, choices: Sequence[str], *, unconditional: bool = False) -> Selection:
        """Like `submit_select`, and waits for the result."""
        future: Future[Selection] = Future()
        self.submit_select(prompt, choices, sink=_into(future), unconditional=unconditional)
        return future.result()

    # ------------------------------------------------------------------------------------------ the engine

    def chat_template(self) -> JinjaTemplate | None:
        """The model's own chat template, or the one the engine was given; None where there is none."""
        source = self.config.chat_template
        if source is None:
            source = self.tokenizer.chat_template
        elif "{" not in source:
            path = Path(source)
            if not path.is_file():
                raise ParameterError("chat_template", f"{source!r} is neither a Jinja template nor a file.")
            source = path.read_text()
        return None if source is None else JinjaTemplate(source, self.tokenizer.special_tokens)

    def flush_cache(self) -> int:
        """Drops every cached prefix that no request is using; returns how many tokens that freed."""
        store = self._scheduler.store
        return self._loop.call(store.flush) * store.page_size

    def stats(self) -> dict[str, int]:
        """Counts, taken between two steps: requests waiting and running, tokens cached and free, steps."""
        scheduler, store = self._scheduler, self._scheduler.store

        def count() -> dict[str, int]:
            return {
                "waiting": len(scheduler.waiting),
                "running": len(scheduler.prefilling) + len(scheduler.decoding),
                "cached_tokens": store.tree.pages * store.page_size,
                "free_tokens": store.pool.free * store.page_size,
                "total_tokens": store.pool.total * store.page_size,
                "steps": self._loop.steps,
            }

        return self._loop.call(count)

    def close(self) -> None:
        """Stops the engine; requests that have not ended fail with EngineClosedError. May be called again."""
        self._closed = True
        self._compilers.shutdown(wait=True, cancel_futures=True)
        self._loop.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _into(future: Future[Any]) -> Callable[[Any], None]:
    """A sink that settles a future with the last event."""

    def sink(event: Event | Selection) -> None:
        if isinstance(event, SglError):
            future.set_exception(event)
        elif isinstance(event, Generation | Selection):
            future.set_result(event)

    return sink
