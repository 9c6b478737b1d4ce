"""The interpreter: executes a program's nodes against a backend, branch by branch.

A `StreamExecutor` is one branch: a text that grows. The user's function submits nodes from its own thread or event loop
and goes on; they are played in order. Text and turns are played at once, where they are submitted; what has to wait for
a backend is played on the executor loop (loop.py), or on the backend's pool of threads if its hooks block. Whoever
plays a branch owns it: only one thread at a time, handed on under the branch's lock.

A branch that fails stays failed: everything queued and submitted later fails with the same error, and nothing waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_lite.constraints.free_numbers import ENDS
from sglang_lite.lang import generation
from sglang_lite.lang.backend.base_backend import EVERYTHING, BaseBackend
from sglang_lite.lang.choices import token_length_normalized
from sglang_lite.lang.futures import Cell, TextLog, located
from sglang_lite.lang.ir import (
    NUMBER_STOPS,
    SglCall,
    SglGen,
    SglImage,
    SglSelect,
    SglSeparateReasoning,
    number_as_regex,
)
from sglang_lite.lang.loop import executor, forks
from sglang_lite.lang.ops import (
    ForkOp,
    GenOp,
    HookOp,
    JoinOp,
    Mark,
    MarkOp,
    Op,
    Piece,
    ReadOp,
    Reasoned,
    ScopeOp,
    SelectOp,
)
from sglang_lite.lang.push_down import Handed, Line
from sglang_lite.lang.results import total_usage, usages_of
from sglang_lite.lang.tracebacks import is_library
from sglang_lite.program.expressions import Expression, Expressions, not_addable
from sglang_lite.program.nodes import (
    Fork,
    Gen,
    GrammarBegin,
    GrammarEnd,
    ImagePart,
    Join,
    JoinMode,
    ScopeBegin,
    ScopeEnd,
    Text,
    TurnBegin,
    TurnEnd,
)
from sglang_lite.protocol import (
    UNSET,
    Constraint,
    Continuation,
    Image,
    InOrder,
    Location,
    Message,
    Number,
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
from sglang_lite.protocol.sampling import PARAMETERS
from sglang_lite.text.chat_template import ChatTemplate
from sglang_lite.text.reasoning import reasoned

if TYPE_CHECKING:
    from sglang_lite.constraints.byte_matcher import ByteMatcher

logger = logging.getLogger("sglang_lite")

NO_PARAMS = SamplingParams()
_NO_CONTEXT = Context()
_NOTHING = Text("")  # what a forked branch is at until its parent gets there
_UNKNOWN_TO_HOOKS = tuple(parameter.name for parameter in PARAMETERS if "hooks" not in parameter.places)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What holds for a whole run.

    Attributes:
        params: sampling parameters that nodes inherit.
        stream: somebody may read the text while it grows.
        seed: from which each node's seed is made.
        timeout: seconds for the whole run, None for no limit.
        retries: how often a node whose backend failed is tried again.
        push_down: hand the run over as one program, where the backend plays programs.
    """

    params: SamplingParams = NO_PARAMS
    stream: bool = False
    seed: int | None = None
    timeout: float | None = None
    retries: int = 0
    push_down: bool = True


class Run:
    """What the branches of one run share.

    Attributes:
        backend, settings: as given.
        deadline: `time.monotonic()` at which the run, or one that it is inside, has taken too long; None for never.
        timeout: the seconds that the deadline stands for.
        body_open: the body is still running, so that names may yet be declared.
        is_async: the body is a coroutine, whose event loop no read may block.
        body: the task of a streaming coroutine body, which nobody else may hold.
        loop: the event loop that a coroutine body runs on, where that is the caller's.
        made: `forks()` when it began.
        plain: neither retries nor a timeout are to be watched.
        push_down: as set, for this run and those that it is inside.
        context: of whoever has run it: what is played elsewhere is played in copies of it.
    """

    __slots__ = (
        "_inside", "_last_end", "_records", "_seeds", "_started", "_template", "backend", "body", "body_open",
        "context", "deadline", "is_async", "loop", "made", "plain", "push_down", "settings", "timeout",
    )  # fmt: skip

    def __init__(
        self, backend: BaseBackend, settings: RunSettings, *, is_async: bool = False, outer: Run | None = None
    ) -> None:
        self.backend, self.settings, self.is_async = backend, settings, is_async
        self.timeout = settings.timeout
        self.deadline = None if self.timeout is None else time.monotonic() + self.timeout
        if outer is not None and outer.deadline is not None and outer.deadline < (self.deadline or math.inf):
            self.deadline, self.timeout = outer.deadline, outer.timeout
        self.plain = self.deadline is None and not settings.retries
        self.push_down: bool = settings.push_down and (outer is None or outer.push_down)
        self.body_open, self.made = True, forks()
        self.body: Any = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.context = _NO_CONTEXT
        self._template: ChatTemplate | None = None
        self._records: list[Any] = []
        self._seeds = itertools.count(1)
        self._inside: set[weakref.ref[StreamExecutor]] = set()
        self._started = self._last_end = time.perf_counter()

    def line(self) -> Line | None:
        """Hands the run over; None where the backend is asked node by node."""
        if not self.push_down or not self.backend.plays_programs:
            return None
        return Line(Handed(self.backend, stream=self.settings.stream))

    @property
    def template(self) -> ChatTemplate:
        """How roles become text. Raises TemplateError: the model has none."""
        if self._template is None:
            self._template = self.backend.get_chat_template()
            if self._template is None:
                raise TemplateError(
                    "the model has no chat template, so roles have no text.",
                    hint="Write the prompt as plain text, or set `backend.chat_template` to one of "
                    "sglang_lite.lang.chat_template.",
                )
        return self._template

    def played(self, record: Any) -> None:
        """A node has its result."""
        self._records.append(record)
        self._last_end = time.perf_counter()

    def inner_seed(self) -> int | None:
        """A seed for the next program that the body runs by itself."""
        seed = self.settings.seed
        return None if seed is None else derived_seed(seed, f"inside/{next(self._seeds)}")

    def contain(self, branch: StreamExecutor) -> None:
        """A program that the body runs by itself is stopped with this run."""
        self._inside.add(weakref.ref(branch, self._inside.discard))

    def inside(self) -> list[StreamExecutor]:
        return [branch for ref in list(self._inside) if (branch := ref()) is not None]

    def usage(self) -> Usage:
        return msgspec.structs.replace(total_usage(usages_of(self._records[:])), total_s=self._last_end - self._started)


