"""The interpreter: executes a program's nodes against a backend, branch by branch.

A `StreamExecutor` is one branch: a text that grows. The user's function submits nodes from its own thread or event
loop and goes on; the executor loop (loop.py) plays them in order. What both sides touch is the queue, under a lock; the
rest belongs to one side:

- submitting side: names of variables, open roles and scopes, so that misuse is an error at the user's line;
- playing side: the text, the messages, what the backend said.

A branch that fails stays failed: everything queued and submitted later fails with the same error, and nothing waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import threading
import time
import uuid
import weakref
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeAlias

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.futures import Cell, TextLog, located
from sglang_lite.lang.ir import (
    SglConstantText,
    SglExpr,
    SglExprList,
    SglGen,
    SglRoleBegin,
    SglRoleEnd,
    SglSelect,
    SglVarScopeBegin,
    SglVarScopeEnd,
)
from sglang_lite.lang.loop import executor
from sglang_lite.lang.results import decide, delta_meta, total_usage, usages_of
from sglang_lite.protocol import (
    UNSET,
    Delta,
    Generation,
    Image,
    Location,
    Message,
    ParameterError,
    ProgramError,
    Prompt,
    RequestAbortedError,
    SamplingParams,
    SglError,
    Span,
    TemplateError,
    UnknownVariableError,
    Unset,
    Usage,
)
from sglang_lite.text.chat_template import ChatTemplate

logger = logging.getLogger("sglang_lite")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What holds for a whole run.

    Attributes:
        params: sampling parameters that nodes inherit.
        stream: somebody may read the text while it grows.
        seed: from which each node's seed is made.
    """

    params: SamplingParams = SamplingParams()
    stream: bool = False
    seed: int | None = None


class Run:
    """What the branches of one run share.

    Attributes:
        backend, settings: as given.
        template: how roles become text; fetched on the first role.
        body_open: the body is still running, so that names may yet be declared.
        is_async: the body is a coroutine, whose event loop no read may block.
    """

    def __init__(
        self,
        backend: BaseBackend,
        settings: RunSettings,
        template: ChatTemplate | None = None,
        *,
        is_async: bool = False,
    ) -> None:
        self.backend, self.settings = backend, settings
        self.body_open = True
        self.is_async = is_async
        self.body: Any = None  # the task of a streaming coroutine body: a task nobody holds may be collected
        self._template = template
        self._records: list[Any] = []
        self._branches: list[weakref.ref[StreamExecutor]] = []
        self._started = self._last_end = time.perf_counter()

    @property
    def template(self) -> ChatTemplate:
        """Raises TemplateError: the model has none."""
        if self._template is None:
            self._template = self.backend.get_chat_template()
            if self._template is None:
                raise TemplateError(
                    "the model has no chat template, so roles have no text.",
                    hint="Write the prompt as plain text, or set a chat template on the backend.",
                )
        return self._template

    def stop(self, error: SglError) -> None:
        """Fails every branch that has anything left to do. On the executor loop only."""
        for reference in self._branches:
            branch = reference()
            if branch is not None:
                branch._stop(error)

    def played(self, record: Any) -> None:
        """A node has its result. On the executor loop only."""
        self._records.append(record)
        self._last_end = time.perf_counter()

    def usage(self) -> Usage:
        return replace(total_usage(usages_of(self._records[:])), total_s=self._last_end - self._started)


current_run: ContextVar[Run | None] = ContextVar("sglang_lite_run", default=None)  # whose body is running here


@dataclass(slots=True)
class _Gen:
    node: SglGen
    cell: Cell
    log: TextLog | None
    seed: int | Unset


@dataclass(slots=True)
class _Select:
    node: SglSelect
    cell: Cell
    log: TextLog | None
    seed: int | Unset


@dataclass(slots=True)
class _TurnBegin:
    role: str


@dataclass(slots=True)
class _TurnEnd:
    role: str


@dataclass(slots=True)
class _ScopeBegin:
    cell: Cell


@dataclass(slots=True)
class _ScopeEnd:
    cell: Cell


@dataclass(slots=True)
class _Fork:
    children: list[StreamExecutor]


@dataclass(slots=True)
class _JoinText:
    children: list[StreamExecutor]
    where: Location | None


