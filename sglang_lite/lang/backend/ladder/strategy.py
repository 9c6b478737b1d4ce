"""Records for the ladder: a strategy that serves a node, or the reason why the node is rejected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from sglang_lite.lang.backend.apis.api import Shape
from sglang_lite.lang.backend.ladder.object_constraints import JsonForm
from sglang_lite.lang.backend.ladder.schema_fit import Fit
from sglang_lite.lang.backend.profiles.profile import ApiName

Policy: TypeAlias = Literal["strict", "emulate", "warn"]
POLICIES: Final = ("strict", "emulate", "warn")
REPAIRS: Final = 2  # maximum number of repairs of an answer that breaks its constraint


@dataclass(frozen=True, slots=True)
class Strategy:
    """Strategy with which a node is served.

    Attributes:
        name: a strategy of `profile.STRATEGIES`; "free" for text without a constraint;
            "token_logprobs" for a choice by the alternatives of one token; "enum" for a choice in
            strict JSON; or "repair": generated, checked, and requested again with the error shown.
        api: API that is called.
        native: True if the provider itself honours the request, False if it is emulated.
        calls: number of calls at best and at worst.
        form: JSON object that the answer is read from, or None if the answer is the text.
        fit: JSON schema fitted to the provider, or None if the schema is sent unchanged.
        shape: form in which the answer is requested.
        alternatives: number of alternatives of a token that are requested.
        samples: number of calls that make the `n` samples; 1 if the API makes all samples in one
            call.
        stops: stop strings at which the finished text is cut here.
        left_out: parameters that are not sent, which only `policy="warn"` allows.
        warnings: differences from the request, in words.
        effort: amount of reasoning in the request, or None if the request sets none.
        fallback: strategy that serves the node if the model's answer with this one is useless.
    """

    name: str
    api: ApiName
    native: bool = True
    calls: tuple[int, int] = (1, 1)
    form: JsonForm | None = None
    fit: Fit | None = None
    shape: Shape = None
    alternatives: int = 0
    samples: int = 1
    stops: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    effort: str | None = None
    fallback: Strategy | None = None

    @property
    def mode(self) -> Literal["native", "emulated"]:
        return "native" if self.native else "emulated"

    def mark_as_emulated(self, warning: str, *left_out: str) -> Strategy:
        """Returns a copy of the strategy that is marked as emulated. The warning says how it
        differs from the request.

        Args:
            warning: difference, in words.
            *left_out: parameters that are not sent.
        """
        left_out = (*self.left_out, *left_out)
        warnings = (*self.warnings, warning)
        return replace(self, native=False, left_out=left_out, warnings=warnings)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why a node is not served.

    Attributes:
        feature: feature that can't be honoured.
        instead: advice on what to do instead.
        reasons: for a JSON schema, pointers to the parts that the provider does not accept, each
            with the reason.
    """

    feature: str
    instead: str
    reasons: tuple[tuple[str, str], ...] = ()
