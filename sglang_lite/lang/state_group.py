"""Group of the states that a fork creates. They can be extended together and joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from sglang_lite.errors import with_article
from sglang_lite.lang.concurrency.variables import Variable, when_all_done
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.waits import Gathered
from sglang_lite.lang.expressions import is_constant
from sglang_lite.lang.states_table import states_table
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.program.nodes import Expression, JoinMode, not_addable
from sglang_lite.protocol import ParameterError, ProgramError

if TYPE_CHECKING:
    from sglang_lite.lang.state import ProgramState


class ProgramStateGroup:
    """States of the branches of a fork, as a sequence with `len`, indexing and iteration."""

    def __init__(
        self, states: Sequence[ProgramState], src_state: ProgramState | None = None
    ) -> None:
        self.states = list(states)
        self.src_state = src_state
        self._alike = src_state is not None  # whether all branches have received the same additions

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Passes the results of the branches to the state from which they were forked. Does not
        wait for the results.

        Args:
            mode: "gather_variable" (default): each variable that a branch has set since the fork
                becomes a list in that state, with one entry per branch, or None for a branch that
                has not set it. Reading the list raises the error of a branch that failed.
                "concate_and_append": in addition, the texts that the branches added are appended,
                one after another.
        """
        if self.src_state is None:
            raise ProgramError(
                "this group was not made by fork(), so there is nothing to join.",
                where=user_location(),
            )
        if mode not in ("gather_variable", "concate_and_append"):
            raise ParameterError(
                "mode",
                f"{mode!r} is not 'gather_variable' or 'concate_and_append'.",
                where=user_location(),
            )
        for state in (self.src_state, *self.states):
            state.branch.names.raise_if_removed(user_location())
        parent = self.src_state.branch
        children = [state.branch for state in self.states]
        parent.join(children, mode, user_location())
        own = [child.names.own_variables_by_name() for child in children]
        gathered = {
            name: _gather_variable(children, own, name)
            for name in dict.fromkeys(chain.from_iterable(own))
        }
        for name, variable in gathered.items():
            parent.names.declare(name, variable)

    def __repr__(self) -> str:
        return f"ProgramStateGroup({len(self)} states)"

    def _repr_html_(self) -> str:
        """Returns a table of the states and their variables, for notebooks."""
        return states_table(self.states, of_runs=False)

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        self._alike = False
        return iter(self.states)

    def __getitem__(self, i: int) -> ProgramState:
        self._alike = False
        try:
            return self.states[i]
        except IndexError:
            raise IndexError(
                f"there is no branch {i}: the fork has {len(self)}, numbered from 0."
            ) from None

    def __setitem__(self, i: int, value: ProgramState) -> None:
        if value is not self.states[i]:  # `group[i] += …` assigns the same state
            raise ProgramError("the branches of a fork can't be replaced.", where=user_location())

    def __iadd__(self, other: object) -> ProgramStateGroup:
        """Adds something to every branch: the same text or expression, the branch's item of a list,
        or the result of a function that is called with the branch's index.
        """
        where = user_location()
        if isinstance(other, str | Expression):
            alike = self._alike
            added = other
            if isinstance(other, Expression):
                self._alike = alike and is_constant(other)
                planner = self.states[0].branch.planner
                if planner is not None and alike and len(self) > 1:
                    added = planner.share_among_branches(other, len(self))
            each: Iterable[Any] = [added] * len(self.states)
        elif callable(other):
            each = [other(i) for i in range(len(self.states))]
        elif isinstance(other, list | tuple):
            if len(other) != len(self.states):
                raise ParameterError(
                    "+=",
                    f"{len(other)} items for {len(self.states)} branches. Give one for each.",
                    where=where,
                )
            each = other
        else:
            raise ParameterError(
                "+=",
                f"{with_article(type(other).__name__)} can't be added to a group.",
                hint="Give text, an expression, a list of them, or a function of the index.",
                where=where,
            )
        self._alike = self._alike and isinstance(other, str | Expression)
        for state, item in zip(self.states, each):
            if item is None:
                raise not_addable("+=", item, where)
            state.branch.submit_expression(item, where)
        return self


def _gather_variable(
    children: Sequence[Branch], own: Sequence[Mapping[str, Variable]], name: str
) -> Variable:
    """Creates a variable for the list of values that the branches have set for a name. The entry of
    a branch that has not set it is None. If a branch failed to produce its value, the variable
    fails with that error.

    Args:
        own: variables that each branch has made.
    """
    variables = [made.get(name) for made in own]
    gathered = Variable()
    declared = [variable for variable in variables if variable is not None]
    gathered.awaited = Gathered(declared)

    def set_or_fail() -> None:
        for child, variable in zip(children, variables):
            if variable is not None and (error := variable.error_or_none()) is not None:
                child.player.failure_reported = True
                if not gathered.done:
                    gathered.where = variable.where
                    gathered.set_error(error)
        if not gathered.done:
            gathered.record = [
                None if variable is None else variable.record for variable in variables
            ]
            # A cancellation may discard values meanwhile, but it then discards the list, too.
            gathered.set(
                [
                    None if variable is None else next(iter(variable.value_so_far()), None)
                    for variable in variables
                ]
            )

    when_all_done(declared, set_or_fail)
    return gathered


def adopt_variables(parent: Branch, child: Branch) -> None:
    """Adds the variables that the branch `child` has set to the branch `parent`."""
    for name, variable in child.names.own_variables_by_name().items():
        parent.names.declare(name, variable)
        variable.when_done(partial(_mark_failure_reported, child, variable))


def _mark_failure_reported(child: Branch, variable: Variable) -> None:
    """Marks the child's failure as reported if this variable of the child has failed, because the
    parent reports that error.
    """
    if variable.error_or_none() is not None:
        child.player.failure_reported = True
