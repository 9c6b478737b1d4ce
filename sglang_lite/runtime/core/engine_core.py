"""Core of the engine: the parts that run requests, and the methods that any thread may call.

None of the methods waits for a generation. Their arguments and results are records and callbacks
only, so the core of another process can offer the same methods.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import torch

from sglang_lite.protocol import (
    BackendError,
    CapabilityError,
    Constraint,
    ConstraintError,
    EngineClosedError,
    ParameterError,
    ProgramSink,
    RequestAbortedError,
    SamplingParams,
    Selection,
    SglError,
)
from sglang_lite.runtime.calls import (
    CompileGrammar,
    ContinueGeneration,
    EndSession,
    EngineCall,
    ExportPrefix,
    FlushCache,
    FreezeObjects,
    ImportPrefix,
    PauseGeneration,
    R,
    RecordExperts,
    StartProfile,
    Stats,
    StopProfile,
)
from sglang_lite.runtime.capacity import Capacity
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.cache_tiers import make_tiers, page_names
from sglang_lite.runtime.core.capacity import compute_capacity
from sglang_lite.runtime.core.choice_scoring import ChoiceScoring
from sglang_lite.runtime.core.engine_context import ConstantTexts, EngineContext
from sglang_lite.runtime.core.engine_part import CallTable, EnginePart
from sglang_lite.runtime.core.engine_program import EngineProgram
from sglang_lite.runtime.core.engine_sessions import EngineSessions
from sglang_lite.runtime.core.exact_draws import ExactDraws
from sglang_lite.runtime.core.gate import CLOSED
from sglang_lite.runtime.core.healing import Healing
from sglang_lite.runtime.core.open_requests import OpenRequests, Ticket
from sglang_lite.runtime.core.prefix_files import PrefixFiles
from sglang_lite.runtime.core.profiling import Profiler
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.step_loop import StepLoop, span_without_profiler
from sglang_lite.runtime.core.submission import (
    GenerateRequest,
    OpenRequest,
    ProgramRequest,
    SelectRequest,
    Submission,
    check_priority,
    check_replica_rank,
)
from sglang_lite.runtime.core.weight_calls import CALLS, WeightCalls
from sglang_lite.runtime.drafting.registry import make_drafting
from sglang_lite.runtime.embedding.request import not_an_encoder_error
from sglang_lite.runtime.embedding.spec import EncoderSpec
from sglang_lite.runtime.executor import make_runner
from sglang_lite.runtime.executor.model_runner import ModelRunner
from sglang_lite.runtime.executor.ranks import LeadRunner
from sglang_lite.runtime.executor.step_record import StepWriter, append_step
from sglang_lite.runtime.host.garbage import freeze_objects
from sglang_lite.runtime.kv_cache.eviction_policy import EVICTION
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.prefix_hash import digest_interval
from sglang_lite.runtime.kv_cache.state_pages import OWN, StatePages
from sglang_lite.runtime.kv_cache.tiers import Tiers
from sglang_lite.runtime.kv_cache.tree_changes import TreeChanges
from sglang_lite.runtime.kv_cache.window_pages import WindowPages
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.requests.output_builder import Event, Sink
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.scheduler.admission_order import POLICIES
from sglang_lite.runtime.scheduler.queues import Queues
from sglang_lite.runtime.scheduler.scheduler import Scheduler
from sglang_lite.runtime.scheduler.step_pace import StepPace
from sglang_lite.runtime.structured_output.base import CompiledGrammar
from sglang_lite.runtime.structured_output.compiler import Compiler
from sglang_lite.runtime.structured_output.mask_filler import MaskFiller
from sglang_lite.runtime.structured_output.request_matcher import RequestMatcher

T = TypeVar("T")

_MASK_THREADS = 4  # more are no faster, and delay the loop's thread
_STEP_COST = 16  # tokens, on a CPU; not measured on a GPU, where they are nearly free
_OF_ONE_RANK = frozenset((*CALLS, ExportPrefix, ImportPrefix)) - {
    PauseGeneration,
    ContinueGeneration,
    RecordExperts,
}
_ONE_RANK = "Use an engine with one rank, or start another engine."
_ENCODE_THREADS = 4  # number of texts that are tokenised at the same time


class EngineCore:
    """Core of an engine with a model that generates text.

    Must be made on the thread that runs its loop, as all work with tensors is done there.

    Args:
        config: configuration of the engine.
        loaded: loaded model.
        parts: features that only some engines have. Parameters and calls that need another feature
            are rejected.
        encoder: executor for tokenisation; None for a new thread pool.

    Attributes:
        config, model_name: configuration and name that match the current weights.
        tokenizer, vocab_size, eos_ids: tokenizer, vocabulary size and end-of-sequence ids of the
            model.
        capacity: sizes and limits of the engine.
        device: device of the model.
        description: one line that describes the engine, for its start message.
        thread: thread that the core was made on, and that runs its loop.
        loop: step loop that runs the requests.
        weights: answers the calls that concern its weights and its memory.
        builder: checks requests, and converts their prompts to tokens.
        open_requests: requests and programs that have not ended.
        gate, call_soon: see `Core` in engine/core.py.
        runner, scheduler, compiler: internal parts, for tests and measurements.

    Raises:
        ParameterError, ModelError: the memory is too small for the model with this configuration.
    """

    encoder: EncoderSpec | None = None  # set in an encoder's core
    responds = generates = True  # unlike a stopped process or an encoder
    pids: Sequence[int] = ()  # it has no process of its own
    _profile: Profiler | None = None  # running profile

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        parts: Sequence[EnginePart] = (),
        encoder: Executor | None = None,
    ) -> None:
        self.thread = threading.current_thread()
        self.config = config
        self.model_name = loaded.name
        self.tokenizer = loaded.tokenizer
        self.vocab_size = loaded.vocab_size
        self.eos_ids = loaded.eos_ids
        self.parts = parts
        self.capacity = compute_capacity(config, loaded)
        self.device = loaded.model.device
        sizes = self.capacity.sizes
        longest = self.capacity.longest
        store = _make_prefix_cache(config, self.capacity, loaded)
        encoder = encoder or ThreadPoolExecutor(_ENCODE_THREADS, "sglang_lite-encode")
        drafting = make_drafting(
            config, loaded.vocab_size, loaded.eos_ids, fused=loaded.model.fused
        )
        threads = min(config.threads or os.cpu_count() or 1, _MASK_THREADS)
        self.compiler = Compiler(
            loaded.tokenizer,
            loaded.vocab_size,
            loaded.eos_ids,
            threads,
            backend=config.constraint_backend,
            timeout_s=config.compile_timeout_s,
            memory_mb=config.compile_memory_mb,
            tracked="state" in config.drafters,
        )
        # runs while kernels compile
        warming = self.compiler.warm_up() if self.device.type != "cpu" else []
        queues = Queues(store)
        for part in parts:
            part.join_scheduler(store, queues, self.capacity)
        self.scheduler = Scheduler(
            store,
            queues,
            sizes.step_tokens,
            POLICIES[config.policy],
            last_alone=_requires_last_token_step(config, loaded),
            pace=StepPace(sizes.step_tokens) if loaded.model.device.type == "cpu" else None,
            drafting=drafting,
            resources=[each.resource for each in parts if each.resource is not None],
            stages=loaded.stages,
        )
        try:
            self.runner = make_runner(
                loaded.model,
                self.capacity,
                config,
                loaded.compiling,
                self.compiler.is_busy,
                drafting,
                _single_non_none(each.device_memory for each in parts),
                loaded.ranks,
            )
            if config.enable_hierarchical_cache:
                store.source = make_tiers(
                    config, loaded, self.capacity, store, self.runner, encoder
                )
            self.description = _describe_engine(loaded, self.capacity, store)
            wait(warming)
            self.loop = StepLoop(
                self.scheduler,
                self.runner,
                StepWriter(
                    store.table,
                    store.windows,
                    _make_step_file(self.runner, self.capacity),
                    columns=[each.column for each in parts if each.column is not None],
                    replacer=_single_non_none(each.replacer for each in parts),
                ),
                loaded.eos_ids,
                loaded.vocab_size,
                MaskFiller(threads),
                preparation=_single_non_none(each.preparation for each in parts),
                overlap=config.overlap,
                jump=config.jump_forward == "safe",
                stream_interval_s=config.stream_interval_s,
                shared=loaded.shared,
                stages=loaded.stages,
            )
            # takes seconds, so only while no request waits
            self.loop.recount.when_quiet = self.compiler.warm_up
        except BaseException:
            self.compiler.close()
            raise
        self.builder = RequestBuilder(
            loaded.name,
            loaded.tokenizer,
            loaded.vocab_size,
            loaded.eos_ids,
            longest,
            config.seed,
            all_special=config.special_tokens_in_roles,
            paced=config.stream_interval_s > 0,
            weight_version=config.weight_version,
            recorded=config.recorded_names,
        )
        self.builder.now = lambda: self.loop.clock.now()
        for part in parts:
            part.join_builder(self.builder)
        self.open_requests = OpenRequests(config.max_queued + sizes.max_running)
        # for calls that wait for the loop, or for files
        self._calls = ThreadPoolExecutor(1, "sglang_lite-calls")
        self.weights = WeightCalls(
            self.loop,
            self.builder.weights,
            loaded,
            config,
            self._calls,
            parts,
            self._adopt_weights_config,
        )
        self._context = EngineContext(
            self.loop,
            self.builder,
            self.open_requests,
            self.compiler,
            encoder,
            ConstantTexts(
                partial(self.builder.start_token_log("").encode_after, first=False), encoder
            ),
            self.tokenizer,
            EngineSessions(self.loop.inbox, self.scheduler.pauses),
            step_cost=_STEP_COST if loaded.model.device.type == "cpu" else math.inf,
        )
        self._answers = self._merge_call_tables()
        self.gate = self.loop.inbox.gate
        self.call_soon = self.loop.inbox.post_lock_free

    # ------------------------------------------------------------------------ what can be submitted

    def submit(
        self,
        request: Submission,
        sink: Callable[[Any], None],
        flush: Callable[[], object] | None = None,
    ) -> Ticket:  # each kind of submission has its own events
        """Submits a generation, a selection or a whole program; see `Engine.submit`,
        `submit_select` and `run_program`.
        """
        self.gate.check_open()
        request.check_fields()
        return self._submit_by_kind[type(request)](
            self, request, self.loop.flushes.wrap_sink_with_flush(sink, flush)
        )

    def _submit_generation(self, request: GenerateRequest, sink: Sink) -> Ticket:
        check_replica_rank(request.routed_dp_rank, 1)
        requests, complete = self.builder.build_generation(request, sink)
        winding_down = partial(self.loop.wind_down, requests)
        ticket = Ticket(
            partial(_abort_requests, self.loop, requests),
            partial(_max_cached_tokens, requests),
            winding_down,
        )
        counted = self.open_requests.track(sink, len(requests), request.rid, ticket)
        self.open_requests.count("requests_submitted", len(requests))
        for index, sample in enumerate(requests):
            sample.output.sink = partial(_send_with_index, counted, index) if index else counted
            sample.priority = request.priority
            sample.processor = request.logit_processor
            sample.output.origin = request.constraint
            sample.times.deadline = (
                None if request.timeout is None else self.loop.clock.now() + request.timeout
            )
            sample.times.winds_down = request.winds_down
        self._context.sessions.join_session(request.session, requests, request.priority)
        if complete:
            _compile_and_start(self._context, requests, request.constraint)
        else:
            self._context.encoder.submit(_complete_and_start, self._context, requests, request)
        return ticket

    def _submit_selection(
        self, request: SelectRequest, sink: Callable[[Selection | SglError], None]
    ) -> Ticket:
        log = self.builder.start_token_log(request.prompt)
        scoring = ChoiceScoring(self._context, self.open_requests.track(sink))
        self.open_requests.count("requests_submitted")
        try:
            scoring.start_request(log, request)
        except BaseException:  # refused: no event will be sent
            self.open_requests.release()
            raise
        return Ticket(scoring.abort)

    def _submit_program(self, request: ProgramRequest, sink: ProgramSink) -> Ticket:
        check_priority(request.priority, self.config.policy)
        log = self.builder.start_token_log(request.prompt)
        program = EngineProgram(
            self._context,
            log,
            sink,
            stream=request.stream,
            namespace=request.namespace,
            priority=request.priority,
            has_room=True,
        )
        self.open_requests.acquire()
        try:
            program.play(request.program.nodes)
        except BaseException:  # refused: no event will be sent
            self.open_requests.release()
            raise
        self.open_requests.count("programs_opened")
        return Ticket(program.abort, wind_down=program.wind_down)

    _submit_by_kind: ClassVar[Mapping[type[Submission], Callable[..., Ticket]]] = {
        GenerateRequest: _submit_generation,
        SelectRequest: _submit_selection,
        ProgramRequest: _submit_program,
    }

    def open_program(
        self, request: OpenRequest, sink: ProgramSink, flush: Callable[[], object] | None = None
    ) -> EngineProgram:
        """Opens a program that can be extended; see `Engine.open_program`."""
        self.gate.check_open()
        request.check_for_policy(self.config.policy)
        self.open_requests.count("programs_opened")
        return EngineProgram(
            self._context,
            self.builder.start_token_log(""),
            self.loop.flushes.wrap_sink_with_flush(sink, flush),
            stream=request.stream,
            namespace=request.namespace,
            priority=request.priority,
        )

    # ------------------------------------------------------------------------ calls with one answer

    def submit_call(self, call: EngineCall[R]) -> Future[R]:
        """Returns a future of the answer to a call. The calls are documented by the methods of
        `Engine`.

        Raises:
            EngineClosedError: the engine is closed.
            CapabilityError: the call needs a model that embeds or classifies texts, or an engine
                with one rank.
        """
        self.gate.check_open()
        if type(call) in _OF_ONE_RANK and (
            self.config.enable_dp_attention or isinstance(self.runner, LeadRunner)
        ):
            several = f"{self.config.sharing.setting} above 1"
            raise CapabilityError(
                f"{call.__struct_config__.tag}: is not here with {several}.", hint=_ONE_RANK
            )
        answer = self._answers.get(type(call))
        if answer is None:
            raise not_an_encoder_error(self.model_name)
        return answer(call)

    def _adopt_weights_config(self, config: EngineConfig, path: Path | None) -> None:
        """Adopts the config of new weights. From now on, pages in the lower cache tiers get names
        that belong to these weights.
        """
        if path is not None:
            self.model_name = config.model
        self.config = config
        if isinstance(tiers := self.scheduler.store.source, Tiers):
            model = self.runner.model
            given = path is None
            tiers.names = page_names(
                config, self.model_name, path, model, self.capacity, given=given
            )

    def _start_profile(self, call: StartProfile) -> Future[None]:
        def start() -> None:
            if self._profile is not None:
                raise ParameterError(
                    "profile", "one is already being recorded.", hint="Call stop_profile first."
                )
            device = torch.device(self.runner.model.device)
            profile = Profiler(
                call.folder, device, with_stack=call.with_stack, record_shapes=call.record_shapes
            )
            self._profile = profile
            self.loop.span = profile.span

        return self.loop.inbox.post_for_result(start)

    def _stop_profile(self, _: StopProfile) -> Future[str]:
        def stop() -> Profiler:
            profile = self._profile
            self._profile = None
            if profile is None:
                raise ParameterError(
                    "profile", "none is being recorded.", hint="Call start_profile first."
                )
            self.loop.span = span_without_profiler
            profile.stop()
            return profile

        return self._calls.submit(lambda: self.loop.inbox.call_and_wait(stop).write_trace())

    def _export_prefix(self, call: ExportPrefix) -> Future[int]:
        tokens = self.builder.check_prompt_tokens(
            self.builder.prompt_ids(call.ids or call.prompt),
            self.builder.resolve_with_defaults(SamplingParams(max_tokens=0)),
        )
        return self._submit_prefix_file_call(
            lambda files: files.export_prefix_file(tokens, call.namespace, call.path, call.secret)
        )

    def _import_prefix(self, call: ImportPrefix) -> Future[int]:
        return self._submit_prefix_file_call(
            lambda files: files.import_prefix_file(call.path, call.namespace, call.secret)
        )

    def _submit_prefix_file_call(self, do: Callable[[PrefixFiles], int]) -> Future[int]:
        return self._calls.submit(lambda: do(PrefixFiles(self.scheduler.store, self.loop.inbox)))

    def _stats(self, _: Stats) -> Future[dict[str, Any]]:
        def count() -> dict[str, Any]:
            scheduler = self.scheduler
            store = self.scheduler.store
            return {
                "waiting": len(scheduler.queues.waiting) + len(scheduler.queues.returned),
                "running": len(scheduler.queues.prefilling) + len(scheduler.queues.decoding),
                "cached_tokens": store.tree.pages * store.page_size,
                "paused_branches": len(scheduler.pauses),
                "paused_tokens_evicted": scheduler.pauses.pages_given_up * store.page_size,
                # free pages and those in quarantine have no owner
                "free_tokens": (store.pool.free + store.pool.quarantined) * store.page_size,
                "total_tokens": store.pool.total * store.page_size,
                "prompt_tokens": scheduler.admission.prompt_tokens,
                "prompt_tokens_cached": scheduler.admission.prompt_tokens_cached,
                "pages_without_owner": self.loop.recount.lost,
                "steps": self.loop.steps,
                "asleep": int(bool(self.weights.sleep.released)),
                **self.weights.sleep.stats(),
                "appended_tokens": scheduler.appended_tokens,
                **store.source.stats(),
                **{
                    name: count for each in store.companions for name, count in each.stats().items()
                },
                **{name: count for part in self.parts for name, count in part.stats().items()},
                **(self.runner.stats() if isinstance(self.runner, LeadRunner) else {}),
                **self.open_requests.counts(),
                **self.compiler.cache.stats(),
                "grammars_from_disk": self.compiler.disk_hits,
                **self.loop.masks.times.summary("mask"),
                **self.loop.masks.waits.summary("mask_wait"),
                "late_masks": self.loop.masks.late,
                **({"drafters": {}} if scheduler.drafts is None else scheduler.drafts.stats()),
            }

        return self.loop.inbox.post_for_result(count)

    def _flush_cache(self, _: FlushCache) -> Future[int]:
        return self.loop.inbox.post_for_result(
            lambda: self.scheduler.end_pauses_and_flush() * self.scheduler.store.page_size
        )

    def _merge_call_tables(self) -> CallTable:
        """Returns the functions that answer calls, including those of the engine's parts."""
        answers: dict[type[EngineCall[Any]], Callable[[Any], Future[Any]]] = {
            CompileGrammar: lambda call: self.compiler.compile_in_background(call.constraint),
            **dict.fromkeys(CALLS, self.weights.answer_weight_call),
            StartProfile: self._start_profile,
            StopProfile: self._stop_profile,
            FlushCache: self._flush_cache,
            FreezeObjects: lambda _: self.loop.inbox.post_for_result(freeze_objects),
            EndSession: lambda call: self._context.sessions.drop_session(call.name),
            ExportPrefix: self._export_prefix,
            ImportPrefix: self._import_prefix,
            Stats: self._stats,
        }
        for part in self.parts:
            answers.update(part.answers(self.loop.inbox, self._calls.submit))
        return answers

    def close(self) -> None:
        """Ends the loop, the compiler and the tokenisation threads. Ends nothing in a forked copy
        of the process, because they run in the original.
        """
        self.gate.reason = CLOSED
        if self.gate.is_forked_copy:
            return
        self.compiler.close()
        self._context.encoder.shutdown()
        for part in self.parts:
            part.close()
        self._calls.shutdown(wait=False)
        self.weights.groups.close()
        self.loop.inbox.close()
        if threading.current_thread() is not self.thread:
            self.thread.join()


