"""The engine: a model, its cache and its step loop, behind calls that any thread may make."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from sglang_lite.program.nodes import Program
from sglang_lite.protocol import (
    CapabilityError,
    ChoiceScore,
    Constraint,
    ConstraintError,
    EngineClosedError,
    Generation,
    ParameterError,
    Played,
    ProgramResult,
    Prompt,
    RequestAbortedError,
    SamplingParams,
    Selection,
    SglError,
)
from sglang_lite.runtime import messages, offline, openmp
from sglang_lite.runtime import sglang_api as native
from sglang_lite.runtime.config import FIELDS, EngineConfig, takes_fields
from sglang_lite.runtime.core.choice_scoring import ChoiceScoring, no_choices
from sglang_lite.runtime.core.engine_parts import Core
from sglang_lite.runtime.core.program_player import Player, ProgramSink
from sglang_lite.runtime.core.request_builder import Intake, Ticket
from sglang_lite.runtime.core.step_loop import StepLoop
from sglang_lite.runtime.executor import make_runner, memory
from sglang_lite.runtime.executor.sampler import SamplingTable
from sglang_lite.runtime.kv_cache.eviction import EVICTION
from sglang_lite.runtime.kv_cache.store import KVStore
from sglang_lite.runtime.load import LoadedModel, load_alike, load_model
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.models.room import cache_bytes, check_room
from sglang_lite.runtime.request import Event, Request, Sink
from sglang_lite.runtime.sampling_params import LogitProcessor, shown
from sglang_lite.runtime.scheduler.policy import POLICIES
from sglang_lite.runtime.scheduler.scheduler import Scheduler
from sglang_lite.runtime.structured_output.base import CompiledGrammar
from sglang_lite.runtime.structured_output.compiler import Compiler
from sglang_lite.runtime.structured_output.mask_filler import MaskFiller
from sglang_lite.text.chat_template import JinjaTemplate
from sglang_lite.version import __version__

logger = logging.getLogger("sglang_lite")

_MASK_THREADS = 4  # more are no faster, and hold up the loop
_ENCODE_THREADS = 4  # texts that are tokenised at a time


class Engine:
    __doc__ = f"""A model, ready to run: for programs (`sgl.set_default_backend`, `run(backend=…)`), and by itself.

    Args:
{FIELDS}

    SGLang's ServerArgs of the same meaning (`model_path` …) are taken, too.

    Raises:
        ParameterError: an unknown parameter or a bad value.
        ModelError: the model can't be found, read or run.
    """

    @takes_fields
    def __init__(self, model: str | os.PathLike[str] | None = None, **config: Any) -> None:
        if model is not None:
            config["model"] = os.fspath(model)
        settings = EngineConfig.make(**native.engine_settings(config))
        path = resolve(settings.model, settings.revision)
        started = time.perf_counter()
        self._launch(settings, lambda: load_model(settings, path))
        seconds = time.perf_counter() - started
        messages.say(f"{self._ready_line}; ready after {seconds:.1f} s.", settings.log_level)

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
        messages.set_level(config.log_level)
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(self), config, load, ready), name="sglang_lite-engine", daemon=True
        )
        self._thread.start()
        try:
            ready.result()
        finally:
            del ready  # a failure refers to this frame: no cycle

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
        device = loaded.model.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread: kernels are launched there
        else:
            openmp.say_if_unbound()
        sizes = self._sizes = config.sized(gpu=device.type == "cuda")
        pool = config.max_total_tokens or max(self.context_length, sizes.max_running * 512)
        if device.type == "cuda" and config.max_total_tokens is None:
            assert isinstance(loaded.model, Decoder)
            pool = memory.pool_tokens(loaded.model, config.mem_fraction, sizes, self.context_length)
        pages = -(-pool // sizes.page_size)
        longest = min(self.context_length, pages * sizes.page_size)
        parts = {}
        if isinstance(loaded.model, Decoder):
            item, tokens = loaded.model.precision.cache.itemsize, pages * sizes.page_size
            parts[f"{tokens:,} tokens of keys and values"] = cache_bytes(loaded.model.spec, tokens, item)
        if device.type == "cpu":
            parts[f"{sizes.max_running:,} requests"] = sizes.max_running * (8 * longest + 2 * loaded.vocab_size)
        hint = "Lower max_total_tokens, context_length or max_running."
        check_room(parts, device, loaded.name, hint)
        store = KVStore(
            pages,
            sizes.page_size,
            sizes.max_running,
            longest,
            reuse=config.prefix_cache,
            priority=EVICTION[config.eviction],
        )
        sampling = SamplingTable(sizes.max_running)
        threads = min(config.threads or os.cpu_count() or 1, _MASK_THREADS)
        self._compiler = Compiler(loaded.tokenizer, loaded.vocab_size, self._eos, config, threads)
        warming = self._compiler.warm_up()  # while kernels are compiled
        try:
            runner = make_runner(loaded.model, store.table, sampling, pages, sizes, config)
        except BaseException:
            self._compiler.close()
            raise
        wait(warming)
        self._longest = longest
        kind = str(getattr(getattr(loaded.model, "precision", None), "compute", config.dtype)).removeprefix("torch.")
        self._ready_line = f"{loaded.name} on {device}, {kind}, room for {pages * sizes.page_size:,} tokens"
        rounds = isinstance(loaded.model, Decoder) and not loaded.model.fused and loaded.model.precision.rounds
        self._scheduler = Scheduler(
            store, sizes.step_tokens, POLICIES[config.policy], last_alone=rounds and not config.deterministic
        )
        self.intake = Intake(
            config.max_queued + sizes.max_running, config.seed, loaded, longest,
            all_special=config.special_tokens_in_roles,
        )  # fmt: skip
        self._closed = False
        self._encoder = self._encoders()
        loop = self._loop = StepLoop(
            self._scheduler, runner, sampling, self._eos, loaded.vocab_size, MaskFiller(threads),
            overlap=config.overlap, jump=config.jump_forward == "safe",
        )  # fmt: skip
        self._runner = runner  # last: an engine that fails to start keeps no tensors
        self._core = Core(loop, self.intake, self._compiler, self._encoder, self.tokenizer, self.vocab_size)
        # At exit Python runs no finalizers of ours, but `_end_all`, which waits for the threads, too.
        self._end = weakref.finalize(self, loop.close)
        self._end.atexit = False
        return loop

    def _encoders(self) -> Executor:
        return ThreadPoolExecutor(_ENCODE_THREADS, "sglang_lite-encode")

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
        priority: int = 0,
        logit_processor: LogitProcessor | None = None,
        rid: str | None = None,
    ) -> Ticket:
        """Starts a generation and returns at once.

        Args:
            prompt: spans, text, or token ids.
            params: UNSET fields take the engine's defaults.
            constraint: what the output must be.
            sink: called on the engine's thread with each Delta (if `stream`), then with the Generation or an SglError:
                once, or `n` times for `n` samples. It must not block.
            namespace: requests of different namespaces never share cached prefixes.
            priority: higher ones first, where the engine's policy is "priority".
            logit_processor: `(token_ids, logits) -> logits`, with the ids so far and float32 logits [vocab_size] that
                it may change. Called for every token on the engine's thread, so all requests wait for it: slow.
            rid: a name for `abort`, which no other request may have at the time.

        Raises:
            ParameterError: a bad parameter, or a prompt that does not fit.
            OverloadedError: too many requests are waiting.
            EngineClosedError: the engine is closed.
        """
        self._check_open()
        for name, value, kind in (("priority", priority, int), ("namespace", namespace, str)):
            if not isinstance(value, kind):
                raise ParameterError(name, f"{shown(value)} is no {kind.__name__}.")
        ids = self.intake.prompt_ids(prompt)
        resolved = self.intake.resolved(params)
        requests = self.intake.requests(ids, resolved, sink, stream=stream, namespace=namespace)
        ticket = Ticket(partial(_abort, self._loop, requests), requests)
        counted = self.intake.counted(sink, len(requests), rid, ticket)
        self.intake.count("requests_submitted", len(requests))
        for index, request in enumerate(requests):
            request.sink = partial(_indexed, counted, index) if index else counted
            request.priority, request.processor = priority, logit_processor
        if constraint is None:
            _start(self._loop, requests)
        else:
            compiled = self._compiler.request_all({constraint})
            compiled.add_done_callback(partial(_start_constrained, self._loop, requests, constraint))
        return ticket

    def complete(
        self,
        prompt: Prompt | str | Sequence[int],
        params: SamplingParams = SamplingParams(),
        constraint: Constraint | None = None,
    ) -> Generation:
        """Like `submit` with one sample, and waits for the result."""
        self._check_wait("complete")
        if isinstance(params.n, int) and params.n > 1:
            raise ParameterError("n", "complete gives one generation.", hint="Use generate or submit.")
        future: Future[Generation] = Future()
        self.submit(prompt, params, constraint, sink=_into(future))
        return future.result()

    def compile_grammar(self, constraint: Constraint) -> CompiledGrammar:
        """Makes a constraint ready. May take long.

        Raises:
            ConstraintError: it can't be enforced.
            EngineClosedError: the engine is closed.
        """
        self._check_open()
        try:
            return self._compiler.request(constraint).result()
        except SglError as error:
            raise copy(error) from error

    def _check_open(self) -> None:
        self._loop.check_process()
        if self._closed:
            raise EngineClosedError("the engine is closed.")

    def _check_wait(self, name: str) -> None:
        self._loop.check_wait(name)
        self._check_open()

    # ----------------------------------------------------------------------------------------- selection

    def submit_select(
        self,
        prompt: Prompt | str,
        choices: Sequence[str],
        *,
        sink: Callable[[Selection | SglError], None],
        unconditional: bool = False,
        namespace: str = "",
    ) -> Ticket:
        """Scores every choice as a continuation of the prompt: all in one batched forward over the shared prefix.

        Args:
            choices: at least one, none empty.
            unconditional: score them without the prompt, too.
            sink: called once, on the engine's thread.

        Raises:
            ParameterError, OverloadedError, EngineClosedError: as `submit`.
        """
        self._check_open()
        if not choices or not all(choices):
            raise no_choices()
        log = self.intake.log(prompt)
        special = isinstance(prompt, str) or prompt.role is None  # in a turn they are its content
        selecting = ChoiceScoring(self._core, self.intake.counted(sink))
        self.intake.count("requests_submitted")
        selecting.start(log, tuple(choices), unconditional=unconditional, namespace=namespace, special=special)
        return Ticket(selecting.abort)

    def select(self, prompt: Prompt | str, choices: Sequence[str], *, unconditional: bool = False) -> Selection:
        """Like `submit_select`, and waits for the result."""
        self._check_wait("select")
        future: Future[Selection] = Future()
        self.submit_select(prompt, choices, sink=_into(future), unconditional=unconditional)
        return future.result()

    # ------------------------------------------------------------------------------------------ programs

    def open_program(self, *, sink: ProgramSink, stream: bool = False, namespace: str = "") -> Player:
        """Opens a program, to which nodes are added while it is played: at the end of a generation the next text is
        appended and its row goes on in its slot. With nothing to play it holds no slot, no page and no room.

        Args:
            sink: called on the engine's thread with what each node brings (Played; of one that failed, its SglError,
                and nothing more of its branch), and when the program was closed and all is played with a ProgramResult
                or the SglError of its main branch. It must not block.
            stream: deltas are wanted, too.

        Raises:
            EngineClosedError: the engine is closed.
        """
        self._check_open()
        self.intake.count("programs_opened")
        return Player(self._core, self.intake.log(""), sink, stream=stream, namespace=namespace)

    def run_program(
        self,
        prompt: Prompt | str,
        program: Program,
        *,
        sink: ProgramSink,
        stream: bool = False,
        namespace: str = "",
    ) -> Ticket:
        """Plays a program that is whole.

        Args:
            sink, stream: as of `open_program`.

        Raises:
            ParameterError, OverloadedError, EngineClosedError: as `submit`.
        """
        self._check_open()
        log = self.intake.log(prompt)
        player = Player(self._core, log, sink, stream=stream, namespace=namespace, entered=True)
        entries = player.checked(program.nodes)
        self.intake.enter_now()
        self.intake.count("programs_opened")
        player.take((), entries)
        player.close()
        return Ticket(player.abort)

    def play(self, prompt: Prompt | str, program: Program) -> tuple[ProgramResult, list[Played]]:
        """Like `run_program`, and waits for the result."""
        self._check_wait("play")
        played: list[Played] = []
        future: Future[ProgramResult] = Future()
        settle = _into(future)
        self.run_program(prompt, program, sink=lambda e: played.append(e) if isinstance(e, Played) else settle(e))
        return future.result(), played

    # -------------------------------------------------------------------------------- SGLang's offline engine

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        stream: bool = False,
        **request: Any,
    ) -> Any:
        """SGLang's offline generation. `native.read_request` has the parameters, and what is refused.

        Returns:
            A dictionary with `text`, `output_ids` and `meta_info`; a list of them for a list of prompts or `n` > 1;
            with `stream` an iterator of dictionaries, each with all that has come so far.

        Raises:
            ParameterError, OverloadedError, EngineClosedError: as `submit`; nothing was generated.
            BatchError: some of a list failed; it has the others' results.
        """
        self._check_wait("generate")
        request.update(prompt=prompt, sampling_params=sampling_params, input_ids=input_ids)
        return offline.generate(self, request, stream=stream)

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        stream: bool = False,
        **request: Any,
    ) -> Any:
        """Like `generate`, for asyncio; with `stream`, what is awaited is an asynchronous iterator."""
        self._check_open()
        request.update(prompt=prompt, sampling_params=sampling_params, input_ids=input_ids)
        return await offline.async_generate(self, request, stream=stream)

    def abort(self, rid: str) -> None:
        """Ends the request of this name with RequestAbortedError, which has the result up to there (`partial`). A call
        of `generate` that waits for it returns that, with a `finish_reason` of type "abort".

        Raises:
            ParameterError: no request that is waiting or running has this name.
        """
        self._loop.check_process()
        self.intake.ticket(rid).abort()

    def encode(self, prompt: str | Sequence[str]) -> Any:
        """Embeddings. Raises CapabilityError: no embedding model is supported."""
        raise CapabilityError(f"{self.model_name} generates text; encode needs an embedding model.")

    def get_server_info(self) -> dict[str, Any]:
        """The settings, the model's limits, and `stats`."""
        return {
            **asdict(self.config),
            **asdict(self._sizes),
            "version": __version__,
            "model_path": self.config.model,
            "served_model_name": self.model_name,
            "vocab_size": self.vocab_size,
            "max_req_input_len": self._longest - 1,
            "internal_states": [self.stats()],
        }

    # ------------------------------------------------------------------------------------------ the engine

    def score(self, prompt: Prompt | str, continuations: Sequence[str]) -> tuple[ChoiceScore, ...]:
        """The log-probabilities of texts, each going on from the prompt, which may be empty. As `select` scores them.

        Raises:
            ParameterError, OverloadedError, EngineClosedError: as `submit`.
        """
        return self.select(prompt, continuations).scores

    def update_weights(self, path: str) -> None:
        """Replaces the weights by those of another checkpoint of the same architecture, between two steps.

        Nothing that was computed with the old ones is read again: cached prefixes are dropped, and requests that are
        running are computed anew up to where they are. No step runs meanwhile, and both sets are in memory at once.

        Args:
            path: as EngineConfig's `model`.

        Raises:
            ModelError: it can't be read, or is another architecture; the engine goes on as it was.
        """
        self._check_wait("update_weights")
        config = replace(self.config, model=path, revision=None)
        location = resolve(path, None)

        def update() -> None:
            loaded = load_alike(config, location, self._runner.model)
            self._runner.replace(loaded.model)
            for request in list(self._scheduler.running()):
                self._scheduler.retract(request)
            self._scheduler.store.flush()
            self.config, self.model_name = config, loaded.name

        self._loop.call(update)

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
        self._check_wait("flush_cache")
        store = self._scheduler.store
        return self._loop.call(store.flush) * store.page_size

    def stats(self) -> dict[str, Any]:
        """Counts, taken between two steps: requests waiting and running, tokens cached and free, steps, what was
        asked for so far (requests and selections by themselves, programs, and how often those were extended),
        constraints compiled, found compiled, and of those to be compiled found on disk; and of the last 4,096 steps
        with grammars median, 99th percentile and maximum of the seconds that their masks took, and that the device
        (on a CPU: the step) waited for them; and rows that went on a step later, as their masks took too long."""
        self._check_wait("stats")
        scheduler, store = self._scheduler, self._scheduler.store

        def count() -> dict[str, Any]:
            return {
                "waiting": len(scheduler.waiting),
                "running": len(scheduler.prefilling) + len(scheduler.decoding),
                "cached_tokens": store.tree.pages * store.page_size,
                "free_tokens": store.pool.free * store.page_size,
                "total_tokens": store.pool.total * store.page_size,
                "steps": self._loop.steps,
                **self.intake.counts(),
                "grammars_compiled": self._compiler.misses,
                "grammars_cached": self._compiler.hits,
                "grammars_from_disk": self._compiler.kept,
                **self._loop.mask_times.summary("mask"),
                **self._loop.mask_waits.summary("mask_wait"),
                "late_masks": self._loop.late_masks,
            }

        return self._loop.call(count)

    def close(self) -> None:
        """Stops the engine and gives its memory back; requests that have not ended fail with EngineClosedError. May be
        called again. An engine that nobody refers to any more is closed, too."""
        self._closed = True
        if self._loop.is_copy:
            return  # the threads and processes are those of the other process
        self._compiler.close()
        self._encoder.shutdown()
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    shutdown = close

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_running: dict[threading.Thread, StepLoop] = {}


