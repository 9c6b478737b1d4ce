"""Tracing: runs a program's body without executing its nodes, and records them. Values that only a run has are symbols
(symbolic/symbols.py)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, Token, copy_context
from dataclasses import dataclass
from typing import Any

from sglang_lite.lang.backend.base_backend import ALL_CONSTRAINTS, BaseBackend, Capabilities
from sglang_lite.lang.backend.default import BackendLike, as_backend
from sglang_lite.lang.backend.remote.explain import TracedBackend
from sglang_lite.lang.backend.remote.shared_call import SharedCall, first_generation
from sglang_lite.lang.backend.remote.turn_plan import TurnPlan
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.checks import check_whole
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.branch import Branch, raised_at
from sglang_lite.lang.execution.operations import (
    BranchMark,
    BranchSnapshot,
    GenOp,
    HookOp,
    MarkOp,
    Op,
    ReadOp,
    ScopeOp,
    SelectOp,
)
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.reading import nothing
from sglang_lite.lang.execution.run import Run, RunSettings, current_run
from sglang_lite.lang.expressions import BaseProgram, SglGen, SglGetForkItem, SglImage, SglSelect
from sglang_lite.lang.state import ProgramState, ProgramStateGroup, in_event_loop, user_location
from sglang_lite.lang.symbolic.graph import Graph, graph_of
from sglang_lite.lang.symbolic.symbols import (
    MARK,
    MAX_NODES,
    CutError,
    EndlessError,
    Entry,
    SglArgument,
    SglVariable,
    Symbol,
    TraceLog,
    is_limit,
    origin,
    recording,
    refuse,
)
from sglang_lite.lang.symbolic.traced_turns import planned, with_shared_call
from sglang_lite.lang.unawaited import must_await
from sglang_lite.program.graph import Call
from sglang_lite.program.nodes import (
    BaseNode,
    Expression,
    Expressions,
    Fork,
    GrammarBegin,
    Join,
    JoinMode,
    Mark,
    Rollback,
    ScopeBegin,
    ScopeEnd,
    Text,
    TurnBegin,
    TurnEnd,
)
from sglang_lite.protocol import (
    Constraint,
    Delta,
    Generation,
    Location,
    ParameterError,
    ProgramError,
    Prompt,
    SamplingParams,
    Selection,
    TraceError,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.text.chat_template import TurnTemplate

_CONSTANT = (Text, TurnBegin, TurnEnd, ScopeBegin, ScopeEnd)  # nodes with the same text in every run


class StopTracing(Exception):  # noqa: N818 # SGLang's name
    """Exception that a body may raise to end the constant prefix that `cache` looks for."""


class TraceBranch(Branch):
    """Branch that records what is added instead of playing it. Performs the same checks as Branch.

    Attributes:
        state: state of the branch.
    """

    __slots__ = ("_equal", "_turn", "state")

    state: TracerProgramState

    def __init__(self, player: Player, path: str = "") -> None:
        super().__init__(player, path)
        self._turn: tuple[TurnPlan, int] | None = None  # of the generation being added
        self._equal: SharedCall | None = None  # likewise

    def submit(self, expr: Expression | str, where: Location | None = None) -> None:
        if isinstance(expr, str):
            self._submit_text(expr, where)
            return
        several = isinstance(expr, Expressions)
        parts = list(expr.walk()) if several else [expr]
        turns = self._turns_of(parts, where)
        for i, part in enumerate(parts):
            source = part.source if isinstance(part, SglGen) and i not in turns else None
            self._turn, self._equal = turns.get(i), source if isinstance(source, SharedCall) else None
            self._submit_one(part.text if isinstance(part, Text) and several else part, where)

    def share(self, added: Expression, size: int) -> Expression:
        parts = list(added.walk())
        i = first_generation(parts)
        if i is None or not isinstance(self.backend, TracedBackend):
            return added
        parts[i] = with_shared_call(parts[i], self.backend, size)
        return Expressions(parts)

    def _submit_one(self, expr: Expression | str, where: Location | None) -> None:
        if isinstance(expr, str):
            self._submit_text(expr, where)
        elif isinstance(expr, Symbol | SglImage):
            self.state.add(expr, where)
        else:
            super().submit(expr, where)

    def _turns_of(self, parts: Sequence[Expression], where: Location | None) -> dict[int, tuple[TurnPlan, int]]:
        if not isinstance(self.backend, TracedBackend):
            return {}
        return planned(parts, self.backend, None if self._role is None else self._role[0], where)

    def _submit_text(self, text: str, where: Location | None) -> None:
        """Records text; marks in it are replaced by the symbols that they stand for."""
        marks = self.state.recording.marks
        for part in MARK.split(text) if "\ue002" in text else (text,):
            if part in marks:
                self.state.add(marks[part], where)
            else:
                super().submit(part, where)

    def fork(self, size: int = 1, where: Location | None = None) -> list[Branch]:
        parent, begun = self.state, Fork(((),) * size, where=where)
        branches: list[Branch] = []
        for i in range(size):
            branch = TraceBranch(Player(self.run), f"{self.path}.{i}")
            self.copy_state_to([branch])
            child = TracerProgramState(branch, parent.arguments, parent.recording)
            child.on_node = parent.on_node
            child.variables = dict(parent.variables)
            child.nodes.append(SglGetForkItem(i))
            branches.append(branch)
        parent.add(begun, where, states=[_state_of(branch) for branch in branches])
        parent.child_states += [_state_of(branch) for branch in branches]
        return branches

    def join(self, children: list[Branch], mode: JoinMode, where: Location | None) -> None:
        if mode == "concate_and_append":
            self._matcher = None
        self.state.add(Join(mode=mode, where=where), where, states=[_state_of(child) for child in children])

    def roll_back(self, to: BranchSnapshot, where: Location | None) -> None:
        super().roll_back(to, where)
        self.state.record_mark(to.mark, back=True)

    def read(self, what: Callable[[Player], UserValue], where: Location | None = None) -> Variable:
        if what is not nothing:
            refuse(SglVariable("the text"), "read the text or the messages")
        return Variable.of(None)

    def _put(self, op: Op) -> None:
        """Records the node of an operation instead of playing it."""
        state = self.state
        node: BaseNode
        own = None
        match op:
            case ReadOp() | HookOp():
                return
            case MarkOp(mark):
                state.record_mark(mark)
                return
            case GenOp() | SelectOp():
                node, own = op.node, op.expression
            case BaseNode():
                node = op
            case _:
                node = op.node
        if isinstance(node, GrammarBegin):
            self._matcher = None  # text with symbols can't be checked against the grammar
        if not isinstance(node, Text) or node.text:
            planned = (self._turn, self._equal) if own is not None else (None, None)
            state.add(node, node.where, own, (), *planned)
        if isinstance(op, GenOp | SelectOp):
            name = op.node.name or f"{'gen' if isinstance(op, GenOp) else 'select'}_{len(state.variables)}"
            state.variables[name] = SglVariable(name, node, _choices(op))
            op.variable.set(state.variables[name])
            if isinstance(op, GenOp) and op.thoughts is not None:
                op.thoughts.set(SglVariable(f"{name}_reasoning_content", node))
        elif isinstance(op, ScopeOp) and isinstance(op.node, ScopeEnd):
            state.variables[op.node.name] = SglVariable(op.node.name, node)
            op.variable.set(state.variables[op.node.name])


def _choices(op: Op) -> tuple[str, ...]:
    """Possible values of a selection; empty if they are not known."""
    given: Any = op.node.choices if isinstance(op, SelectOp) and op.expression.multi is None else ()
    return () if isinstance(given, Symbol) or any("\ue002" in each for each in given) else given


class TracerProgramState(ProgramState):
    """State of a program that is being traced, and the result of `trace()`.

    Attributes:
        nodes: nodes and symbols in the order in which they were added.
        last_node: last of the nodes, or None.
        variables: symbol of each variable, by name.
        child_states: states of forks and of nested programs.
        arguments: arguments of the body, including symbols for those that were not given.
        recording: log of the whole trace.
        on_node: called with each node that is added, or None.
        program: program that was traced; None for the branches of a fork.
        paths: ways through the body that were followed.
        complete: whether all ways through the body were followed.
        outermost: whether the program was not called by another program that was being traced.
        given: arguments that were given to `trace()`.
    """

    def __init__(self, executor: TraceBranch, arguments: dict[str, UserValue], recording: TraceLog) -> None:
        super().__init__(executor)
        executor.state = self
        self.arguments = arguments
        self.recording = recording
        self.nodes: list[Expression] = []
        self.variables: dict[str, SglVariable] = {}
        self.child_states: list[TracerProgramState] = []
        self.on_node: Callable[[Expression], None] | None = None
        self._marks: list[BranchMark] = []
        self.program: BaseProgram | None = None
        self.paths: list[TracedPath] = []
        self.complete = True
        self.outermost = True
        self.given: dict[str, Any] = {}

    @property
    def last_node(self) -> Expression | None:
        return self.nodes[-1] if self.nodes else None

    def add(
        self,
        node: Expression,
        where: Location | None = None,
        own: SglGen | SglSelect | None = None,
        states: Sequence[TracerProgramState] = (),
        turn: tuple[TurnPlan, int] | None = None,
        equal: SharedCall | None = None,
    ) -> None:
        self.recording.add(Entry(self, node, where, own, tuple(states), turn, equal))
        self.nodes.append(node)
        if self.on_node is not None:
            self.on_node(node)

    def call(self, program: UserValue, *args: UserValue, **kwargs: UserValue) -> UserValue:
        if not isinstance(program, BaseProgram):
            return super().call(program)
        own = {name: value for name, value in kwargs.items() if name not in program.options}
        try:
            given = program.signature.bind_partial(*args).arguments
            arguments = {**program.bind_arguments, **given, **own}
        except TypeError as error:
            raise ParameterError("call", f"{program.name}: {error}.", where=user_location()) from error
        traced = trace_program(program, arguments, self.branch.backend)
        return _at_once(traced) if program.is_async and in_event_loop() else traced

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        group = super().fork(size, position_ids_offset)
        return ProgramStateGroup([_state_of(child.branch) for child in group], self)

    def record_mark(self, mark: BranchMark, *, back: bool = False) -> None:
        """Records a checkpoint, or with `back` the rollback to one. Neither is added to `nodes`."""
        if not back:
            self._marks.append(mark)
        node = Rollback(mark=self._marks.index(mark)) if back else Mark()
        self.recording.add(Entry(self, node, user_location()))

    def __getitem__(self, name: str) -> UserValue:
        if name in self.arguments:
            return self.arguments[name]
        return self._read(super().__getitem__(name))

    get_var = __getitem__

    def _record(self, name: str) -> Any:
        refuse(SglVariable(name), "read the metadata of a variable")

    @must_await
    async def get(self, name: str) -> UserValue:
        return self.arguments[name] if name in self.arguments else self._read(await super().get(name))

    def _read(self, value: Any) -> Any:
        """Notes that the body has read a variable, and returns its value."""
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, Symbol):
                self.recording.reads.append(origin(each).symbol)
        return value

    def graph(self) -> Graph:
        """Graph of the program, with all ways through its body that were followed. Runs the body once more, with the
        same arguments, to find texts that change from run to run.

        Raises:
            ProgramError: the state is a branch, or belongs to a program called by the traced one.
        """
        if self.program is None or not self.outermost:
            raise ProgramError("only the state that trace() returned has a graph.", where=user_location())
        first = self.paths[0].state.recording
        forced = None if first.forced is None else tuple(decision.outcome for decision in first.decisions)
        again = _tracer(self.program, self.given, self.branch.backend, forced)
        with contextlib.suppress(CutError, Exception):  # errors were handled in the first run
            _run_traced(self.program, again)
        name, body = self.program.name, self.program.func
        return graph_of(name, self.paths, again.recording, body=body, complete=self.complete)

    def entries(self, graph: Graph) -> dict[int, Entry]:
        """Entries of the trace from which the nodes of a graph were made, by the nodes' ids."""
        found: dict[int, Entry] = {}
        for path, way in zip(self.paths, graph.ways):
            entries = [each for each in path.state.recording.entries if not isinstance(each.node, SglGetForkItem)]
            found |= dict(zip(way.nodes, entries))
        return found

    def flatten_nodes(self) -> list[Expression]:
        """Nodes of the state, with lists of expressions replaced by their parts."""
        return [part for node in self.nodes for part in node.walk()]

    def print_graph_dfs(self) -> None:
        """Prints one node per line, with branches indented."""
        for line in _lines(self, ""):
            print(line)

    def __repr__(self) -> str:
        return f"TracerProgramState({len(self.nodes)} nodes)"


