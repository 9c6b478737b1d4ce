"""The engine's core: the parts that run requests, and the methods that any thread may call. None of them waits for a
generation.

Their arguments and results are records and callbacks only, so a handle in another process can offer the same methods.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.protocol import (
    BackendError,
    Constraint,
    ConstraintError,
    EngineClosedError,
    ParameterError,
    ProgramSink,
    RequestAbortedError,
    Selection,
    SglError,
)
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.capacity import capacity_of
from sglang_lite.runtime.core.choice_scoring import ChoiceScoring
from sglang_lite.runtime.core.engine_parts import EngineParts
from sglang_lite.runtime.core.engine_program import EngineProgram
from sglang_lite.runtime.core.open_requests import OpenRequests, Ticket
from sglang_lite.runtime.core.profiling import Profile
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.step_loop import StepLoop
from sglang_lite.runtime.core.submission import (
    GenerateRequest,
    ProgramRequest,
    SelectRequest,
    check_kind,
    check_priority,
)
from sglang_lite.runtime.embedding.request import EncodeRequest, not_an_encoder_error
from sglang_lite.runtime.embedding.spec import EncoderSpec
from sglang_lite.runtime.executor import make_runner
from sglang_lite.runtime.executor.sampler import SamplingTable
from sglang_lite.runtime.kv_cache.eviction_policy import EVICTION
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.load_model import LoadedModel, load_same_architecture
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.output_builder import Event, Sink
from sglang_lite.runtime.request import Request
from sglang_lite.runtime.scheduler.admission_order import POLICIES
from sglang_lite.runtime.scheduler.scheduler import Scheduler
from sglang_lite.runtime.scheduler.step_pace import StepPace
from sglang_lite.runtime.structured_output.base import CompiledGrammar
from sglang_lite.runtime.structured_output.compiler import Compiler
from sglang_lite.runtime.structured_output.mask_filler import MaskFiller

E = TypeVar("E")
_MASK_THREADS = 4  # more are not faster, and hold up the loop's thread
_STEP_COST = 16  # tokens, on a CPU; not measured on a GPU, where they are nearly free
_ENCODE_THREADS = 4  # number of texts that are tokenised at the same time


class EngineCore:
    """Core of an engine with a model that generates text.

    Must be made on the thread that runs its loop, as all work with tensors is done there.

    Args:
        config: configuration of the engine.
        loaded: loaded model.
        encoder: executor for tokenisation; None for a new thread pool.

    Attributes:
        config, model_name: configuration and name that match the current weights.
        tokenizer, vocab_size, eos_ids: tokenizer, vocabulary size and end-of-sequence ids of the model.
        capacity: sizes and limits of the engine.
        device: device of the model.
        description: one line that describes the engine, for its start message.
        thread: thread that the core was made on, and that runs its loop.
        loop: step loop that runs the requests.
        runner, scheduler, compiler, builder, open_requests: internal parts, for tests and measurements.

    Raises:
        ParameterError, ModelError: the memory is too small for the model with this configuration.
    """

    encoder: EncoderSpec | None = None  # set in the core of an encoder
    responds = True  # unlike a process that is stopped

    def __init__(self, config: EngineConfig, loaded: LoadedModel, encoder: Executor | None = None) -> None:
        self.thread = threading.current_thread()
        self.config, self.model_name = config, loaded.name
        self.tokenizer, self.vocab_size, self.eos_ids = loaded.tokenizer, loaded.vocab_size, loaded.eos_ids
        self.capacity, self.device = capacity_of(config, loaded), loaded.model.device
        self.description = (
            f"{loaded.name} on {loaded.model.device}, {loaded.model.format}, room for {self.capacity.tokens:,} tokens"
        )  # fmt: skip
        sizes, pages, longest = self.capacity.sizes, self.capacity.pages, self.capacity.longest
        store = PrefixCache(
            pages,
            sizes.page_size,
            sizes.max_running,
            longest,
            reuse=config.prefix_cache,
            priority=EVICTION[config.eviction],
            reveal_others=config.explain_cache_misses is not False,
        )
        sampling = SamplingTable(sizes.max_running)
        threads = min(config.threads or os.cpu_count() or 1, _MASK_THREADS)
        self.compiler = Compiler(
            loaded.tokenizer, loaded.vocab_size, loaded.eos_ids, threads, backend=config.constraint_backend,
            timeout_s=config.compile_timeout_s, memory_mb=config.compile_memory_mb,
        )  # fmt: skip
        warming = self.compiler.warm_up()  # runs while kernels are compiled
        rounds = loaded.model.batch_sensitive and not loaded.model.fused
        self.scheduler = Scheduler(
            store, sizes.step_tokens, POLICIES[config.policy], last_alone=rounds and not config.deterministic,
            pace=StepPace(sizes.step_tokens) if loaded.model.device.type == "cpu" else None,
        )  # fmt: skip
        try:
            self.runner = make_runner(
                loaded.model, store.table, sampling, pages, sizes, config, loaded.compiling, self.compiler.is_busy
            )
            wait(warming)
            self.loop = StepLoop(
                self.scheduler, self.runner, sampling, loaded.eos_ids, loaded.vocab_size, MaskFiller(threads),
                overlap=config.overlap, jump=config.jump_forward == "safe", stream_interval_s=config.stream_interval_s,
            )  # fmt: skip
        except BaseException:
            self.compiler.close()
            raise
        self.builder = RequestBuilder(
            loaded.name, loaded.tokenizer, loaded.vocab_size, loaded.eos_ids, longest, config.seed,
            all_special=config.special_tokens_in_roles, paced=config.stream_interval_s > 0,
        )  # fmt: skip
        self.open_requests = OpenRequests(config.max_queued + sizes.max_running)
        self._encoder = encoder or ThreadPoolExecutor(_ENCODE_THREADS, "sglang_lite-encode")
        self._parts = EngineParts(
            self.loop, self.builder, self.open_requests, self.compiler, self._encoder, self.tokenizer,
            step_cost=_STEP_COST if loaded.model.device.type == "cpu" else math.inf,
        )  # fmt: skip
        self._profile: Profile | None = None

    # ------------------------------------------------------------------------------- what can be submitted

    def submit(self, request: GenerateRequest, sink: Sink) -> Ticket:
        """Submits a generation; see `Engine.submit`."""
        self.check_open()
        request.check()
        ids = self.builder.prompt_ids(request.prompt)
        params = self.builder.resolved(request.params)
        requests = self.builder.build(
            ids, params, sink, stream=request.stream, namespace=request.namespace, output_ids=request.output_ids
        )  # fmt: skip
        ticket = Ticket(partial(_abort, self.loop, requests), partial(_cached, requests))
        counted = self.open_requests.track(sink, len(requests), request.rid, ticket)
        self.open_requests.count("requests_submitted", len(requests))
        for index, sample in enumerate(requests):
            sample.output.sink = partial(_indexed, counted, index) if index else counted
            sample.priority, sample.processor = request.priority, request.logit_processor
        if request.constraint is None:
            _start(self._parts, requests)
        else:
            compiled = self.compiler.request_all({request.constraint})
            compiled.add_done_callback(partial(_start_constrained, self._parts, requests, request.constraint))
        return ticket

    def submit_select(self, request: SelectRequest, sink: Callable[[Selection | SglError], None]) -> Ticket:
        """Submits the scoring of choices; see `Engine.submit_select`."""
        self.check_open()
        request.check()
        log = self.builder.log(request.prompt)
        special = isinstance(request.prompt, str) or request.prompt.role is None  # in a turn, choices are its content
        scoring = ChoiceScoring(self._parts, self.open_requests.track(sink))
        self.open_requests.count("requests_submitted")
        try:
            scoring.start(
                log,
                tuple(request.choices),
                unconditional=request.unconditional,
                namespace=request.namespace,
                special=special,
            )
        except BaseException:  # refused: no event will be sent
            self.open_requests.release()
            raise
        return Ticket(scoring.abort)

    def open_program(
        self, sink: ProgramSink, *, stream: bool = False, namespace: str = "", priority: int = 0
    ) -> EngineProgram:
        """Opens a program that can be extended; see `Engine.open_program`."""
        self.check_open()
        check_kind("namespace", namespace, str)
        check_priority(priority, self.config.policy)
        self.open_requests.count("programs_opened")
        return EngineProgram(
            self._parts, self.builder.log(""), sink, stream=stream, namespace=namespace, priority=priority
        )

    def run_program(self, request: ProgramRequest, sink: ProgramSink) -> Ticket:
        """Plays a whole program; see `Engine.run_program`."""
        self.check_open()
        request.check()
        check_priority(request.priority, self.config.policy)
        log = self.builder.log(request.prompt)
        program = EngineProgram(
            self._parts, log, sink,
            stream=request.stream, namespace=request.namespace, priority=request.priority, holds_room=True,
        )  # fmt: skip
        self.open_requests.acquire()
        try:
            program.play(request.program.nodes)
        except BaseException:  # refused: no event will be sent
            self.open_requests.release()
            raise
        self.open_requests.count("programs_opened")
        return Ticket(program.abort)

    def encode(self, _: EncodeRequest) -> Future[NDArray[np.float32]]:
        """Raises CapabilityError, as the model generates text."""
        raise not_an_encoder_error(self.model_name)

    def abort(self, rid: str) -> None:
        """Aborts the request with this name; see `Engine.abort`."""
        self.loop.inbox.check_process()
        self.open_requests.ticket(rid).abort()

    def compile_grammar(self, constraint: Constraint) -> CompiledGrammar:
        """Compiles a constraint; see `Engine.compile_grammar`."""
        self.check_open()
        try:
            return self.compiler.request(constraint).result()
        except SglError as error:
            raise copy(error) from error

    def validated_prompt_ids(self, request: GenerateRequest) -> Sequence[int]:
        """Token ids of a prompt, after all checks that `submit` would make.

        Raises:
            ParameterError: the request is not valid.
        """
        ids, params = self.builder.prompt_ids(request.prompt), self.builder.resolved(request.params)
        self.builder.output(request.output_ids, len(self.builder.tokens(ids, params)), params)
        return ids

    def with_flush(self, sink: Callable[[E], object], flush: Callable[[], object] | None) -> Callable[[E], None]:
        """Sink that calls `flush` once after each step that has sent events to it."""
        return self.loop.flushes.with_flush(sink, flush)

    # -------------------------------------------------------------------------------------- room for more

    def wait_for_room(self, call: Callable[[], object], count: int, *, first: bool = False) -> None:
        """Calls back when the engine has room, as `OpenRequests.wait_for_room`."""
        self.open_requests.wait_for_room(call, count, first=first)

    def cancel_wait(self, call: Callable[[], object]) -> None:
        """Gives up a place in the queue for room, as `OpenRequests.leave`."""
        self.open_requests.leave(call)

    def submit_when_room(self, submit: Callable[[], Ticket], count: int) -> Awaitable[Ticket]:
        """Submits as soon as the engine has room, as `OpenRequests.admitted`."""
        return self.open_requests.admitted(submit, count)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Schedules a call on the loop's thread; drops it if the loop has ended. Takes no lock."""
        self.loop.inbox.post_lock_free(call)

    # ----------------------------------------------------------------------------------- the engine itself

    def check_open(self) -> None:
        """Raises EngineClosedError if the engine is closed, or belongs to another process (after a fork)."""
        self.loop.inbox.check_open()

    def check_wait(self, name: str) -> None:
        """Raises BackendError if `name` is called on the loop's own thread, which it would wait for; EngineClosedError
        as `check_open`."""
        self.loop.inbox.check_wait(name)

    def update_weights(self, path: str, version: str | None = None) -> None:
        """Replaces the weights between two steps; see `Engine.update_weights`."""
        self.check_wait("update_weights")
        version = self.config.weight_version if version is None else version
        config = replace(self.config, model=path, revision=None, weight_version=version)
        location = resolve(path, None)

        def update() -> None:
            loaded = load_same_architecture(config, location, self.runner.model)
            self.runner.replace(loaded.model)
            for request in list(self.scheduler.running()):
                self.scheduler.retract(request)
            self.scheduler.flush()
            self.config, self.model_name = config, loaded.name

        self.loop.inbox.call(update)

    def start_profile(self, folder: str, *, with_stack: bool = False, record_shapes: bool = False) -> None:
        """Starts a profile; see `Engine.start_profile`."""
        self.check_wait("start_profile")

        def start() -> None:
            if self._profile is not None:
                raise ParameterError("profile", "one is already being recorded.", hint="Call stop_profile first.")
            device = torch.device(self.runner.model.device)
            profile = Profile(folder, device, with_stack=with_stack, record_shapes=record_shapes)
            profile.start()
            self._profile, self.loop.span = profile, profile.span

        self.loop.inbox.call(start)

    def stop_profile(self) -> str:
        """Ends the profile, and returns the path of its trace; see `Engine.stop_profile`."""
        self.check_wait("stop_profile")

        def stop() -> Profile:
            profile, self._profile = self._profile, None
            if profile is None:
                raise ParameterError("profile", "none is being recorded.", hint="Call start_profile first.")
            self.loop.unmark()
            profile.stop()
            return profile

        return self.loop.inbox.call(stop).write()

    def flush_cache(self) -> int:
        """Evicts every cached prefix that no request is using. Returns the number of tokens freed."""
        self.check_wait("flush_cache")
        return self.loop.inbox.call(self.scheduler.flush) * self.scheduler.store.page_size

    def stats(self) -> dict[str, Any]:  # counts are int, seconds float
        """Counters, read between two steps; see `Engine.stats`."""
        self.check_wait("stats")
        return self.loop.inbox.call(self._count)

    def _count(self) -> dict[str, Any]:
        scheduler, store = self.scheduler, self.scheduler.store
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.prefilling) + len(scheduler.decoding),
            "cached_tokens": store.tree.pages * store.page_size,
            "free_tokens": (store.pool.free + store.pool.quarantined) * store.page_size,  # neither has an owner
            "total_tokens": store.pool.total * store.page_size,
            "steps": self.loop.steps,
            **self.open_requests.counts(),
            "grammars_compiled": self.compiler.misses,
            "grammars_cached": self.compiler.hits,
            "grammars_from_disk": self.compiler.disk_hits,
            **self.loop.mask_times.summary("mask"),
            **self.loop.mask_waits.summary("mask_wait"),
            "late_masks": self.loop.late_masks,
        }

    def close(self) -> None:
        """Ends the loop, the compiler and the tokenisation threads. In a forked copy it ends nothing, as they run in
        the other process."""
        self.loop.inbox.shut()
        if self.loop.inbox.is_copy:
            return
        self.compiler.close()
        self._encoder.shutdown()
        self.loop.inbox.close()
        if threading.current_thread() is not self.thread:
            self.thread.join()


