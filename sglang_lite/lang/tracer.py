"""Tracing: running a program's body without a backend, to see its nodes.

What is not known yet is a symbol. A symbol can be added to a state and formatted into text (`f"{x}"` splits into the
text and the symbol); a body that asks it anything, such as whether it is true, raises TraceError at that line.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.interpreter import (
    ForkOp,
    GenOp,
    JoinOp,
    Op,
    ReadOp,
    Run,
    RunSettings,
    ScopeOp,
    SelectOp,
    StreamExecutor,
    current_run,
    nothing,
)
from sglang_lite.lang.ir import (
    SglConcateAndAppend,
    SglConstantText,
    SglExpr,
    SglExprList,
    SglFork,
    SglGen,
    SglGetForkItem,
    SglImage,
    SglSelect,
    SglVarScopeBegin,
    SglVarScopeEnd,
)
from sglang_lite.lang.state import ProgramState, ProgramStateGroup, user_location
from sglang_lite.protocol import Location, ProgramError

if TYPE_CHECKING:
    from sglang_lite.lang.function import SglFunction


class TraceError(ProgramError):
    """The body decides by a value that only a run has."""


class Symbol(SglExpr):
    """Something that is not known before the program runs."""

    __slots__ = ("_mark", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._mark = ""

    def mark(self) -> str:
        """Text that stands for the symbol until it is added to a state."""
        if not self._mark:
            number = next(_numbers)
            self._mark = f"\ue002{number}\ue003"
            _marked.get()[self._mark] = self
        return self._mark

    def __format__(self, spec: str) -> str:
        if spec:
            self.refuse("format it with a specification")
        return self.mark()

    def __str__(self) -> str:
        return self.mark()

    def refuse(self, what: str) -> NoReturn:
        raise TraceError(
            f"tracing can't {what}: {self!r} is only known when the program runs.",
            hint="Give the argument to trace(), or run the program.", where=user_location(),
        )  # fmt: skip

    def __bool__(self) -> bool:
        self.refuse("tell whether it is true")

    def __len__(self) -> int:
        self.refuse("tell how long it is")

    def __iter__(self) -> Any:
        self.refuse("go through it")

    def __int__(self) -> int:
        self.refuse("turn it into a number")

    def __float__(self) -> float:
        self.refuse("turn it into a number")

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        return self.refuse("compare it")

    def __lt__(self, other: object) -> bool:
        self.refuse("compare it")

    __le__ = __gt__ = __ge__ = __lt__

    def __hash__(self) -> int:
        return id(self)

    def __getitem__(self, key: Any) -> Symbol:
        return type(self)(f"{self.name}[{key!r}]")

    def __contains__(self, item: object) -> bool:
        self.refuse("tell what is in it")


class SglArgument(Symbol):
    """An argument that was not given."""

    __slots__ = ("value",)

    def __init__(self, name: str, value: Any = None) -> None:
        super().__init__(name)
        self.value = value

    def __repr__(self) -> str:
        return f"Argument(name={self.name!r})"


class SglVariable(Symbol):
    """The value of a node."""

    __slots__ = ("source",)

    def __init__(self, name: str, source: Any = None) -> None:
        super().__init__(name)
        self.source = source

    def __repr__(self) -> str:
        return f"Variable({self.name!r})"


_numbers = itertools.count()
_MARK = re.compile("(\ue002[0-9]+\ue003)")
_marked: ContextVar[dict[str, Symbol]] = ContextVar("sglang_lite_marks")


class TraceExecutor(StreamExecutor):
    """A branch that records instead of playing. Everything the submitting side checks is checked here too."""

    __slots__ = ("state",)

    state: TracerProgramState

    def facade(self) -> TracerProgramState:
        return self.state

    def submit(self, expr: Any, where: Location | None = None) -> None:
        if isinstance(expr, str) and "\ue002" in expr:
            for part in _MARK.split(expr):
                if part in _marked.get():
                    self.state._append(_marked.get()[part])
                elif part:
                    self._put(part)
        elif isinstance(expr, Symbol):
            self.state._append(expr)
        elif isinstance(expr, SglExprList):
            for node in expr.walk():
                self.submit(node.value if isinstance(node, SglConstantText) else node, where)
        elif isinstance(expr, SglImage):
            self.state._append(expr)
        elif isinstance(expr, SglVarScopeBegin | SglVarScopeEnd):
            self.state._append(expr)
            super().submit(expr, where)
        else:
            super().submit(expr, where)

    def _put(self, op: Op) -> None:
        state = self.state
        match op:
            case str():
                if op:
                    state._append(SglConstantText(op))
            case GenOp() | SelectOp():
                node: SglGen | SglSelect = op.node
                name = node.name or f"{'gen' if isinstance(op, GenOp) else 'select'}_{len(state.variables)}"
                state.variables[name] = SglVariable(name, node)
                op.cell.set(state.variables[name])
                state._append(node)
                if isinstance(op, GenOp) and op.thoughts is not None:
                    op.thoughts.set(SglVariable(f"{name}_reasoning_content", node))
            case ScopeOp():
                if not op.begins:
                    name = next(n for n, cell in self._cells.items() if cell is op.cell)
                    state.variables[name] = SglVariable(name, state.last_node)
                    op.cell.set(state.variables[name])
            case ForkOp():
                state._append(SglFork(len(op.children)))
            case JoinOp():
                state._append(SglConcateAndAppend(op.children))
            case ReadOp():
                if op.what is not nothing:
                    SglVariable("the text").refuse("read the text or the messages")
                op.cell.set(None)


class TracerProgramState(ProgramState):
    """A program as tracing sees it.

    Attributes:
        nodes: in the order they were added.
        last_node: the last of them.
        variables: name to SglVariable.
        child_states: of the forks and nested programs.
        arguments: what the body was called with.
    """

    def __init__(self, executor: TraceExecutor, arguments: dict[str, Any]) -> None:
        super().__init__(executor)
        executor.state = self
        self.arguments = arguments
        self.nodes: list[SglExpr] = []
        self.variables: dict[str, SglVariable] = {}
        self.child_states: list[TracerProgramState] = []
        self.on_node: Callable[[SglExpr], None] | None = None

    @property
    def last_node(self) -> SglExpr | None:
        return self.nodes[-1] if self.nodes else None

    def _append(self, node: SglExpr) -> None:
        self.nodes.append(node)
        if self.on_node is not None:
            self.on_node(node)

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        executor = self.stream_executor
        self._append(SglFork(size))
        children: list[ProgramState] = []
        for i in range(size):
            branch = TraceExecutor(executor.run, f"{executor.path}.{i}")
            branch._cells = dict(executor._cells)
            branch._turns, branch._role = list(executor._turns), executor._role
            child = TracerProgramState(branch, self.arguments)
            child.on_node = self.on_node
            child.variables = dict(self.variables)
            child.nodes.append(SglGetForkItem(i))
            self.child_states.append(child)
            children.append(child)
        return ProgramStateGroup(children, self)

    def __getitem__(self, name: str) -> Any:
        if name in self.arguments:
            return self.arguments[name]
        return super().__getitem__(name)

    get_var = __getitem__

    def flatten_nodes(self) -> list[SglExpr]:
        """The nodes, without lists."""
        return [part for node in self.nodes for part in node.walk()]

    def print_graph_dfs(self) -> None:
        """Prints the nodes, one a line, branches indented."""
        for line in self._lines(""):
            print(line)

    def _lines(self, indent: str) -> list[str]:
        lines = [f"{indent}%{i} = {node!r}" for i, node in enumerate(self.nodes)]
        return lines + [line for child in self.child_states for line in child._lines(indent + "  ")]

    def __repr__(self) -> str:
        return f"TracerProgramState({len(self.nodes)} nodes)"


class TracingScope:
    """`with TracingScope(state):` programs called inside are traced, as children of `state`. Of this context alone:
    other threads and tasks run theirs."""

    def __init__(self, tracer_state: TracerProgramState) -> None:
        self.tracer_state = tracer_state
        self._token: Token[TracingScope | None] | None = None

    def __enter__(self) -> TracingScope:
        self._token = _scope.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _scope.reset(self._token)

    @staticmethod
    def get_current_scope() -> TracingScope | None:
        return _scope.get()

    def add_child_state(self, state: TracerProgramState) -> None:
        self.tracer_state.child_states.append(state)


_scope: ContextVar[TracingScope | None] = ContextVar("sglang_lite_tracing", default=None)


class _Enough(Exception):  # noqa: N818 # it ends a trace on purpose
    pass


def trace_program(program: SglFunction, arguments: dict[str, Any], backend: BaseBackend | None) -> TracerProgramState:
    """Traces a program; arguments not given are symbols.

    Raises:
        TraceError: the body decides by a symbol.
    """
    state = _tracer(program, arguments, backend)
    _run_traced(program, state)
    return state


def extract_prefix_by_tracing(program: SglFunction, backend: BaseBackend | None) -> str:
    """The constant text that every run of a program starts with. Tracing stops at the first node that is no text."""
    state = _tracer(program, dict(program.bind_arguments), backend)

    def stop_at(node: SglExpr) -> None:
        if not isinstance(node, SglConstantText):
            raise _Enough

    state.on_node = stop_at
    with contextlib.suppress(_Enough, ProgramError):
        _run_traced(program, state)
    texts = itertools.takewhile(lambda node: isinstance(node, SglConstantText), state.flatten_nodes())
    return "".join(node.value for node in texts if isinstance(node, SglConstantText))


def _tracer(program: SglFunction, arguments: dict[str, Any], backend: BaseBackend | None) -> TracerProgramState:
    symbols = {name: SglArgument(name) for name in program.arg_names if name not in arguments}
    run = Run(backend or _Blank(), RunSettings(), is_async=program.is_async)
    state = TracerProgramState(TraceExecutor(run), {**arguments, **symbols})
    scope = TracingScope.get_current_scope()
    if scope is not None:
        scope.add_child_state(state)
    return state


def _run_traced(program: SglFunction, state: TracerProgramState) -> None:
    import asyncio

    marks = _marked.set({} if _scope.get() is None else _marked.get())
    token = current_run.set(state.stream_executor.run)
    try:
        with TracingScope(state):
            result = program.func(state, **state.arguments)
            state.ret_value = asyncio.run(result) if program.is_async else result
    finally:
        current_run.reset(token)
        _marked.reset(marks)


class _Blank(BaseBackend):
    """What a trace without a backend renders its roles with."""

    def __init__(self) -> None:
        super().__init__()
        self.chat_template = get_chat_template("chatml")
