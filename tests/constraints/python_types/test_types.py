"""Python types: what spells a value, and reading it back."""

import datetime
import enum
import os
import random
import re
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict

import pytest
from pydantic import BaseModel, Field, TypeAdapter

import sglang_lite as sgl
from sglang_lite.constraints.python_types.readable import make_readable
from sglang_lite.constraints.python_types.value_type import value_type
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.protocol import (
    Choices,
    ConstraintError,
    JsonSchema,
    Number,
    Regex,
    ValueValidationError,
)
from tests.constraints.python_regex import to_python
from tests.constraints.python_types.examples import (
    CHECKED,
    HELD,
    USUAL,
    WRONG,
    Checked,
    CheckedWhole,
    Coded,
    Plain,
)

SAMPLES = int(os.environ.get("SGLANG_LITE_TYPE_SAMPLES", "4"))


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Model(BaseModel):
    name: str
    tags: list[str] = Field(max_length=2)


@dataclass
class Point:
    x: int
    y: float | None = None


class Options(TypedDict):
    verbose: bool


READS = [
    (str, "any text", "any text"),
    (int, "-42", -42),
    (float, "3.5", 3.5),
    (bool, "true", True),
    (Colour, "red", Colour.RED),
    (Literal["a", 2, None], "2", 2),
    (datetime.date, "2024-02-29", datetime.date(2024, 2, 29)),
    (datetime.time, "23:59:01", datetime.time(23, 59, 1)),
    (datetime.datetime, "2024-05-01T10:00:00", datetime.datetime(2024, 5, 1, 10)),
    (list[int], "[1, 2]", [1, 2]),
    (dict[str, int], '{"a": 1}', {"a": 1}),
    (int | None, "null", None),
    (Annotated[int, Field(ge=1, le=5)], "3", 3),
    (Model, '{"name": "x", "tags": ["y"]}', Model(name="x", tags=["y"])),
    (Point, '{"x": 1, "y": 2.0}', Point(1, 2.0)),
    (Options, '{"verbose": false}', {"verbose": False}),
]


@pytest.mark.parametrize(("annotation", "text", "value"), READS)
def test_a_text_is_read_as_a_value_of_the_type(annotation, text, value):
    kind = value_type(annotation)
    assert kind.parse(text) == value
    if isinstance(kind.constraint, Regex):
        assert re.fullmatch(to_python(parse(kind.constraint.pattern)), text)


@pytest.mark.parametrize("annotation", [a for a, _, _ in READS if a is not str])
def test_whatever_satisfies_the_constraint_can_be_read(annotation):
    kind = value_type(annotation)
    rng = random.Random(1)
    for _ in range(30):
        kind.parse(sample(kind.constraint, rng))  # type: ignore[arg-type]  # no `str`


def test_scalars_are_bare_and_the_rest_is_json():
    assert value_type(str).constraint is None
    assert value_type(Colour).constraint == Choices(("red", "blue"))
    assert isinstance(value_type(Model).constraint, JsonSchema)
    assert value_type(int).constraint == Number("integer")


@pytest.mark.parametrize(
    "day", ["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01", "2024-13-01"]
)
def test_dates_that_do_not_exist_are_not_in_the_language(day):
    assert not re.fullmatch(to_python(parse(value_type(datetime.date).constraint.pattern)), day)


@pytest.mark.parametrize(
    ("annotation", "text"), [(int, "x"), (Model, '{"name": 3}'), (Colour, "[")]
)
def test_a_text_of_no_value_is_an_error_with_the_text(annotation, text):
    with pytest.raises((ValueValidationError, KeyError)) as caught:
        value_type(annotation).parse(text)
    if isinstance(caught.value, ValueValidationError):
        assert caught.value.text == text


@pytest.mark.parametrize("annotation", [object(), lambda: 0, enum.Enum("Empty", {})])
def test_what_is_no_type_is_refused(annotation):
    with pytest.raises(ConstraintError, match="type:"):
        value_type(annotation)


def test_a_members_time_has_no_leap_second():
    class Moment(BaseModel):
        at: datetime.time
        day: datetime.datetime

    kind, rng = value_type(Moment), random.Random(1)
    texts = [sample(kind.constraint, rng) for _ in range(300)]  # type: ignore[arg-type]  # no `str`
    assert all(isinstance(kind.parse(text), Moment) for text in texts)


def test_bytes_in_base64_end_as_pydantic_reads_them():
    kind = value_type(Coded)
    for seed in range(60):
        kind.parse(sample(kind.constraint, random.Random(seed)))  # type: ignore[arg-type]  # no `str`


@pytest.mark.sampled(4)
@pytest.mark.parametrize("annotation", [*HELD, *CHECKED], ids=lambda a: str(a)[:60])
def test_a_random_text_is_read_or_check_says_what_is_not_enforced(annotation):
    kind = value_type(annotation)
    assert bool(kind.checked) == (annotation in CHECKED)
    if kind.constraint is None or kind.checked:
        return
    for seed in range(SAMPLES):
        text = sample(kind.constraint, random.Random(seed))
        kind.parse(text)
        if isinstance(kind.constraint, JsonSchema):
            TypeAdapter(make_readable(annotation)).validate_json(text)


@pytest.mark.parametrize(("annotation", "text"), USUAL, ids=lambda each: str(each)[:60])
def test_texts_that_people_write_are_in_the_language(annotation, text):
    assert sgl.grammar.matches(annotation, text)


@pytest.mark.parametrize(("annotation", "text"), WRONG, ids=lambda each: str(each)[:60])
def test_texts_that_pydantic_refuses_are_not(annotation, text):
    constraint = value_type(annotation).constraint
    assert not sgl.grammar.matches(constraint, text)


def test_check_names_what_is_checked_when_a_text_is_read():
    assert sgl.grammar.check(Plain).checked == ()
    assert sgl.grammar.check(list[Checked]).checked == (
        ("/$defs/Checked/properties/a", "by the function Checked.check_a"),
    )
    assert [pointer for pointer, _ in sgl.grammar.check(CheckedWhole).checked] == [""]


@pytest.mark.parametrize(
    "annotation",
    [
        dict[tuple[int, int], str],
        dict[None, int],
        dict[Literal[1, 2], int],
        list[Literal[Colour.RED]],
        list[Literal[b"x"]],
        type[int],
        list[enum.Enum("Pairs", {"A": (1, 2)})],
    ],
    ids=str,
)
def test_types_that_json_has_no_values_of_are_refused_by_name(annotation):
    with pytest.raises(ConstraintError, match=r"type: .* has no JSON schema: .*WithJsonSchema"):
        value_type(annotation)


def test_a_value_of_a_type_comes_of_its_text():
    assert sgl.grammar.validate(Point, '{"x": 1}') == Point(1)
    assert sgl.grammar.validate(int, "3") == 3
    with pytest.raises(ValueValidationError):
        sgl.grammar.validate(Checked, '{"a": 1, "b": ""}')
    assert not sgl.grammar.matches(Checked, '{"a": 1, "b": ""}')
    assert sgl.grammar.matches(Checked, '{"a": 2, "b": ""}')
