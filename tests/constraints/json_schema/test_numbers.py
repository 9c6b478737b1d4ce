"""Sets of numbers and their texts: exact, whatever the ends, steps and complements."""

import contextlib
import json
import math
import random
from fractions import Fraction

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.json_schema.numbers import (
    EVERY,
    NONE,
    WHOLE,
    NumberRange,
    complement_numbers,
    intersect_numbers,
    to_fraction,
    unite_numbers,
)
from sglang_lite.constraints.json_schema.write_numbers import decimal_text, texts
from sglang_lite.protocol import ConstraintError, SglError
from tests.constraints import engine

STEPS = [
    None,
    None,
    Fraction(1),
    Fraction(1),
    *map(Fraction, (2, 3, 7, 25)),
    *(Fraction(n, 100) for n in (1, 5, 50, 150)),
]


def number(rng):
    return Fraction(rng.randint(-300, 300), 10 ** rng.choice([0, 0, 1, 2]))


def piece(rng):
    low, high = rng.choice([None, number(rng)]), rng.choice([None, number(rng)])
    is_open = [rng.random() < 0.5 for _ in range(2)]
    avoid = rng.choice([(), (), (Fraction(2),), (Fraction(1),), (Fraction(1, 10),)])
    return NumberRange(
        low,
        high,
        low is not None and is_open[0],
        high is not None and is_open[1],
        rng.choice(STEPS),
        avoid,
    )


def decimal(rng):
    places = rng.choice([0, 0, 1, 2, 3])
    digits = str(rng.randint(0, 400 * 10**places if rng.random() < 0.7 else 30)).zfill(places + 1)
    return rng.choice(["", "-"]) + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)


@pytest.mark.parametrize("seed", range(60))
def test_the_texts_spell_exactly_the_numbers_of_the_set(seed):
    rng = random.Random(seed)
    numbers = tuple(p for p in (piece(rng), piece(rng)) if not p.has_no_numbers())
    if rng.random() < 0.4:
        numbers = complement_numbers(numbers)
    if rng.random() < 0.4:
        numbers = intersect_numbers(numbers, complement_numbers((piece(rng),)))
    language = texts(numbers)
    for _ in range(60):
        text = decimal(rng)
        value = Fraction(text)
        inside = any(value in p for p in numbers)
        if accepts(language, text):
            assert inside, (text, numbers)
        elif inside:  # what our style does not write
            assert (text.startswith("-") and value == 0) or ("." in text and text.endswith("0")), (
                text,
                numbers,
            )


def test_sets():
    assert complement_numbers(EVERY) == NONE
    assert complement_numbers(NONE) == EVERY
    assert intersect_numbers(WHOLE, (NumberRange(step=Fraction(3, 2)),)) == (
        NumberRange(step=Fraction(3)),
    )
    assert intersect_numbers(WHOLE, complement_numbers(WHOLE)) == NONE
    assert unite_numbers(WHOLE, EVERY) == EVERY
    assert NumberRange(Fraction(1), Fraction(2), True, True, Fraction(1)).has_no_numbers()
    assert [int(m) for m in NumberRange(Fraction(1), Fraction(9), step=Fraction(3)).members()] == [
        3,
        6,
        9,
    ]


def test_numbers_are_decimals_as_they_are_written():
    assert to_fraction(0.1) == Fraction(1, 10)
    assert to_fraction(1e308) == 10**308
    assert decimal_text(Fraction(-1, 8)) == "-0.125"
    assert accepts(texts((NumberRange(step=to_fraction(0.01)),)), "19.99")
    assert accepts(texts(EVERY), "-1.5e+299")
    assert not accepts(texts(EVERY), "1e309")  # no float is as large
    assert not accepts(texts(EVERY), f"{10**20}e299")
    assert accepts(texts(EVERY), "12345678.5e299")
    assert not accepts(texts(WHOLE), "1.0")


