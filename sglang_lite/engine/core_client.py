"""Core of an engine that runs in a process of its own: sends calls to that process, and passes its events to the
callers' sinks, on one thread.

Prompts of generations are tokenised and parameters checked in the caller's process, so that errors are raised at the
call.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_lite.engine import spawned_process, switch_interval
from sglang_lite.engine.engine_process import EngineProcess
from sglang_lite.engine.frames import (
    Abort,
    Ask,
    AskReply,
    Close,
    Command,
    Drop,
    Encode,
    Extend,
    Failed,
    Log,
    Open,
    Play,
    Progress,
    Ready,
    Report,
    RequestEvent,
    Score,
    Submit,
    error_of,
    frame,
    reports,
)
from sglang_lite.engine.open_submissions import OpenSubmission, OpenSubmissions
from sglang_lite.engine.signs_of_life import LOOK_S
from sglang_lite.program.nodes import Gen, Node
from sglang_lite.program.nodes import Path as BranchPath
from sglang_lite.protocol import (
    Constraint,
    EngineClosedError,
    ParameterError,
    ProgramSink,
    Selection,
    SglError,
)
from sglang_lite.runtime import startup_messages
from sglang_lite.runtime.config import Capacity, EngineConfig, Sizes
from sglang_lite.runtime.core.inbox import forked_copy_error, self_wait_error
from sglang_lite.runtime.core.open_requests import OpenRequests, Ticket
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.submission import (
    GenerateRequest,
    ProgramRequest,
    SelectRequest,
    check_kind,
    check_nodes,
    check_priority,
)
from sglang_lite.runtime.embedding.request import EncodeRequest, not_a_generator_error, not_an_encoder_error
from sglang_lite.runtime.embedding.spec import EncoderSpec, encoder_spec, is_encoder
from sglang_lite.runtime.embedding.tokenizer import encoder_tokenizer
from sglang_lite.runtime.model_files import open_model_files
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.output_builder import Sink
from sglang_lite.runtime.resolved_params import LogitProcessor, shown
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.wire.failure import as_failure

if TYPE_CHECKING:
    from sglang_lite.runtime.structured_output.base import CompiledGrammar
    from sglang_lite.runtime.structured_output.compiler import Compiler

logger = logging.getLogger("sglang_lite")
E = TypeVar("E")

MOST_RESTARTS = 3  # per RESTART_WINDOW_S
RESTART_WINDOW_S = 300.0
_SPENT = f" {MOST_RESTARTS} restarts in five minutes are spent. Find the cause, then make a new engine: sgl.Engine(…)."


_CLOSED = "the engine is closed."  # by its owner


class CoreClient:
    """Client of an engine in another process: the `Core` that `Engine` uses by default.

    Args:
        config: settings of the engine.
        path: folder of the model.
        process: process that was started with `config` and `path`.

    Attributes:
        config, model_name: settings and name of the weights that are loaded now.
        encoder: specification of an embedding or classification model; None for a model that generates.
        tokenizer, vocab_size: tokenizer and vocabulary size of the model.
        capacity: limits of the engine: rows, tokens per step, pages, context length.
        description: one line about the model and its capacity.

    Raises:
        SglError: the process, or the engine in it, can't be started.
    """

    def __init__(self, config: EngineConfig, path: Path, process: EngineProcess) -> None:
        self.config = config
        self._home = os.getpid()
        self._ids = itertools.count(1)
        self._submissions = OpenSubmissions(self._abort)
        self._lock = self._submissions.lock
        self._closed = False
        self._why_closed = _CLOSED
        self._starts: deque[float] = deque()
        self._compiler: Compiler | None = None
        self._process = process
        self._path = path.absolute()  # folder of the weights that are loaded now
        switch_interval.shorten()
        self._listen()
        _open_clients.add(self)
        try:
            self.encoder, self.tokenizer = encoder_and_tokenizer(config, path)  # while the process loads the model
            ready = self._process.ready.result()
        except BaseException:
            self.close()
            raise
        self._set_up(ready)

    def _set_up(self, ready: Ready) -> None:
        config = self.config
        self.model_name, self.vocab_size, self.description = ready.model_name, ready.vocab_size, ready.description
        self._eos_ids = frozenset(ready.eos_ids)
        self.capacity = Capacity(Sizes(*ready.sizes), ready.context_length, ready.pages, ready.longest)
        self._builder = RequestBuilder(
            ready.model_name, self.tokenizer, ready.vocab_size, self._eos_ids, ready.longest, config.seed,
            all_special=config.special_tokens_in_roles,
        )  # fmt: skip
        self._requests = OpenRequests(config.max_queued + ready.sizes[0])

    def _listen(self) -> None:
        reader = self._submissions.reader = threading.Thread(
            target=self._read, args=(self._process,), name="sglang_lite-events", daemon=True
        )
        reader.start()

    # ----------------------------------------------------------------------------------------- submissions

    def submit(self, request: GenerateRequest, sink: Sink) -> Ticket:
        """Starts a generation: see `Engine.submit`."""
        self.check_open()
        request.check()
        ids = self._builder.prompt_ids(request.prompt)
        params = self._builder.resolved(request.params)
        tokens = self._builder.tokens(ids, params)
        output = self._builder.output(request.output_ids, len(tokens), params)
        processor = None if request.logit_processor is None else _import_name(request.logit_processor)
        number = next(self._ids)
        entry = OpenSubmission(params.n)
        ticket = Ticket(partial(self._abort, number), lambda: entry.cached)
        message = Submit(
            number, tokens.tobytes(), request.params, request.constraint, request.stream, request.namespace,
            request.priority, processor, output.tobytes(),
        )  # fmt: skip
        self._begin(message, entry, lambda: self._requests.track(sink, params.n, request.rid, ticket))
        return ticket

    def submit_select(self, request: SelectRequest, sink: Callable[[Selection | SglError], None]) -> Ticket:
        """Scores choices: see `Engine.submit_select`."""
        self.check_open()
        request.check()
        self._builder.check_images(request.prompt)
        number = next(self._ids)
        message = Score(number, request.prompt, tuple(request.choices), request.unconditional, request.namespace)
        self._begin(message, OpenSubmission(), lambda: self._requests.track(sink))
        return Ticket(partial(self._abort, number))

    def open_program(
        self, sink: ProgramSink, *, stream: bool = False, namespace: str = "", priority: int = 0
    ) -> _OpenProgram:
        """Opens a program: see `Engine.open_program`."""
        self.check_open()
        check_kind("namespace", namespace, str)
        check_priority(priority, self.config.policy)
        number = next(self._ids)
        self._begin(Open(number, stream, namespace, priority), OpenSubmission(), lambda: sink)
        return _OpenProgram(self, number)

    def run_program(self, request: ProgramRequest, sink: ProgramSink) -> Ticket:
        """Plays a complete program: see `Engine.run_program`."""
        self.check_open()
        request.check()
        check_priority(request.priority, self.config.policy)
        self._builder.check_images(request.prompt)
        for error in self._builder.refused(request.program.nodes).values():
            raise error
        number = next(self._ids)
        message = Play(number, request.prompt, request.program, request.stream, request.namespace, request.priority)
        self._begin(message, OpenSubmission(), lambda: self._requests.track(sink))
        return Ticket(partial(self._abort, number))

    def extend(self, number: int, path: BranchPath, nodes: Sequence[Node]) -> None:
        """Adds nodes to a branch of an open program: see `EngineProgram.extend`."""
        self.check_open()
        check_nodes(nodes, path)
        refused = {i: error for i, error in self._builder.refused(nodes).items() if isinstance(nodes[i], Gen)}
        if refused:  # parameters of refused nodes may have any type, and may not be serialisable
            nodes = [_without_params(node) if i in refused else node for i, node in enumerate(nodes)]
        self.send(Extend(number, path, tuple(nodes), {i: as_failure(error) for i, error in refused.items()}))

    def encode(self, request: EncodeRequest) -> Future[NDArray[np.float32]]:
        """Future of the numbers that an embedding or classification model computes for texts: float32 [N, width]."""
        self.check_open()
        encoder = self.encoder
        if encoder is None:
            raise not_an_encoder_error(self.model_name)
        number = next(self._ids)
        data = frame([Encode(number, request.ids.tobytes(), request.types.tobytes(), request.lengths.tobytes())])
        vectors: Future[NDArray[np.float32]] = Future()
        self._call(number, data).add_done_callback(partial(_as_vectors, vectors, encoder.width))
        return vectors

    def abort(self, rid: str) -> None:
        """Aborts the request with the name `rid`: see `Engine.abort`."""
        self._check_process()
        self._requests.ticket(rid).abort()

    def compile_grammar(self, constraint: Constraint) -> CompiledGrammar:
        """Compiles a constraint in both processes: see `Engine.compile_grammar`."""
        self._check_generates()
        self.check_wait("compile_grammar")
        from sglang_lite.runtime.structured_output.compiler import Compiler  # imports a grammar engine

        with self._lock:
            if self._compiler is None:
                self._compiler = Compiler(
                    self.tokenizer, self.vocab_size, self._eos_ids, 1, backend=self.config.constraint_backend,
                    timeout_s=self.config.compile_timeout_s, memory_mb=self.config.compile_memory_mb,
                )  # fmt: skip
        try:
            compiled = self._compiler.request(constraint).result()
        except SglError as error:
            raise copy(error) from error
        self._call_method("compile", constraint=constraint)
        return compiled

    def validated_prompt_ids(self, request: GenerateRequest) -> Sequence[int]:
        """Token ids of a request's prompt. Raises ParameterError if the request could not be run."""
        ids, params = self._builder.prompt_ids(request.prompt), self._builder.resolved(request.params)
        self._builder.output(request.output_ids, len(self._builder.tokens(ids, params)), params)
        return ids

    def with_flush(self, sink: Callable[[E], object], flush: Callable[[], object] | None) -> Callable[[E], None]:
        """Sink that also calls `flush`: once for all events that arrive in one frame."""
        return self._submissions.with_flush(sink, flush)

    # ----------------------------------------------------------------------------------- waiting for room

    def wait_for_room(self, call: Callable[[], object], count: int, *, first: bool = False) -> None:
        """Calls back when there is room for more requests: see `OpenRequests.wait_for_room`."""
        self._requests.wait_for_room(call, count, first=first)

    def cancel_wait(self, call: Callable[[], object]) -> None:
        """Withdraws a callback that waits for room: see `OpenRequests.leave`."""
        self._requests.leave(call)

    def submit_when_room(self, submit: Callable[[], Ticket], count: int) -> Awaitable[Ticket]:
        """Submits as soon as there is room: see `OpenRequests.admitted`."""
        return self._requests.admitted(submit, count)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Calls back on the reader's thread after the next frame. Takes no lock."""
        self._submissions.call_soon(call)

    # --------------------------------------------------------------------------------- state of the engine

    def check_open(self) -> None:
        """Raises EngineClosedError if the engine is closed, has died, or belongs to another process."""
        self._check_process()
        if self._closed:
            hint = "Make a new one: sgl.Engine(…)." if self._why_closed == _CLOSED else ""
            raise EngineClosedError(self._why_closed, hint=hint)

    @property
    def responds(self) -> bool:
        """False while the process is stopped or swapped out: see `SignsOfLife`."""
        return not self._process.signs.missing

    def check_wait(self, name: str) -> None:
        """Checks that the calling thread may wait for the engine.

        Args:
            name: name of the calling method, for messages.

        Raises:
            BackendError: the method was called on the thread that reads the engine's events, and would wait for itself.
            EngineClosedError: as `check_open`.
        """
        self._check_process()
        if threading.current_thread() is self._submissions.reader:
            raise self_wait_error(name)
        self.check_open()

    def _check_process(self) -> None:
        if os.getpid() != self._home:
            raise forked_copy_error(self._home)

    def update_weights(self, path: str, version: str | None = None) -> None:
        """Replaces the weights between two steps: see `Engine.update_weights`."""
        self.check_wait("update_weights")
        version = self.config.weight_version if version is None else version
        config = replace(self.config, model=path, revision=None, weight_version=version)
        absolute = os.path.abspath(path) if os.path.exists(path) else path  # the process may be in another folder
        name = self._call_method("update_weights", path=absolute)
        self.model_name = path if name == absolute else name
        self.config, self._path = config, resolve(absolute, None)

    def start_profile(self, folder: str, *, with_stack: bool = False, record_shapes: bool = False) -> None:
        """Starts a profile: see `Engine.start_profile`."""
        self.check_wait("start_profile")
        options = {"with_stack": with_stack, "record_shapes": record_shapes}
        self._call_method("start_profile", path=folder, options=options)

    def stop_profile(self) -> str:
        """Ends the profile: see `Engine.stop_profile`."""
        self.check_wait("stop_profile")
        return str(self._call_method("stop_profile"))

    def flush_cache(self) -> int:
        """Drops every cached prefix that no request is using; returns the number of tokens that were freed."""
        self.check_wait("flush_cache")
        return int(self._call_method("flush_cache"))

    def stats(self) -> dict[str, Any]:  # counts are int, seconds float
        """Counts, taken between two steps: see `Engine.stats`."""
        self.check_wait("stats")
        return dict(self._call_method("stats"))

    def close(self, patience_s: float | None = None) -> None:
        """Ends the process. In a forked copy, only marks this object as closed: the process belongs to the original.

        Args:
            patience_s: seconds to wait for a sink that has not returned; None waits without limit.
        """
        if os.getpid() != self._home:
            self._closed, self._why_closed = True, _CLOSED
            return
        self.disconnect()
        if self._compiler is not None:
            self._compiler.close()
        if threading.current_thread() is not self._submissions.reader:
            self._submissions.reader.join(patience_s)

    def disconnect(self) -> None:
        """Makes the process end, so that open requests fail. Waits for nothing and takes no lock: a garbage collector
        may call it on a thread that holds any lock."""
        if os.getpid() == self._home and not self._closed:
            self._closed = True
            self._process.child.connection.close()

    # ---------------------------------------------------------------------------------------------- sending

    def _begin(
        self, message: Submit | Score | Open | Play, entry: OpenSubmission, counted: Callable[[], Callable[[Any], None]]
    ) -> None:
        """Registers and sends a submission, whose events follow until its last one.

        Args:
            counted: function that counts the submission as open, and returns its sink.
        """
        self._check_generates()
        data = frame([message])
        with self._lock:
            self.check_open()
            entry.sink, entry.process = counted(), self._process
            self._submissions.add(message.id, entry)
            _send_to(self._process, data)

    def send(self, message: Command) -> None:
        """Sends a message of an open submission, unless that has ended. Sends nothing from a forked copy."""
        if os.getpid() != self._home:
            return
        data = frame([message])
        with self._lock:
            if (entry := self._submissions.get(message.id)) is not None:
                _send_to(entry.process, data)

    def _abort(self, number: int) -> None:
        self.send(Abort(number))

    def _call_method(
        self,
        what: Any,
        *,
        path: str = "",
        constraint: Constraint | None = None,
        options: Mapping[str, bool] = MappingProxyType({}),
    ) -> Any:
        number = next(self._ids)
        return self._call(number, frame([Ask(number, what, path, constraint, dict(options))])).result()

    def _call(self, number: int, data: bytes) -> Future[Any]:
        """Sends a frame with a call, and returns the future of its one answer."""
        with self._lock:
            self.check_open()
            future = self._submissions.register_call(number, self._process)
            _send_to(self._process, data)
        return future

    def _check_generates(self) -> None:
        if self.encoder is not None:
            raise not_a_generator_error(self.model_name)

    # ------------------------------------------------------------------------------------ the reader's thread

    def _read(self, process: EngineProcess) -> None:
        """Reads the frames of a process until it ends, and then fails everything that is open in it."""
        problem = ""
        try:
            for content in process.child.connection.frames(process.signs.look, LOOK_S):
                process.signs.seen()
                for message in reports(content):
                    self._handle(message, process)
                self._submissions.flush()
        except Exception as error:  # any error: callers would otherwise wait for ever
            problem = f"sent what can't be read ({error!r}), and "
            process.child.kill()
        closed = self._closed
        ended = process.child.end()
        process.child.connection.release()
        startup_messages.move_bar(process.bar, 1, 1, self.config.log_level)
        if closed:
            self._submissions.fail(process, EngineClosedError("the engine was closed before the request finished."))
        elif process.failure is not None:
            self._closed, self._why_closed = True, f"the engine could not be started: {process.failure}"
            self._submissions.fail(process, process.failure)
        else:
            self._on_death(process, f"the engine's process {problem}{ended}")
        if threading.current_thread() is self._submissions.reader:  # and not a later one, of a restarted process
            switch_interval.restore()

    def _handle(self, message: Report, process: EngineProcess) -> None:
        match message:
            case RequestEvent():
                self._submissions.deliver(message)
            case AskReply():
                self._submissions.answer(message)
            case Log():
                with contextlib.suppress(Exception):  # the caller's logging handlers may raise
                    logging.getLogger(message.logger).log(message.level, "%s", message.line)
            case Progress():
                process.bar = startup_messages.move_bar(process.bar, message.done, message.total, self.config.log_level)
            case Ready():
                process.ready.set_result(message)
            case Failed():
                process.failure = error_of(message.failure)
                process.child.connection.close()

    def _on_death(self, process: EngineProcess, why: str) -> None:
        """Fails everything that was open in a dead process, and starts another one if the settings allow it."""
        with contextlib.suppress(Exception):  # the caller's logging handlers may raise
            logger.error("%s", why)
        with self._lock:
            ran = process.ready.done() or self._starts  # this process, or the one that it replaced
            if not (self.config.restart and ran and self._may_restart()):
                self._closed, why = True, why + (_SPENT if len(self._starts) > MOST_RESTARTS else "")
            self._why_closed = why
            if not self._closed:
                self._restart()
        self._submissions.fail(process, EngineClosedError(why))

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._starts and now - self._starts[0] > RESTART_WINDOW_S:
            self._starts.popleft()
        self._starts.append(now)
        return len(self._starts) <= MOST_RESTARTS

    def _restart(self) -> None:
        """Starts another process with the weights that were loaded last. New submissions wait until it is ready."""
        try:
            self._process = EngineProcess(self.config, self._path)
            self._listen()
        except Exception as error:  # any error: open submissions must still be failed
            self._closed, self._why_closed = True, f"{self._why_closed} It could not be started again: {error}"


