"""The variables of a branch, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from sglang_lite.lang.concurrency.variables import TextLog, Variable
from sglang_lite.protocol import SglError


class Names:
    """Names and their variables. A reader on another thread may be earlier than the body that declares a name: it waits
    for a promise, which is settled when the name is declared or never will be.

    Attributes:
        variables: by name; may be read on any thread.
        logs: streams of those that are generated while somebody may read them.
        scopes: of the names whose text is being collected; one may be inside another of its name.
    """

    __slots__ = ("_lock", "_promises", "logs", "scopes", "variables")

    def __init__(self) -> None:
        self.variables: dict[str, Variable] = {}
        self.logs: dict[str, TextLog] = {}
        self.scopes: dict[str, tuple[Variable, ...]] = {}
        self._lock = threading.Lock()
        self._promises: dict[str, Variable] = {}

    def declare(self, name: str, variable: Variable, log: TextLog | None = None) -> None:
        """Gives a name its variable, in place of the one it had."""
        with self._lock:
            if log is not None:  # first: who finds the variable looks for the log
                self.logs[name] = log
            self.variables[name] = variable
            promise = self._promises.pop(name, None) if self._promises else None
        if promise is not None:
            promise.set(None)

    def promise(self, name: str, fresh: Variable, refusal: Callable[[], SglError | None]) -> Variable:
        """A variable to wait for until a name is declared: `fresh`, or the one that others wait for.

        Args:
            refusal: why the name never will be.
        """
        with self._lock:
            if name in self.variables:
                return Variable.of(None)
            error = refusal()
            if error is not None:
                raise error
            return self._promises.setdefault(name, fresh)

    def close(self, unknown: Callable[[str], SglError]) -> None:
        """Ends the declaring of names: who waits for one is told that it will not come."""
        if not self._promises:
            return
        with self._lock:
            promises, self._promises = self._promises, {}
        for name, promise in promises.items():
            promise.fail(unknown(name))

    @property
    def awaited(self) -> bool:
        """True if somebody waits for a name."""
        return bool(self._promises)

    def own(self, outer: Mapping[str, Variable]) -> dict[str, Variable]:
        """Variables by name that are not those of the branch it was forked from."""
        return {name: variable for name, variable in self.variables.items() if outer.get(name) is not variable}

    def listed(self) -> str:
        return ", ".join(map(repr, self.variables)) or "none"