current_run: ContextVar[Run | None] = ContextVar("sglang_lite_run", default=None)  # whose body is running here


class StreamExecutor:
    """One branch of a run.

    Args:
        run: what it belongs to.
        path: where the branch is in the tree of forks; seeds are made from it.
        line: hands it to a backend that plays whole programs; None: that is asked node by node.
    """

    __slots__ = (
        "__weakref__", "_ahead", "_at", "_cells", "_children", "_failure", "_failure_seen", "_grammar", "_lock",
        "_logs", "_messages", "_nodes", "_pieces", "_promises", "_queue", "_role", "_scope_starts", "_scopes", "_sid",
        "_stopped", "_task", "_turn", "_turns", "backend", "fork_start", "line", "log", "path", "run", "walk",
    )  # fmt: skip

    def __init__(self, run: Run, path: str = "", line: Line | None = None) -> None:
        self.run, self.path, self.backend, self.line = run, path, run.backend, line
        self._sid = ""
        self._lock = threading.Lock()
        self._queue: deque[Op] = deque()
        self._at: Op | None = None  # what is being played: who plays it owns the branch, as long as it stays here
        self._failure: SglError | None = None
        self._failure_seen = False
        self._stopped = False  # from outside of the body: for good
        self._task: asyncio.Task[None] | None = None
        self._children: list[StreamExecutor] = []
        # the submitting side's
        self._cells: dict[str, Cell] = {}
        self._logs: dict[str, TextLog] = {}
        self._promises: dict[str, Cell] = {}
        self._turns: list[str] = []
        self._role: tuple[str, str] | None = None  # the open turn's role and suffix
        self._scopes: dict[str, tuple[Cell, ...]] = {}  # those that are open; one may be inside another of its name
        self._grammar: Constraint | None = None  # that is open
        self._ahead: ByteMatcher | None = None  # through it, as long as all text in it is known
        self._nodes = 0
        # the playing side's
        self._pieces: list[Piece] = []
        self._messages: list[Message] = []
        self._turn: tuple[str, int] | None = None  # the open turn's role and where its text starts
        self._scope_starts: dict[int, int] = {}
        self.walk: ByteMatcher | None = None  # through the open grammar
        self.fork_start = 0
        self.log: TextLog | None = TextLog() if run.settings.stream else None

    # ------------------------------------------------------------------------------ the submitting side

    def submit(self, expr: Expression | str, where: Location | None = None) -> None:
        """Queues what `expr` says. Misuse that can be seen now is raised now."""
        if isinstance(expr, str):
            self._put_text(expr, where)
        elif isinstance(expr, Expressions):
            for part in expr.walk():
                self._submit_part(part, where)
        elif isinstance(expr, Expression):
            self._submit_part(expr, where)
        else:
            raise not_addable("+=", expr, where)

    def _submit_part(self, part: Expression, where: Location | None) -> None:
        match part:
            case Text():
                self._put_text(part.text, where, part.ids, special=part.special)
            case SglGen():
                self._put(self._gen(part, where))
            case SglSelect():
                self._put(self._select(part, where))
            case TurnBegin():
                self._begin_turn(part.role, where)
            case TurnEnd():
                self._end_turn(part.role, where)
            case ScopeBegin():
                cell = Cell(where)
                self._scopes[part.name] = (*self._scopes.get(part.name, ()), cell)
                self._put(ScopeOp(ScopeBegin(part.name, where=where), cell))
            case ScopeEnd():
                if part.name not in self._scopes:
                    raise ProgramError(f"the variable scope {part.name!r} is not open.", where=where)
                *outer, cell = self._scopes.pop(part.name)
                if outer:
                    self._scopes[part.name] = tuple(outer)
                self._name(part.name, cell)
                self._put(ScopeOp(ScopeEnd(part.name, where=where), cell))
            case GrammarBegin():
                self._begin_grammar(part, where)
            case GrammarEnd():
                self._end_grammar(where)
            case SglImage():
                self._put_images(part.load(where), where)
            case SglSeparateReasoning():
                for each in part.marked().walk():
                    self._submit_part(each, where)
            case SglCall():
                part.play_on(self)
            case _:
                raise ParameterError("+=", f"{part!r} can't be executed.", where=where)

    def _put_text(
        self, text: str, where: Location | None, ids: tuple[int, ...] | None = None, *, special: bool = True
    ) -> None:
        if type(text) is not str:
            if not isinstance(text, str):
                raise not_addable("+=", text, where)
            text = str.__str__(text)  # a subclass is no plain data
        if self._ahead is not None:  # it is refused where it stands
            self._ahead.push(text)
        self._put(Text(text, ids, special and self._role is None, where=where))

    def _begin_grammar(self, node: GrammarBegin, where: Location | None) -> None:
        from sglang_lite.constraints.byte_matcher import ByteMatcher

        if self._grammar is not None:
            raise ProgramError("a grammar is open already.", hint="Make one grammar of the two.", where=where)
        if Continuation not in self.backend.capabilities.constraints:
            raise self.backend.refusal(
                node, "a grammar over several nodes", "Write all of it with one gen(constraint=…).", where
            )
        self._ahead = ByteMatcher(node.constraint)
        self._grammar = node.constraint
        self._put(GrammarBegin(node.constraint, where=where))

    def _end_grammar(self, where: Location | None) -> None:
        if self._grammar is None:  # a checkpoint has taken its beginning back
            return
        ahead, self._grammar, self._ahead = self._ahead, None, None
        self._put(GrammarEnd(where=where))
        if ahead is not None:
            ahead.end()

    def _select(self, own: SglSelect, where: Location | None) -> SelectOp:
        can, node = self.backend.capabilities, own.node
        if self._grammar is not None and own.multi is not None:
            raise ProgramError("select(multi=…) can't be part of a grammar.", hint="Select one by one.", where=where)
        if not can.select:
            raise self.backend.refusal(own, "select", "Generate text and compare, or use another backend.", where)
        plain = node.temperature == 0 and own.multi is None and own.choices_method is token_length_normalized
        if not can.scores and not plain:
            raise self.backend.refusal(
                own, "choices_method, temperature or multi", "It only picks, without scores: leave them out.", where
            )
        self._ahead = None
        cell, log = self._declare(node.name, where)
        held = own.multi is not None or self.run.settings.retries
        node = msgspec.structs.replace(
            node,
            method=None if held else node.method,
            seed=self._node_seed(),
            special=self._role is None,
            where=where,
        )
        return SelectOp(node, own, cell, log)

    def _gen(self, own: SglGen, where: Location | None) -> GenOp:
        options = own.options
        backend = self.backend if options is None or options.backend is None else options.backend
        if own.tools is not None and (family := backend.tool_family()) is not None:
            spelled = own.tools.value_type(family)
            asked = msgspec.structs.replace(own.node, constraint=spelled.constraint)
            own = replace(own, node=asked, value_type=spelled)
        constraint = own.node.constraint
        reasoning = None if options is None else options.reasoning
        known, stops = backend.capabilities.constraints, tuple[str, ...]()
        if isinstance(constraint, Number) and (Number not in known or (reasoning is not None and InOrder in known)):
            if reasoning is None:
                constraint, stops = number_as_regex(constraint), NUMBER_STOPS
            else:  # which a stop would end
                constraint = number_as_regex(constraint, ENDS)
        if reasoning is not None and constraint is not None and InOrder in known:
            constraint = reasoned(reasoning, constraint)
        params = self._params(own.node, stops)
        whole = constraint if self._grammar is None else Continuation(self._grammar, part=constraint)
        if whole is not None or backend.capabilities is not EVERYTHING:
            backend.check(own, params, whole, where)
        if backend.blocking and params is not NO_PARAMS:
            for field in _UNKNOWN_TO_HOOKS:
                if not isinstance(getattr(params, field), Unset):
                    raise backend.refusal(own, field, "SGLang's blocking hooks have no such parameter.", where)
        kind = None if own.value_type is None else own.value_type.annotation
        cell, log = self._declare(own.node.name, where, kind)
        op = GenOp(Gen(own.node.name, params, constraint, self._held(own), where=where), own, cell, log)
        self._ahead = None
        if reasoning is not None:
            name = f"{own.node.name}_reasoning_content" if own.node.name is not None else None
            op.thoughts, op.thoughts_log = self._declare(name, where)
        return op

    def _held(self, own: SglGen) -> bool:
        """Whether the caller has a say in what comes of it."""
        if own.options is None:
            return bool(self.run.settings.retries)
        retries = self.run.settings.retries if own.options.retries is None else own.options.retries
        return bool(retries) or own.options.check is not None or own.options.backend is not None

    def _params(self, node: Gen, more: tuple[str, ...]) -> SamplingParams:
        """What the node said, over what the run said; and more stops, those of the chat template too."""
        params = merge(self.run.settings.params, node.params)
        seed = self._node_seed()
        if self._role is not None:
            more += tuple(self.run.template.stop_str)
        return _completed(params, more, seed) if more or seed is not UNSET else params

    def _put(self, op: Op) -> None:
        """Plays an operation, and what was queued behind it, as far as that needs no waiting; queues it where somebody
        is playing."""
        with self._lock:
            failure = self._failure
            if failure is None:
                if self.line is not None and type(op) not in (ReadOp, HookOp):
                    self._hand(op)
                if self._at is not None:
                    self._queue.append(op)
                    return
                if type(op) is Text and self._grammar is None:  # which could refuse it
                    self._write(op)
                    return
                self._at = op
        if failure is None:
            self._play_on(op)
        else:
            _fail_op(op, failure)

    def _hand(self, op: Op) -> None:
        """Hands an operation over, under the lock."""
        assert self.line is not None
        if not self.line.add(op):
            self.line = self.line.fresh(self._at, self._pieces)
            self.line.add(op)

    def _put_images(self, images: Sequence[Image], where: Location | None) -> None:
        if self._grammar is not None:
            raise ProgramError("an image can't be part of a grammar.", hint="Add it before.", where=where)
        if not self.backend.capabilities.images:
            raise self.backend.refusal("image", "images", "Describe what it shows, or use another backend.", where)
        token = getattr(self.run.template, "image_token", "")
        for image in images:
            self._put(ImagePart(image, token, where=where))
        self.tell("fill_image", self)

    def _declare(self, name: str | None, where: Location | None, kind: Any = None) -> tuple[Cell, TextLog | None]:
        cell = Cell(where)
        cell.kind = kind  # before the name is known: readers wait for that
        if name is None:
            return cell, None
        log = TextLog() if self.log is not None else None
        self._name(name, cell, log)
        return cell, log

    def _name(self, name: str, cell: Cell, log: TextLog | None = None) -> None:
        with self._lock:
            if log is not None:  # first: who finds the cell looks for the log
                self._logs[name] = log
            self._cells[name] = cell
            promise = self._promises.pop(name, None) if self._promises else None
        if promise is not None:
            promise.set(None)

    def _node_seed(self) -> int | Unset:
        self._nodes += 1
        seed = self.run.settings.seed
        return UNSET if seed is None else derived_seed(seed, f"{self.path}/{self._nodes}")

    def _begin_turn(self, role: str, where: Location | None) -> None:
        if self._grammar is not None:
            raise ProgramError(f"a {role!r} turn begins inside a grammar.", hint="End that one first.", where=where)
        if self._role is not None:
            raise ProgramError(
                f"a {role!r} turn begins inside a {self._role[0]!r} turn.", hint="End that one first.", where=where
            )
        try:
            template = self.run.template
            system = template.default_system_prompt
            if system and not self._turns and role != "system":
                self._begin_turn("system", where)
                self._put(Text(system, where=where))
                self._end_turn("system", where)
            prefix, suffix = template.get_prefix_and_suffix(role, [{"role": r, "content": ""} for r in self._turns])
        except Exception as error:  # templates are foreign code
            raise located(error, where) from error
        self._role = role, suffix
        self._put(Text(prefix, where=where))
        self._put(TurnBegin(role, where=where))

    def _end_turn(self, role: str, where: Location | None) -> None:
        if self._grammar is not None:
            raise ProgramError(f"a {role!r} turn ends inside a grammar.", hint="End that one first.", where=where)
        if self._role is None or self._role[0] != role:
            found = "no turn is open" if self._role is None else f"the open turn is {self._role[0]!r}"
            raise ProgramError(f"a {role!r} turn ends, but {found}.", where=where)
        _, suffix = self._role
        self._role = None
        self._turns.append(role)
        self._put(TurnEnd(role, where=where))
        self._put(Text(suffix, where=where))

    def fork(self, size: int = 1, where: Location | None = None) -> list[StreamExecutor]:
        """Branches that continue from here, each on its own."""
        self._nodes += 1
        children = [StreamExecutor(self.run, f"{self.path}/{self._nodes}.{i}", self._forked()) for i in range(size)]
        for child in children:
            child._cells = dict(self._cells)
            child._turns, child._role = list(self._turns), self._role
            child._grammar, child._ahead = self._grammar, self._ahead and self._ahead.copy()
            child._at = _NOTHING
        self._children += children
        if size > 1:
            self.tell("commit_lazy_operations", self)
        self._put(ForkOp(Fork(((),) * size, where=where), children))
        self.tell("fork_program", self, children, None)
        return children

    def _forked(self) -> Line | None:
        line = self.line
        return None if line is None else Line(line.handed, line)

    def tell(self, hook: str, *args: Any) -> None:
        """Calls a hook of the backend when everything before has been played; nothing where it defines none."""
        if hook in self.backend.hooks:
            self._put(HookOp(hook, args))

    def join(self, children: list[StreamExecutor], mode: JoinMode, where: Location | None) -> None:
        """Ends branches; if asked to, appends what they have added to the parent's text."""
        added = [child.read(_added, where) for child in children] if mode == "concate_and_append" else []
        node = Join(mode=mode, where=where)
        if self.line is not None:
            node = self.line.join(node, [child.line for child in children])
        if mode == "concate_and_append":
            self._ahead = None
        self._put(JoinOp(node, children, added))

    def mark(self) -> Mark:
        """Remembers this place."""
        mark = Mark(self)
        self._put(MarkOp(mark, back=False))
        return mark

    def roll_back(self, mark: Mark, where: Location | None) -> None:
        """Goes back to a mark: text, turns and variables are what they were there. A branch that has failed since
        works again, unless it was stopped from outside or its time is over."""
        if self.log is not None:
            raise ProgramError("text that was streamed can't be taken back.", hint="Run without stream.", where=where)
        deadline = self.run.deadline
        over = self._stopped or (deadline is not None and time.monotonic() >= deadline)
        if over and self._failure is not None:  # else a body that tries until it succeeds would never end
            raise located(self._failure, where)
        given_up = RequestAbortedError("the program went back to before it.")
        with self._lock:
            lost = self._failure is not None and mark.lengths is None  # it has failed before the mark
            running, gone = self._take_back(mark)
            if self.line is not None and not lost:
                self.line.roll_back(mark.place)
        for op in gone:
            _fail_op(op, given_up)
        self._cells = dict(mark.cells)
        self._turns, self._role, self._scopes = list(mark.turns), mark.role, dict(mark.scopes)
        self._grammar, self._ahead = mark.grammar, mark.ahead and mark.ahead.copy()
        self._put(MarkOp(mark, back=True))
        if running is not None:
            executor().post(self._give_up, running, given_up)

    def _take_back(self, mark: Mark) -> tuple[Op | None, list[Op]]:
        """Takes what comes after a mark out of the queue, but for hooks. Returns what is being played of it, and what
        will not be played. Under the lock."""
        queued = list(self._queue)
        if mark.lengths is not None:
            self._failure = None
            before, after, running = list[Op](), queued, None if self._at is _NOTHING else self._at
        else:  # so nothing after it has been played
            at = next((i for i, op in enumerate(queued) if isinstance(op, MarkOp) and op.mark is mark), len(queued))
            before, after, running = queued[: at + 1], queued[at + 1 :], None
        self._queue = deque([*before, *(op for op in after if isinstance(op, HookOp))])
        return running, [op for op in after if not isinstance(op, HookOp)]

    def _give_up(self, op: Op, error: SglError) -> None:
        """Ends an operation that a rollback waits for, unless a thread plays it: that can't be stopped. On the
        executor loop."""
        if self._task is not None and (task := self._fail(error, op)) is not None:
            task.cancel()

    def facade(self) -> Any:
        """The state that the user holds of this branch."""
        from sglang_lite.lang.state import ProgramState

        return ProgramState(self)

    def end(self) -> None:
        """The body has ended: names that were not declared never will be, and the text is complete."""
        self.run.body_open = False
        if self.line is not None:
            self.when_finished(self.line.handed.close)
        if self._promises or self._children or self.log is not None:
            for branch in self._tree():
                branch._declare_no_more()
        self.tell("end_program", self)

    def _declare_no_more(self) -> None:
        if self._promises:
            with self._lock:
                promises, self._promises = self._promises, {}
            for name, promise in promises.items():
                promise.fail(self._unknown(name))
        if self.log is not None:
            self._put(ReadOp(Cell(), lambda branch: branch.log.close() if branch.log else None))

    def abandon(self, error: BaseException) -> None:
        """The body has raised: what is still under way is stopped, in every branch. Its caller is told; in a stream
        only who reads."""
        if isinstance(error, SglError) and error.where is None:
            error.where = _raised_at(error)
        if not isinstance(error, Exception):
            error = RequestAbortedError(f"the program was interrupted by {type(error).__name__}.")
        self.stop(located(error, _raised_at(error)), told=not self.run.settings.stream)

    def stop(self, error: SglError, *, told: bool = True) -> None:
        """Fails the branch and those forked from it, and cancels what their backends are doing. A body that is stopped
        from outside can add nothing more.

        Args:
            told: who has the branch knows of it.
        """
        self._failure_seen = self._failure_seen or told
        self._stopped = self._stopped or (self.run.body_open and current_run.get() is not self.run)
        with self._lock:
            ending = isinstance(self._at, HookOp) and self._at.hook == "end_program"  # nothing is left but to tell so
            busy = (self._at is not None and not ending) or (self.log is not None and not self.log.closed)
        task = self._fail(error) if busy or self._stopped else None
        if task is not None:
            executor().post(task.cancel)
        for child in self._children:
            child.stop(error)
        for inner in self.run.inside() if not self.path else ():
            inner.stop(error)

    # ----------------------------------------------------------------------------------------- readers

    def cell(self, name: str, where: Location | None = None) -> Cell:
        """The variable's cell. From outside a body that is still running, waits for the name to be declared."""
        check_name(name, where)
        cell = self._cells.get(name)
        while cell is None:
            promise = self._promise(name, where)
            self.may_block(f"await s.get({name!r})", where)
            promise.wait()
            cell = self._cells.get(name)
        return cell

    async def acell(self, name: str, where: Location | None = None) -> Cell:
        """`cell` for coroutines."""
        check_name(name, where)
        cell = self._cells.get(name)
        while cell is None:
            promise = self._promise(name, where)
            await promise.get()
            cell = self._cells.get(name)
        return cell

    def _promise(self, name: str, where: Location | None) -> Cell:
        """Something to wait for until a name is declared; raises where it never will be."""
        with self._lock:
            if name in self._cells:
                return Cell.of(None)
            if name in self._scopes:
                raise ProgramError(f"the variable scope {name!r} is still open.", where=where)
            if not self.run.body_open or current_run.get() is self.run:
                raise self._unknown(name, where)
            return self._promises.setdefault(name, Cell(where, self.run.made))

    def _unknown(self, name: str, where: Location | None = None) -> SglError:
        if self._failure is not None:  # it may have been about to be made
            self._failure_seen = True
            return located(self._failure, where)
        known = ", ".join(map(repr, self._cells)) or "none"
        return UnknownVariableError(f"the program has no variable {name!r}; it has: {known}.", where=where)

    def may_block(self, instead: str, where: Location | None) -> None:
        """Whoever is going to block asks this first.

        Raises:
            ProgramError: the coroutine body that is waited for needs the event loop of this thread.
        """
        run = self.run
        if not (run.is_async and run.body_open):
            return
        with contextlib.suppress(RuntimeError):  # no event loop is running here
            if asyncio.get_running_loop() is run.loop or current_run.get() is run:
                raise ProgramError(
                    "reading would block the event loop of an async program.", hint=f"Use {instead}.", where=where
                )

    def read(self, what: Callable[[StreamExecutor], Any], where: Location | None = None) -> Cell:
        """A cell for something about the branch as it is after everything queued so far."""
        cell = Cell(where, self.run.made)
        self._put(ReadOp(cell, what))
        return cell

    def when_finished(self, callback: Callable[[], object]) -> None:
        """Calls back when everything queued so far, in every branch, has been played or has failed."""
        if not self._children:
            self.read(nothing).when_done(callback)
            return
        branches = list(self._tree())
        left = itertools.count(len(branches) - 1, -1)  # counts down atomically: branches end on several threads

        def one_more() -> None:
            if not next(left):
                callback()

        for branch in branches:
            branch.read(nothing).when_done(one_more)

    def finished(self) -> Cell:
        """A cell that is set when everything queued so far, in every branch, has been played or has failed."""
        cell = Cell()
        self.when_finished(lambda: cell.set(None))
        return cell

    def _tree(self) -> Iterator[StreamExecutor]:
        yield self
        for child in self._children:
            yield from child._tree()

    @property
    def failure(self) -> SglError | None:
        """What the branch has failed with so far. Whoever asks is told."""
        self._failure_seen = True
        return self._failure

    def error(self) -> SglError | None:
        """What the branch failed with, once everything queued has been played."""
        with contextlib.suppress(SglError):
            self.read(nothing).wait()
        return self.failure

    # -------------------------------------------------------------------------------- the playing side

    def _play_on(self, op: Op) -> None:
        """Plays `op`, which the branch is at, and on; hands what has to wait to where it can."""
        waits = self._advance(op)
        if waits is not None:
            self._hand_over(waits)

    def _hand_over(self, op: Op) -> None:
        if self.backend.blocking and not generation.needs_loop(self, op):
            self.backend.pool.submit(partial(self.run.context.copy().run, self._play_blocking, op))
        else:
            executor().post(self._start, op)

    def _advance(self, op: Op) -> Op | None:
        """Plays `op`, which the branch is at, and the queue up to the first operation that has to wait, and returns
        that; None where the caller does not own the branch any more: nothing is left to play, or it was stopped."""
        while True:
            try:
                if type(op) is Text:
                    self._write(op)
                elif not _AT_ONCE[type(op)](self, op):
                    return op
            except BaseException as error:  # whatever it is, the branch has failed and its readers must know
                self._fail(error, op)
                if not isinstance(error, Exception):
                    raise
                return None
            with self._lock:  # as in _next, which is not called: this is the hottest loop there is
                if self._at is not op:
                    return None
                if self.line is not None and self.line.held is op:
                    self.line.go_on(op, self._pieces, self._queue)
                if not self._queue:
                    self._at = None
                    return None
                op = self._at = self._queue.popleft()

    def _next(self, op: Op) -> Op | None:
        """What comes after `op`, which the caller has played; None as in _advance."""
        with self._lock:
            if self._at is not op:
                return None
            if self.line is not None and self.line.held is op:
                self.line.go_on(op, self._pieces, self._queue)
            self._at = self._queue.popleft() if self._queue else None
            return self._at

    def _play_after(self, op: Op) -> Op | None:
        """`_advance` from what comes after `op`."""
        following = self._next(op)
        return None if following is None else self._advance(following)

    def _start(self, op: Op) -> None:
        with self._lock:
            if self._at is op:
                loop = asyncio.get_running_loop()
                self._task = loop.create_task(self._play(op), context=self.run.context.copy())

    async def _play(self, waits: Op) -> None:
        """Plays on the executor loop from an operation on that has to wait."""
        current_run.set(self.run)
        task, op = self._task, waits
        while True:
            try:
                if isinstance(op, JoinOp):
                    added = [piece for cell in op.added for piece in await cell.get()]
                    if self._at is op:
                        self._take(added)
                elif isinstance(op, HookOp):
                    await generation.in_pool(self.backend, partial(_call_hook, self.backend, op))
                elif isinstance(op, GenOp):
                    await generation.agenerate(self, op)
                else:
                    assert isinstance(op, SelectOp)
                    await generation.aselect(self, op)
                following = self._play_after(op)
            except asyncio.CancelledError:
                self._fail(RequestAbortedError("the program was cancelled."), op)
                return
            except BaseException as error:  # as in _advance; no SystemExit of a backend may end this thread
                self._fail(error, op)
                return
            if following is None:
                break
            op = following
        if self._task is task:
            self._task = None

    def _play_blocking(self, waits: Op) -> None:
        """Plays on a thread of the backend's pool from an operation on that has to wait."""
        current_run.set(self.run)
        op: Op | None = waits
        while op is not None and self._at is op:
            try:
                if isinstance(op, HookOp):
                    _call_hook(self.backend, op)
                elif isinstance(op, GenOp):
                    generation.generate(self, op)
                else:
                    assert isinstance(op, SelectOp)
                    generation.select(self, op)
                following = self._play_after(op)
            except BaseException as error:  # as in _play
                self._fail(error, op)
                return
            if following is not None and generation.needs_loop(self, following):
                self._hand_over(following)
                return
            op = following

    def _fail(self, error: BaseException, op: Op | None = None) -> asyncio.Task[None] | None:
        """Fails the branch, with everything that is queued or being played. Returns the task that was playing.

        Args:
            op: what its player tells to have failed; one that was stopped meanwhile has nothing to tell.
        """
        with self._lock:
            at, self._at = self._at, None
            if op is not None and at is not op:
                self._at = at
                return None
            failure = self._failure or located(error, _where(op))
            back = next(filter(_goes_back, self._queue), None) if op is not None else None
            left, logs = list[Op](), list[TextLog]()
            while self._queue and self._queue[0] is not back:
                left.append(self._queue.popleft())
            if back is not None:  # what has failed is taken back already, by a rollback that waits for it
                self._at = self._queue.popleft()
            else:
                if self.line is not None:
                    self.line.drop()
                self._failure, logs = failure, list(self._logs.values())
                if self.log is not None:
                    logs.append(self.log)
            task, self._task = self._task, None
        if at is not None and not isinstance(at, HookOp):  # a hook is called already
            left.insert(0, at)
        for each in left:
            _fail_op(each, failure)
        for log in logs:
            log.close(failure)
        if back is not None:
            self._play_on(back)
        return task

    def _write(self, node: Text) -> None:
        text = node.text
        if not text:
            return
        if self.walk is not None:
            self.walk.push(text)
        self._pieces.append(text if node.special and node.ids is None else Span(text, node.ids, node.special))
        if self.log is not None:
            self.log.append(text)

    def write(self, text: str) -> None:
        """Appends what was chosen. In a turn it names no special tokens."""
        self._write(Text(text, special=self._turn is None))

    def append(self, pieces: Sequence[Piece]) -> None:
        """Appends what a backend has generated: its text was logged while it came."""
        start = len(self._pieces)
        self._pieces += pieces
        if self.walk is not None:
            self.walk.push(self._text_from(start))

    @property
    def pieces(self) -> Sequence[Piece]:
        """Its text. To be read by whoever plays it."""
        return self._pieces

    def _text_from(self, start: int) -> str:
        return "".join([p if isinstance(p, str) else p.text for p in self._pieces[start:] if not isinstance(p, Image)])

    def prompt(self, *, same_model: bool = True) -> Prompt:
        """What a backend continues. `same_model`: its token ids are those of the run's backend."""
        try:
            spans: tuple[Span, ...] = (Span("".join(self._pieces)),)  # type: ignore[arg-type] # mostly there is only text
        except TypeError:
            spans = self._spans(same_model)
        if self._turn is None and not self._messages:
            return Prompt(spans, images=self._images())
        role, start = self._turn or (None, len(self._pieces))
        return Prompt(spans, tuple(self._messages), role, self._text_from(start), self._images())

    def _spans(self, same_model: bool) -> tuple[Span, ...]:
        spans: list[Span] = []
        for piece in self._pieces:
            if isinstance(piece, str):
                spans.append(Span(piece))
            elif not isinstance(piece, Image):
                found = (piece,) if isinstance(piece, Span) else piece.spans
                spans += found if same_model else [Span(s.text, special=s.special and s.ids is None) for s in found]
        return tuple(spans)

    def _images(self) -> tuple[Image, ...]:
        return tuple([piece for piece in self._pieces if type(piece) is Image])

    def _turn_at_once(self, node: TurnBegin | TurnEnd) -> bool:
        if isinstance(node, TurnBegin):
            self._turn = node.role, len(self._pieces)
            return True
        assert self._turn is not None
        role, start = self._turn
        self._messages.append(Message(role, _content(self._pieces[start:])))
        self._turn = None
        return True

    def _scope_at_once(self, op: ScopeOp) -> bool:
        if isinstance(op.node, ScopeBegin):
            self._scope_starts[id(op.cell)] = len(self._pieces)
        else:
            op.cell.set(self._text_from(self._scope_starts.pop(id(op.cell))))
        return True

    def _grammar_at_once(self, node: GrammarBegin | GrammarEnd) -> bool:
        from sglang_lite.constraints.byte_matcher import ByteMatcher

        before, self.walk = self.walk, ByteMatcher(node.constraint) if isinstance(node, GrammarBegin) else None
        if before is not None:
            before.end()
        return True

    def _image_at_once(self, node: ImagePart) -> bool:
        self._pieces.append(node.image)
        self._write(Text(node.text))
        return True

    def _fork_at_once(self, op: ForkOp) -> bool:
        for child in op.children:
            child._pieces, child._messages = list(self._pieces), list(self._messages)
            child._turn, child.walk = self._turn, self.walk and self.walk.copy()
            child.fork_start = len(self._pieces)
            if self.log is not None and child.log is not None:
                child.log.append(self._text_from(0))
            child._play_on(_NOTHING)
        return True

    def _join_at_once(self, op: JoinOp) -> bool:
        if self.line is not None:
            self.line.reach(op, self._pieces)
        if not all(cell.done for cell in op.added):
            return False
        for cell in op.added:
            self._take(cell.result())
        return True

    def _take(self, pieces: Sequence[Piece]) -> None:
        """Appends what other branches have added."""
        start = len(self._pieces)
        self.append(pieces)
        if self.log is not None:
            self.log.append(self._text_from(start))

    def _read_at_once(self, op: ReadOp) -> bool:
        op.cell.set(op.what(self))
        return True

    def _mark_at_once(self, op: MarkOp) -> bool:
        if not op.back:
            op.mark.lengths = len(self._pieces), len(self._messages), self._turn
            op.mark.walk = self.walk and self.walk.copy()
        elif op.mark.lengths is not None:
            pieces, messages, self._turn = op.mark.lengths
            self.walk = op.mark.walk and op.mark.walk.copy()
            del self._pieces[pieces:], self._messages[messages:]
        return True

    # ------------------------------------------------------- what SGLang's users read of an executor

    @property
    def sid(self) -> str:
        """A unique name."""
        if not self._sid:
            self._sid = uuid.uuid4().hex
        return self._sid

    @property
    def text_(self) -> str:
        return self._text_from(0)

    @property
    def messages_(self) -> list[dict[str, Any]]:
        return as_dicts(self._messages)

    @property
    def images_(self) -> list[Image]:
        return list(self._images())

    @property
    def cur_role(self) -> str | None:
        return self._turn[0] if self._turn is not None else None

    @property
    def chat_template(self) -> ChatTemplate:
        return self.run.template

    @property
    def stream(self) -> bool:
        return self.run.settings.stream

    @property
    def variables(self) -> dict[str, Any]:
        """The variables that have their value."""
        return {name: cell.result() for name, cell in self._cells.items() if cell.done and cell.error() is None}

    @property
    def meta_info(self) -> dict[str, Any]:
        """What the backend reported about the variables that have their value."""
        from sglang_lite.lang.results import meta_info

        return {name: meta_info(cell.record) for name, cell in self._cells.items() if cell.done and cell.record}

    @property
    def error_(self) -> SglError | None:
        return self.failure

    @property
    def is_finished(self) -> bool:
        return self._at is None and not self.run.body_open

    def get_var(self, name: str) -> Any:
        return self.cell(name).wait()

    def set_var(self, name: str, value: Any) -> None:
        self._name(name, Cell.of(value))

    def get_meta_info(self, name: str, timeout: float | None = None) -> dict[str, Any] | None:
        """Raises RequestTimeoutError: the variable has no value within `timeout` seconds."""
        from sglang_lite.lang.results import meta_info

        cell = self.cell(name)
        cell.wait(timeout)
        return meta_info(cell.record)

    def text(self) -> str:
        text: str = self.read(whole_text).wait()
        return text

    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self.read(all_messages).wait()
        return messages

    def sync(self) -> None:
        self.read(nothing).wait()

    def __del__(self) -> None:
        if getattr(self, "_failure", None) is not None and not self._failure_seen:
            logger.error("A program failed and nobody read it: %s", self._failure)


