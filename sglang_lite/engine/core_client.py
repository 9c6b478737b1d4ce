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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sglang_lite.engine import spawned_process, switch_interval
from sglang_lite.engine.engine_process import EngineProcess
from sglang_lite.engine.frames import (
    Abort,
    AskReply,
    Close,
    DropBranch,
    Encode,
    Extend,
    Log,
    Progress,
    Ready,
    Report,
    RequestEvent,
    StartFailed,
    Submit,
    Submitted,
    frame,
    reports,
)
from sglang_lite.engine.open_submissions import OpenSubmission, OpenSubmissions
from sglang_lite.engine.signs_of_life import LOOK_S
from sglang_lite.errors import shown
from sglang_lite.program.nodes import Gen, Node
from sglang_lite.program.nodes import Path as BranchPath
from sglang_lite.protocol import (
    EngineClosedError,
    ParameterError,
    ProgramSink,
    Selection,
    SglError,
)
from sglang_lite.runtime.calls import CompileGrammar, EngineCall, R, UpdateWeights
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.gate import CLOSED, Gate
from sglang_lite.runtime.core.open_requests import OpenRequests, Ticket
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.submission import (
    GenerateRequest,
    OpenRequest,
    ProgramRequest,
    SelectRequest,
    Submission,
    check_nodes,
    check_priority,
)
from sglang_lite.runtime.embedding.request import EncodeRequest, not_a_generator_error, not_an_encoder_error
from sglang_lite.runtime.embedding.spec import EncoderSpec, encoder_spec, is_encoder
from sglang_lite.runtime.embedding.tokenizer import encoder_tokenizer
from sglang_lite.runtime.host import startup_messages
from sglang_lite.runtime.loading.model_files import open_model_files
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.requests.output_builder import Sink
from sglang_lite.runtime.requests.resolved_params import LogitProcessor
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.wire.failure import as_error, as_failure

if TYPE_CHECKING:
    from sglang_lite.runtime.structured_output.base import CompiledGrammar
    from sglang_lite.runtime.structured_output.compiler import Compiler

logger = logging.getLogger("sglang_lite")

