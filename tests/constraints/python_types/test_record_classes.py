"""attrs classes and msgspec Structs as types: the schema, the values, and errors with their places."""

import dataclasses
import json
import random
import typing
from typing import Annotated, Literal

import attrs
import msgspec
import pydantic
import pytest

import sglang_lite as sgl
from sglang_lite.constraints.python_types.partial import partial_reader
from sglang_lite.constraints.python_types.value_type import value_type
from sglang_lite.constraints.random_texts import sample
from sglang_lite.protocol import ConstraintError, JsonSchema, ValueValidationError


class Address(msgspec.Struct, frozen=True, rename="camel"):
    street_name: str
    floor: Annotated[int, msgspec.Meta(ge=0, le=90)] = 1


class Person(msgspec.Struct, kw_only=True):
    """Somebody."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=20)]
    homes: list[Address] = []
    nick: str | msgspec.UnsetType | None = msgspec.UNSET
    friends: "list[Person]" = msgspec.field(default_factory=list)


class Cat(msgspec.Struct, tag="cat"):
    lives: Literal[7, 9]


class Dog(msgspec.Struct, tag="dog"):
    age: Annotated[float, msgspec.Meta(gt=0, lt=30)]


class Even(msgspec.Struct):
    number: int

    def __post_init__(self):
        if self.number % 2:
            raise ValueError(f"{self.number} is odd")


@attrs.define
class Point:
    x: int
    _y: int = attrs.field(default=3)
    label: str | None = None
    norm: int = attrs.field(init=False, default=0)


@attrs.frozen(kw_only=True)
class Path:
    name: str
    points: list[Point] = attrs.field(factory=list)
    below: "Path | None" = None


@attrs.define
class Grade:
    value: int = attrs.field(validator=attrs.validators.in_(range(1, 7)))


@attrs.define
class Lost:
    a: "Missing"  # type: ignore[name-defined]  # noqa: F821 # the fault


@attrs.define
class Mixed:
    at: Point
    owner: Person
    pets: dict[str, Cat | Dog]


class PointModel(pydantic.BaseModel):
    x: int
    y: int = 3
    label: str | None = None


class AddressModel(pydantic.BaseModel):
    street_name: str = pydantic.Field(alias="streetName")
    floor: int = pydantic.Field(1, ge=0, le=90)


def schema_of(annotation):
    constraint = value_type(annotation).constraint
    assert isinstance(constraint, JsonSchema)
    return constraint


@pytest.mark.parametrize(("cls", "model"), [(Point, PointModel), (Address, AddressModel)])
def test_the_schema_is_that_of_a_model_with_the_same_fields(cls, model):
    def properties(annotation):
        found = json.loads(schema_of(annotation).schema)
        return [
            {k: v for k, v in each.items() if k != "title"} for each in found["properties"].values()
        ], {key: found.get(key) for key in ("type", "required", "additionalProperties")}

    assert properties(cls) == properties(model)


@pytest.mark.parametrize(
    "annotation", [Address, Person, Cat, Cat | Dog, list[Address], dict[str, Cat | Dog]]
)
def test_random_texts_of_structs_are_read_as_msgspec_reads_them(annotation):
    rng = random.Random(1)
    kind = value_type(annotation)
    for _ in range(8):
        text = sample(schema_of(annotation), rng)
        assert kind.parse(text) == msgspec.json.decode(text, type=annotation)


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (Point, '{"x": 1}', Point(1)),
        (Point, '{"x": 1, "y": 2, "label": "a"}', Point(1, 2, "a")),
        (Path, '{"name": "a", "below": {"name": "b", "points": [{"x": 1}]}}',
         Path(name="a", below=Path(name="b", points=[Point(1)]))),
        (Person, '{"name": "Ann", "homes": [{"streetName": "Elm"}], "friends": [{"name": "Bo", "nick": null}]}',
         Person(name="Ann", homes=[Address("Elm")], friends=[Person(name="Bo", nick=None)])),
        (Mixed, '{"at": {"x": 1}, "owner": {"name": "A"}, "pets": {"a": {"type": "dog", "age": 2.5}}}',
         Mixed(Point(1), Person(name="A"), {"a": Dog(2.5)})),
        (list[Cat | None], '[{"type": "cat", "lives": 9}, null]', [Cat(9), None]),
    ],
)  # fmt: skip
def test_a_text_becomes_a_value_of_the_class(annotation, text, value):
    assert value_type(annotation).parse(text) == value
    assert sgl.grammar.matches(annotation, text)


@pytest.mark.parametrize(
    ("annotation", "text", "where", "why"),
    [
        (Mixed, '{"at": {"x": "a"}, "owner": {"name": "A"}, "pets": {}}', "at.x", "valid integer"),
        (
            Person,
            '{"name": "A", "homes": [{"streetName": "E", "floor": 91}]}',
            "homes.0.floor",
            "less than or equal",
        ),
        (Path, '{"name": "a", "below": {"points": []}}', "below.name", "required"),
        (list[Grade], '[{"value": 1}, {"value": 7}]', "1", "must be in"),
        (list[Even], '[{"number": 3}]', "0", "3 is odd"),
    ],
)
def test_an_error_says_where_it_is(annotation, text, where, why):
    with pytest.raises(ValueValidationError, match=why) as caught:
        value_type(annotation).parse(text)
    assert where in str(caught.value).splitlines()[1:2] or f"\n{where}\n" in str(caught.value)


def test_what_a_constructor_checks_is_listed():
    assert value_type(Point).checked == ()
    assert value_type(Person).checked == ()
    assert "Grade: validators" in value_type(list[Grade]).checked[0][1]
    assert "Even: __post_init__" in value_type(Even).checked[0][1]


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (msgspec.defstruct("Row", [("a", int)], array_like=True), "written as an array"),
        (
            msgspec.defstruct("Late", [("at", Annotated[str, msgspec.Meta(tz=True)])]),
            "tz of msgspec",
        ),
        (msgspec.defstruct("Raw", [("raw", msgspec.Raw)]), "can't be generated"),
        (Lost, "Missing"),
    ],
)
def test_what_json_can_not_give_is_refused(annotation, message):
    with pytest.raises(ConstraintError, match=message):
        value_type(annotation)


def test_partial_values_have_the_fields_so_far():
    partial = partial_reader(Person)('{"name": "Ann", "homes": [{"streetName": "El')
    assert (partial.name, partial.homes[0].street_name, partial.friends) == ("Ann", "El", None)
    assert partial_reader(Point)('{"x": 12, "y": 1').x == 12


def test_a_program_gets_the_value():
    @sgl.function
    def place(s):
        s += sgl.gen("point", type=Point) + sgl.gen("pets", type=list[Cat | Dog])

    state = place.run(
        backend=sgl.ScriptedBackend({"": ['{"x": 4}', '[{"type": "cat", "lives": 7}]']})
    )
    assert (state["point"], state["pets"]) == (Point(4), [Cat(7)])


class Entry(typing.TypedDict):
    word: str
    count: typing.NotRequired[int]


@dataclasses.dataclass
class Index:
    entries: list[Entry]
    owner: Person
    pages: int = 3
    parts: "list[Index]" = dataclasses.field(default_factory=list)


def test_a_dataclass_may_have_typed_dicts_and_structs_in_it():
    read = value_type(Index).parse
    text = (
        '{"entries": [{"word": "a"}], "owner": {"name": "Anna", "homes": [{"streetName": "Main"}]}}'
    )
    found = read(text)
    assert found == Index([{"word": "a"}], found.owner)
    assert type(found.owner) is Person
    nested = read(json.dumps({**json.loads(text), "pages": 4, "parts": [json.loads(text)]}))
    assert (nested.pages, nested.parts) == (4, [found])
    with pytest.raises(ValueValidationError, match="word"):
        read(text.replace("word", "wrd"))
