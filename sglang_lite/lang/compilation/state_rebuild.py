"""Rebuilding of a run's state from the results of nodes that were played elsewhere, by repeating its script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.backend.delegating_backend import DelegatingBackend
from sglang_lite.lang.compilation.compile_symbols import resolved
from sglang_lite.lang.compilation.script import Script, Submitted
from sglang_lite.lang.compilation.script_run import ScriptRun
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.run import BoundCall, Run, RunSettings
from sglang_lite.lang.expressions import SglGen, SglSelect
from sglang_lite.lang.state import ProgramState
from sglang_lite.program.choosing import METHODS, decide
from sglang_lite.program.control_flow import node_at
from sglang_lite.program.nodes import Node, Path
from sglang_lite.protocol import (
    Constraint,
    Delta,
    Generation,
    Played,
    ProgramError,
    ProgramEvent,
    ProgramResult,
    Prompt,
    SamplingParams,
    Selection,
    SglError,
    Usage,
)
from sglang_lite.protocol.anything import UserValue

Brought: TypeAlias = "Generation | list[Generation] | Selection | SglError"


@dataclass(slots=True, eq=False)
class RowResult:
    """Results of a played program.

    Attributes:
        brought: results or errors by the paths of their nodes; a list for several samples.
        end: result or error of the whole program, or None before its end.
        failed: whether a node or the whole program has failed.
        seconds: duration of the run.
    """

    brought: dict[Path, Brought] = field(default_factory=dict)
    end: ProgramResult | SglError | None = None
    failed: bool = False
    seconds: float = 0.0

    def take(self, event: ProgramEvent) -> bool:
        """Records an event. Returns True if it was the last one."""
        if type(event) is not Played:
            assert not isinstance(event, Played)
            self.end = event
            self.failed = self.failed or isinstance(event, SglError)
            return True
        found = event.event
        if type(found) is Generation:
            before = self.brought.setdefault(event.path, found)
            if before is not found:
                samples = before if isinstance(before, list) else [before]
                self.brought[event.path] = [*samples, found]
        elif not isinstance(found, Delta):
            self.brought[event.path] = found
            self.failed = self.failed or isinstance(found, SglError)
        return False


def text_of(found: Brought, node: UserValue) -> str | list[str]:
    """Text of a node's result, or a list of the texts of several samples. Raises LookupError if the node has failed."""
    if isinstance(found, Generation):
        return found.text
    if isinstance(found, list):
        return [each.text for each in sorted(found, key=lambda each: each.index)]
    if isinstance(found, Selection):
        return decide(found, node.choices, METHODS[node.method], node.temperature, node.seed).decision
    raise LookupError


class PlayedAnswers(DelegatingBackend):
    """Backend that answers immediately with the results of a played program.

    Args:
        backend: backend that played the program.
        result: results of the program.

    Attributes:
        path: path of the node that is answered next.
    """

    def __init__(self, backend: BaseBackend, result: RowResult) -> None:
        super().__init__(backend)
        self._result, self.enforces = result, backend.enforces
        self.path: Path | None = None

    def answer_now(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None
    ) -> Sequence[Generation] | None:
        found = self._brought()
        if isinstance(found, list):
            return sorted(found, key=lambda each: each.index)
        assert isinstance(found, Generation)
        return (found,)

    def select_now(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Selection | None:
        found = self._brought()
        assert isinstance(found, Selection)
        return found

    def usages(self, paths: Sequence[Path]) -> list[Usage | None]:
        """Usages of the nodes with these paths that are generations."""
        found = (self._result.brought.get(path) for path in paths)
        return [each.usage for each in found if isinstance(each, Generation)]

    def _brought(self) -> Brought:
        found = None if self.path is None else self._result.brought.get(self.path)
        if found is None:
            found = self._result.end if isinstance(self._result.end, SglError) else None
        if found is None:
            found = ProgramError("the node was not played.")
        if isinstance(found, SglError):
            raise found
        return found


def rebuilt_state(
    script: Script, nodes: Sequence[Node], row: Mapping[str, UserValue], result: RowResult, backend: BaseBackend,
    settings: RunSettings, called: BoundCall,
) -> tuple[ProgramState, SglError | None]:  # fmt: skip
    """State of a run, and the error that the script raises, or None.

    Args:
        script: script of the way that the run took.
        nodes: nodes that were played.
        row: arguments by name.
        result: results of the nodes.
        backend: backend that played them.
        settings: settings of the run, with the seed of its draws.
        called: call of the program.
    """
    answers = PlayedAnswers(backend, result)
    run = Run(answers, replace(settings, timeout=None), new_state=ProgramState)
    run.called = called

    def asks(action: Submitted) -> Any:
        run.account.failed(answers.usages(action.refused))
        answers.path, expression = action.path, action.expression
        if not action.holes:
            return expression
        node = node_at(nodes, action.path or ())
        return replace(expression, node=node) if isinstance(expression, SglGen | SglSelect) else node

    state = ProgramState(Branch(Player(run)))
    script_run = ScriptRun(row, {0: state}, asks)
    raised: SglError | None = None
    try:
        for variable in script_run.do(script, 0, len(script.actions)):
            variable.wait()
        state.ret_value = resolved(script.result, script_run.of)
    except SglError as error:
        state.branch.abandon(error)
        raised = error
    finally:
        state.branch.end()
    run.account.took(result.seconds)
    run.backend, run.settings = backend, settings
    for each in script_run.states.values():
        each.branch.continue_on(backend)
    return state, raised