def _single_non_none(found: Iterable[T | None]) -> T | None:
    """Returns the only item that is not None, or None if all are."""
    made = [each for each in found if each is not None]
    assert len(made) <= 1, made
    return made[0] if made else None


def _requires_last_token_step(config: EngineConfig, loaded: LoadedModel) -> bool:
    """Returns whether the last prompt token needs a step of its own. Otherwise outputs would
    depend, through rounding, on how much of the prompt is cached.
    """
    return loaded.model.batch_sensitive and not loaded.model.fused and not config.deterministic


def _make_step_file(runner: ModelRunner, capacity: Capacity) -> Path | None:
    """Creates the file that records an engine's steps, in the folder for dumped layer outputs.
    Returns None if outputs are not dumped.
    """
    folder = runner.model.watch.folder if isinstance(runner.model, Decoder) else None
    if folder is None:
        return None
    append_step(folder / "steps", capacity)
    return folder / "steps"


def _describe_engine(loaded: LoadedModel, capacity: Capacity, store: PrefixCache) -> str:
    own = capacity.window_pages * capacity.sizes.page_size
    windows = f", for {own:,} in layers with a window" if own else ""
    running = capacity.sizes.max_running  # fewer than by default if states are large
    states = f", {capacity.states:,} states for {running} requests" if capacity.states else ""
    if isinstance(tiers := store.source, Tiers) and tiers.states is not None:
        states += f", {tiers.states.host.slots:,} states on the host"
    return (
        f"{loaded.name} on {loaded.model.device}, {loaded.model.format}, "
        f"room for {capacity.tokens:,} tokens{windows}{states}"
    )


