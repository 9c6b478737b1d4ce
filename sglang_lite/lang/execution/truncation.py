"""Answers that were cut by a limit: `gen(shortened="raise" | "warn" | "keep")`."""

from __future__ import annotations

import json
from typing import Any

from sglang_lite.constraints.answer_limit import estimate_max_answer_tokens
from sglang_lite.constraints.unfinished_json import create_unfinished_json
from sglang_lite.lang.execution.operations import GenOp
from sglang_lite.lang.execution.run import Run
from sglang_lite.protocol import (
    Constraint,
    Generation,
    ParameterError,
    SamplingParams,
    SglError,
    TruncatedError,
    Unset,
    ValueValidationError,
)

_WHOLE = ("",)  # JSON Pointers of an answer that is not a value
_SHOWN_POINTERS = 4  # pointers shown in a message


def is_constrained_answer_truncated(op: GenOp, generation: Generation) -> bool:
    """Returns True if a limit cut an answer that has a constraint."""
    return (
        generation.finish_reason == "length"
        and op.node.constraint is not None
        and not _only_scores_prompt(op.node.params)
    )


def _only_scores_prompt(params: SamplingParams) -> bool:
    return params.max_tokens == 0


def is_truncated_by_wind_down(run: Run, op: GenOp, generation: Generation) -> bool:
    """Returns True if an answer that has just arrived was cut because its run winds down, rather
    than by the generation's own limit.
    """
    limit = op.node.params.max_tokens
    return run.winds_down and (
        isinstance(limit, Unset) or generation.usage.completion_tokens < limit
    )


def truncation_policy(run: Run, op: GenOp, generation: Generation) -> str:
    """Returns the policy for an answer that was cut: the generation's setting, or else the run's.
    By default, a cut typed value or tool call is an error, and a cut text is kept with a warning.
    If the run's winding down has cut the answer, the default is to keep it with a warning.
    """
    own = op.expression
    of_run = run.settings.shortened
    if of_run is None and is_truncated_by_wind_down(run, op, generation):
        of_run = "warn"
    if own.options.shortened is not None:
        return own.options.shortened
    if of_run is not None:
        return of_run
    raises = own.is_typed or own.tools is not None or own.options.code is not None
    return "raise" if raises else "warn"


def missing_json_pointers(generation: Generation) -> tuple[str, ...]:
    """Returns JSON Pointers to the parts that are missing in a cut answer. The pointer "" stands
    for the whole value.
    """
    return generation.shortened or _WHOLE


def truncation_error(
    run: Run, op: GenOp, generation: Generation, text: str, problem: str = "it is no value"
) -> SglError:
    """Makes the error for an answer that was cut.

    Args:
        run: its run.
        op: the generation.
        generation: its answer.
        text: the answer without reasoning.
        problem: why the text is not a value.
    """
    winds_down = is_truncated_by_wind_down(run, op, generation)
    count = generation.usage.completion_tokens
    pointers = missing_json_pointers(generation)
    fewest = generation.meta.get("fewest_tokens")
    if isinstance(fewest, int) and not winds_down:
        return ParameterError(
            "max_tokens",
            f"leaves {count:,} tokens for {op.node.name!r}, and the shortest text of its constraint has {fewest:,}.",
            hint="Raise it, or shorten the prompt if the context is full.",
        )
    enough = _sufficient_limit(op, generation)
    missing = (
        problem.rstrip(".")
        if pointers == _WHOLE
        else f"what is missing: {_list_pointers(pointers)}"
    )
    keep = "" if pointers == _WHOLE else ', or shortened="keep" to take what there is'
    return TruncatedError(
        f"{op.node.name!r} was cut after {count:,} tokens: {missing}.",
        text=text,
        value=_partial_value(op, text, pointers),
        left_out=pointers,
        max_tokens=enough,
        hint=f"Raise the timeout of the run{keep}."
        if winds_down
        else f"Set max_tokens={enough}{keep}.",
    )


def truncation_warning(run: Run, op: GenOp, generation: Generation) -> str:
    """Returns the warning about an answer that was cut and is kept."""
    which = (
        "the default of max_tokens"
        if isinstance(op.node.params.max_tokens, Unset)
        else "max_tokens"
    )
    count = generation.usage.completion_tokens
    pointers = missing_json_pointers(generation)
    fewest = generation.meta.get("fewest_tokens")
    if is_truncated_by_wind_down(run, op, generation):
        which = "the timeout of the run"
    elif isinstance(fewest, int):
        return f"{which} cut {op.node.name!r} after {count} tokens: the shortest text of its constraint has {fewest}"
    lost = (
        "it is no value"
        if pointers == _WHOLE
        else f"{_list_pointers(pointers)} and what would follow is missing"
    )
    return f"{which} cut {op.node.name!r} after {count} tokens, {lost}: raise it"


def _list_pointers(pointers: tuple[str, ...]) -> str:
    """Formats the first pointers as a list, each shortened in the middle if it is long."""
    shown = [
        each if len(each) <= 80 else f"{each[:40]}…{each[-30:]}"
        for each in pointers[:_SHOWN_POINTERS]
    ]
    others = len(pointers) - len(shown)
    return ", ".join(shown) + (f" and {others} more" if others else "")


def _sufficient_limit(op: GenOp, generation: Generation) -> int:
    """Returns a token limit to suggest: at least twice the tokens that were generated, and enough
    for every value of the constraint if their length is bounded.
    """
    twice = 2 * max(generation.usage.completion_tokens, 32)
    constraint = op.node.constraint
    suffices = None if constraint is None else estimate_max_answer_tokens(constraint)
    return max(suffices or 0, twice)


def _partial_value(op: GenOp, text: str, pointers: tuple[str, ...]) -> Any:
    """Returns the known part of a cut value. It has the node's type if the text can be parsed as
    that type; otherwise it is plain data. Returns None if nothing is known.
    """
    value_type = op.expression.value_type
    constraint = op.expression.node.constraint
    if pointers != _WHOLE:
        try:
            return json.loads(text) if value_type is None else value_type.parse(text)
        except (ValueError, ValueValidationError, RecursionError):
            pass
    return None if constraint is None else _partial_data(constraint, text)


def _partial_data(constraint: Constraint, text: str) -> Any:
    reader = create_unfinished_json(constraint)
    if reader is None:
        return None
    reader.push(text)
    closed = reader.close_at_last_position()
    try:
        return json.loads(closed) if closed else None
    except (ValueError, RecursionError):
        return None
