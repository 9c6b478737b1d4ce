"""Records of what is submitted to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_lite.program.nodes import Program
from sglang_lite.protocol import Constraint, Prompt, SamplingParams, Unset
from sglang_lite.runtime.resolved_params import LogitProcessor


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


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """A whole program that is to be played; `Engine.run_program` says what the fields mean."""

    prompt: Prompt | str
    program: Program
    stream: bool = False
    namespace: str = ""