def _lines(state: TracerProgramState, indent: str) -> list[str]:
    lines = [f"{indent}%{i} = {node!r}" for i, node in enumerate(state.nodes)]
    return lines + [line for child in state.child_states for line in _lines(child, indent + "  ")]


async def _at_once(state: TracerProgramState) -> TracerProgramState:
    return state


def _state_of(branch: Branch) -> TracerProgramState:
    assert isinstance(branch, TraceBranch)
    return branch.state


class TracingScope:
    """Context manager that makes programs called inside be traced, as children of `tracer_state`. Applies only to the
    current context: programs of other threads and tasks run."""

    def __init__(self, tracer_state: TracerProgramState) -> None:
        self.tracer_state = tracer_state
        self._tokens: tuple[Token[TracingScope | None], Token[TraceLog | None]] | None = None

    def __enter__(self) -> TracingScope:
        self._tokens = _scope.set(self), recording.set(self.tracer_state.recording)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._tokens is not None
        _scope.reset(self._tokens[0])
        recording.reset(self._tokens[1])

    @staticmethod
    def get_current_scope() -> TracingScope | None:
        return _scope.get()

    def add_child_state(self, state: TracerProgramState) -> None:
        self.tracer_state.child_states.append(state)


_scope: ContextVar[TracingScope | None] = ContextVar("sglang_lite_tracing", default=None)


