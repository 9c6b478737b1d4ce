"""Check `tasks`: ten structured generations. All of them must be valid, and some should be right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field

from sglang_lite.commands.verify.records import Check
from sglang_lite.engine.engine import Engine
from sglang_lite.lang.api import function, gen
from sglang_lite.lang.state import ProgramState
from sglang_lite.protocol import SglError
from sglang_lite.protocol.anything import Json


@dataclass(frozen=True, slots=True)
class _Task:
    """Task with a known answer.

    Attributes:
        name: name of the task.
        prompt: text before the answer, with an example.
        options: constraint, as keywords of `gen`.
        valid: whether a value has the required form; shares no code with constraints.
        right: the right value.
    """

    name: str
    prompt: str
    options: Mapping[str, Any]
    valid: Callable[[Any], bool]
    right: object


class _Person(BaseModel):
    name: Annotated[str, Field(pattern=r"^[A-Z][a-z]{1,11}$")]
    age: Annotated[int, Field(ge=0, le=120)]


class _Order(BaseModel):
    item: Literal["lamp", "chair", "desk"]
    count: Annotated[int, Field(ge=1, le=99)]
    paid: bool


_COLOURS: Final = ("red", "green", "blue")
_LIST: Final = json.dumps(
    {"type": "array", "items": {"enum": list(_COLOURS)}, "minItems": 1, "maxItems": 3}
)
_CITY: Final = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "capital": {"type": "boolean"}},
        "required": ["city", "capital"],
        "additionalProperties": False,
    }
)


def _is_colour_list(value: object) -> bool:
    found = json.loads(str(value))
    return (
        isinstance(found, list) and 1 <= len(found) <= 3 and all(each in _COLOURS for each in found)
    )


def _is_city(value: object) -> bool:
    found = json.loads(str(value))
    return (
        set(found) == {"city", "capital"}
        and len(found["city"]) <= 12
        and isinstance(found["capital"], bool)
    )


def _build_pattern_predicate(pattern: str) -> Callable[[Any], bool]:
    return lambda value: re.fullmatch(pattern, str(value)) is not None


TASKS: Final = (
    _Task(
        "sentiment", "A joy from start to end => positive\nDull and far too long => negative\nI loved it =>",
        {"choices": [" positive", " negative"]}, lambda value: value in (" positive", " negative"), " positive",
    ),
    _Task(
        "ticket",
        "I was charged twice => billing\nThe app crashes => bug\nMy parcel is late => delivery\nThe screen freezes =>",
        {"choices": [" billing", " bug", " delivery"]},
        lambda value: value in (" billing", " bug", " delivery"), " bug",
    ),
    _Task(
        "date", "on 2021-07-09 we met => 2021-07-09\nit was made on 2024-03-05 in Rome => ",
        {"regex": r"\d{4}-\d{2}-\d{2}"}, _build_pattern_predicate(r"\d{4}-\d{2}-\d{2}"), "2024-03-05",
    ),
    _Task(
        "code", "order AB-1234 is late => AB-1234\nwhere is my parcel XK-7702? => ",
        {"regex": r"[A-Z]{2}-\d{4}"}, _build_pattern_predicate(r"[A-Z]{2}-\d{4}"), "XK-7702",
    ),
    _Task(
        "truth", "Paris is in France: true\nRome is in Spain: false\nBerlin is in Germany: ", {"type": bool},
        lambda value: isinstance(value, bool), True,
    ),
    _Task(
        "number", "Tim is 9 => 9\nHenrik is 71 years old => 71\nMaria, who is 34, sings => ",
        {"type": Annotated[int, Field(ge=0, le=120)]},
        lambda value: isinstance(value, int) and 0 <= value <= 120, 34,
    ),
    _Task(
        "colour", "grass: green\nblood: red\nthe sky: ", {"type": Literal["red", "green", "blue"]},
        lambda value: value in _COLOURS, "blue",
    ),
    _Task(
        "person", 'Tim is 9: {"name": "Tim", "age": 9}\nMaria, who is 34, sings: ', {"type": _Person},
        lambda value: isinstance(value, _Person) and re.fullmatch("[A-Z][a-z]{1,11}", value.name) is not None,
        _Person(name="Maria", age=34),
    ),
    _Task(
        "order",
        '2 desks, not paid: {"item": "desk", "count": 2, "paid": false}\n'
        '5 chairs, paid: {"item": "chair", "count": 5, "paid": true}\n3 lamps, paid: ',
        {"type": _Order}, lambda value: isinstance(value, _Order) and 1 <= value.count <= 99,
        _Order(item="lamp", count=3, paid=True),
    ),
    _Task(
        "list", 'grass and blood: ["green", "red"]\nthe sea and grass: ', {"json_schema": _LIST}, _is_colour_list,
        '["blue", "green"]',
    ),
)  # fmt: skip


@function
def _ask_task(s: ProgramState, task: _Task) -> None:
    s += task.prompt
    s += gen("answer", temperature=0, **task.options)


def check_tasks(engine: Engine) -> Check:
    """Runs the tasks. An answer without the required form fails; a wrong answer is only reported."""
    found: dict[str, Json] = {}
    invalid = []
    right = 0
    for task in TASKS:
        try:
            value = _ask_task.run(task, backend=engine, max_new_tokens=64)["answer"]
            valid = task.valid(value)
        except (SglError, ValueError, TypeError, KeyError) as error:
            value = f"{type(error).__name__}: {error}"
            valid = False
        if not valid:
            invalid.append(task.name)
        right += valid and value == task.right
        found[task.name] = {
            "valid": valid,
            "right": valid and value == task.right,
            "value": str(value),
        }
    summary = (
        f"{len(TASKS) - len(invalid)} of {len(TASKS)} structured answers are valid, {right} right"
    )
    if invalid:
        summary += f"; not valid: {', '.join(invalid)}"
    return Check(
        "tasks", "failed" if invalid else "passed", summary, {"tasks": found, "right": right}
    )
