"""Records of the ladder: what a node asks for, the way in which it is served, and why it is not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from sglang_lite.lang.backend.object_constraints import Form
from sglang_lite.lang.backend.profile import ApiName
from sglang_lite.lang.backend.schema_fit import Fit
from sglang_lite.protocol import Constraint, SamplingParams

Policy: TypeAlias = Literal["strict", "emulate", "warn"]
POLICIES: Final = ("strict", "emulate", "warn")
REPAIRS: Final = 2  # at most, of an answer that breaks its constraint


@dataclass(frozen=True, slots=True)
class Rung:
    """A way in which a node is served.

    Attributes:
        name: a rung of `profile.RUNGS`, "free" for text without a constraint, "token_logprobs" for a choice by the
            alternatives of one token, "enum" for one in strict JSON, or "repair": generated, checked, and asked for
            again with the error shown.
        api: the API that is asked.
        native: the provider keeps what was asked for; else it is emulated.
        calls: how many at best, and at worst.
        form: the JSON object that the answer is read from; None: the answer is the text.
        fit: what becomes of a JSON schema; None where it is sent as it is.
        strict: a schema that is sent is kept; else it is a hint.
        field: the value of the rung's own field in the request: a pattern, a grammar, a schema.
        samples: how many calls make up `n`; 1: the API makes all samples itself.
        stops: stop strings by which the finished text is cut here.
        left_out: parameters that are not sent, as `policy="warn"` allows.
        warnings: what is not as it was asked for, in words.
        effort: how much the model is told to reason; None: it is told nothing.
        otherwise: the rung that serves the node where the model's answer on this one is of no use.
    """

    name: str
    api: ApiName
    native: bool = True
    calls: tuple[int, int] = (1, 1)
    form: Form | None = None
    fit: Fit | None = None
    strict: bool = True
    field: Any = None
    samples: int = 1
    stops: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    effort: str | None = None
    otherwise: Rung | None = None

    @property
    def mode(self) -> Literal["native", "emulated"]:
        return "native" if self.native else "emulated"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason for which a node is not served.

    Attributes:
        feature: what can't be honoured.
        instead: what to do.
        reasons: of a JSON schema: pointers of what the provider does not take, and why.
    """

    feature: str
    instead: str
    reasons: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """Demands of a node.

    Attributes:
        kind: "gen", or "select" of one of the choices.
        params: the parameters that are set.
        constraint: of the text.
        scores: the choices' probabilities are wanted.
        effort: how much the model is to reason; None: as much as it does by itself.
    """

    kind: Literal["gen", "select"] = "gen"
    params: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    scores: bool = False
    effort: str | None = None