@dataclass(frozen=True, slots=True)
class TracedPath:
    """One way through a program's body.

    Attributes:
        state: state that the body was called with.
        error: exception that the body raised, or None.
        cut: whether the way was not followed to its end, as it has too many decisions.
    """

    state: TracerProgramState
    error: Exception | None = None
    cut: bool = False


def trace_program(
    program: BaseProgram, arguments: dict[str, UserValue], backend: BaseBackend | None, explore: int | None = None
) -> TracerProgramState:
    """Traces a program and returns the state of the first way through its body.

    Args:
        arguments: arguments by name; the others are symbols.
        backend: backend whose chat template and capabilities apply; None for NoBackend.
        explore: maximum number of ways through the body to follow; None for one way without decisions.

    Raises:
        TraceError: the body decides by a symbol (with `explore`, in a way that can't be explored), or does not end.
        ParameterError: the arguments don't fit the program.
    """
    if explore is None:
        state = _tracer(program, arguments, backend)
        _run_traced(program, state)
        return state
    check_whole("explore", explore, 1, user_location())
    paths, complete = explored(program, arguments, backend, explore)
    for path in paths:
        if isinstance(path.error, TraceError):
            raise path.error
    state = paths[0].state
    state.paths, state.complete = paths, complete
    return state


def explored(
    program: BaseProgram, arguments: dict[str, UserValue], backend: BaseBackend | None, most: int
) -> tuple[list[TracedPath], bool]:
    """Follows the ways through a body, breadth-first: the first way takes the first outcome of each decision, and the
    outcomes of earlier decisions are varied before those of later ones.

    Returns:
        At most `most` ways, and True if they are all.
    """
    waiting: deque[tuple[int, ...]] = deque([()])
    paths: list[TracedPath] = []
    left = MAX_NODES
    while waiting and len(paths) < most and left > 0:
        forced = waiting.popleft()
        state = _tracer(program, arguments, backend, forced)
        error, cut = None, False
        try:
            _run_traced(program, state)
        except CutError:
            cut = True
        except Exception as raised:  # raised by the user's body: the result of this way
            error = raised
        paths.append(TracedPath(state, error, cut))
        left -= len(state.recording.entries)
        decisions = state.recording.decisions
        taken = tuple(decision.outcome for decision in decisions)
        for i in range(len(forced), len(decisions)):
            others = ((*taken[:i], other) for other in range(1, len(decisions[i].outcomes)))
            waiting.extend(itertools.islice(others, most + 1 - len(waiting)))  # further ones would not be used
    over = all(not path.cut and not (path.error is not None and is_limit(path.error)) for path in paths)
    return paths, over and not waiting