STEPPED = [
    ("0.01", None, None), ("0.1", None, None), ("0.5", None, None), ("2.5", "0.5", None), ("0.25", "-3", "40"),
    ("0.125", None, "7.3"), ("32", None, None), ("64", "0", "9999"), ("1000", None, None), ("21", "0", "999"), ("0.3", None, None),
    ("0.7", "-20", "20"), ("9", "-500", "500"), ("0.9", "0", "100"), ("1.1", "0", "99.5"), ("2.7", "1", "50"), ("13", "0", "2000"),
    ("256", "0", "99999"), ("0.0003", None, None), ("0.123", "0", "9.9"), ("11", None, None), ("3.1", "-70", None), ("4.29", None, None),
    ("25", "-900", None), ("0.27", None, None), ("29", "5", "5000"),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("step", "low", "high"), STEPPED)
def test_multiples_of_decimals_are_told_by_brute_force(step, low, high):
    least, most = (None if end is None else Fraction(end) for end in (low, high))
    piece = NumberRange(least, most, step=Fraction(step))
    language = texts((piece,))
    near = [Fraction(i, 40) for i in range(-400, 800)]
    for value in (*near, *(k * Fraction(step) for k in range(-60, 200))):
        assert accepts(language, decimal_text(value)) == (value in piece), value


def test_multiples_that_need_a_large_automaton_are_refused():
    with pytest.raises(ConstraintError, match="multiples of 37"):
        texts((NumberRange(step=Fraction(37)),))
    with pytest.raises(ConstraintError, match=r"multiples of 0\.0123"):
        texts((NumberRange(Fraction(0), Fraction(10**9), step=Fraction("0.0123")),))
    assert accepts(texts((NumberRange(Fraction(0), Fraction(99), step=Fraction(37)),)), "74")


@pytest.mark.parametrize(
    "schema",
    [{"multipleOf": 7}, {"multipleOf": 66}, {"not": {"multipleOf": 13}}, {"multipleOf": 0.39}],
)
def test_masks_keep_multiples(schema):
    grammar, _ = engine.compiled(sgl.grammar.json_schema({"type": "number", **schema}))
    rng = random.Random(1)
    step = Fraction(str(schema.get("multipleOf", 13)))
    for i in range(60):
        value = rng.randrange(10 ** rng.randrange(1, 25)) * (step if i % 2 else Fraction(1, 100))
        wanted = (value % step == 0) == ("multipleOf" in schema)
        assert engine.accepts(grammar, decimal_text(value)) == wanted, value


@pytest.mark.parametrize(
    "schema", [{"minimum": 1e300}, {"maximum": -1e308}, {"minimum": -1.5e250, "maximum": 2e300}]
)
def test_limits_of_many_digits_are_enforced(schema):
    report = sgl.grammar.check(schema)
    assert report.refused == ()
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    for value in (1, 1e300, -1e300, 10**300 - 1, 1.7e308, -1.7e308, 5e299):
        assert sgl.grammar.matches(schema, json.dumps(value)) == (least <= value <= most), value


def test_limits_of_hundreds_of_digits_are_enforced():
    low, high = (int("987654321" * 60 + end) for end in ("3", "7"))
    grammar, _ = engine.compiled(
        sgl.grammar.json_schema({"type": "integer", "minimum": low - 10**500, "maximum": high})
    )
    for value in (low, high, low - 10**500):
        assert engine.accepts(grammar, str(value))
    for value in (high + 1, low - 10**500 - 1, -low, 10 * low, 0):
        assert not engine.accepts(grammar, str(value))


@pytest.mark.parametrize("schema", [{"minimum": 10**1400 + 1}, {"maximum": -(10**1200) - 5}])
def test_limits_of_too_many_digits_are_refused(schema):
    assert "more than 1,000 digits" in sgl.grammar.check(schema).refused[0][1]
    for ask in (sgl.grammar.matches, sgl.grammar.validate):
        with contextlib.suppress(SglError):
            ask(schema, "1")