# What is played where it is submitted. True: done. False: it has to wait for a backend.
_AT_ONCE: dict[type, Callable[[StreamExecutor, Any], bool]] = {
    GenOp: generation.at_once,
    SelectOp: generation.select_at_once,
    ImagePart: StreamExecutor._image_at_once,
    TurnBegin: StreamExecutor._turn_at_once,
    TurnEnd: StreamExecutor._turn_at_once,
    ScopeOp: StreamExecutor._scope_at_once,
    GrammarBegin: StreamExecutor._grammar_at_once,
    GrammarEnd: StreamExecutor._grammar_at_once,
    ForkOp: StreamExecutor._fork_at_once,
    JoinOp: StreamExecutor._join_at_once,
    ReadOp: StreamExecutor._read_at_once,
    MarkOp: StreamExecutor._mark_at_once,
    HookOp: lambda branch, op: False,
}


def _where(op: Op | None) -> Location | None:
    said = getattr(op, "node", None) or getattr(op, "cell", op)
    found: Location | None = getattr(said, "where", None)
    return found


def _goes_back(op: Op) -> bool:
    """Whether an operation goes back to before anything that is played now."""
    return isinstance(op, MarkOp) and op.back and op.mark.lengths is not None


def _call_hook(backend: BaseBackend, op: HookOp) -> None:
    getattr(backend, op.hook)(*op.args)