def _start(parts: EngineParts, requests: Sequence[Request], grammar: CompiledGrammar | None = None) -> None:
    for request in requests:
        if request.replayed_count:
            try:
                parts.encoder.submit(_resume, parts.loop, request, grammar)
            except RuntimeError:  # the executor has been shut down
                parts.loop.fail(request, EngineClosedError("the engine is closed."))
            continue
        if grammar is not None:
            request.output.matcher = grammar.matcher()
        parts.loop.submit(request)


def _resume(loop: StepLoop, request: Request, grammar: CompiledGrammar | None) -> None:
    try:
        request.resume(None if grammar is None else grammar.matcher(), jump=loop.jump)
        loop.submit(request)
    except Exception as error:  # any exception: nobody reads the future of the executor
        failure = error if isinstance(error, SglError) else BackendError(f"the output can't be continued: {error!r}")
        loop.fail(request, failure)


def _abort(loop: StepLoop, requests: Sequence[Request]) -> None:
    for request in requests:
        loop.abort(request)


def _cached(requests: Sequence[Request]) -> int:
    return max(request.cached_tokens for request in requests)


def _start_constrained(
    parts: EngineParts,
    requests: Sequence[Request],
    constraint: Constraint,
    compiled: Future[dict[Constraint, CompiledGrammar]],
) -> None:
    try:
        _start(parts, requests, compiled.result()[constraint])
    except Exception as error:  # a grammar engine's failure too must end the requests: nobody reads the future
        failure = error if isinstance(error, SglError) else ConstraintError(f"no mask can be made: {error!r}")
        for request in requests:
            parts.loop.fail(request, copy(failure))  # copied, as programs add a source location to it


def _indexed(sink: Sink, index: int, event: Event) -> None:
    if isinstance(event, RequestAbortedError) and event.partial is not None:
        event.partial = msgspec.structs.replace(event.partial, index=index)
    sink(event if isinstance(event, SglError) else msgspec.structs.replace(event, index=index))
