"""Limits of a program, and the meter that checks them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

MAX_DEPTH: Final = 50  # levels of nested lists and dicts
MAX_BITS: Final = 4096  # bits of a whole number


@dataclass(frozen=True, slots=True)
class CodeLimits:
    """Limits of a program, named like the parameters of `CodeTools`."""

    max_steps: int
    max_memory: int
    max_calls: int
    max_result: int
    tool_timeout: float | None


class ProgramFault(Exception):  # noqa: N818 # it becomes a CodeError, which has the line
    """Raised if a program does something wrong while it runs.

    Args:
        kind: like in CodeError.
        problem: what was wrong.
        cure: hint for fixing it.
    """

    def __init__(self, kind: str, problem: str, cure: str) -> None:
        super().__init__(problem)
        self.kind = kind
        self.problem = problem
        self.cure = cure


class Meter:
    """Counter of a program's steps, memory and calls.

    Args:
        limits: the limits.
        stopped: set by another thread to end the program.
    """

    def __init__(self, limits: CodeLimits, stopped: threading.Event) -> None:
        self.limits = limits
        self._stopped = stopped
        self._steps = 0
        self._memory = 0
        self.calls = 0

    def count_steps(self, count: int = 1) -> None:
        """Counts steps. Raises ProgramFault if there were too many."""
        self._steps += count
        if self._steps > self.limits.max_steps:
            raise ProgramFault(
                "limit",
                f"the program takes more than max_steps={self.limits.max_steps:,} steps.",
                "Loop over fewer items.",
            )
        if self._stopped.is_set():
            raise ProgramFault("limit", "the time for the program is up.", "Do less.")

    def count_memory(self, size: int) -> None:
        """Counts the items or characters of a new value. Raises ProgramFault if there are too many."""
        self._memory += size
        if self._memory > self.limits.max_memory:
            raise ProgramFault(
                "limit",
                f"the program makes values of more than max_memory={self.limits.max_memory:,} items and characters.",
                "Keep less.",
            )

    def count_call(self) -> None:
        """Counts a call of a function. Raises ProgramFault if there were too many."""
        self.calls += 1
        if self.calls > self.limits.max_calls:
            raise ProgramFault(
                "limit",
                f"the program makes more than max_calls={self.limits.max_calls} calls.",
                "Make fewer calls.",
            )


def check_int(value: int) -> int:
    """Returns `value` itself. Raises ProgramFault if it is too large."""
    if value.bit_length() > MAX_BITS:
        raise ProgramFault(
            "limit", f"a number has more than {MAX_BITS} bits.", "Compute with smaller numbers."
        )
    return value
