"""Variables of a branch, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from sglang_lite.lang.concurrency.variables import TextLog, Variable
from sglang_lite.protocol import SglError


class Names:
    """Names of a branch and their variables. A reader on another thread may ask for a name before the body declares it:
    the reader waits for a promise, which is settled when the name is declared or can't be declared any more.

    Attributes:
        variables: variables by name; may be read on any thread.
        logs: text streams of generated variables, by name; only filled in streamed runs.
        scopes: open scopes by name, each a stack of variables, as a scope may contain another one of the same name.
    """

    __slots__ = ("_lock", "_promises", "logs", "scopes", "variables")

    def __init__(self) -> None:
        self.variables: dict[str, Variable] = {}
        self.logs: dict[str, TextLog] = {}
        self.scopes: dict[str, tuple[Variable, ...]] = {}
        self._lock = threading.Lock()
        self._promises: dict[str, Variable] = {}

    def declare(self, name: str, variable: Variable, log: TextLog | None = None) -> None:
        """Binds a name to a variable, in place of its previous one, and settles the promise for the name."""
        with self._lock:
            if log is not None:  # first: a reader that finds the variable looks for its log
                self.logs[name] = log
            self.variables[name] = variable
            promise = self._promises.pop(name, None) if self._promises else None
        if promise is not None:
            promise.set(None)

    def promise(self, name: str, fresh: Variable, refusal: Callable[[], SglError | None]) -> Variable:
        """Variable that is settled when a name is declared: `fresh`, or the one that other readers wait for already.

        Args:
            refusal: returns the error to raise if the name will never be declared, else None.
        """
        with self._lock:
            if name in self.variables:
                return Variable.of(None)
            error = refusal()
            if error is not None:
                raise error
            return self._promises.setdefault(name, fresh)

    def close(self, unknown: Callable[[str], SglError]) -> None:
        """Fails all promises: no name will be declared any more.

        Args:
            unknown: makes the error of a name.
        """
        if not self._promises:
            return
        with self._lock:
            promises, self._promises = self._promises, {}
        for name, promise in promises.items():
            promise.fail(unknown(name))

    @property
    def awaited(self) -> bool:
        """True if a reader waits for a name."""
        return bool(self._promises)

    def own(self, outer: Mapping[str, Variable]) -> dict[str, Variable]:
        """Variables that this branch has declared since its fork, by name.

        Args:
            outer: variables of the parent branch.
        """
        return {name: variable for name, variable in self.variables.items() if outer.get(name) is not variable}

    def listed(self) -> str:
        return ", ".join(map(repr, self.variables)) or "none"