MAX_RESTARTS = 3  # per RESTART_WINDOW_S
RESTART_WINDOW_S = 300.0
_SPENT = f" {MAX_RESTARTS} restarts in five minutes are spent. Find the cause, then make a new engine: sgl.Engine(…)."


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
        builder: checks of requests, and their tokens.
        open_requests: requests and programs that have not ended.
        gate: checks of callers.

    Raises:
        SglError: the process, or the engine in it, can't be started.
    """

    def __init__(self, config: EngineConfig, path: Path, process: EngineProcess) -> None:
        self.config = config
        self.gate = Gate()
        self._ids = itertools.count(1)
        self._submissions = OpenSubmissions(self._abort)
        self._lock = self._submissions.lock
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
        self.capacity = capacity = ready.capacity
        self.builder = RequestBuilder(
            ready.model_name, self.tokenizer, ready.vocab_size, self._eos_ids, capacity.longest, config.seed,
            all_special=config.special_tokens_in_roles,
        )  # fmt: skip
        self.open_requests = OpenRequests(config.max_queued + capacity.sizes.max_running)

    def _listen(self) -> None:
        reader = self._submissions.reader = threading.Thread(
            target=self._read, args=(self._process,), name="sglang_lite-events", daemon=True
        )
        reader.start()

    # ----------------------------------------------------------------------------------------- submissions

    def submit(
        self, request: Submission, sink: Callable[[Any], None], flush: Callable[[], object] | None = None
    ) -> Ticket:  # each kind of submission has its own events
        """Starts a generation, a selection or a whole program: see `Engine.submit`, `submit_select` and
        `run_program`."""
        self.gate.check_open()
        request.check()
        return self._submit_by_kind[type(request)](self, request, self._submissions.flushes.with_flush(sink, flush))

    def _generate(self, request: GenerateRequest, sink: Sink) -> Ticket:
        ids = self.builder.prompt_ids(request.prompt)
        params = self.builder.resolved(request.params)
        tokens = self.builder.tokens(ids, params)
        output = self.builder.output(request.output_ids, len(tokens), params)
        processor = None if request.logit_processor is None else _import_name(request.logit_processor)
        number = next(self._ids)
        entry = OpenSubmission(params.n)
        ticket = Ticket(partial(self._abort, number), lambda: entry.cached)
        message = Submit(
            tokens.tobytes(), request.params, request.constraint, request.stream, request.namespace, request.priority,
            processor, output.tobytes(),
        )  # fmt: skip
        self._begin(number, message, entry, lambda: self.open_requests.track(sink, params.n, request.rid, ticket))
        return ticket

    def _select(self, request: SelectRequest, sink: Callable[[Selection | SglError], None]) -> Ticket:
        self.builder.check_images(request.prompt)
        return self._submit_whole(request, sink)

    def _play(self, request: ProgramRequest, sink: ProgramSink) -> Ticket:
        check_priority(request.priority, self.config.policy)
        self.builder.check_images(request.prompt)
        for error in self.builder.refused(request.program.nodes).values():
            raise error
        return self._submit_whole(request, sink)

    def _submit_whole(self, request: SelectRequest | ProgramRequest, sink: Callable[[Any], None]) -> Ticket:
        number = next(self._ids)
        self._begin(number, request, OpenSubmission(), lambda: self.open_requests.track(sink))
        return Ticket(partial(self._abort, number))

    _submit_by_kind: ClassVar[Mapping[type[Submission], Callable[..., Ticket]]] = {
        GenerateRequest: _generate,
        SelectRequest: _select,
        ProgramRequest: _play,
    }

    def open_program(
        self, request: OpenRequest, sink: ProgramSink, flush: Callable[[], object] | None = None
    ) -> _OpenProgram:
        """Opens a program: see `Engine.open_program`."""
        self.gate.check_open()
        request.check(self.config.policy)
        number, sink = next(self._ids), self._submissions.flushes.with_flush(sink, flush)
        self._begin(number, request, OpenSubmission(), lambda: sink)
        return _OpenProgram(self, number)

    def extend(self, number: int, path: BranchPath, nodes: Sequence[Node]) -> None:
        """Adds nodes to a branch of an open program: see `EngineProgram.extend`."""
        self.gate.check_open()
        check_nodes(nodes, path)
        refused = {i: error for i, error in self.builder.refused(nodes).items() if isinstance(nodes[i], Gen)}
        if refused:  # parameters of refused nodes may have any type, and may not be serialisable
            nodes = [
                Gen(node.name, where=node.where) if isinstance(node, Gen) and i in refused else node
                for i, node in enumerate(nodes)
            ]
        self.send(number, Extend(path, tuple(nodes), {i: as_failure(error) for i, error in refused.items()}))

    # ---------------------------------------------------------------------------------- calls with one answer

    def ask(self, call: EngineCall[R]) -> Future[R]:
        """Future of the answer to a call: see `EngineCore.ask`."""
        self.gate.check_open()
        answer = self._answers.get(type(call))
        future: Future[R] = self._ask(call) if answer is None else answer(self, call)
        return future

    def _encode(self, request: EncodeRequest) -> Future[NDArray[np.float32]]:
        encoder = self.encoder
        if encoder is None:
            raise not_an_encoder_error(self.model_name)
        answer = self._ask(Encode(request.ids.tobytes(), request.types.tobytes(), request.lengths.tobytes()))
        return _then(answer, lambda data: np.frombuffer(data, np.float32).reshape(-1, encoder.width))

    def _compile(self, call: CompileGrammar) -> Future[CompiledGrammar]:
        """Compiles in both processes. The one of the engine begins when the caller's has succeeded."""
        self._check_generates()
        self.gate.check_wait("compile_grammar")
        from sglang_lite.runtime.structured_output.compiler import Compiler  # imports a grammar engine

        with self._lock:
            if self._compiler is None:
                self._compiler = Compiler(
                    self.tokenizer, self.vocab_size, self._eos_ids, 1, backend=self.config.constraint_backend,
                    timeout_s=self.config.compile_timeout_s, memory_mb=self.config.compile_memory_mb,
                )  # fmt: skip
        compiled = self._compiler.request(call.constraint).result()
        return _then(self._ask(call), lambda _: compiled)

    def _update_weights(self, call: UpdateWeights) -> Future[str]:
        path = call.path
        version = self.config.weight_version if call.version is None else call.version
        config = replace(self.config, model=path, revision=None, weight_version=version)
        absolute = os.path.abspath(path) if os.path.exists(path) else path  # the process may be in another folder
        folder = resolve(absolute, None)

        def updated(name: str) -> str:
            self.model_name = path if name == absolute else name
            self.config, self._path = config, folder
            return self.model_name

        return _then(self._ask(UpdateWeights(absolute, version)), updated)

    _answers: ClassVar[Mapping[type[EngineCall[Any]], Callable[..., Future[Any]]]] = {
        EncodeRequest: _encode,
        CompileGrammar: _compile,
        UpdateWeights: _update_weights,
    }

    # --------------------------------------------------------------------------------- state of the engine

    def call_soon(self, call: Callable[[], object]) -> None:
        """Calls back on the reader's thread after the next frame. Takes no lock."""
        self._submissions.call_soon(call)

    @property
    def responds(self) -> bool:
        """False while the process is stopped or swapped out: see `SignsOfLife`."""
        return not self._process.signs.missing

    def close(self, patience_s: float | None = None) -> None:
        """Ends the process. In a forked copy, only marks this object as closed: the process belongs to the original.

        Args:
            patience_s: seconds to wait for a sink that has not returned; None waits without limit.
        """
        if self.gate.is_copy:
            self.gate.reason = CLOSED
            return
        self.disconnect()
        if self._compiler is not None:
            self._compiler.close()
        if threading.current_thread() is not self._submissions.reader:
            self._submissions.reader.join(patience_s)

    def disconnect(self) -> None:
        """Makes the process end, so that open requests fail. Waits for nothing and takes no lock: a garbage collector
        may call it on a thread that holds any lock."""
        if not self.gate.is_copy and not self.gate.reason:
            self.gate.reason = CLOSED
            self._process.child.connection.close()

    # ---------------------------------------------------------------------------------------------- sending

    def _begin(
        self, number: int, request: Submitted, entry: OpenSubmission, counted: Callable[[], Callable[[Any], None]]
    ) -> None:
        """Registers and sends a submission, whose events follow until its last one.

        Args:
            counted: function that counts the submission as open, and returns its sink.
        """
        self._check_generates()
        data = frame([(number, request)])
        with self._lock:
            self.gate.check_open()
            entry.sink, entry.process = counted(), self._process
            self._submissions.add(number, entry)
            _send_to(self._process, data)

    def send(self, number: int, message: Extend | DropBranch | Close | Abort) -> None:
        """Sends a message of an open submission, unless that has ended. Sends nothing from a forked copy."""
        if self.gate.is_copy:
            return
        data = frame([(number, message)])
        with self._lock:
            if (entry := self._submissions.get(number)) is not None:
                _send_to(entry.process, data)

    def _abort(self, number: int) -> None:
        self.send(number, Abort())

    def _ask(self, call: Any) -> Future[Any]:  # any of `Asked`; each has its own type of answer
        number = next(self._ids)
        data = frame([(number, call)])
        with self._lock:
            self.gate.check_open()
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
        self.gate.claim()
        try:
            for content in process.child.connection.frames(process.signs.look, LOOK_S):
                process.signs.seen()
                for message in reports(content):
                    self._handle(message, process)
                self._submissions.flush()
        except Exception as error:  # any error: callers would otherwise wait for ever
            problem = f"sent what can't be read ({error!r}), and "
            process.child.kill()
        closed = bool(self.gate.reason)
        ended = process.child.end()
        process.child.connection.release()
        startup_messages.move_bar(process.bar, 1, 1, self.config.log_level)
        if closed:
            self._submissions.fail(process, EngineClosedError("the engine was closed before the request finished."))
        elif process.failure is not None:
            self.gate.reason = f"the engine could not be started: {process.failure}"
            self._submissions.fail(process, process.failure)
        else:
            self._on_death(process, f"the engine's process {problem}{ended}")
        self.gate.release()
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
            case StartFailed():
                process.failure = as_error(message.failure)
                process.child.connection.close()

    def _on_death(self, process: EngineProcess, why: str) -> None:
        """Fails everything that was open in a dead process, and starts another one if the settings allow it."""
        with contextlib.suppress(Exception):  # the caller's logging handlers may raise
            logger.error("%s", why)
        with self._lock:
            ran = process.ready.done() or self._starts  # this process, or the one that it replaced
            if not (self.config.restart and ran and self._may_restart()):
                self.gate.reason = why = why + (_SPENT if len(self._starts) > MAX_RESTARTS else "")
            elif not self.gate.reason:
                self._restart(why)
        self._submissions.fail(process, EngineClosedError(why))

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._starts and now - self._starts[0] > RESTART_WINDOW_S:
            self._starts.popleft()
        self._starts.append(now)
        return len(self._starts) <= MAX_RESTARTS

    def _restart(self, why: str) -> None:
        """Starts another process with the weights that were loaded last. New submissions wait until it is ready."""
        try:
            self._process = EngineProcess(self.config, self._path)
            self._listen()
        except Exception as error:  # any error: open submissions must still be failed
            self.gate.reason = f"{why} It could not be started again: {error}"


