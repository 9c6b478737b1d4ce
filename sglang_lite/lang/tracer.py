"""Tracing: running a program's body without a backend, to see its nodes.

What is not known yet is a symbol. A symbol can be added to a state and formatted into text (`f"{x}"` splits into the
text and the symbol), and so can its attributes and items, which are symbols too; a body that asks it anything, such as
whether it is true, raises TraceError at that line. (What can't be noticed: `x is None` and `repr(x)`.)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, Token, copy_context
from typing import Any, NoReturn

from sglang_lite.lang.backend.base_backend import ALL_CONSTRAINTS, BaseBackend, Capabilities
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.operations import GenOp, HookOp, JoinOp, MarkOp, Op, ReadOp, ScopeOp, SelectOp
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.reading import nothing
from sglang_lite.lang.execution.run import Run, RunSettings, current_run
from sglang_lite.lang.expressions import BaseProgram, SglGetForkItem, SglImage
from sglang_lite.lang.state import ProgramState, ProgramStateGroup, in_event_loop, user_location
from sglang_lite.program.nodes import (
    BaseNode,
    Expression,
    Expressions,
    Fork,
    GrammarBegin,
    Join,
    JoinMode,
    ScopeBegin,
    ScopeEnd,
    Text,
    TurnBegin,
    TurnEnd,
)
from sglang_lite.protocol import Location, ParameterError, ProgramError
from sglang_lite.protocol.sampling import Deferred


class TraceError(ProgramError):
    """The body decides by a value that only a run has."""


class _UnhashableError(TraceError, TypeError):
    pass


class _Own:
    """Attribute of a symbol itself. The body that is being traced sees the value's attribute of that name instead."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, symbol: Symbol, owner: type[Symbol]) -> Any:
        return getattr(symbol, f"_{self._name}") if _scope.get() is None else symbol._part(f".{self._name}")  # noqa: SLF001 # its own