def _make_prefix_cache(
    config: EngineConfig, capacity: Capacity, loaded: LoadedModel
) -> PrefixCache:
    return PrefixCache(
        capacity.pages,
        capacity.sizes.page_size,
        capacity.sizes.max_running,
        capacity.longest,
        reuse=config.prefix_cache,
        priority=EVICTION[config.eviction],
        reveal_others=config.explain_cache_misses is not False,
        windows=_make_window_pages(capacity, loaded),
        states=_make_state_pages(config, capacity),
        changes=TreeChanges(digest_interval(capacity.sizes.page_size))
        if config.dp_size > 1
        else None,
    )


def _make_window_pages(capacity: Capacity, loaded: LoadedModel) -> WindowPages | None:
    """Creates the separate pages of layers with a window, if the engine has any."""
    if not capacity.window_pages:
        return None
    sizes = capacity.sizes
    window = loaded.model.window
    assert window is not None
    return WindowPages(
        capacity.pages,
        capacity.window_pages,
        sizes.page_size,
        window,
        sizes.max_running,
        sizes.step_tokens,
    )


def _make_state_pages(config: EngineConfig, capacity: Capacity) -> StatePages | None:
    """Creates the places of states, if the model has any."""
    if not capacity.states:
        return None
    sizes = capacity.sizes
    return StatePages(
        capacity.pages,
        capacity.states - OWN * sizes.max_running,
        sizes.page_size,
        sizes.max_running,
        config.mamba_track_interval,
    )


