"""Records of what is submitted to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_lite.program.nodes import Program
from sglang_lite.protocol import Constraint, OverloadedError, ParameterError, Prompt, SamplingParams, Unset
from sglang_lite.runtime.resolved_params import LogitProcessor, shown

MOST_QUEUED = 100_000  # nodes of one program that wait to be played


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A prompt that is to be continued; `Engine.submit` says what the fields mean."""

    prompt: Prompt | str | Sequence[int]
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    stream: bool = False
    namespace: str = ""
    priority: int = 0
    logit_processor: LogitProcessor | None = None
    rid: str | None = None

    def check(self) -> None:
        """Raises ParameterError: what says how it is run is of another type."""
        for name, value, kind in (("priority", self.priority, int), ("namespace", self.namespace, str)):
            if not isinstance(value, kind):
                raise ParameterError(name, f"{shown(value)} is no {kind.__name__}.")

    @property
    def samples(self) -> int:
        return 1 if isinstance(self.params.n, Unset) else self.params.n


@dataclass(frozen=True, slots=True)
class SelectRequest:
    """Choices that are to be scored; `Engine.submit_select` says what the fields mean."""

    prompt: Prompt | str
    choices: Sequence[str]
    unconditional: bool = False
    namespace: str = ""

    def check(self) -> None:
        """Raises ParameterError: it has no choices, or an empty one."""
        if not self.choices or not all(self.choices):
            raise no_choices()


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """A whole program that is to be played; `Engine.run_program` says what the fields mean."""

    prompt: Prompt | str
    program: Program
    stream: bool = False
    namespace: str = ""

    def check(self) -> None:
        """Raises OverloadedError: it has too many nodes."""
        if len(self.program.nodes) > MOST_QUEUED:
            raise too_many(len(self.program.nodes))


def no_choices() -> ParameterError:
    """The error of a selection that has none, or an empty one."""
    return ParameterError("choices", "at least one, and none empty.")


def too_many(waiting: int) -> OverloadedError:
    """The error of a program with more nodes to be played than may wait."""
    return OverloadedError(
        f"{waiting:,} nodes of the program wait to be played.",
        hint="Read a value now and then: that waits for what was added before.",
    )
