"""Context managers of a state: turns, variable scopes, grammars, copies and checkpoints."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from sglang_lite.lang.execution.branch import BranchSnapshot
from sglang_lite.lang.state_group import adopt_variables
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.program.nodes import Expression
from sglang_lite.protocol import ProgramError, SglError

if TYPE_CHECKING:
    from sglang_lite.lang.state import ProgramState
    from sglang_lite.lang.state_group import ProgramStateGroup


class Scope:
    """Context manager that adds one expression to a state on entry and another on exit. The second
    one is added even after an exception.
    """

    def __init__(self, state: ProgramState, begin: Expression, end: Expression) -> None:
        self._state = state
        self._begin = begin
        self._end = end

    def __enter__(self) -> ProgramState:
        self._state.branch_after_body.submit_expression(self._begin, user_location())
        return self._state

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        # keeps the error of the `with` block
        with contextlib.suppress(*([SglError] if error is not None else [])):
            self._state.branch.submit_expression(self._end, user_location())


class CopyScope:
    """Context manager of `with s.copy() as c`. `c` is a branch forked from the state `s`. On exit,
    the variables that `c` has set are added to `s`.
    """

    def __init__(self, state: ProgramState) -> None:
        self._state = state
        self._group: ProgramStateGroup | None = None

    def __enter__(self) -> ProgramState:
        self._group = self._state.fork(1)
        return self._group[0]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._group is not None
        adopt_variables(self._state.branch, self._group[0].branch)


class Checkpoint:
    """Context manager of `with s.checkpoint() as c`. It marks a place in the program, to which
    `c.rollback()` returns.
    """

    def __init__(self, state: ProgramState) -> None:
        self._state = state
        self._mark: BranchSnapshot | None = None

    def __enter__(self) -> Checkpoint:
        self._mark = self._state.branch_after_body.mark(user_location())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._mark = None

    def rollback(self) -> None:
        """Restores the text, turns and variables that the program had at the checkpoint, and
        forgets any error since then. Can be called repeatedly.

        Raises:
            ProgramError: the `with` block has ended, or the run has stream=True, so that text may
                have been shown.
        """
        if self._mark is None:
            raise ProgramError(
                "the checkpoint can only be rolled back inside its `with`.", where=user_location()
            )
        self._state.branch.roll_back(self._mark, user_location())