@contextmanager
def _fail_on_error(
    loop: StepLoop, requests: Sequence[Request], problem: str, kind: type[SglError] = BackendError
) -> Iterator[None]:
    """Fails requests if the code in the `with` block raises an exception. Without this, the
    exception would stay in a future that nobody reads.
    """
    try:
        yield
    except Exception as error:
        failure = error if isinstance(error, SglError) else kind(f"{problem}: {error!r}")
        error.__traceback__ = None  # its frames hold the error: a cycle with the requests
        for request in requests:
            loop.fail_before_start(
                request, copy(failure)
            )  # copied, as programs add a source location to it


def _complete_and_start(
    context: EngineContext, requests: Sequence[Request], of: GenerateRequest
) -> None:
    """Starts requests after reading a file that they need."""
    with _fail_on_error(context.loop, requests, context.builder.incomplete):
        context.builder.complete_requests(requests, of.namespace)
        _compile_and_start(context, requests, of.constraint)


def _compile_and_start(
    context: EngineContext, requests: Sequence[Request], constraint: Constraint | None
) -> None:
    if requests[0].params.exact:
        draw = partial(_draw_exactly, context, requests, constraint)
        _submit_or_fail(context, requests, draw)
        return

    def start_with_grammar(grammar: Future[CompiledGrammar]) -> None:
        with _fail_on_error(context.loop, requests, "no mask can be made", ConstraintError):
            assert constraint is not None
            found = grammar.result()

            def start_constrained() -> None:
                for request in requests:
                    _start_request(context, request, request.constrain(constraint, found))

            if requests[0].respelled:
                _heal(context, requests, constraint, found, start_constrained)
            else:
                start_constrained()

    if constraint is not None:
        context.compiler.compile_in_background(constraint).add_done_callback(start_with_grammar)
    elif requests[0].respelled:
        _heal(context, requests, None, None, partial(_start_without_grammar, context, requests))
    else:
        _start_without_grammar(context, requests)


