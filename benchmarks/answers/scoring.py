"""What is right: counts for each case, their sums, and the interval of a difference between two ways."""

from __future__ import annotations

import inspect
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from benchmarks.answers.cases import Case
from benchmarks.answers.outcome import Outcome
from benchmarks.answers.schemas import SCHEMAS
from benchmarks.answers.toolbox import TOOLS, Tool

Counts = dict[str, int]


def normal(value: Any) -> Any:
    """A value for comparison: strings without case, surplus blanks and punctuation at their ends; numbers as floats."""
    if isinstance(value, str):
        value = unicodedata.normalize("NFC", value).replace("’", "'")
        return re.sub(r"\s+", " ", value).strip(" .,;:!?\"'“”„«»¿¡").casefold()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value


def equal(found: Any, truth: Any) -> bool:
    """Whether a value is the right one, or one of those if the truth is a list."""
    choices = truth if isinstance(truth, list) else [truth]
    return any(type(normal(found)) is type(normal(each)) and normal(found) == normal(each) for each in choices)


def score_extraction(case: Case, outcome: Outcome) -> Counts:
    names, answer = list(SCHEMAS[case["schema"]].model_fields), case["answer"]
    value = outcome.value if isinstance(outcome.value, dict) else None
    right = [value is not None and equal(value.get(name), answer.get(name)) for name in names]
    stated = [name in answer for name in names]
    return {
        "valid": int(value is not None),
        "fields": len(names),
        "right": sum(right),
        "stated": sum(stated),
        "found": sum(ok and here for ok, here in zip(right, stated)),
        "null": sum(value is not None and not here for here in stated),
        "invented": sum(value is not None and name not in answer and value.get(name) is not None for name in names),
    }


def valid_call(name: str, arguments: str, tools: Sequence[Tool]) -> dict[str, Any] | None:
    """Arguments of a call, as JSON values, or None if the tool isn't there or doesn't take them."""
    tool = {each.__name__: each for each in tools}.get(name)
    if tool is None:
        return None
    parameters = inspect.signature(tool, eval_str=True).parameters.values()
    fields: dict[str, Any] = {each.name: (each.annotation, ...) for each in parameters}
    model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    try:
        return model.model_validate_json(arguments, strict=True).model_dump(mode="json")
    except ValidationError:
        return None


def score_tools(case: Case, outcome: Outcome) -> Counts:
    """Right if exactly the expected calls were written, in any order."""
    tools = [TOOLS[name] for name in case["tools"]]
    read = [(name, valid_call(name, arguments, tools)) for name, arguments in outcome.calls]
    left = [*case["answer"]]
    for name, arguments in read:
        match = next((each for each in left if each["name"] == name and _same(arguments, each["arguments"])), None)
        if match is not None:
            left.remove(match)
    right = not outcome.error and not left and len(read) == len(case["answer"])
    return {"right": int(right), "of": 1, "invalid": sum(arguments is None for _, arguments in read)}


def _same(arguments: Mapping[str, Any] | None, expected: Mapping[str, Any]) -> bool:
    return arguments is not None and all(equal(arguments.get(name), value) for name, value in expected.items())


def score_labels(case: Case, outcome: Outcome) -> Counts:
    text = normal(outcome.value) if isinstance(outcome.value, str) else None
    return {"right": int(text == normal(case["answer"])), "of": 1, "valid": int(text in case["labels"])}


def score_agents(case: Case, outcome: Outcome) -> Counts:
    """Right if the world is what it should be at the end, whatever was said."""
    right = not outcome.error and _plain(outcome.value) == _plain(case["answer"])
    return {"right": int(right), "of": 1, "invalid": outcome.invalid}


def _plain(world: Any) -> Any:
    return {part: sorted((normal(key), normal(value)) for key, value in items.items()) for part, items in world.items()}


def score_quotes(case: Case, outcome: Outcome) -> Counts:
    text = outcome.value.strip().strip("\"“”„«»'") if isinstance(outcome.value, str) else ""
    return {
        "verbatim": int(bool(text) and text in case["text"]),
        "right": int(bool(text) and text in case["text"] and normal(text) == normal(case["answer"])),
        "of": 1,
    }


SCORES: dict[str, Callable[[Case, Outcome], Counts]] = {
    "extraction": score_extraction, "tools": score_tools, "labels": score_labels, "agents": score_agents,
    "quotes": score_quotes,
}  # fmt: skip


def total(counts: Sequence[Counts]) -> Counts:
    """Sums of counts."""
    return {key: sum(each[key] for each in counts) for key in counts[0]}


def interval(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], draws: int = 10_000
) -> tuple[float, float, float]:
    """Difference of the right shares of two ways in points, and its 95 % interval by a paired bootstrap over texts.

    Cases with the same `text` are drawn together; one without is a text of its own.
    """
    of = "fields" if "fields" in ours[0] else "of"
    by_text: dict[Any, list[float]] = {}
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        sums = by_text.setdefault(a.get("text", index), [0.0, 0.0])
        sums[0] += a["right"] - b["right"]
        sums[1] += a[of]
    gains, sizes = np.array([*by_text.values()]).T
    picks = np.random.default_rng(0).integers(len(gains), size=(draws, len(gains)))
    low, high = np.percentile(gains[picks].sum(1) / sizes[picks].sum(1), [2.5, 97.5])
    return 100 * float(gains.sum() / sizes.sum()), 100 * float(low), 100 * float(high)


def json_of(value: Any) -> Any:
    """A value as plain JSON data."""
    return json.loads(json.dumps(value, default=str))