def _call_last_hook(backend: BaseBackend, op: HookOp) -> None:
    try:
        _call_hook(backend, op)
    except Exception:  # its program has failed already, with another error
        logger.exception("%s of %s failed", op.hook, type(backend).__name__)


def _fail_op(op: Op, failure: SglError) -> None:
    if isinstance(op, ForkOp):
        for child in op.children:
            child._failure_seen = True  # the parent tells
            child._fail(failure)
    elif isinstance(op, HookOp):
        if op.hook == "end_program":  # a program that failed has ended too
            branch: StreamExecutor = op.args[0]
            branch.backend.pool.submit(partial(_call_last_hook, branch.backend, op))
    elif isinstance(op, GenOp | SelectOp | ReadOp | ScopeOp):
        op.cell.fail(failure)
        if isinstance(op, GenOp) and op.thoughts is not None:
            op.thoughts.fail(failure)


def check_name(name: Any, where: Location | None) -> None:
    """Raises ParameterError: this is no name of a variable."""
    if not isinstance(name, str):
        raise ParameterError("name", f"{name!r:.60} is not a string.", where=where)


def nothing(branch: StreamExecutor) -> None:
    """For `read`: only waits."""


def whole_text(branch: StreamExecutor) -> str:
    return branch._text_from(0)


