"""Scopes that `with` opens on a state: turns, variables and grammars, copies, checkpoints."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from sglang_lite.lang.execution.operations import BranchSnapshot
from sglang_lite.lang.state_group import adopt
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.program.nodes import Expression
from sglang_lite.protocol import ProgramError, SglError

if TYPE_CHECKING:
    from sglang_lite.lang.state import ProgramState
    from sglang_lite.lang.state_group import ProgramStateGroup


class Scope:
    """`with`: one expression before, one after, whatever happens between."""

    def __init__(self, state: ProgramState, begin: Expression, end: Expression) -> None:
        self._state, self._begin, self._end = state, begin, end

    def __enter__(self) -> ProgramState:
        self._state.branch.submit(self._begin, user_location())
        return self._state

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(*([SglError] if error is not None else [])):  # what the body raised is what counts
            self._state.branch.submit(self._end, user_location())


class CopyScope:
    """`with s.copy() as c`: a branch whose new variables are the state's own afterwards."""

    def __init__(self, state: ProgramState) -> None:
        self._state = state
        self._group: ProgramStateGroup | None = None

    def __enter__(self) -> ProgramState:
        self._group = self._state.fork(1)
        return self._group[0]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._group is not None
        adopt(self._state.branch, self._group[0].branch)


class Checkpoint:
    """A place in a program to come back to. Made by `s.checkpoint()`."""

    def __init__(self, state: ProgramState) -> None:
        self._state = state
        self._mark: BranchSnapshot | None = None

    def __enter__(self) -> Checkpoint:
        self._mark = self._state.branch.mark()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._mark = None

    def rollback(self) -> None:
        """Goes back: text, turns and variables are what they were when the checkpoint was made, and a program that
        has failed since works again. It may be called again.

        Raises:
            ProgramError: outside the `with`, or in a run with stream=True: shown text can't be taken back.
        """
        if self._mark is None:
            raise ProgramError("the checkpoint can only be rolled back inside its `with`.", where=user_location())
        self._state.branch.roll_back(self._mark, user_location())
