"""Engine core without a model: each step takes a fixed time and generates one token for each
request. Shows the cost of everything else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sglang_lite import Engine
from sglang_lite.engine.core import OpenProgram
from sglang_lite.program.nodes import Gen, Node, Text, Verdict
from sglang_lite.protocol import (
    CapabilityError,
    Delta,
    EngineClosedError,
    Generation,
    Played,
    ProgramResult,
    ProgramSink,
    RequestAbortedError,
    Span,
    Usage,
)
from sglang_lite.runtime.calls import EngineCall, FlushCache, R, Stats, UpdateWeights
from sglang_lite.runtime.capacity import Capacity, Sizes
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.flushes import Flushes
from sglang_lite.runtime.core.gate import CLOSED, Gate
from sglang_lite.runtime.core.open_requests import OpenRequests, Ticket
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.submission import (
    GenerateRequest,
    OpenRequest,
    ProgramRequest,
    Submission,
)
from sglang_lite.runtime.loading.model_files import open_model_files
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.requests.resolved_params import resolve_params

_TOKEN = 7  # id of every token


class ScriptedCore:
    """Core of an engine whose steps follow a script.

    Args:
        model: name or path of a model, whose tokenizer and chat template are used, but not its
            weights.
        step_s: seconds from the start of one step to the next; each open generation receives a
            token in every step.
        write: function that returns the text of each token.
    """

    responds = True  # unlike a process that is stopped
    pids: Sequence[int] = ()
    encoder = None
    generates = True

    def __init__(self, model: str, step_s: float, write: Callable[[], str] = "a ".__str__) -> None:
        self.config = EngineConfig(model=model)
        path: Path = resolve(model, None)
        self.tokenizer, self.model_name = open_model_files(path).tokenizer, model
        self.vocab_size = self.tokenizer.vocab_size
        self.capacity = Capacity(Sizes(65_536, 65_536, 1), 1 << 20, 1 << 20, 1 << 20)
        self.description = f"a script of {step_s * 1000:g} ms a step"
        self.steps = 0
        self._step_s, self._write = step_s, write
        self.builder = RequestBuilder(
            model, self.tokenizer, self.vocab_size, frozenset(), 1 << 20, None
        )
        self.open_requests, self.gate = OpenRequests(1 << 20), Gate()
        self._lock = threading.Condition()
        self._open: list[_Generating | _Playing] = []
        self._flushes = Flushes(lambda: threading.current_thread() is self._thread)
        self._thread = threading.Thread(target=self._run, name="sglang_lite-script", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------------- submitting

    def submit(
        self,
        request: Submission,
        sink: Callable[[Any], None],
        flush: Callable[[], object] | None = None,
    ) -> Ticket:  # each kind of submission has its own events
        request.check_fields()
        sink = self._flushes.wrap_sink_with_flush(sink, flush)
        match request:
            case GenerateRequest():
                count = self.builder.resolve_with_defaults(request.params).max_tokens
                return self._begin(_Generating(sink, count, request.stream))
            case ProgramRequest():
                _check_nodes(request.program.nodes)
                return self._begin(
                    _Playing(
                        sink,
                        request.program.nodes,
                        self.vocab_size,
                        stream=request.stream,
                        closed=True,
                    )
                )
        raise CapabilityError("a script scores nothing.")

    def open_program(
        self, request: OpenRequest, sink: ProgramSink, flush: Callable[[], object] | None = None
    ) -> OpenProgram:
        sink = self._flushes.wrap_sink_with_flush(sink, flush)
        playing = _Playing(sink, (), self.vocab_size, stream=request.stream, closed=False)
        return _Growing(playing, self._begin(playing))

    def _begin(self, running: _Generating | _Playing) -> Ticket:
        self.gate.check_open()
        with self._lock:
            self._open.append(running)
            self._lock.notify()
        return Ticket(partial(self._abort, running))

    def _abort(self, running: _Generating | _Playing) -> None:
        with self._lock:
            if running not in self._open:
                return
            self._open.remove(running)
        running.sink(RequestAbortedError("the request was aborted."))

    # ------------------------------------------------------------------------------------ the steps

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            with self._lock:
                while not self._open and not self.gate.reason:
                    self._lock.wait()
                    due = time.monotonic()
                if self.gate.reason:
                    break
                rows = list(self._open)
            due += self._step_s
            time.sleep(max(due - time.monotonic(), 0))
            self.steps += 1
            ended = [row for row in rows if row.step(self._write())]
            if ended:
                with self._lock:
                    gone = set(map(id, ended))
                    self._open = [row for row in self._open if id(row) not in gone]
            self._flushes.call_flush_callbacks()
        for row in self._open:
            row.sink(EngineClosedError("the engine was closed before the request finished."))

    # --------------------------------------------------------------------------- the rest of a core

    def submit_call(self, call: EngineCall[R]) -> Future[R]:
        answer: Future[Any] = Future()
        match call:
            case UpdateWeights():
                version = call.version or self.config.weight_version
                self.config = replace(self.config, model=call.path, weight_version=version)
                answer.set_result(call.path)
            case FlushCache():
                answer.set_result(0)
            case Stats():
                counts = {
                    "running": len(self._open),
                    "waiting": 0,
                    "total_tokens": 1 << 20,
                    "free_tokens": 1 << 20,
                }
                answer.set_result({**counts, "steps": self.steps})
            case _:
                raise CapabilityError("a script can't do that.")
        return answer

    def call_soon(self, call: Callable[[], object]) -> None:
        call()

    def close(self) -> None:
        with self._lock:
            self.gate.reason = CLOSED
            self._lock.notify()
        self._thread.join()


def scripted_engine(model: str, step_s: float, write: Callable[[], str] = "a ".__str__) -> Engine:
    """Handle of an engine with a ScriptedCore."""
    engine = Engine.__new__(Engine)
    engine.core = ScriptedCore(model, step_s, write)
    return engine


@dataclass(eq=False)
class _Generating:
    sink: Callable[[Any], None]
    left: int
    stream: bool
    text: str = ""
    count: int = 0

    def step(self, token: str) -> bool:
        """Takes a token. Returns True if that was the last one."""
        self.left -= 1
        self.count += 1
        self.text += token
        if self.stream:
            self.sink(Delta(token, (_TOKEN,)))
        if self.left <= 0:
            ids, usage = (
                (_TOKEN,) * self.count,
                Usage(prompt_tokens=1, completion_tokens=self.count),
            )
            self.sink(Generation(self.text, ids, (Span(self.text, ids),), "length", usage=usage))
        return self.left <= 0


class _Growing:
    """Handle of an open program."""

    def __init__(self, playing: _Playing, ticket: Ticket) -> None:
        self._playing, self._ticket = playing, ticket

    def extend(self, path: tuple[int, ...], nodes: Sequence[Node]) -> None:
        if path:
            raise CapabilityError("a script plays no branches.")
        _check_nodes(nodes)
        self._playing.nodes += nodes

    def judge(self, path: tuple[int, ...], place: int, verdict: Verdict) -> None:
        raise CapabilityError("a script takes no verdicts.")

    def close(self) -> None:
        self._playing.closed = True

    def abort(self) -> None:
        self._ticket.abort()

    def drop_branch(self, path: tuple[int, ...]) -> None:
        self.abort()

    def expect_pause(self, path: tuple[int, ...], seconds: float) -> None:
        """Does nothing: a script keeps no prefixes."""

    def wind_down(self) -> None:
        raise CapabilityError("a script does not wind down.")


class _Playing:
    """Program that is played. More `nodes` may be added until it is `closed`."""

    def __init__(
        self,
        sink: ProgramSink,
        nodes: Sequence[Node],
        vocab_size: int,
        *,
        stream: bool,
        closed: bool,
    ) -> None:
        self.sink, self.nodes, self._vocab_size, self._stream = (
            sink,
            list(nodes),
            vocab_size,
            stream,
        )
        self.closed = closed
        self._at, self._text = 0, ""
        self._now: _Generating | None = None

    def step(self, token: str) -> bool:
        if self._next() and self._now is not None and self._now.step(token):
            self._text += self._now.text
            self._now, self._at = None, self._at + 1
        if self.closed and self._now is None and not self._next():
            self.sink(ProgramResult(self._text))
            return True
        return False

    def _next(self) -> bool:
        """Proceeds to the next generation. Returns False if the program has none left."""
        while self._now is None and self._at < len(self.nodes):
            node = self.nodes[self._at]
            if isinstance(node, Gen):
                tell = partial(self._tell, self._at, node.name)
                count = resolve_params(node.params, self._vocab_size).max_tokens
                self._now = _Generating(tell, count, self._stream)
            else:
                assert isinstance(node, Text)
                self._text += node.text
                self._at += 1
        return self._now is not None

    def _tell(self, place: int, name: str | None, event: Any) -> None:
        self.sink(Played((place,), name, event))


def _check_nodes(nodes: Sequence[Node]) -> None:
    if not all(
        isinstance(node, Text) or (isinstance(node, Gen) and not node.judged) for node in nodes
    ):
        raise CapabilityError("a script plays texts, and generations that nobody judges.")