class _OpenProgram:
    """Program that is open in the engine's process: see `EngineProgram`."""

    def __init__(self, core: CoreClient, number: int) -> None:
        self._core, self._number = core, number

    def extend(self, path: BranchPath, nodes: Sequence[Node]) -> None:
        self._core.extend(self._number, path, nodes)

    def drop(self, path: BranchPath) -> None:
        self._core.send(Drop(self._number, path))

    def close(self) -> None:
        self._core.send(Close(self._number))

    def abort(self) -> None:
        self._core.send(Abort(self._number))


def _send_to(process: EngineProcess, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the process has ended, and its reader fails all submissions
        process.child.connection.send(data)


def encoder_and_tokenizer(config: EngineConfig, path: Path) -> tuple[EncoderSpec | None, Tokenizer]:
    """Specification of an embedding or classification model (None for other models), and the tokenizer of any model."""
    if is_encoder(path):
        spec = encoder_spec(path)
        return spec, encoder_tokenizer(path, spec)
    return None, open_model_files(path, config.model_impl, tokenizer=not config.skip_tokenizer_init).tokenizer


def _as_vectors(vectors: Future[NDArray[np.float32]], width: int, answer: Future[bytes]) -> None:
    error = answer.exception()
    with contextlib.suppress(InvalidStateError):  # the future was cancelled
        if error is not None:
            vectors.set_exception(error)
        else:
            vectors.set_result(np.frombuffer(answer.result(), np.float32).reshape(-1, width))


def _without_params(node: Node) -> Gen:
    """Generation without parameters, which takes the place of a refused one."""
    return Gen(node.name if isinstance(node, Gen) else None, where=node.where)


def _import_name(processor: LogitProcessor) -> str:
    """Name by which the engine's process can import a logit processor, as "module:name".

    Raises:
        ParameterError: the processor can't be imported by name.
    """
    module, name = getattr(processor, "__module__", None), getattr(processor, "__qualname__", "")
    value: Any = sys.modules.get(module or "")
    for part in name.split("."):
        value = getattr(value, part, None)
    if module == "__main__" or value is not processor:
        raise ParameterError(
            "logit_processor", f"{shown(processor)} can't be found by name in the engine's process.",
            hint="Define it at the top of a module of its own and import it from there, or use in_process=True.",
        )  # fmt: skip
    return f"{module}:{name}"


_open_clients: weakref.WeakSet[CoreClient] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    running = list(_open_clients)
    for core in running:
        core.disconnect()
    for core in running:
        core.close(2 * spawned_process.PATIENCE_S)  # waits for a sink that has not returned