def extract_prefix_by_tracing(program: BaseProgram, backend: BackendLike | None) -> str:
    """Constant text that every run of a program starts with. Tracing stops at the first node that is not constant text,
    or at an exception of the body."""
    state = _tracer(program, dict(program.bind_arguments), None if backend is None else as_backend(backend))

    def stop_at(node: Expression) -> None:
        if not isinstance(node, _CONSTANT):
            raise CutError

    state.on_node = stop_at
    with contextlib.suppress(CutError, Exception):
        _run_traced(program, state)
    texts = itertools.takewhile(lambda node: isinstance(node, _CONSTANT), state.flatten_nodes())
    return "".join(node.text for node in texts if isinstance(node, Text))


def _tracer(
    program: BaseProgram, arguments: dict[str, Any], backend: BaseBackend | None, forced: tuple[int, ...] | None = None
) -> TracerProgramState:
    parameters = program.signature.parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    symbols = {name: SglArgument(name) for name in names if name not in arguments}
    try:
        program.signature.bind(**arguments, **symbols)
    except TypeError as error:
        raise ParameterError("trace", f"{program.name}: {error}.", where=user_location()) from error
    run = Run(backend or NoBackend(), RunSettings(), is_async=program.is_async, new_state=_state_of)
    scope = TracingScope.get_current_scope()
    record = TraceLog(forced) if scope is None else scope.tracer_state.recording
    state = TracerProgramState(TraceBranch(Player(run)), {**arguments, **symbols}, record)
    state.program, state.paths, state.given, state.outermost = program, [TracedPath(state)], arguments, scope is None
    if scope is not None:
        record.add(Entry(scope.tracer_state, Call(program.name), user_location(), states=(state,)))
        scope.add_child_state(state)
    return state


