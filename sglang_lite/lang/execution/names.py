"""Variables of a branch, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from sglang_lite.lang.concurrency.variables import Variable, copy_as_sgl_error
from sglang_lite.protocol import Location, SglError

# Declarations of a branch, as a chain that branches share: (declarations before, name, variable),
# or None for none.
History: TypeAlias = "tuple[History, str, Variable] | None"


class NamesAtMark(NamedTuple):
    """Names of a branch at a mark, for rolling back."""

    variables: dict[str, Variable]
    history: History
    scopes: dict[str, tuple[Variable, ...]]


class Names:
    """Names of a branch and their variables. A reader on another thread may ask for a name before
    the body declares it. The reader then waits for a promise, which is settled when the name is
    declared or can no longer be declared.

    Attributes:
        cut: True if the body ended with an exception before it could declare more names.
        gone: error of all reads and additions after a rollback removed the branch's fork; else
            None.
        variables: variables by name; may be read on any thread.
        history: all declarations, also those before the branch's fork, except those that a rollback
            removed.
        scopes: open scopes by name, each a stack of variables, as a scope may contain another one
            of the same name.
    """

    __slots__ = (
        "_forked",
        "_joined",
        "_lock",
        "_promises",
        "cut",
        "gone",
        "history",
        "scopes",
        "variables",
    )

    def __init__(self) -> None:
        self.variables: dict[str, Variable] = {}
        self.history: History = None
        self._forked: History = None  # the history at the fork
        self._joined: tuple[Variable, ...] = ()  # removed by a rollback after a join took them
        self.scopes: dict[str, tuple[Variable, ...]] = {}
        self.cut = False
        self.gone: SglError | None = None
        self._lock = threading.Lock()
        self._promises: dict[str, Variable] = {}

    def declare(self, name: str, variable: Variable) -> None:
        """Binds a name to a variable, replacing its previous one, and settles the promise for the
        name.
        """
        with self._lock:
            if self.gone is not None:
                raise copy_as_sgl_error(self.gone, variable.where)
            self.variables[name] = variable
            self.history = (self.history, name, variable)
            promise = self._promises.pop(name, None) if self._promises else None
        if promise is not None:
            promise.set(None)

    def promise(
        self, name: str, fresh: Variable, refusal: Callable[[], SglError | None]
    ) -> Variable:
        """Returns a variable that is settled when a name is declared. This is `fresh`, unless other
        readers already wait for another one.

        Args:
            refusal: returns the error to raise if the name will never be declared, else None.
        """
        with self._lock:
            self.raise_if_removed(fresh.where)
            if name in self.variables:
                return Variable.from_value(None)
            error = refusal()
            if error is not None:
                raise error
            return self._promises.setdefault(name, fresh)

    def fail_promises(self, unknown: Callable[[str], SglError]) -> None:
        """Fails all promises because no more names will be declared.

        Args:
            unknown: makes the error for a name.
        """
        if not self._promises:
            return
        with self._lock:
            promises = self._promises
            self._promises = {}
        for name, promise in promises.items():
            promise.set_error(unknown(name))

    def remove_all(self, error: SglError) -> None:
        """Removes all names because a rollback removed the branch's fork. All later uses raise
        `error`.
        """
        with self._lock:
            self.gone = self.gone or error
            self.variables = {}
        self.fail_promises(lambda name: error)

    def raise_if_removed(self, where: Location | None) -> None:
        """Raises an error if a rollback removed the branch's fork."""
        if self.gone is not None:
            raise copy_as_sgl_error(self.gone, where)

    @property
    def awaited(self) -> bool:
        """True if a reader waits for a name."""
        return bool(self._promises)

    def fork_from(self, parent: Names) -> None:
        """Initializes the names of a branch that is forked from `parent` here."""
        self.variables = dict(parent.variables)
        self.history = parent.history
        self._forked = parent.history

    def own_variables_by_name(self) -> dict[str, Variable]:
        """Returns the variables that this branch has declared since its fork, by name."""
        found: dict[str, Variable] = {}
        at = self.history
        while at is not None and at is not self._forked:
            at, name, variable = at
            found.setdefault(name, variable)
        return dict(reversed(found.items()))

    def own_variables(self) -> list[Variable]:
        """Returns all variables that this branch has declared since its fork, including those whose
        name was declared again. Variables that a rollback removed are included if a join had
        already gathered them.
        """
        found = [*self._joined]
        at = self.history
        while at is not None and at is not self._forked:
            at, _, variable = at
            found.append(variable)
        return found

    def first_variable(self, name: str) -> Variable | None:
        """Returns the first variable declared under a name, or None if there is none."""
        found = None
        at = self.history
        while at is not None:
            at, each, variable = at
            if each == name:
                found = variable
        return found

    def all_declarations(self) -> list[tuple[str, Variable]]:
        """Returns all declarations in order."""
        found = list[tuple[str, Variable]]()
        at = self.history
        while at is not None:
            at, name, variable = at
            found.append((name, variable))
        return found[::-1]

    def snapshot_names(self) -> NamesAtMark:
        return NamesAtMark(dict(self.variables), self.history, dict(self.scopes))

    def remove_declarations_after(self, to: NamesAtMark, joined: int) -> None:
        """Removes the declarations made after a mark.

        Args:
            to: the names at the mark.
            joined: number of the last node that a join has taken (`Waits`), or 0.
        """
        at = self.history
        while joined and at is not None and at is not to.history:
            at, _, variable = at
            if getattr(variable.awaited, "number", 0) <= joined:
                self._joined += (variable,)
        self.variables = dict(to.variables)
        self.history = to.history
        self.scopes = dict(to.scopes)

    def quote_names(self) -> str:
        return ", ".join(map(repr, self.variables)) or "none"
