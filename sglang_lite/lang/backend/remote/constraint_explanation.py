"""Explains how a backend would hold a generation to a constraint, before any call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sglang_lite.lang.backend.base import Backend, name_with_model
from sglang_lite.lang.backend.capabilities import CONSTRAINT_NAMES, Demands
from sglang_lite.lang.backend.ladder.strategy import Refusal, Strategy
from sglang_lite.lang.backend.remote.backend import RemoteBackend
from sglang_lite.lang.expressions import number_as_regex
from sglang_lite.program.nodes import Gen, Select
from sglang_lite.protocol import CapabilityError, Choices, Constraint, Number

_ALL = "all of it: the provider does not enforce it"


@dataclass(frozen=True, slots=True)
class ConstraintExplanation:
    """How a backend would hold a generation to a constraint. `str` shows it line by line.

    Attributes:
        constraint: kind of the constraint, such as "a JSON schema".
        backend: name of the backend, with its model.
        mode: "native", "emulated" or "refused".
        by: grammar engine that makes the masks, "scores" for choices, or the strategy of a remote
            backend; empty if the constraint is refused.
        refused: reasons why it is refused, each as (JSON Pointer into the schema, reason); ""
            points to all of it.
        checked: demands that are only checked in the finished value, in the form of `refused`.
        limits: where texts are restricted more, or less, than the constraint says, in words.
        fewest_tokens: number of tokens of the shortest text; a smaller `max_tokens` is refused.
            None if unknown.
    """

    constraint: str
    backend: str
    mode: Literal["native", "emulated", "refused"]
    by: str = ""
    refused: tuple[tuple[str, str], ...] = ()
    checked: tuple[tuple[str, str], ...] = ()
    limits: tuple[str, ...] = ()
    fewest_tokens: int | None = None

    def __str__(self) -> str:
        by = f" by {self.by}" if self.by else ""
        lines = [f"{self.constraint} on {self.backend}: {self.mode}{by}"]
        lines += [f"  refused: {_format_reason(each)}" for each in self.refused]
        lines += [
            f"  checked in the finished value: {_format_reason(each)}" for each in self.checked
        ]
        lines += [f"  limit: {each}" for each in self.limits]
        if self.fewest_tokens is not None:
            lines.append(f"  shortest text: {self.fewest_tokens:,} tokens")
        return "\n".join(lines)


def _format_reason(reason: tuple[str, str]) -> str:
    pointer, why = reason
    return f"{pointer}: {why}" if pointer else why


def explain_for_backend(
    backend: Backend,
    constraint: Constraint,
    checked: tuple[tuple[str, str], ...] = (),
    *,
    select: bool = False,
) -> ConstraintExplanation:
    """Explains how a backend would hold a generation to a constraint. Not for backends on an engine
    of this process.

    Args:
        backend: backend that would be called.
        constraint: constraint on the text.
        checked: demands of a Python type that no constraint expresses.
        select: whether the choices are to be scored, like those of `select`.
    """
    kind = CONSTRAINT_NAMES[type(constraint)]
    found = ConstraintExplanation(kind, name_with_model(backend), "native", checked=checked)
    limits: tuple[str, ...] = ()
    if isinstance(constraint, Number) and Number not in backend.capabilities.constraints:
        constraint = number_as_regex(constraint)
        limits = ("a number of at most 16 digits, as a regex",)
    demands = Demands("select" if select else "gen", constraint=constraint)
    if isinstance(backend, RemoteBackend):
        assert not select or isinstance(constraint, Choices)
        asked = (
            backend.selection(constraint.options)
            if isinstance(constraint, Choices) and select
            else demands
        )
        return _explain_strategy(replace(found, limits=limits), backend.strategy(asked))
    try:
        backend.check(Select("", ("",)) if select else Gen(""), demands, None)
    except CapabilityError as error:
        return replace(
            found, mode="refused", refused=(("", f"{error.message} {error.hint}".rstrip()),)
        )
    return replace(found, by="scores" if select else "the backend", limits=limits)


def _explain_strategy(
    found: ConstraintExplanation, strategy: Strategy | Refusal
) -> ConstraintExplanation:
    if isinstance(strategy, Refusal):
        reasons = strategy.reasons or (("", f"{strategy.feature}. {strategy.instead}"),)
        return replace(found, mode="refused", refused=reasons)
    fit = strategy.fit
    checked = found.checked
    limits = (*found.limits, *strategy.warnings)
    if strategy.name == "repair":
        checked = (("", _ALL), *checked)
    elif fit is not None:
        checked = (*fit.checked, *checked)
        limits += tuple(f"{pointer}: optional, and becomes required" for pointer in fit.required)
    otherwise = "" if strategy.fallback is None else f" or {strategy.fallback.name}"
    return replace(
        found, mode=strategy.mode, by=strategy.name + otherwise, checked=checked, limits=limits
    )