def _heal(
    context: EngineContext,
    requests: Sequence[Request],
    constraint: Constraint | None,
    grammar: CompiledGrammar | None,
    start: Callable[[], None],
) -> None:
    """Heals the prompt of requests off the loop's thread, and then starts the requests."""

    def start_healed(healing: Healing) -> None:
        with _fail_on_error(context.loop, requests, "the prompt can't be healed"):
            healing.set_prompts()
            start()

    def resume(healing: Healing) -> None:
        _submit_or_fail(context, requests, partial(start_healed, healing))

    def heal() -> None:
        with _fail_on_error(context.loop, requests, "the prompt can't be healed"):
            healing = Healing(context, requests, constraint, grammar, resume)
            context.loop.inbox.post(healing.start)

    _submit_or_fail(context, requests, heal)


def _submit_or_fail(
    context: EngineContext, requests: Sequence[Request], function: Callable[[], None]
) -> None:
    """Calls a function off the loop's thread. Ends the requests if the engine is closed."""
    try:
        context.encoder.submit(function)
    except RuntimeError:  # the executor has been shut down
        for request in requests:
            context.loop.fail_before_start(request, EngineClosedError("the engine is closed."))


def _start_without_grammar(context: EngineContext, requests: Sequence[Request]) -> None:
    for request in requests:
        try:
            matcher = request.make_free_matcher()
        except ParameterError as error:  # reported as an event, like other errors of preparation
            context.loop.fail_before_start(request, error)
        else:
            _start_request(context, request, matcher)