def _run_traced(program: BaseProgram, state: TracerProgramState) -> None:
    inside = _scope.get() is not None
    token = current_run.set(state.branch.run)
    try:
        with TracingScope(state):
            result = program.func(state, **state.arguments)
            state.ret_value = awaited(result) if program.is_async else result
    except RecursionError as error:
        if inside:
            raise
        raise EndlessError(
            f"{program.name} calls itself without an end.", hint="Bound the recursion by a value that is not a symbol.",
            where=raised_at(error),
        ) from None  # fmt: skip
    finally:
        current_run.reset(token)


def awaited(body: Coroutine[object, object, UserValue]) -> UserValue:
    """Result of a coroutine, which is run in this thread, or in a new one if this thread already runs an event loop."""
    if not in_event_loop():
        return asyncio.run(body)
    with ThreadPoolExecutor(1) as beside:
        return beside.submit(copy_context().run, asyncio.run, body).result()


class NoBackend(BaseBackend):
    """Backend of traces without a backend: has a chat template and supports all constraints, but can't run programs.

    Args:
        template: chat template; None for ChatML.
    """

    capabilities = Capabilities(ALL_CONSTRAINTS, images=True)

    def __init__(self, template: TurnTemplate | None = None) -> None:
        super().__init__()
        self.chat_template = template or get_chat_template("chatml")

    def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        raise TraceError("tracing can't run a program.", hint="Add it (s += program(…)), or use s.call(program).")

    async def aselect(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Selection:
        raise TraceError("tracing can't run a program.", hint="Add it (s += program(…)), or use s.call(program).")
