"""Execution of scripts: repeats the actions of a compiled body with the values of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_lite.lang.body_run import start_thread
from sglang_lite.lang.compilation.compile_symbols import CompileSymbol, origin_of, resolve_symbols
from sglang_lite.lang.compilation.script import (
    Action,
    Adopted,
    Assigned,
    Called,
    Forked,
    Joined,
    Marked,
    Read,
    RolledBack,
    Script,
    Submitted,
)
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.operations import BranchSnapshot
from sglang_lite.lang.execution.reading import finished, nothing
from sglang_lite.lang.expressions import SglGen, SglSelect
from sglang_lite.lang.state import ProgramState, ProgramStateGroup
from sglang_lite.lang.state_group import adopt
from sglang_lite.program.nodes import Path, ScopeEnd
from sglang_lite.protocol.anything import UserValue


@dataclass(slots=True, eq=False)
class ScriptRun:
    """Execution of a script in a run.

    Attributes:
        row: arguments by name.
        states: states of the run, by the numbers of their branches; initially the main one.
        fill_expression: called with each addition before it is made; returns the expression with the arguments in its
            holes.
        values: variables of generations and selections, by the paths of their nodes.
    """

    row: Mapping[str, Any]
    states: dict[int, ProgramState]
    fill_expression: Callable[[Submitted], Any]
    values: dict[Path, Variable] = field(default_factory=dict)
    _variables: dict[tuple[int, str], Variable] = field(default_factory=dict)  # by action and name
    _marks: dict[int, BranchSnapshot] = field(default_factory=dict)

    def value_of(self, source: tuple[int, str] | None, argument: str) -> UserValue:
        """Value of an action's variable, or of an argument if `source` is None."""
        return self.row[argument] if source is None else self._variables[source].result()

    def perform(self, script: Script, start: int, stop: int) -> Iterator[Variable]:
        """Performs the actions from `start` up to `stop`. Yields variables that have to be set before the next action.

        Raises:
            Exception: the body would raise it here.
        """
        for number in range(start, stop):
            yield from self._perform_action(number, script.actions[number])

    def _perform_action(self, number: int, action: Action) -> Iterator[Variable]:
        state = self.states[action.branch or 0]
        branch = state.branch
        match action:
            case Submitted():
                self._submit(number, action)
            case Forked(children=children, where=where):
                self.states.update(zip(children, map(ProgramState, branch.fork(len(children), where))))
            case Joined(children=children, mode=mode):
                ProgramStateGroup([self.states[child] for child in children], state).join(mode)
            case Adopted(child=child):
                adopt(branch, self.states[child].branch)
            case Assigned(name=name, value=value):
                state.set_var(name, resolve_symbols(value, self.value_of))
            case Marked():
                self._marks[number] = branch.mark(None)
            case RolledBack(mark=mark, where=where):
                branch.roll_back(self._marks[mark], where)
            case Read(name=name, where=where):
                variable = branch.read(nothing, where) if name is None else branch.names.variables[name]
                yield variable
                if name is not None and variable.error() is not None:
                    branch.player.failure_reported = True
                variable.result()
            case Called():
                yield (result := self._call(number, action))
                if (error := result.error()) is not None:
                    raise error

    def _submit(self, number: int, action: Submitted) -> None:
        branch, expression = self.states[action.branch].branch, self.fill_expression(action)
        if isinstance(expression, CompileSymbol) and origin_of(expression).argument:
            expression = str(resolve_symbols(expression, self.value_of))
        branch.submit(resolve_symbols(expression, self.value_of), action.where)
        names = [expression.name] if isinstance(expression, ScopeEnd) else []
        if isinstance(expression, SglGen | SglSelect) and expression.node.name is not None:
            names = [expression.node.name, f"{expression.node.name}_reasoning_content"]
        for name in names:
            if (variable := branch.names.variables.get(name)) is not None:
                self._variables[number, name] = variable
        if names and action.path is not None:
            self.values[action.path] = branch.names.variables[names[0]]

    def _call(self, number: int, action: Called) -> Variable:
        """Calls the user's Python in a new thread, since the call may block. Returns a variable for the result."""
        result = self._variables[number, ""] = Variable(action.where)
        function = action.function
        if action.branch is not None:
            function = getattr(self.states[action.branch], function)

        def call() -> None:
            try:
                args = resolve_symbols(action.args, self.value_of)
                kwargs = resolve_symbols(action.kwargs, self.value_of)
                value = resolve_symbols(function, self.value_of)(*args, **kwargs)
                if isinstance(value, ProgramState):  # reads of the state must not block
                    finished(value.branch.player).wait()
                result.set(value)
            except BaseException as error:  # raised again by the script
                result.fail(error)

        start_thread(call)
        return result