@dataclass(slots=True)
class _Read:
    """Asks for something about the branch as it is at this place in the queue."""

    cell: Cell
    what: str


@dataclass(slots=True)
class _End:
    """The body has ended: the text is complete."""


# What is queued; text is queued as it is.
_Op: TypeAlias = (
    "str | _Gen | _Select | _TurnBegin | _TurnEnd | _ScopeBegin | _ScopeEnd | _Fork | _JoinText | _Read | _End"
)


class StreamExecutor:
    """One branch of a run.

    Args:
        run: what it belongs to.
        path: where the branch is in the tree of forks; seeds are made from it.

    Attributes:
        sid: a unique name.
        backend: what it runs on.
    """

    def __init__(self, run: Run, path: str = "") -> None:
        self.run = run
        self.backend = run.backend
        self.sid = uuid.uuid4().hex
        self.path = path
        self._lock = threading.Lock()
        self._queue: deque[_Op] = deque()
        self._playing = False
        self._failure: BaseException | None = None
        self._failure_seen = False
        self._task: asyncio.Task[None] | None = None
        # the submitting side's
        self._cells: dict[str, Cell] = {}
        self._logs: dict[str, TextLog] = {}
        self._promises: dict[str, Cell] = {}
        self._turns: list[str] = []
        self._role: tuple[str, str] | None = None  # the open turn's role and suffix
        self._scopes: dict[str, Cell] = {}
        self._nodes = itertools.count()
        self._forks = itertools.count()
        # the playing side's
        self._pieces: list[str | Span] = []
        self._messages: list[Message] = []
        self._turn: tuple[str, int] | None = None  # the open turn's role and where its text starts
        self._scope_starts: dict[int, int] = {}
        self._images: list[Image] = []
        self.fork_start = 0
        self.log: TextLog | None = TextLog() if run.settings.stream else None
        run._branches.append(weakref.ref(self))

    # ------------------------------------------------------------------------------ the submitting side

    def submit(self, expr: SglExpr | str, where: Location | None = None) -> None:
        """Queues what `expr` says. Misuse that can be seen now is raised now."""
        if isinstance(expr, str):
            self._put(expr)
        elif isinstance(expr, SglExprList):
            for node in expr.walk():
                self._submit_node(node, where)
        elif isinstance(expr, SglExpr):
            self._submit_node(expr, where)
        else:
            raise ParameterError(
                "+=",
                f"a {type(expr).__name__} can't be added to a program.",
                hint="Turn it into text.",
                where=where,
            )

    def _submit_node(self, node: SglExpr, where: Location | None) -> None:
        match node:
            case SglConstantText(value):
                self._put(value)
            case SglGen():
                self._put(_Gen(node, *self._declare(node.name, where), self._node_seed()))
            case SglSelect():
                self._put(_Select(node, *self._declare(node.name, where), self._node_seed()))
            case SglRoleBegin(role):
                self._begin_turn(role, where)
            case SglRoleEnd(role):
                self._end_turn(role, where)
            case SglVarScopeBegin(name):
                cell = Cell(where)
                self._scopes[name] = cell
                self._put(_ScopeBegin(cell))
            case SglVarScopeEnd(name):
                if name not in self._scopes:
                    raise ProgramError(f"the variable scope {name!r} is not open.", where=where)
                cell = self._scopes.pop(name)
                self._name(name, cell)
                self._put(_ScopeEnd(cell))
            case _:
                raise ParameterError("+=", f"{node!r} can't be executed.", where=where)

    def _put(self, op: _Op) -> None:
        with self._lock:
            failure = self._failure
            if failure is None:
                self._queue.append(op)
                # Text alone changes nothing that anybody could see, unless it is streamed.
                if self._playing or (type(op) is str and self.log is None):
                    return
                self._playing = True
        if failure is None:
            executor().post(self._start)
        else:
            self._fail_op(op, failure)

    def _declare(self, name: str | None, where: Location | None) -> tuple[Cell, TextLog | None]:
        cell = Cell(where)
        log = TextLog() if name is not None and self.log is not None else None
        if name is not None:
            self._name(name, cell, log)
        return cell, log

    def _name(self, name: str, cell: Cell, log: TextLog | None = None) -> None:
        with self._lock:
            self._cells[name] = cell
            if log is not None:
                self._logs[name] = log
            promise = self._promises.pop(name, None)
        if promise is not None:
            promise.set(None)

    def _node_seed(self) -> int | Unset:
        ordinal = next(self._nodes)
        seed = self.run.settings.seed
        if seed is None:
            return UNSET
        digest = hashlib.blake2b(f"{seed}/{self.path}/{ordinal}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big")

    def _begin_turn(self, role: str, where: Location | None) -> None:
        if self._role is not None:
            raise ProgramError(
                f"a {role!r} turn begins inside a {self._role[0]!r} turn.",
                hint="End that one first.",
                where=where,
            )
        try:
            template = self.run.template
            system = template.default_system_prompt
            if system and not self._turns and role != "system":
                self._begin_turn("system", where)
                self._put(system)
                self._end_turn("system", where)
            prefix, suffix = template.get_prefix_and_suffix(role, [{"role": r, "content": ""} for r in self._turns])
        except TemplateError as error:
            raise located(error, where) from error
        self._role = role, suffix
        self._put(prefix)
        self._put(_TurnBegin(role))

    def _end_turn(self, role: str, where: Location | None) -> None:
        if self._role is None or self._role[0] != role:
            found = "no turn is open" if self._role is None else f"the open turn is {self._role[0]!r}"
            raise ProgramError(f"a {role!r} turn ends, but {found}.", where=where)
        _, suffix = self._role
        self._role = None
        self._turns.append(role)
        self._put(_TurnEnd(role))
        self._put(suffix)

    def fork(self, size: int) -> list[StreamExecutor]:
        """Branches that continue from here, each on its own."""
        base = f"{self.path}/{next(self._forks)}"
        children = [StreamExecutor(self.run, f"{base}.{i}") for i in range(size)]
        for child in children:
            child._cells = dict(self._cells)
            child._turns = list(self._turns)
            child._role = self._role
            child._playing = True  # until the parent gets there
        self._put(_Fork(children))
        return children

    def join_text(self, children: list[StreamExecutor], where: Location | None) -> None:
        """Appends what the children have added to the parent's text."""
        self._put(_JoinText(children, where))

    def abandon(self, error: BaseException) -> None:
        """The body has raised: what is still under way is stopped, in every branch."""
        if not isinstance(error, Exception):
            error = RequestAbortedError(f"the program was interrupted by {type(error).__name__}.")
        executor().post(self.run.stop, located(error, _raised_at(error)))

    def end(self) -> None:
        """The body has ended."""
        self.run.body_open = False
        with self._lock:
            promises, self._promises = self._promises, {}
        for name, promise in promises.items():
            promise.fail(self._unknown(name))
        self._put(_End())

    # ----------------------------------------------------------------------------------------- readers

    def cell(self, name: str, where: Location | None = None) -> Cell:
        """The variable's cell. From outside a body that is still running, waits for the name to be declared."""
        while True:
            with self._lock:
                cell = self._cells.get(name)
                if cell is not None:
                    return cell
                if name in self._scopes:
                    raise ProgramError(f"the variable scope {name!r} is still open.", where=where)
                if not self._awaits_names():
                    raise self._unknown(name, where)
                promise = self._promises.setdefault(name, Cell(where))
            promise.wait()

    async def acell(self, name: str, where: Location | None = None) -> Cell:
        """`cell` for coroutines."""
        while True:
            with self._lock:
                cell = self._cells.get(name)
                if cell is not None:
                    return cell
                if not self._awaits_names():
                    raise self._unknown(name, where)
                promise = self._promises.setdefault(name, Cell(where))
            await promise.get()

    def _awaits_names(self) -> bool:
        return self.run.body_open and current_run.get() is not self.run

    def _unknown(self, name: str, where: Location | None = None) -> UnknownVariableError:
        known = ", ".join(map(repr, self._cells)) or "none"
        return UnknownVariableError(f"the program has no variable {name!r}; it has: {known}.", where=where)

    def read(self, what: str, where: Location | None = None) -> Cell:
        """A cell for the text or the messages as they are after everything queued so far."""
        cell = Cell(where)
        self._put(_Read(cell, what))
        return cell

    async def finished(self) -> None:
        """Waits until everything queued so far has been played or has failed."""
        with contextlib.suppress(SglError):
            await self.read("nothing").get()

    @property
    def failure(self) -> BaseException | None:
        """What the branch has failed with so far. Whoever asks is told."""
        self._failure_seen = True
        return self._failure

    def error(self) -> BaseException | None:
        """What the branch failed with, once everything queued has been played."""
        with contextlib.suppress(SglError):
            self.read("nothing").wait()
        return self.failure

    # -------------------------------------------------------------------------------- the playing side

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._play())

    async def _play(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._playing = False
                    self._task = None
                    return
                op = self._queue.popleft()
            try:
                if type(op) is str:
                    self._write(op)
                else:
                    waiting = _PLAYERS[type(op)](self, op)
                    if waiting is not None:
                        await waiting
            except asyncio.CancelledError:
                self._fail(RequestAbortedError("the program was cancelled."), op)
                return
            except Exception as error:  # whatever it is, the branch has failed and its readers must know
                self._fail(error, op)
                return

    def _stop(self, error: SglError) -> None:
        task = self._task
        self._fail(error)
        if task is not None:
            task.cancel()  # it fails what it was waiting for, if it has begun

    def _fail(self, error: BaseException, op: _Op | None = None) -> None:
        where = getattr(getattr(op, "cell", op), "where", None)
        with self._lock:
            failure = self._failure = self._failure or located(error, where)
            left, logs = list(self._queue), list(self._logs.values())
            self._queue.clear()
            self._playing = False
            self._task = None
        for each in ([op] if op is not None else []) + left:
            self._fail_op(each, failure)
        for log in logs:
            log.close(failure)
        if self.log is not None:
            self.log.close(failure)

    def _fail_op(self, op: _Op, failure: BaseException) -> None:
        if isinstance(op, _Fork):
            for child in op.children:
                child._fail(failure)
        elif isinstance(op, _Gen | _Select | _Read | _ScopeEnd):
            op.cell.fail(failure)

    def _write(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            if self.log is not None:
                self.log.append(text)

    def _text_from(self, start: int) -> str:
        return "".join([p if isinstance(p, str) else p.text for p in self._pieces[start:]])

    def _prompt(self) -> Prompt:
        spans: list[Span] = []
        constant: list[str] = []
        for piece in self._pieces:
            if isinstance(piece, str):
                constant.append(piece)
            else:
                if constant:
                    spans.append(Span("".join(constant)))
                    constant.clear()
                spans.append(piece)
        if constant:
            spans.append(Span("".join(constant)))
        role, start = self._turn or (None, len(self._pieces))
        return Prompt(tuple(spans), tuple(self._messages), role, self._text_from(start), tuple(self._images))

    async def _play_gen(self, op: _Gen) -> None:
        params = self._params(op)
        stream = self.log is not None
        done: list[Generation] = []
        streamed = False
        async with contextlib.aclosing(
            self.backend.agenerate(self._prompt(), params, op.node.constraint, stream=stream)
        ) as events:
            async for event in events:
                if isinstance(event, Generation):
                    done.append(event)
                elif not event.index:
                    streamed = True
                    self._emit(event, op.log)
        done.sort(key=lambda g: g.index)
        first = done[0]
        if stream and not streamed:
            self._emit(Delta(first.text, first.token_ids), op.log)
        for span in first.spans or (Span(first.text),):
            self._pieces.append(span if span.ids is not None else span.text)
        read = op.node.value_type.parse if op.node.value_type else None
        values = [read(g.text) if read else g.text for g in done]
        many = not isinstance(params.n, Unset) and params.n > 1
        op.cell.record = done if many else first
        self.run.played(op.cell.record)
        op.cell.set(values if many else values[0])
        if op.log is not None:
            op.log.close()

    def _emit(self, delta: Delta, log: TextLog | None) -> None:
        if delta.text:
            if self.log is not None:
                self.log.append(delta.text)
            if log is not None:
                log.append(delta.text, delta_meta(delta))

    async def _play_select(self, op: _Select) -> None:
        node = op.node
        selection = await self.backend.aselect(
            self._prompt(), node.choices, unconditional=node.choices_method.requires_unconditional_logprobs
        )
        decision = decide(node, selection, op.seed)
        self._write(decision.decision)
        op.cell.record = (selection, decision)
        self.run.played(op.cell.record)
        if op.log is not None:
            op.log.append(decision.decision)
            op.log.close()
        op.cell.set(decision.decision)

    def _play_turn_begin(self, op: _TurnBegin) -> None:
        self._turn = op.role, len(self._pieces)

    def _play_turn_end(self, op: _TurnEnd) -> None:
        assert self._turn is not None
        _, start = self._turn
        self._messages.append(Message(op.role, (self._text_from(start).lstrip(),)))
        self._turn = None

    def _play_scope_begin(self, op: _ScopeBegin) -> None:
        self._scope_starts[id(op.cell)] = len(self._pieces)

    def _play_scope_end(self, op: _ScopeEnd) -> None:
        op.cell.set(self._text_from(self._scope_starts.pop(id(op.cell))))

    def _play_fork(self, op: _Fork) -> None:
        for child in op.children:
            child._pieces = list(self._pieces)
            child._messages = list(self._messages)
            child._turn = self._turn
            child._images = list(self._images)
            child.fork_start = len(self._pieces)
            child._start()

    async def _play_join_text(self, op: _JoinText) -> None:
        for child in op.children:
            self._pieces += await child.read("added", op.where).get()

    def _play_read(self, op: _Read) -> None:
        match op.what:
            case "text":
                op.cell.set(self._text_from(0))
            case "messages":
                op.cell.set([{"role": m.role, "content": "".join(map(str, m.content))} for m in self._messages])
            case "added":
                op.cell.set(self._pieces[self.fork_start :])
            case _:
                op.cell.set(None)

    def _play_end(self, op: _End) -> None:
        if self.log is not None:
            self.log.close()

    def _params(self, op: _Gen) -> SamplingParams:
        """What the node said, over what the run said; and the stops of the chat template."""
        params = merge(self.run.settings.params, op.node.params)
        more = op.node.stop
        if self._turn is not None:
            more += self.run.template.stop_str
        if more or (op.seed is not UNSET and params.seed is UNSET):
            return _completed(params, more, op.seed)
        return params

    # ------------------------------------------------------- what SGLang's users read of an executor

    @property
    def text_(self) -> str:
        return self._text_from(0)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables that have their value."""
        return {name: cell.result() for name, cell in self._cells.items() if cell.done and cell.error() is None}

    def __del__(self) -> None:
        if self._failure is not None and not self._failure_seen:
            logger.error("A program failed and nobody read it: %s", self._failure)


_PLAYERS: dict[type, Any] = {
    _Gen: StreamExecutor._play_gen,
    _Select: StreamExecutor._play_select,
    _TurnBegin: StreamExecutor._play_turn_begin,
    _TurnEnd: StreamExecutor._play_turn_end,
    _ScopeBegin: StreamExecutor._play_scope_begin,
    _ScopeEnd: StreamExecutor._play_scope_end,
    _Fork: StreamExecutor._play_fork,
    _JoinText: StreamExecutor._play_join_text,
    _Read: StreamExecutor._play_read,
    _End: StreamExecutor._play_end,
}


def _raised_at(error: BaseException) -> Location | None:
    """The deepest line of the user's code that an exception went through."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_globals.get("__name__", "").startswith("sglang_lite."):
            found = Location(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return found


@lru_cache(maxsize=4096)
def merge(outer: SamplingParams, inner: SamplingParams) -> SamplingParams:
    """`outer`, with everything that `inner` sets."""
    given = {f.name: value for f in fields(inner) if (value := getattr(inner, f.name)) is not UNSET}
    return replace(outer, **given) if given else outer


def _completed(params: SamplingParams, stops: tuple[str, ...], seed: int | Unset) -> SamplingParams:
    own = () if isinstance(params.stop, Unset) else params.stop
    return replace(
        params,
        stop=(*own, *(s for s in stops if s not in own)) or UNSET,
        seed=seed if isinstance(params.seed, Unset) else params.seed,
    )