def _draw_exactly(
    context: EngineContext, requests: Sequence[Request], constraint: Constraint | None
) -> None:
    with _fail_on_error(context.loop, requests, "no text can be drawn"):
        context.loop.inbox.post(ExactDraws(context, requests, constraint).start)


def _start_request(
    context: EngineContext, request: Request, matcher: RequestMatcher | None
) -> None:
    if request.replayed_count:
        resume = partial(_resume_request, context.loop, request, matcher)
        _submit_or_fail(context, [request], resume)
        return
    if request.output.begins_with_text:  # in this case, the caller is not on the loop's thread
        request.begin_with_given_text(matcher)
    else:
        request.output.matcher = matcher
    context.loop.submit_request(request)


def _resume_request(loop: StepLoop, request: Request, matcher: RequestMatcher | None) -> None:
    with _fail_on_error(loop, [request], "the output can't be continued"):
        request.replay_given_output(matcher, jump=loop.jump)
        loop.submit_request(request)


def _abort_requests(loop: StepLoop, requests: Sequence[Request]) -> None:
    for request in requests:
        loop.abort(request)


def _max_cached_tokens(requests: Sequence[Request]) -> int:
    return max(request.cache.tokens for request in requests)


def _send_with_index(sink: Sink, index: int, event: Event) -> None:
    if isinstance(event, RequestAbortedError) and event.partial is not None:
        event.partial = msgspec.structs.replace(event.partial, index=index)
    sink(event if isinstance(event, SglError) else msgspec.structs.replace(event, index=index))