def all_messages(branch: StreamExecutor) -> list[dict[str, Any]]:
    return as_dicts(branch._messages)


def _added(branch: StreamExecutor) -> list[Piece]:
    return branch._pieces[branch.fork_start :]


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as OpenAI's chat API takes them: content is text, or parts where there are images."""
    found = []
    for message in messages:
        if any(isinstance(part, Image) for part in message.content):
            parts: Any = [
                {"type": "image_url", "image_url": {"url": generation.data_url(part)}}
                if isinstance(part, Image)
                else {"type": "text", "text": part}
                for part in message.content
            ]
        else:
            parts = "".join(map(str, message.content))
        found.append({"role": message.role, "content": parts})
    return found


def _content(pieces: Sequence[Piece]) -> tuple[str | Image, ...]:
    """A finished turn's content: neighbouring texts joined; of reasoned answers only the answer."""
    content: list[str | Image] = []
    for kind, group in itertools.groupby(pieces, key=lambda p: isinstance(p, Image)):
        if kind:
            content += [p for p in group if isinstance(p, Image)]
        else:
            texts = [p if isinstance(p, str) else p.answer if isinstance(p, Reasoned) else p.text for p in group]  # type: ignore[union-attr] # images are in the other branch
            content.append("".join(texts))
    if content and isinstance(content[0], str):
        content[0] = content[0].lstrip()
    return tuple(content)