class _OpenProgram:
    """Program that is open in the engine's process: see `EngineProgram`."""

    def __init__(self, core: CoreClient, number: int) -> None:
        self._core, self._number = core, number

    def extend(self, path: BranchPath, nodes: Sequence[Node]) -> None:
        self._core.extend(self._number, path, nodes)

    def drop(self, path: BranchPath) -> None:
        self._core.send(self._number, DropBranch(path))

    def close(self) -> None:
        self._core.send(self._number, Close())

    def abort(self) -> None:
        self._core.send(self._number, Abort())


def _send_to(process: EngineProcess, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the process has ended, and its reader fails all submissions
        process.child.connection.send(data)


def encoder_and_tokenizer(config: EngineConfig, path: Path) -> tuple[EncoderSpec | None, Tokenizer]:
    """Specification of an embedding or classification model (None for other models), and the tokenizer of any model."""
    if is_encoder(path):
        spec = encoder_spec(path)
        return spec, encoder_tokenizer(path, spec)
    return None, open_model_files(path, config.model_impl, tokenizer=not config.skip_tokenizer_init).tokenizer


def _then(future: Future[Any], convert: Callable[[Any], R]) -> Future[R]:
    """Future of a converted result. The conversion runs before anybody sees the result."""
    converted: Future[R] = Future()

    def settle(_: object) -> None:
        with contextlib.suppress(InvalidStateError):  # the future was cancelled
            try:
                result = convert(future.result())
            except Exception as error:  # of any kind: it is the result
                converted.set_exception(error)
            else:
                converted.set_result(result)

    future.add_done_callback(settle)
    return converted


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
