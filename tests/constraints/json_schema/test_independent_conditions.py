"""Conditions and alternatives about different members of an object are independent: any number of
them is enforced.
"""

import json
import random

import pytest

from sglang_lite.constraints.json_schema.write_value import value_text
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.schema import json_schema
from tests.constraints.engine import accepts, compiled
from tests.constraints.json_schema.test_random_schemas import is_valid
from tests.counts import some

KINDS = [
    lambda a, b, c: {"if": {"properties": {a: {"const": "x"}}, "required": [a]}, "then": {"required": [b]}},
    lambda a, b, c: {"if": {"properties": {a: {"enum": ["x", 1]}}}, "then": {"properties": {b: {"const": 1}}},
                     "else": {"required": [b, c]}},
    lambda a, b, c: {"dependentRequired": {a: [b], b: [c]}},
    lambda a, b, c: {"dependentSchemas": {a: {"properties": {c: {"const": "x"}}}}},
    lambda a, b, c: {"anyOf": [{"required": [a]}, {"required": [b], "properties": {c: {"type": "string"}}}]},
    lambda a, b, c: {"not": {"required": [a, c]}},
]  # fmt: skip


def names_of(number):
    return [f"{letter}{number}" for letter in "abc"]


def conditions(dice, count, *, between):
    """A schema with conditions, each about members of its own.

    Args:
        between: whether other members come between those of a condition.
    """
    names = [name for number in range(count) for name in names_of(number)]
    if between:
        dice.shuffle(names)
    schema = {
        "properties": {name: {"enum": ["x", "y", 1]} for name in names},
        "allOf": [dice.choice(KINDS)(*names_of(number)) for number in range(count)],
    }
    return schema | (
        {"additionalProperties": False, "type": "object"} if dice.random() < 0.7 else {}
    )


def objects(dice, count, rows):
    for _ in range(rows):
        names = [name for number in range(count) for name in names_of(number)]
        yield {name: dice.choice(["x", "y", 1]) for name in names if dice.random() < 0.7}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(some(5, 60)))
def test_independent_conditions_are_enforced_exactly(seed):
    dice = random.Random(seed)
    count = dice.randrange(2, 8)
    schema = conditions(dice, count, between=dice.random() < 0.5)
    constraint = json_schema(schema, order=dice.choice(["schema", "schema", "any"]))
    grammar, refusal = compiled(constraint)
    assert refusal is None
    for sampled in range(4):
        text = sample(constraint, random.Random(sampled))
        assert is_valid(constraint, json.loads(text)), text
        assert accepts(grammar, text), text
    for data in objects(dice, count, 60):
        written = value_text(constraint, data)
        assert (written is not None) == is_valid(constraint, data), (schema, data)
        if written is not None:
            assert accepts(grammar, written), (schema, written)
            missing = [
                name
                for name in data
                if not is_valid(constraint, {k: data[k] for k in data if k != name})
            ]
            for name in missing[:2]:  # one member less, in the order that is written
                less = {k: v for k, v in json.loads(written).items() if k != name}
                assert not accepts(grammar, json.dumps(less)), (schema, less)


@pytest.mark.parametrize("order", ["schema", "any"])
def test_thirty_conditions_are_written_each_by_itself(order):
    dice = random.Random(1)
    for between in (False, True):
        constraint = json_schema(conditions(dice, 30, between=between), order=order)
        grammar, refusal = compiled(constraint)
        assert refusal is None
        for seed in range(2):
            text = sample(constraint, random.Random(seed))
            assert is_valid(constraint, json.loads(text))
            assert accepts(grammar, text)


def test_conditions_about_one_member_are_one_choice():
    """Countries and the forms of their post codes: as many alternatives as countries, not their
    product.
    """
    countries = [f"c{i}" for i in range(12)]
    schema = {
        "type": "object",
        "properties": {
            "country": {"enum": countries},
            "code": {"type": "string"},
            "note": {"type": "string"},
        },
        "required": ["country", "code"],
        "additionalProperties": False,
        "allOf": [
            {
                "if": {"properties": {"country": {"const": country}}, "required": ["country"]},
                "then": {"properties": {"code": {"pattern": f"^{i}[0-9]{{3}}$"}}},
            }
            for i, country in enumerate(countries)
        ],
    }
    constraint = json_schema(schema)
    grammar, refusal = compiled(constraint)
    assert refusal is None
    assert accepts(grammar, '{"country": "c7", "code": "7123", "note": ""}')
    assert not accepts(grammar, '{"country": "c7", "code": "8123"}')