def _run(
    engine: weakref.ref[Engine], config: EngineConfig, load: Callable[[], LoadedModel], ready: Future[None]
) -> None:
    """An engine's thread. While the loop runs it has no reference to the engine, whose end is the loop's end."""
    thread = threading.current_thread()
    try:
        loop = _running[thread] = _built(engine, config, load)
    except BaseException as error:  # raised again in the constructor
        traceback.clear_frames(error.__traceback__)  # whoever keeps the error keeps no tensors
        ready.set_exception(memory.explained(error))
        return
    ready.set_result(None)
    loop.run()
    del _running[thread]


def _built(engine: weakref.ref[Engine], config: EngineConfig, load: Callable[[], LoadedModel]) -> StepLoop:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded, built = load(), engine()
    if built is None:
        raise EngineClosedError("its constructor was interrupted.")
    return built._build(config, loaded)


@atexit.register
def _end_all() -> None:
    """Python ends daemon threads wherever they are, and within torch's code that aborts the process."""
    for thread, loop in list(_running.items()):
        if not loop.is_copy:
            loop.close()
            thread.join()


def _start(loop: StepLoop, requests: Sequence[Request]) -> None:
    for request in requests:
        loop.submit(request)


def _abort(loop: StepLoop, requests: Sequence[Request]) -> None:
    for request in requests:
        loop.abort(request)


def _start_constrained(
    loop: StepLoop,
    requests: Sequence[Request],
    constraint: Constraint,
    compiled: Future[dict[Constraint, CompiledGrammar]],
) -> None:
    try:
        grammar = compiled.result()[constraint]
        for request in requests:
            request.matcher = grammar.matcher()
        _start(loop, requests)
    except Exception as error:  # even a grammar engine's failure must end the requests, not vanish in the pool
        failure = error if isinstance(error, SglError) else ConstraintError(f"no mask can be made: {error!r}")
        for request in requests:
            loop.fail(request, copy(failure))  # programs add their own places to it


def _indexed(sink: Sink, index: int, event: Event) -> None:
    if isinstance(event, RequestAbortedError) and event.partial is not None:
        event.partial = msgspec.structs.replace(event.partial, index=index)
    sink(event if isinstance(event, SglError) else msgspec.structs.replace(event, index=index))


def _into(future: Future[Any]) -> Callable[[Any], None]:
    """A sink that settles a future with the last event."""

    def sink(event: Any) -> None:
        if isinstance(event, SglError):
            future.set_exception(event)
        elif isinstance(event, Generation | Selection | ProgramResult):
            future.set_result(event)

    return sink