def _raised_at(error: BaseException) -> Location | None:
    """The deepest line of the user's code that an exception went through; of a library's, where there is only that."""
    trace, found = error.__traceback__, None
    while trace is not None:
        frame = trace.tb_frame
        if not frame.f_globals.get("__name__", "").startswith("sglang_lite.") and not (found and is_library(trace)):
            found = Location(frame.f_code, trace.tb_lasti)
        trace = trace.tb_next
    return found


def derived_seed(seed: int, path: str) -> int:
    """A node's or an attempt's own seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest(), "big")


def merge(outer: SamplingParams, inner: SamplingParams) -> SamplingParams:
    """`outer`, with everything that `inner` sets."""
    if outer is NO_PARAMS or inner is NO_PARAMS:
        return inner if outer is NO_PARAMS else outer
    return _merged(outer, inner)


@lru_cache(maxsize=4096)
def _merged(outer: SamplingParams, inner: SamplingParams) -> SamplingParams:
    given = {name: value for name in inner.__struct_fields__ if (value := getattr(inner, name)) is not UNSET}
    return msgspec.structs.replace(outer, **given)


def _completed(params: SamplingParams, stops: tuple[str, ...], seed: int | Unset) -> SamplingParams:
    own = () if isinstance(params.stop, Unset) else params.stop
    return msgspec.structs.replace(
        params,
        stop=(*own, *(s for s in stops if s not in own)) or UNSET,
        seed=seed if isinstance(params.seed, Unset) else params.seed,
    )


def __getattr__(name: str) -> Any:
    if name in ("ProgramState", "ProgramStateGroup"):  # where SGLang's users import them from
        from sglang_lite.lang import state

        return getattr(state, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
