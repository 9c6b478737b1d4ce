"""The engine's core: the parts that run requests, and the calls that any thread may make. None waits for a generation.

Whoever calls it refers to records and sinks alone, so a handle in another process can make the same calls.
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
from sglang_lite.runtime.core.open_requests import OpenRequests, Ticket
from sglang_lite.runtime.core.profiling import Profile
from sglang_lite.runtime.core.program_control_flow import PreparedPart
from sglang_lite.runtime.core.program_player import ProgramPlayer
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.step_loop import StepLoop
from sglang_lite.runtime.core.submission import (
    GenerateRequest,
    ProgramRequest,
    SelectRequest,
    check_kind,
    check_priority,
)
from sglang_lite.runtime.embedding.request import EncodeRequest, reads_no_text
from sglang_lite.runtime.embedding.spec import EncoderSpec
from sglang_lite.runtime.executor import make_runner
from sglang_lite.runtime.executor.sampler import SamplingTable
from sglang_lite.runtime.kv_cache.eviction_policy import EVICTION
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.load import LoadedModel, load_alike
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
_MASK_THREADS = 4  # more are no faster, and hold up the loop
_STEP_COST = 16  # tokens, on a CPU; on a GPU it was not measured, and they are nearly free there
_ENCODE_THREADS = 4  # texts that are tokenised at a time


class EngineCore:
    """
    To be built on the thread that runs its loop: all work with tensors is done there.

    Args:
        config: of the engine.
        loaded: its model.
        encoder: runs what tokenises; None for threads.

    Attributes:
        config, model_name: of the weights that run.
        tokenizer, vocab_size, eos_ids: the model's.
        capacity: what it has room for.
        description: one line about all that.
        thread: that it was built on, and that runs its loop.
        loop: runs the requests.
        runner, scheduler, compiler, builder, open: what it is made of; for tests and measurements.

    Raises:
        ParameterError, ModelError: there is no room for the model under this configuration.
    """

    encoder: EncoderSpec | None = None  # a model that reads texts

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
            tell_others=config.tell_cache is not False,
        )
        sampling = SamplingTable(sizes.max_running)
        threads = min(config.threads or os.cpu_count() or 1, _MASK_THREADS)
        self.compiler = Compiler(
            loaded.tokenizer, loaded.vocab_size, loaded.eos_ids, threads, backend=config.constraint_backend,
            timeout_s=config.compile_timeout_s, memory_mb=config.compile_memory_mb,
        )  # fmt: skip
        warming = self.compiler.warm_up()  # while kernels are compiled
        try:
            runner = make_runner(
                loaded.model, store.table, sampling, pages, sizes, config, loaded.compiling, self.compiler.is_busy
            )
        except BaseException:
            self.compiler.close()
            raise
        wait(warming)
        rounds = loaded.model.rounds and not loaded.model.fused
        self.scheduler = Scheduler(
            store, sizes.step_tokens, POLICIES[config.policy], last_alone=rounds and not config.deterministic,
            pace=StepPace(sizes.step_tokens) if loaded.model.device.type == "cpu" else None,
        )  # fmt: skip
        self.loop = StepLoop(
            self.scheduler, runner, sampling, loaded.eos_ids, loaded.vocab_size, MaskFiller(threads),
            overlap=config.overlap, jump=config.jump_forward == "safe", stream_interval_s=config.stream_interval_s,
        )  # fmt: skip
        self.runner = runner
        self.builder = RequestBuilder(
            loaded.name, loaded.tokenizer, loaded.vocab_size, loaded.eos_ids, longest, config.seed,
            all_special=config.special_tokens_in_roles, paced=config.stream_interval_s > 0,
        )  # fmt: skip
        self.open = OpenRequests(config.max_queued + sizes.max_running)
        self._encoder = encoder or ThreadPoolExecutor(_ENCODE_THREADS, "sglang_lite-encode")
        self._parts = EngineParts(
            self.loop, self.builder, self.open, self.compiler, self._encoder, self.tokenizer,
            step_cost=_STEP_COST if loaded.model.device.type == "cpu" else math.inf,
        )  # fmt: skip
        self._profile: Profile | None = None

    # ------------------------------------------------------------------------------- what can be submitted

    def submit(self, asked: GenerateRequest, sink: Sink) -> Ticket:
        """Starts a generation: see `Engine.submit`."""
        self.check_open()
        asked.check()
        ids = self.builder.prompt_ids(asked.prompt)
        params = self.builder.resolved(asked.params)
        requests = self.builder.build(
            ids, params, sink, stream=asked.stream, namespace=asked.namespace, given=asked.output_ids
        )  # fmt: skip
        ticket = Ticket(partial(_abort, self.loop, requests), partial(_cached, requests))
        counted = self.open.counted(sink, len(requests), asked.rid, ticket)
        self.open.count("requests_submitted", len(requests))
        for index, request in enumerate(requests):
            request.output.sink = partial(_indexed, counted, index) if index else counted
            request.priority, request.processor = asked.priority, asked.logit_processor
        if asked.constraint is None:
            _start(self._parts, requests)
        else:
            compiled = self.compiler.request_all({asked.constraint})
            compiled.add_done_callback(partial(_start_constrained, self._parts, requests, asked.constraint))
        return ticket

    def submit_select(self, asked: SelectRequest, sink: Callable[[Selection | SglError], None]) -> Ticket:
        """Scores choices: see `Engine.submit_select`."""
        self.check_open()
        asked.check()
        log = self.builder.log(asked.prompt)
        special = isinstance(asked.prompt, str) or asked.prompt.role is None  # in a turn they are its content
        scoring = ChoiceScoring(self._parts, self.open.counted(sink))
        self.open.count("requests_submitted")
        try:
            scoring.start(
                log,
                tuple(asked.choices),
                unconditional=asked.unconditional,
                namespace=asked.namespace,
                special=special,
            )
        except BaseException:  # it is refused: nothing will be told
            self.open.go_out()
            raise
        return Ticket(scoring.abort)

    def open_program(
        self, sink: ProgramSink, *, stream: bool = False, namespace: str = "", priority: int = 0
    ) -> ProgramPlayer:
        """Opens a program: see `Engine.open_program`."""
        self.check_open()
        check_kind("namespace", namespace, str)
        check_priority(priority, self.config.policy)
        self.open.count("programs_opened")
        return ProgramPlayer(
            self._parts, self.builder.log(""), sink, stream=stream, namespace=namespace, priority=priority
        )

    def run_program(self, asked: ProgramRequest, sink: ProgramSink) -> Ticket:
        """Plays a program that is whole: see `Engine.run_program`."""
        self.check_open()
        asked.check()
        check_priority(asked.priority, self.config.policy)
        log = self.builder.log(asked.prompt)
        player = ProgramPlayer(
            self._parts, log, sink,
            stream=asked.stream, namespace=asked.namespace, priority=asked.priority, entered=True,
        )  # fmt: skip
        entries = player.checked(asked.program.nodes)
        parts = [
            PreparedPart([(each.path, player.checked(each.nodes)) for each in part.added], part.decision)
            for part in asked.program.parts
        ]
        self.open.enter_now()
        self.open.count("programs_opened")
        player.take((), entries)
        if asked.program.decision is None:
            player.close()
        else:
            player.decide(asked.program.decision, parts)
        return Ticket(player.abort)

    def encode(self, _: EncodeRequest) -> Future[NDArray[np.float32]]:
        """Raises CapabilityError: the model generates text."""
        raise reads_no_text(self.model_name)

    def abort(self, rid: str) -> None:
        """Ends the request of this name: see `Engine.abort`."""
        self.loop.inbox.check_process()
        self.open.ticket(rid).abort()

    def compile_grammar(self, constraint: Constraint) -> CompiledGrammar:
        """Makes a constraint ready: see `Engine.compile_grammar`."""
        self.check_open()
        try:
            return self.compiler.request(constraint).result()
        except SglError as error:
            raise copy(error) from error

    def checked_ids(self, asked: GenerateRequest) -> Sequence[int]:
        """The token ids of a prompt.

        Raises:
            ParameterError: the request could not be run.
        """
        ids, params = self.builder.prompt_ids(asked.prompt), self.builder.resolved(asked.params)
        self.builder.output(asked.output_ids, len(self.builder.tokens(ids, params)), params)
        return ids

    def flushed(self, sink: Callable[[E], object], flush: Callable[[], object] | None) -> Callable[[E], None]:
        """A sink with `flush` called after it: once for all that a step tells such sinks."""
        return self.loop.flushes.flushed(sink, flush)

    # -------------------------------------------------------------------------------------- room for more

    def wait_for_room(self, call: Callable[[], object], count: int, *, first: bool = False) -> None:
        """Calls back when there is room, as `OpenRequests.wait_for_room`."""
        self.open.wait_for_room(call, count, first=first)

    def leave(self, call: Callable[[], object]) -> None:
        """Gives up room that was asked for, as `OpenRequests.leave`."""
        self.open.leave(call)

    def admitted(self, submit: Callable[[], Ticket], count: int) -> Awaitable[Ticket]:
        """Submits as soon as there is room, as `OpenRequests.admitted`."""
        return self.open.admitted(submit, count)

    def later(self, call: Callable[[], object]) -> None:
        """Calls back on the loop's thread, unless that has ended. Takes no lock."""
        self.loop.inbox.later(call)

    # ----------------------------------------------------------------------------------- the engine itself

    def check_open(self) -> None:
        """Raises EngineClosedError: the engine is closed, or runs in another process."""
        self.loop.inbox.check_open()

    def check_wait(self, name: str) -> None:
        """Raises BackendError where `name` would wait for the thread that it was called on; or as `check_open`."""
        self.loop.inbox.check_wait(name)

    def update_weights(self, path: str, version: str | None = None) -> None:
        """Replaces the weights between two steps: see `Engine.update_weights`."""
        self.check_wait("update_weights")
        version = self.config.weight_version if version is None else version
        config = replace(self.config, model=path, revision=None, weight_version=version)
        location = resolve(path, None)

        def update() -> None:
            loaded = load_alike(config, location, self.runner.model)
            self.runner.replace(loaded.model)
            for request in list(self.scheduler.running()):
                self.scheduler.retract(request)
            self.scheduler.flush()
            self.config, self.model_name = config, loaded.name

        self.loop.inbox.call(update)

    def start_profile(self, folder: str, *, with_stack: bool = False, record_shapes: bool = False) -> None:
        """Starts a profile: see `Engine.start_profile`."""
        self.check_wait("start_profile")

        def start() -> None:
            if self._profile is not None:
                raise ParameterError("profile", "one is being taken.", hint="Stop it first.")
            device = torch.device(self.runner.model.device)
            profile = Profile(folder, device, with_stack=with_stack, record_shapes=record_shapes)
            profile.start()
            self._profile, self.loop.span = profile, profile.span

        self.loop.inbox.call(start)

    def stop_profile(self) -> str:
        """Ends the profile, and returns the path of its trace: see `Engine.stop_profile`."""
        self.check_wait("stop_profile")

        def stop() -> Profile:
            profile, self._profile = self._profile, None
            if profile is None:
                raise ParameterError("profile", "none is being taken.", hint="Start one first.")
            self.loop.unmark()
            profile.stop()
            return profile

        return self.loop.inbox.call(stop).write()

    def flush_cache(self) -> int:
        """Drops every cached prefix that no request is using; returns how many tokens that freed."""
        self.check_wait("flush_cache")
        return self.loop.inbox.call(self.scheduler.flush) * self.scheduler.store.page_size

    def stats(self) -> dict[str, Any]:  # counts are int, seconds float
        """Counts, taken between two steps: see `Engine.stats`."""
        self.check_wait("stats")
        return self.loop.inbox.call(self._count)

    def _count(self) -> dict[str, Any]:
        scheduler, store = self.scheduler, self.scheduler.store
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.prefilling) + len(scheduler.decoding),
            "cached_tokens": store.tree.pages * store.page_size,
            "free_tokens": (store.pool.free + store.pool.quarantined) * store.page_size,  # nobody has either
            "total_tokens": store.pool.total * store.page_size,
            "steps": self.loop.steps,
            **self.open.counts(),
            "grammars_compiled": self.compiler.misses,
            "grammars_cached": self.compiler.hits,
            "grammars_from_disk": self.compiler.kept,
            **self.loop.mask_times.summary("mask"),
            **self.loop.mask_waits.summary("mask_wait"),
            "late_masks": self.loop.late_masks,
        }

    def close(self) -> None:
        """Ends the loop and what works for it; in a forked copy nothing, as they are the other process's."""
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
        if request.given:
            try:
                parts.encoder.submit(_resume, parts.loop, request, grammar)
            except RuntimeError:  # its threads have ended
                parts.loop.fail(request, EngineClosedError("the engine is closed."))
            continue
        if grammar is not None:
            request.output.matcher = grammar.matcher()
        parts.loop.submit(request)


def _resume(loop: StepLoop, request: Request, grammar: CompiledGrammar | None) -> None:
    try:
        request.resume(None if grammar is None else grammar.matcher(), jump=loop.jump)
        loop.submit(request)
    except Exception as error:  # whatever it is, nobody looks at what the pool's future has
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
    except Exception as error:  # even a grammar engine's failure must end the requests, not vanish in the pool
        failure = error if isinstance(error, SglError) else ConstraintError(f"no mask can be made: {error!r}")
        for request in requests:
            parts.loop.fail(request, copy(failure))  # programs add their own places to it


def _indexed(sink: Sink, index: int, event: Event) -> None:
    if isinstance(event, RequestAbortedError) and event.partial is not None:
        event.partial = msgspec.structs.replace(event.partial, index=index)
    sink(event if isinstance(event, SglError) else msgspec.structs.replace(event, index=index))
