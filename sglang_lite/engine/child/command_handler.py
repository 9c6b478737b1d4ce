"""The command loop of an engine's process. Executes the commands that the engine's handle sends
over a socket from the user's process, and exits when the handle is closed.

The main thread loads the model and runs the step loop. One thread reads commands, and never waits
for the loop. Another one writes (outgoing.py).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from sglang_lite.engine.child.outgoing import Outgoing
from sglang_lite.engine.child.ranks import RankProcesses
from sglang_lite.engine.connection import BrokenFrameError, Connection
from sglang_lite.engine.frames import (
    Abort,
    AskReply,
    Close,
    Command,
    DropBranch,
    Encode,
    ExpectPause,
    Extend,
    Judge,
    Log,
    ProgramEnded,
    Progress,
    Ready,
    RequestEvent,
    Start,
    StartFailed,
    Submit,
    WindDown,
    decode_commands,
    serializable_failure,
)
from sglang_lite.engine.meetings import join_rendezvous
from sglang_lite.engine.switch_interval import SHORT_S
from sglang_lite.protocol import (
    Delta,
    Generation,
    OverloadedError,
    ParameterError,
    Played,
    ProgramResult,
    RequestAbortedError,
    Selection,
    SglError,
)
from sglang_lite.runtime.calls import CompileGrammar, EngineCall
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.open_requests import Ticket
from sglang_lite.runtime.core.submission import (
    GenerateRequest,
    OpenRequest,
    ProgramRequest,
    SelectRequest,
    Submission,
)
from sglang_lite.runtime.embedding.request import EncodeRequest
from sglang_lite.runtime.host.heap import start_trimming
from sglang_lite.runtime.host.parent import end_with_parent
from sglang_lite.runtime.kernels.compile_process import CompileProcess
from sglang_lite.runtime.requests.logit_processors import LogitProcessor
from sglang_lite.wire.failure import Failure, as_error

if TYPE_CHECKING:
    from sglang_lite.runtime.core.engine_program import EngineProgram
    from sglang_lite.runtime.core.engine_thread import AnyCore, AnyLoop

logger = logging.getLogger("sglang_lite")

# Python's switch interval on a CPU. A forward on a CPU releases the interpreter's lock some hundred
# times, and each time waits for a computing thread, for example one that loads a grammar.
_TURN_S = 0.0001
_T = TypeVar("_T")

_CRASH_S = 2.0  # time for the loop to end after an error was raised in it


def serve(descriptor: int, compiler: CompileProcess | None) -> None:
    """Runs the engine's process.

    Args:
        descriptor: file descriptor of the process's end of the socket.
        compiler: compile process that was started early, if any.
    """
    # the handle handles Ctrl-C, and aborts its requests
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(SHORT_S)  # the loop and the reader of commands take turns
    connection = Connection(socket.socket(fileno=descriptor))
    frames = connection.read_frames()
    messages = _read_messages(frames)
    _, start = next(messages, (0, None))
    if not isinstance(start, Start):
        os._exit(0)
    outgoing = Outgoing(connection, start.config["stream_interval_s"])
    end_with_parent(start.handle, outgoing.send_heartbeat)
    _forward_logs(outgoing)
    handler = CommandHandler(outgoing)
    threading.Thread(
        target=_execute_and_exit, args=(handler, messages), name="sglang_lite-read", daemon=True
    ).start()
    try:
        core, advice = _load_core(start, outgoing, compiler, handler.crash)
    except Exception as error:
        outgoing.post(StartFailed(serializable_failure(error)))
        threading.Event().wait()  # the handle closes the connection when it has read the message
        raise AssertionError from error
    outgoing.post(
        Ready(
            core.model_name,
            core.vocab_size,
            tuple(core.eos_ids),
            core.description,
            core.capacity,
            core.encoder is None and core.builder.media is not None,
            advice,
        )
    )
    if core.device.type == "cpu":
        sys.setswitchinterval(_TURN_S)
        start_trimming()
    from sglang_lite.runtime.core.engine_core import EngineCore  # imports torch

    if isinstance(core, EngineCore):
        outgoing.tree = core.scheduler.store.tree.changes
    handler.start_executing(core)
    threading.Thread(
        target=log_slow_steps, args=(core.loop, start.config["stall_timeout_s"]), daemon=True
    ).start()
    try:
        core.loop.run()
    except BaseException:  # freeing resources may fail on a lost device
        logger.exception("the engine could not be put away")
    # for requests still on the way
    print(f"the engine's loop crashed: {core.loop.inbox.crash}", flush=True)
    outgoing.close()  # the loop has crashed and failed every request; a new process may do better
    os._exit(1)


def _read_messages(frames: Iterable[memoryview]) -> Iterator[Command | tuple[int, ParameterError]]:
    """Yields commands until the connection is closed."""
    try:
        for content in frames:
            yield from decode_commands(content)
    except (BrokenFrameError, msgspec.MsgspecError):
        logger.exception("the engine's process was sent what can't be read")
        os._exit(1)


class _Forwarding(logging.Handler):
    """Logging handler that sends records to the handle."""

    def __init__(self, outgoing: Outgoing) -> None:
        super().__init__()
        self._outgoing = outgoing

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if record.exc_info:
            line += "\n" + logging.Formatter().formatException(record.exc_info)
        self._outgoing.post(
            Log(record.name, record.levelno, line.encode("utf-8", "backslashreplace").decode())
        )


def _forward_logs(outgoing: Outgoing) -> None:
    ours = logging.getLogger("sglang_lite")
    ours.addHandler(_Forwarding(outgoing))
    ours.setLevel(logging.DEBUG)  # the handle's process decides what to show
    ours.propagate = False


def _load_core(
    start: Start,
    outgoing: Outgoing,
    compiler: CompileProcess | None,
    crash: Callable[[SglError], None],
) -> tuple[AnyCore, str]:
    """Loads the model and builds the engine's core. Returns the core and a line of advice on the
    choice of model. The advice depends on free memory, so it is determined before the model is
    loaded.
    """
    config = EngineConfig(**start.config)
    path = Path(start.model_path)
    several = config.parallel.ranks > 1
    # before the import of torch, so that the ranks start in the meantime
    ranks = RankProcesses(config, path, crash) if several else None
    from sglang_lite.runtime.core.engine_thread import build_core  # imports torch
    from sglang_lite.runtime.loading.load_model import load
    from sglang_lite.runtime.loading.model_choice import suggest_larger_model

    # imported objects stay alive: a collector's pass over them would cost as much time as a step
    gc.freeze()

    def progress(parts: Iterable[_T]) -> Iterator[_T]:
        every = list(parts)
        for done, part in enumerate(every):
            outgoing.post(Progress(done, len(every)))
            yield part
        outgoing.post(Progress(len(every), len(every)))

    try:
        met = start.meeting
        advice = "" if several else suggest_larger_model(config)
        core = build_core(
            config,
            lambda: load(
                config,
                path,
                progress,
                compiler,
                ranks,
                None if met is None else join_rendezvous(met, config),
            ),
        )
        return core, advice
    finally:
        if compiler is not None:
            compiler.kill()
        gc.enable()  # main.py has disabled it
        gc.collect()
        gc.freeze()  # the model and its tokenizer stay alive, too
        # a step of many rows creates thousands of objects, which end with it
        gc.set_threshold(10_000)


def _ignore_retry() -> None:
    """Does nothing. Used as the `retry` of a submission that is not waiting for room."""


class _Submission:
    """Submission from the handle that has not ended in this process.

    Args:
        number: number that the handle gave the submission, and that all its events carry.
        request: the submitted request.

    Attributes:
        expected_ends: number of final events still to come: one, or one per sample.
        ticket: ticket of the accepted submission; None while it waits for room.
        retry: callback that submits again when the engine has room.
        aborted: True if the handle has aborted the submission.
        winds_down: True if its generations should end as soon as a limit could cut them.
    """

    def __init__(self, number: int, request: Submission | OpenRequest) -> None:
        self.number = number
        self.request = request
        self.expected_ends = request.samples if isinstance(request, GenerateRequest) else 1
        self.ticket: Ticket | None = None
        self.retry: Callable[[], object] = _ignore_retry
        self.aborted = self.winds_down = False

    @property
    def cached_tokens(self) -> int:
        return -1 if self.ticket is None else self.ticket.cached_tokens


class CommandHandler:
    """Executes the handle's commands and keeps track of open submissions. Only one thread calls its
    methods, except for the sinks.

    Args:
        outgoing: messages to the handle.
    """

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._ready = threading.Event()
        self._core: Any = None  # an AnyCore; each rejects calls that it doesn't support
        self._open: dict[int, _Submission] = {}
        self._programs: dict[int, EngineProgram] = {}

    def start_executing(self, core: AnyCore) -> None:
        """Sets the core and starts executing commands, including those that arrived earlier."""
        self._core = core
        self._ready.set()

    def crash(self, error: SglError) -> None:
        """Reports an error that the engine can't survive. If the step loop is running, the error
        ends it, all requests fail, and this process exits. Otherwise reports that the engine failed
        to start.
        """
        if self._core is None:
            self._outgoing.post(StartFailed(serializable_failure(error)))
        else:
            self._core.loop.inbox.post_if_open(partial(_raise_in_loop, error, self._core.loop))
            time.sleep(_CRASH_S)
            print(f"the engine's loop crashed: {error}", flush=True)
            os._exit(1)  # the loop may wait for its GPU, and that for another rank's

    def execute_all(self, messages: Iterator[Command | tuple[int, ParameterError]]) -> None:
        """Executes all commands. Runs on its own thread."""
        for number, message in messages:
            self._ready.wait()
            try:
                self._execute(number, message)
            except Exception as error:  # any error affects only the caller of the command
                self._fail(number, error)

    def flush_cache_files(self) -> None:
        """Writes all pending cache files. If this takes long, the handle kills this process."""
        core = self._core
        if core is None or not core.generates:
            return
        source = core.scheduler.store.source
        if source.has_files:
            core.loop.inbox.call_and_wait(source.close)

    # any record of a Command, or an error in its place
    def _execute(self, number: int, message: Any) -> None:
        program = self._programs.get(number)
        match message:
            case Submit():
                self._admit(_Submission(number, _make_generate_request(message)))
            case SelectRequest() | ProgramRequest():
                self._admit(_Submission(number, message))
            case OpenRequest():
                submission = self._open[number] = _Submission(number, message)
                sink = partial(self._deliver, submission)
                self._programs[number] = self._core.open_program(
                    message, sink, self._outgoing.flush
                )
            case Extend() if program is not None:
                program.extend(
                    message.path,
                    message.nodes,
                    {i: _as_parameter_error(of) for i, of in message.refused.items()},
                )
            case Judge() if program is not None:
                program.judge(message.path, message.place, message.verdict)
            case DropBranch() if program is not None:
                program.drop_branch(message.path)
            case ExpectPause() if program is not None:
                program.expect_pause(message.path, message.seconds)
            case WindDown() if program is not None:
                program.wind_down()
            case WindDown() if number in self._open:
                self._wind_down(self._open[number])
            case Close() if program is not None:
                program.close()
            case Abort() if program is not None:
                program.abort()
            case Abort() if number in self._open:
                self._abort(self._open[number])
            case Encode():
                texts = (
                    np.frombuffer(data, np.int32)
                    for data in (message.ids, message.types, message.lengths)
                )
                ids, types, lengths = texts
                self._ask_core(number, EncodeRequest(ids, types, lengths, message.adapters))
            case EngineCall():
                self._ask_core(number, message)
            case ParameterError():
                raise message

    def _ask_core(self, number: int, call: EngineCall[Any]) -> None:
        self._core.submit_call(call).add_done_callback(partial(self._send_answer, number, call))

    def _send_answer(self, number: int, call: EngineCall[Any], answer: Future[Any]) -> None:
        try:
            value = answer.result()
        except Exception as error:  # any error is sent as the answer
            self._outgoing.post(AskReply(number, failure=serializable_failure(error)))
            return
        match call:
            case EncodeRequest():
                value = value.tobytes()
            case CompileGrammar():
                value = None  # the handle has compiled the grammar for itself
        self._outgoing.post(AskReply(number, value))

    # ---------------------------------------------------------------------------------- submissions

    def _admit(self, submission: _Submission) -> None:
        """Submits a request once the engine has room. The handle counts its own submissions, but
        only this process knows how much room open programs take.
        """
        self._open[submission.number] = submission
        submission.retry = partial(self._retry, submission)
        self._submit_or_wait(submission, first=False)

    def _retry(self, submission: _Submission) -> None:
        if submission.aborted:
            self._core.open_requests.give_up_place(submission.retry)
            return
        try:
            self._submit_or_wait(submission, first=True)
        except SglError as error:
            self._fail(submission.number, error)

    def _submit_or_wait(self, submission: _Submission, *, first: bool) -> None:
        """Submits a request, or lets it wait for room. May run on the loop's thread while the
        reader's thread aborts the submission. Each thread writes its attribute (`ticket`,
        `aborted`) before it reads the other's, so at least one of them sees the abort.
        """
        room = self._core.open_requests
        try:
            sink = partial(self._deliver, submission)
            submission.ticket = ticket = self._core.submit(
                submission.request, sink, self._outgoing.flush
            )
        except OverloadedError:
            room.wait_for_room(submission.retry, submission.expected_ends, first=first)
            if submission.aborted:
                room.give_up_place(submission.retry)
            return
        # The callback holds the submission: without a cycle both, and the request, are freed when
        # the last event comes.
        submission.retry = _ignore_retry
        if submission.aborted:
            ticket.abort()
        if submission.winds_down:
            ticket.wind_down()

    def _abort(self, submission: _Submission) -> None:
        submission.aborted = True  # before reading the ticket: see `_submit_or_wait`
        if submission.ticket is not None:
            submission.ticket.abort()
        else:  # the submission waits for room
            self._fail(submission.number, RequestAbortedError("the request was aborted."))
            self._core.open_requests.give_up_place(submission.retry)

    def _wind_down(self, submission: _Submission) -> None:
        submission.winds_down = True  # before reading the ticket: see `_submit_or_wait`
        if submission.ticket is not None:
            submission.ticket.wind_down()

    def _deliver(
        self,
        submission: _Submission,
        event: Delta | Generation | Selection | Played | ProgramResult | SglError,
    ) -> None:
        path = None
        name = None
        attempt = 0
        if isinstance(event, Played):
            path = event.path
            name = event.name
            attempt = event.attempt
            event = event.event
        elif not isinstance(event, Delta):
            submission.expected_ends -= 1
            if not submission.expected_ends:
                self._open.pop(submission.number, None)
                self._programs.pop(submission.number, None)
        told = RequestEvent(
            submission.number,
            _event_record(event),
            submission.cached_tokens,
            path,
            name,
            attempt=attempt,
        )
        self._outgoing.put_event(told)

    def _fail(self, number: int, error: BaseException) -> None:
        """Sends an error as the last event of a submission. No further events follow, even if
        several samples are still running. The submission may be unknown here.
        """
        self._open.pop(number, None)
        program = self._programs.pop(number, None)
        if program is not None:
            program.abort()
        self._outgoing.post(RequestEvent(number, serializable_failure(error), ends=True))


def _execute_and_exit(
    handler: CommandHandler, messages: Iterator[Command | tuple[int, ParameterError]]
) -> None:
    """Executes all commands and then ends this process, because nobody waits for results any more."""
    try:
        handler.execute_all(messages)
        handler.flush_cache_files()
    finally:
        os._exit(0)


def _raise_in_loop(error: SglError, loop: AnyLoop) -> None:
    """Raises an error in a loop, which ends the loop. Does nothing if the loop is already ending."""
    if not loop.inbox.closing:
        raise error


# in the form of RequestEvent
def _event_record(event: Delta | Generation | Selection | ProgramResult | SglError) -> Any:
    if isinstance(event, SglError):
        return serializable_failure(event)
    return ProgramEnded(event.text) if isinstance(event, ProgramResult) else event


def _as_parameter_error(failure: Failure) -> ParameterError:
    error = as_error(failure)
    assert isinstance(error, ParameterError)
    return error


def _make_generate_request(message: Submit) -> GenerateRequest:
    ids = array("i", message.ids)
    output_ids = array("i", message.output_ids)
    return GenerateRequest(
        ids,
        message.params,
        message.constraint,
        message.stream,
        message.namespace,
        message.priority,
        None
        if message.processor is None
        else _import_processor(message.processor, message.processor_args),
        output_ids=output_ids,
        timeout=message.timeout,
        session=message.session,
        media=message.media,
        winds_down=message.winds_down,
        text_tokens=message.text_tokens,
    )


def _import_processor(processor: str, args: tuple[Any, ...]) -> LogitProcessor:
    module, _, name = processor.partition(":")
    value: Any = import_module(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        raise ParameterError("logit_processor", f"{processor!r} is nothing that can be called.")
    # any callable; its results are checked at each call
    return partial(value, *args) if args else value


def log_slow_steps(loop: AnyLoop, timeout_s: float) -> None:
    """Logs the stack of each step that takes longer than `timeout_s`. Never returns.

    Args:
        loop: step loop to watch, which runs on the main thread.
        timeout_s: longest duration of a step that is not reported, in seconds.
    """
    main = threading.main_thread().ident
    assert main is not None
    told = None
    while True:
        time.sleep(timeout_s / 4)
        since = loop.stepping_since
        if since is None or since == told or time.monotonic() - since < timeout_s:
            continue
        told = since
        stack = "".join(traceback.format_stack(sys._current_frames().get(main)))  # noqa: SLF001 # Python's own way
        logger.warning(
            "a step of the engine has stood still for %g s. It is here:\n%s", timeout_s, stack
        )
