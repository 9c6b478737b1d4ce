"""Tracing: runs a program's body and records its nodes without executing them. Values that are only
known during a run are represented by symbols (symbolic/symbols.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, Token, copy_context
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from sglang_lite.lang.backend.base import ALL_CONSTRAINTS, Backend
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.default import BackendLike, as_backend
from sglang_lite.lang.backend.planning import Planner
from sglang_lite.lang.backend.remote.explain import TracedAnswer, TracedBackend
from sglang_lite.lang.backend.remote.planner import CallPlanner
from sglang_lite.lang.backend.remote.turn import Turn, TurnSource
from sglang_lite.lang.backend.remote.turn_plan import TurnContext, plan_turns
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.checks import check_whole_number
from sglang_lite.lang.concurrency.loop import in_event_loop
from sglang_lite.lang.execution.branch import Branch, find_raise_location
from sglang_lite.lang.execution.reading import variable_name_of
from sglang_lite.lang.execution.run import Run, RunSettings, current_run
from sglang_lite.lang.expressions import BaseProgram, SglGen, SglSelect, VariableName
from sglang_lite.lang.state import ProgramState, ProgramStateGroup, user_location
from sglang_lite.lang.symbolic.graph import Graph, build_graph, with_text_changes
from sglang_lite.lang.symbolic.recorder import (
    MAX_NODES,
    CutError,
    EndlessError,
    Recorder,
    TracedBranch,
    TracedGraph,
    TracedWay,
    is_tracing_limit,
)
from sglang_lite.lang.symbolic.symbols import MARK, SglArgument, SglVariable, Symbol, traced_way
from sglang_lite.lang.unawaited import must_await
from sglang_lite.notebook.markup import element, notebook_html
from sglang_lite.program.graph import Call
from sglang_lite.program.nodes import (
    BaseNode,
    Expression,
    Mark,
    ScopeBegin,
    ScopeEnd,
    Text,
    TurnBegin,
    TurnEnd,
)
from sglang_lite.protocol import UNSET, Location, ParameterError, ProgramError, Regex, TraceError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.text.chat_template import TurnTemplate

# Nodes without text, or with the same text in every run.
_CONSTANT = (Text, TurnBegin, TurnEnd, ScopeBegin, ScopeEnd, Mark, Call)


class StopTracing(Exception):  # noqa: N818 # SGLang's name
    """Exception that a body may raise to mark the end of the constant prefix that `cache` looks
    for.
    """


class TracerProgramState(ProgramState):
    """State of a program that is being traced, and the result of `trace()`.

    Args:
        program: program that is traced; None for branches, and for programs that a traced program
            calls.
        arguments: arguments of the body, including symbols for those that were not given.

    Attributes:
        paths: paths through the body that were followed.
        complete: whether all paths through the body were followed.
    """

    branch: TracedBranch

    def __init__(
        self,
        branch: Branch,
        program: BaseProgram | None = None,
        arguments: Mapping[str, UserValue] | None = None,
    ) -> None:
        super().__init__(branch)
        self._program = program
        self.arguments = arguments or {}
        self.paths: Sequence[TracedPath] = (TracedPath(self),)
        self.complete = True

    @property
    def nodes(self) -> list[Expression]:
        """Nodes and symbols in the order in which they were added."""
        return self.branch.player.expressions

    @property
    def last_node(self) -> Expression | None:
        """Last node of the state, or None if it has no nodes."""
        return self.nodes[-1] if self.nodes else None

    @property
    def variables(self) -> dict[str, SglVariable]:
        """Symbol of each variable, by name."""
        return self.branch.player.symbols

    @property
    def child_states(self) -> list[TracerProgramState]:
        """States of forks and of programs that the body calls."""
        return [
            state for state in self.branch.player.states if isinstance(state, TracerProgramState)
        ]

    @property
    def answers(self) -> Mapping[int, TracedAnswer]:
        """Generations and selections of a trace for `explain`. The keys are the ids of their nodes
        in the graph.
        """
        return self.branch.player.way.graph.answers

    def call(self, program: UserValue, *args: UserValue, **kwargs: UserValue) -> UserValue:
        if not isinstance(program, BaseProgram):
            return super().call(program)
        traced = trace_call(program, args, kwargs)
        return _as_coroutine(traced) if program.is_async and in_event_loop() else traced

    def fork(
        self, size: int = 1, position_ids_offset: list[int] | None = None
    ) -> ProgramStateGroup:
        group = super().fork(size, position_ids_offset)
        self.branch.player.states += group.states
        return group

    def __getitem__(self, name: VariableName) -> UserValue:
        value: UserValue = super().__getitem__(name)
        self.branch.player.way.record_variable_read(value)
        return value

    get_var = __getitem__

    @must_await
    async def get(self, name: VariableName) -> UserValue:
        return self[name]

    def _wait_for_record(self, name: VariableName) -> NoReturn:
        SglVariable(variable_name_of(name, user_location())).__refuse__(
            "read the metadata of a variable"
        )

    def graph(self) -> Graph:
        """Returns the graph of the program, with all paths through its body that were followed.
        Runs the body once more with the same arguments, to find texts that change from run to run.

        Raises:
            ProgramError: the state is a branch, or belongs to a program called by the traced one.
        """
        if self._program is None:
            raise ProgramError(
                "only the state that trace() returned has a graph.", where=user_location()
            )
        ways = [path.state.branch.player.way for path in self.paths]
        graph = build_graph(self._program, self.arguments, ways, complete=self.complete)
        again = _new_tracer_state(
            self._program, self.arguments, self.branch.backend, ways[0].forced
        )
        with contextlib.suppress(CutError, Exception):  # errors were handled in the first run
            _trace_body(self._program, again)
        return with_text_changes(
            graph, build_graph(self._program, {}, [again.branch.player.way], complete=False)
        )

    def flatten_nodes(self) -> list[Expression]:
        """Returns the nodes of the state as a new list. The list is flat, because no node contains
        others.
        """
        return list(self.nodes)

    def print_graph_dfs(self) -> None:
        """Prints one node per line, with branches indented."""
        for line in _format_nodes(self, ""):
            print(line)

    def __repr__(self) -> str:
        return f"TracerProgramState({len(self.nodes)} nodes)"

    def _repr_html_(self) -> str:
        """Returns the graph of the program as HTML, or for a branch the list of its nodes."""
        if self._program is None:
            return notebook_html(element("pre", "\n".join(_format_nodes(self, ""))))
        return notebook_html(self.graph().svg())


def _format_nodes(state: TracerProgramState, indent: str) -> list[str]:
    lines = [f"{indent}%{i} = {node!r}" for i, node in enumerate(state.nodes)]
    return lines + [
        line for child in state.child_states for line in _format_nodes(child, indent + "  ")
    ]


async def _as_coroutine(state: TracerProgramState) -> TracerProgramState:
    return state


class TracingScope:
    """Context manager that traces the programs called inside it, as children of `tracer_state`.
    Applies only to the current context: programs of other threads and tasks run normally.
    """

    def __init__(self, tracer_state: TracerProgramState) -> None:
        self.tracer_state = tracer_state
        self._tokens: tuple[Token[TracingScope | None], Token[TracedWay | None]] | None = None

    def __enter__(self) -> TracingScope:
        self._tokens = _scope.set(self), traced_way.set(self.tracer_state.branch.player.way)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._tokens is not None
        _scope.reset(self._tokens[0])
        traced_way.reset(self._tokens[1])

    @staticmethod
    def get_current_scope() -> TracingScope | None:
        return _scope.get()

    def add_child_state(self, state: TracerProgramState) -> None:
        self.tracer_state.branch.player.states.append(state)


_scope: ContextVar[TracingScope | None] = ContextVar("sglang_lite_tracing", default=None)


@dataclass(frozen=True, slots=True)
class TracedPath:
    """One path through a program's body.

    Attributes:
        state: state that the body was called with.
        error: exception that the body raised, or None.
        cut: whether the path was not followed to its end because it has too many decisions.
    """

    state: TracerProgramState
    error: Exception | None = None
    cut: bool = False


def trace_program(
    program: BaseProgram,
    arguments: dict[str, UserValue],
    backend: Backend | None,
    explore: int | None = None,
) -> TracerProgramState:
    """Traces a program and returns the state of the first path through its body.

    Args:
        arguments: arguments by name; the others are symbols.
        backend: backend whose chat template and capabilities apply; None for that of the enclosing
            traced program, or NoBackend.
        explore: maximum number of paths through the body to follow; None for one path without
            decisions.

    Raises:
        TraceError: the body decides by a symbol (with `explore`, in a way that can't be explored),
            or does not end.
        ParameterError: the arguments don't fit the program.
    """
    if explore is None:
        state = _new_tracer_state(program, arguments, backend)
        _trace_body(program, state)
        return state
    check_whole_number("explore", explore, 1, user_location())
    state = explore_ways(program, arguments, backend, explore)
    for path in state.paths:
        if isinstance(path.error, TraceError):
            raise path.error
    return state


def trace_call(
    program: BaseProgram, args: Sequence[UserValue], kwargs: dict[str, UserValue]
) -> TracerProgramState:
    """Traces a program that the body of a traced program calls. Ignores the settings of the run."""
    own = {name: value for name, value in kwargs.items() if name not in program.options}
    try:
        given = program.signature.bind_partial(*args).arguments
    except TypeError as error:
        raise ParameterError("call", f"{program.name}: {error}.", where=user_location()) from error
    return trace_program(program, {**program.bind_arguments, **given, **own}, None)


def explore_ways(
    program: BaseProgram, arguments: dict[str, UserValue], backend: Backend | None, most: int
) -> TracerProgramState:
    """Follows up to `most` paths through a body, breadth-first, and returns the state of the first
    path. That path takes the first outcome of each decision. Later paths vary the outcomes of
    earlier decisions first.
    """
    waiting: deque[tuple[int, ...]] = deque([()])
    paths: list[TracedPath] = []
    graph = TracedGraph()
    left = MAX_NODES
    while waiting and len(paths) < most and left > 0:
        forced = waiting.popleft()
        state = _new_tracer_state(program, arguments, backend, forced, graph)
        way = state.branch.player.way
        try:
            _trace_body(program, state)
        except CutError:
            way.cut = True
        except Exception as raised:  # raised by the user's body: the result of this way
            way.error = raised
        paths.append(TracedPath(state, way.error, way.cut))
        left -= len(way.ids)
        for i, decision in enumerate(way.decisions()[len(forced) :], len(forced)):
            others = ((*way.outcomes[:i], other) for other in range(1, len(decision.outcomes)))
            # further ones would not be used
            waiting.extend(itertools.islice(others, most + 1 - len(waiting)))
    over = all(
        not path.cut and not (path.error is not None and is_tracing_limit(path.error))
        for path in paths
    )
    first = paths[0].state
    first.paths = paths
    first.complete = over and not waiting
    return first


def extract_prefix_by_tracing(program: BaseProgram, backend: BackendLike | None) -> str:
    """Returns the constant text that every run of a program starts with. Tracing stops at the first
    node that is not constant text, or when the body raises an exception.
    """
    chosen = None if backend is None else as_backend(backend)
    state = _new_tracer_state(program, dict(program.bind_arguments), chosen, only=_CONSTANT)
    with contextlib.suppress(CutError, Exception):
        _trace_body(program, state)
    return "".join(node.text for node in state.flatten_nodes() if isinstance(node, Text))


def _new_tracer_state(
    program: BaseProgram,
    arguments: Mapping[str, UserValue],
    backend: Backend | None,
    forced: tuple[int, ...] | None = None,
    graph: TracedGraph | None = None,
    only: tuple[type[BaseNode], ...] | None = None,
) -> TracerProgramState:
    """Creates the state used to trace a program's body. For the arguments, see `explore_ways` and
    `TracedWay`.
    """
    parameters = program.signature.parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    bound = {**arguments, **{name: SglArgument(name) for name in names if name not in arguments}}
    try:
        program.signature.bind(**bound)
    except TypeError as error:
        raise ParameterError("trace", f"{program.name}: {error}.", where=user_location()) from error
    scope = TracingScope.get_current_scope()
    outer = None if scope is None else scope.tracer_state.branch
    chosen = backend or (NoBackend() if outer is None else outer.backend)
    run = Run(chosen, RunSettings(), is_async=program.is_async, new_state=TracerProgramState)
    planner = TracedPlanner(chosen) if isinstance(chosen, TracedBackend) else None
    if scope is None or outer is None:
        recorder = Recorder(run, TracedWay(graph or TracedGraph(), forced, only))
        return TracerProgramState(TracedBranch(recorder, planner=planner), program, bound)
    inner = TracedBranch(outer.player.record_call(run, program.name), planner=planner)
    state = TracerProgramState(inner, arguments=bound)
    scope.add_child_state(state)
    return state


def _trace_body(program: BaseProgram, state: TracerProgramState) -> None:
    inside = _scope.get() is not None
    token = current_run.set(state.branch.run)
    try:
        with TracingScope(state):
            result = program.func(state, **state.arguments)
            state.ret_value = run_coroutine_blocking(result) if program.is_async else result
        if not inside:
            state.branch.player.way.returns = state.ret_value is not None
    except RecursionError as error:
        if inside:
            raise
        raise EndlessError(
            f"{program.name} calls itself without an end.",
            hint="Bound the recursion by a value that is not a symbol.",
            where=find_raise_location(error),
        ) from None
    finally:
        current_run.reset(token)


def run_coroutine_blocking(body: Coroutine[object, object, UserValue]) -> UserValue:
    """Runs a coroutine and returns its result. If this thread already runs an event loop, the
    coroutine runs in a new thread.
    """
    if not in_event_loop():
        return asyncio.run(body)
    with ThreadPoolExecutor(1) as beside:
        return beside.submit(copy_context().run, asyncio.run, body).result()


class NoBackend(Backend):
    """Backend for traces without a given backend. It has a chat template and supports all
    constraints, but can't run programs.

    Args:
        template: chat template; None for ChatML.
    """

    capabilities = Capabilities(ALL_CONSTRAINTS, images=True, sounds=True, adapters=True)

    def __init__(self, template: TurnTemplate | None = None) -> None:
        super().__init__()
        self.chat_template = template or get_chat_template("chatml")

    def agenerate(self, *args: object, **kwargs: object) -> NoReturn:
        raise TraceError(
            "tracing can't run a program.", hint="Add it (s += program(…)), or use s.call(program)."
        )

    async def aselect(self, *args: object, **kwargs: object) -> NoReturn:
        self.agenerate()


_SOME_TEXT = Text("…")


class TracedPlanner(CallPlanner):
    """Planner of a trace. For `explain`, it stores in each generation and selection which turn it
    belongs to.
    """

    def __init__(self, backend: TracedBackend) -> None:
        super().__init__(backend.about, backend.facts, backend.about.shares_prompt_cost)

    def plan(
        self, expressions: Sequence[Expression], role: str | None, where: Location | None
    ) -> Sequence[Expression]:
        planned = list(expressions)
        context = TurnContext(self._backend, role, self._run, where)
        for i, (turn, index) in plan_turns(
            list(map(_replace_symbols, expressions)), context
        ).items():
            expression = planned[i]
            assert isinstance(expression, SglGen | SglSelect)
            planned[i] = msgspec.structs.replace(
                expression, source=TurnSource(Turn(turn, self._run), index)
            )
        return planned

    def may_share_call(self, own: SglGen, size: int) -> bool:
        known = _replace_symbols(own)
        assert isinstance(known, SglGen)
        return super().may_share_call(known, size)

    def fork(self, size: int) -> Sequence[Planner]:
        return [self] * size


def _replace_symbols(expression: Expression) -> Expression:
    match expression:
        case Symbol():
            return _SOME_TEXT
        case SglGen():
            node = expression.node
            constraint = Regex("[^\n]+") if _contains_symbol(node.constraint) else node.constraint
            changes = {
                name: UNSET
                for name in node.params.__struct_fields__
                if _contains_symbol(getattr(node.params, name))
            }
            params = msgspec.structs.replace(node.params, **changes)
            return msgspec.structs.replace(
                expression, node=msgspec.structs.replace(node, params=params, constraint=constraint)
            )
        case SglSelect() if _contains_symbol(expression.node.choices):
            return msgspec.structs.replace(
                expression, node=msgspec.structs.replace(expression.node, choices=("a", "b"))
            )
    return expression


def _contains_symbol(value: Any) -> bool:
    """Returns whether a value contains a symbol."""
    if isinstance(value, Symbol):
        return True
    return (
        value is not UNSET
        and MARK.search(msgspec.json.encode(value, enc_hook=str).decode()) is not None
    )
