"""Schemas, types and prompts whose answers are limited: ordinary ones, real-world ones and random
ones.
"""

from __future__ import annotations

import datetime
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field, TypeAdapter

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Constraint, ConstraintError, Regex
from tests.constraints.random_schemas import schema as random_schema
from tests.constraints.suites import maskbench


class Item(BaseModel):
    name: str
    quantity: int
    price: float


class Receipt(BaseModel):
    shop: str
    items: list[Item]
    total: float
    paid: bool = False


class Person(BaseModel):
    name: str
    age: int
    email: str | None = None


class Address(BaseModel):
    street: str
    city: str
    zip: str = Field(pattern=r"^[0-9]{5}$")


class Customer(BaseModel):
    person: Person
    address: Address | None = None
    orders: list[int] = Field(default=[], max_length=20)


class Ticket(BaseModel):
    title: str
    severity: Literal["low", "medium", "high", "critical"]
    labels: list[Literal["bug", "crash", "docs", "question"]] = Field(max_length=6)
    assignee: Person | None = None


class Event(BaseModel):
    what: str
    day: datetime.date
    begins: datetime.time | None = None
    guests: list[str]


class Reading(BaseModel):
    sensor: str
    values: list[float] = Field(min_length=2, max_length=30)
    unit: Literal["C", "F", "K"]


class Recipe(BaseModel):
    title: str
    minutes: int = Field(ge=1, le=600)
    steps: list[str] = Field(min_length=1)


class Tree(BaseModel):
    label: str
    children: list[Tree] = []


class Point(msgspec.Struct):
    x: float
    y: float


TYPES: dict[str, tuple[Any, str]] = {
    "receipt": (Receipt, "a receipt of a grocery shop with five things"),
    "person": (Person, "a person called Ada Lovelace, aged 36"),
    "people": (list[Person], "four people who work in a library"),
    "customer": (Customer, "a customer, where she lives, and her orders"),
    "ticket": (Ticket, "a ticket about a crash of the printer"),
    "tickets": (list[Ticket], "three tickets of a help desk"),
    "event": (Event, "a birthday party on 2024-05-17 with six guests"),
    "reading": (Reading, "twelve readings of a thermometer"),
    "recipe": (Recipe, "a recipe of pancakes"),
    "tree": (Tree, "the folders of a small project"),
    "scores": (dict[str, int], "the scores of five players"),
    "numbers": (list[int], "the first forty prime numbers"),
    "matrix": (list[list[float]], "a matrix of three rows"),
    "integer": (int, "the number of people who live in Paris"),
    "float": (float, "pi with many digits"),
    "string": (str, "a sentence about the sea"),
    "boolean": (bool, "whether water is wet"),
    "literal": (Literal["positive", "negative", "neutral"], "the mood of: I love it"),
    "points": (list[tuple[int, int]], "the corners of a square"),
    "maybe": (Person | None, "the president of the moon"),
    "many names": (list[str], "twenty first names"),
    "either": (Person | Receipt, "a receipt of a bookshop"),
}
REGEXES = {
    "words": (r"[a-z]{3,8}( [a-z]{4,8}){1,12}\.", "a sentence"),
    "phone": (r"\+[0-9]{1,3} [0-9]{3} [0-9]{3,12}", "a phone number"),
    "date": (r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z", "a time"),
    "list": (r"(- [A-Za-z ]{3,30}\n){2,12}", "a shopping list"),
}
TOOL = "save"


@dataclass(frozen=True, eq=False, slots=True)
class Case:
    """What is generated: a JSON Schema (None for a regex), its type if it is one of ours, and what
    the prompt asks for. `least` is the number of tokens of the shortest text, as the engine knows
    it.
    """

    name: str
    schema: Any
    constraint: Constraint
    wish: str
    least: int
    type: Any = None

    @property
    def prompt(self) -> str:
        return f"Write {self.wish}, as JSON." if self.schema is not None else f"Write {self.wish}."


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """A case to generate with a seed. The prompt has the seed where the protocol has none."""

    case: Case
    seed: int
    temperature: float
    samples: int = 1


def _schemas(count: int) -> Iterator[tuple[str, Any, str, Any]]:
    for name, (kind, wish) in TYPES.items():
        yield name, TypeAdapter(kind).json_schema(), wish, kind
    real = ((name, found, _wish(name, found), None) for name, found, _ in maskbench(2))
    yield from itertools.islice(real, count * 3 // 4)
    for seed in itertools.count(1):
        drawn = random_schema(random.Random(seed))
        if isinstance(drawn, dict):
            if seed % 3:
                drawn["type"] = "object" if seed % 3 == 1 else "array"
            yield f"random {seed}", drawn, "a value", None


def _wish(name: str, schema: Any) -> str:
    names = list(schema.get("properties", {}))[:8] if isinstance(schema, dict) else []
    return (
        f"an example with {', '.join(names)}"
        if names
        else f"an example of {name.rpartition('-')[0] or name}"
    )


def cases(engine: sgl.Engine, count: int, longest: int) -> list[Case]:
    """Schemas that masks alone enforce, whose shortest text has at most `longest` tokens, and the
    regexes.
    """
    found: list[Case] = []
    for name, (pattern, wish) in REGEXES.items():
        found.append(Case(name, None, Regex(pattern), wish, least(engine, Regex(pattern)) or 1))
    for name, schema, wish, kind in _schemas(count):
        if len(found) >= count:
            break
        constraint = json_schema(schema)
        try:
            if sgl.grammar.check(constraint).checked:
                continue
            tokens = least(engine, constraint)
        except ConstraintError:
            continue
        if tokens is not None and 0 < tokens <= longest:
            found.append(Case(name, schema, constraint, wish, tokens, kind))
    return found


def least(engine: sgl.Engine, constraint: Constraint) -> int | None:
    """Number of tokens of a shortest text that the engine knows."""
    return engine.compile_grammar(constraint).lengths().fewest


def sources(
    found: list[Case], count: int, dice: random.Random, *, samples: int = 1
) -> list[Source]:
    """Draws sources: every case greedy at most once, the others at temperature 1."""
    drawn: list[Source] = []
    order = random.Random(dice.random()).sample(found, len(found))
    for i in range(count):
        greedy = i % 2 == 0 and i // 2 < len(order) and samples == 1
        case = order[i // 2 % len(order)]
        drawn.append(Source(case, dice.randrange(1 << 40), 0.0 if greedy else 1.0, samples))
    return drawn