class Symbol(Expression, Deferred):
    """Value that is not known before the program runs."""

    __slots__ = ("_mark", "_name")

    name = _Own("name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._mark = ""

    def _part(self, which: str) -> Symbol:
        return type(self)(self._name + which)

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("_"):
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        return self._part(f".{name}")

    def __getitem__(self, key: object) -> Symbol:
        return self._part(f"[{key!r}]")

    def __format__(self, spec: str) -> str:
        if spec:
            self._refuse("format it with a specification")
        return str(self)

    def __str__(self) -> str:
        """Text that stands for the symbol in a body that is being traced, until it is added to a state."""
        marked = _marked.get()
        if marked is None:
            return repr(self)
        self._mark = self._mark or f"\ue002{next(_numbers)}\ue003"
        marked[self._mark] = self
        return self._mark

    def _refuse(self, what: str, kind: type[TraceError] = TraceError) -> NoReturn:
        raise kind(
            f"tracing can't {what}: {self!r} is only known when the program runs.",
            hint="Give the argument to trace(), or run the program.", where=user_location(),
        )  # fmt: skip

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("call it")

    def __add__(self, other: object) -> Expressions:
        return super().__add__(self._summand(other))

    def __radd__(self, other: object) -> Expressions:
        return super().__radd__(self._summand(other))

    def _summand(self, other: Any) -> Any:
        return other if isinstance(other, str | Expression) else self._refuse("calculate with it")

    def __bool__(self) -> bool:
        self._refuse("tell whether it is true")

    def __len__(self) -> int:
        self._refuse("tell how long it is")

    def __iter__(self) -> Any:
        self._refuse("go through it")

    def __int__(self) -> int:
        self._refuse("turn it into a number")

    __index__ = __float__ = __int__

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        return self._refuse("compare it")

    def __lt__(self, other: object) -> bool:
        self._refuse("compare it")

    __le__ = __gt__ = __ge__ = __lt__

    def __hash__(self) -> int:
        self._refuse("look it up", _UnhashableError)

    def __contains__(self, item: object) -> bool:
        self._refuse("tell what is in it")


def _calculating(self: Symbol, *_: object) -> NoReturn:
    self._refuse("calculate with it")


for _operator in ("sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor"):
    setattr(Symbol, f"__{_operator}__", _calculating)
    setattr(Symbol, f"__r{_operator}__", _calculating)
for _operator in ("neg", "pos", "abs", "invert", "round"):
    setattr(Symbol, f"__{_operator}__", _calculating)


class SglArgument(Symbol):
    """An argument that was not given."""

    __slots__ = ("_value",)

    value = _Own("value")

    def __init__(self, name: str, value: object = None) -> None:
        super().__init__(name)
        self._value = value

    def __repr__(self) -> str:
        return f"Argument(name={self._name!r})"


class SglVariable(Symbol):
    """The value of a node."""

    __slots__ = ("_source",)

    source = _Own("source")

    def __init__(self, name: str, source: object = None) -> None:
        super().__init__(name)
        self._source = source

    def __repr__(self) -> str:
        return f"Variable({self._name!r})"


_CONSTANT = (Text, TurnBegin, TurnEnd, ScopeBegin, ScopeEnd)  # nodes with the same text in every run
_numbers = itertools.count()
_MARK = re.compile("(\ue002[0-9]+\ue003)")
_marked: ContextVar[dict[str, Symbol] | None] = ContextVar("sglang_lite_marks", default=None)


class TraceBranch(Branch):
    """A branch that records instead of playing. Everything the submitting side checks is checked here too."""

    __slots__ = ("state",)

    state: TracerProgramState

    def submit(self, expr: Expression | str, where: Location | None = None) -> None:
        if isinstance(expr, str):
            self._submit_text(expr, where)
        elif isinstance(expr, Expressions):
            for part in expr.walk():
                self.submit(part.text if isinstance(part, Text) else part, where)
        elif isinstance(expr, Symbol | SglImage):
            self.state.add(expr)
        else:
            super().submit(expr, where)

    def _submit_text(self, text: str, where: Location | None) -> None:
        """Text, in which marks stand for symbols."""
        marked = _marked.get() or {}
        for part in _MARK.split(text) if "\ue002" in text else (text,):
            if part in marked:
                self.state.add(marked[part])
            else:
                super().submit(part, where)

    def fork(self, size: int = 1, where: Location | None = None) -> list[Branch]:
        parent = self.state
        parent.add(Fork(((),) * size, where=where))
        branches: list[Branch] = []
        for i in range(size):
            branch = TraceBranch(Player(self.run), f"{self.path}.{i}")
            branch.inherit(self)
            child = TracerProgramState(branch, parent.arguments)
            child.on_node = parent.on_node
            child.variables = dict(parent.variables)
            child.nodes.append(SglGetForkItem(i))
            parent.child_states.append(child)
            branches.append(branch)
        return branches

    def join(self, children: list[Branch], mode: JoinMode, where: Location | None) -> None:
        self._put(JoinOp(Join(mode=mode, where=where), [], []))

    def read(self, what: Callable[[Player], Any], where: Location | None = None) -> Variable:
        if what is not nothing:
            SglVariable("the text")._refuse("read the text or the messages")  # noqa: SLF001 # names without _ are the user's
        return Variable.of(None)

    def _put(self, op: Op) -> None:
        """Records the node of an operation, instead of playing it."""
        state = self.state
        match op:
            case ReadOp() | HookOp() | MarkOp():
                return
            case BaseNode():
                node: BaseNode = op
            case _:
                node = op.node
        if isinstance(node, GrammarBegin):
            self._ahead = None  # what symbols stand for is not known
        if not isinstance(node, Text) or node.text:
            state.add(node)
        if isinstance(op, GenOp | SelectOp):
            name = op.node.name or f"{'gen' if isinstance(op, GenOp) else 'select'}_{len(state.variables)}"
            state.variables[name] = SglVariable(name, node)
            op.variable.set(state.variables[name])
            if isinstance(op, GenOp) and op.thoughts is not None:
                op.thoughts.set(SglVariable(f"{name}_reasoning_content", node))
        elif isinstance(op, ScopeOp) and isinstance(op.node, ScopeEnd):
            state.variables[op.node.name] = SglVariable(op.node.name, node)
            op.variable.set(state.variables[op.node.name])


class TracerProgramState(ProgramState):
    """A program as tracing sees it.

    Attributes:
        nodes: in the order they were added.
        last_node: the last of them.
        variables: name to SglVariable.
        child_states: of the forks and nested programs.
        arguments: what the body was called with.
    """

    def __init__(self, executor: TraceBranch, arguments: dict[str, Any]) -> None:
        super().__init__(executor)
        executor.state = self
        self.arguments = arguments
        self.nodes: list[Expression] = []
        self.variables: dict[str, SglVariable] = {}
        self.child_states: list[TracerProgramState] = []
        self.on_node: Callable[[Expression], None] | None = None

    @property
    def last_node(self) -> Expression | None:
        return self.nodes[-1] if self.nodes else None

    def add(self, node: Expression) -> None:
        self.nodes.append(node)
        if self.on_node is not None:
            self.on_node(node)

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        group = super().fork(size, position_ids_offset)
        return ProgramStateGroup([_state_of(child.branch) for child in group], self)

    def __getitem__(self, name: str) -> Any:
        if name in self.arguments:
            return self.arguments[name]
        return super().__getitem__(name)

    get_var = __getitem__

    def flatten_nodes(self) -> list[Expression]:
        """The nodes, without lists."""
        return [part for node in self.nodes for part in node.walk()]

    def print_graph_dfs(self) -> None:
        """Prints the nodes, one a line, branches indented."""
        for line in self._lines(""):
            print(line)

    def _lines(self, indent: str) -> list[str]:
        lines = [f"{indent}%{i} = {node!r}" for i, node in enumerate(self.nodes)]
        return lines + [line for child in self.child_states for line in child._lines(indent + "  ")]  # noqa: SLF001 # its own

    def __repr__(self) -> str:
        return f"TracerProgramState({len(self.nodes)} nodes)"


def _state_of(branch: Branch) -> TracerProgramState:
    assert isinstance(branch, TraceBranch)
    return branch.state


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


class _Enough(BaseException):  # it ends a trace on purpose, and no body may catch it
    pass


def trace_program(program: BaseProgram, arguments: dict[str, Any], backend: BaseBackend | None) -> TracerProgramState:
    """Traces a program; arguments not given are symbols.

    Raises:
        TraceError: the body decides by a symbol.
        ParameterError: the program has no such arguments.
    """
    state = _tracer(program, arguments, backend)
    _run_traced(program, state)
    return state


def extract_prefix_by_tracing(program: BaseProgram, backend: BaseBackend | None) -> str:
    """The constant text that every run of a program starts with. Tracing stops at the first node that is no text, or
    at what the body can't do with symbols."""
    state = _tracer(program, dict(program.bind_arguments), backend)

    def stop_at(node: Expression) -> None:
        if not isinstance(node, _CONSTANT):
            raise _Enough

    state.on_node = stop_at
    with contextlib.suppress(_Enough, Exception):
        _run_traced(program, state)
    texts = itertools.takewhile(lambda node: isinstance(node, _CONSTANT), state.flatten_nodes())
    return "".join(node.text for node in texts if isinstance(node, Text))


def _tracer(program: BaseProgram, arguments: dict[str, Any], backend: BaseBackend | None) -> TracerProgramState:
    parameters = program.signature.parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    symbols = {name: SglArgument(name) for name in names if name not in arguments}
    try:
        program.signature.bind(**arguments, **symbols)
    except TypeError as error:
        raise ParameterError("trace", f"{program.name}: {error}.", where=user_location()) from error
    run = Run(backend or _Blank(), RunSettings(), is_async=program.is_async, new_state=_state_of)
    state = TracerProgramState(TraceBranch(Player(run)), {**arguments, **symbols})
    scope = TracingScope.get_current_scope()
    if scope is not None:
        scope.add_child_state(state)
    return state


def _run_traced(program: BaseProgram, state: TracerProgramState) -> None:
    marks = _marked.set({} if _scope.get() is None else _marked.get())
    token = current_run.set(state.branch.run)
    try:
        with TracingScope(state):
            result = program.func(state, **state.arguments)
            state.ret_value = _awaited(result) if program.is_async else result
    finally:
        current_run.reset(token)
        _marked.reset(marks)


def _awaited(body: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine; where an event loop is running here already, from a thread beside it."""
    if not in_event_loop():
        return asyncio.run(body)
    with ThreadPoolExecutor(1) as beside:
        return beside.submit(copy_context().run, asyncio.run, body).result()


class _Blank(BaseBackend):
    """Backend that a trace renders its roles with where it has none."""

    capabilities = Capabilities(ALL_CONSTRAINTS, images=True)

    def __init__(self) -> None:
        super().__init__()
        self.chat_template = get_chat_template("chatml")
