"""Random schemas: the masks, the normaliser's sets and the validator agree about random values."""

import itertools
import json
import os
import random

import pytest

from sglang_lite.constraints.json_schema.write_value import value_text
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import ConstraintError, ValueValidationError
from tests.constraints.engine import accepts, compiled
from tests.constraints.random_schemas import schema, value

COUNT = int(os.environ.get("SGLANG_LITE_RANDOM_SCHEMAS", "100"))


def is_valid(constraint, data):
    try:
        parse_json(constraint, json.dumps(data))
        return True
    except ValueValidationError:
        return False


def orders(value):
    """The value with its members in every order."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*map(orders, value)))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for values in itertools.product(*(orders(value[name]) for name in names)):
                yield dict(zip(names, values))
    else:
        yield value


def accepts_some_order(grammar, data):
    return any(accepts(grammar, json.dumps(order, ensure_ascii=False)) for order in orders(data))


@pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, COUNT, 50)])
def test_enforced_schemas_are_enforced_exactly(seeds):
    for seed in seeds:
        rng = random.Random(seed)
        constraint = json_schema(schema(rng))
        grammar, refusal = compiled(constraint)
        if refusal is not None:
            if "contradicts itself" in str(refusal):
                assert not any(is_valid(constraint, value(rng)) for _ in range(20)), constraint
            continue
        for _ in range(20):
            data = value(rng)
            try:
                ours = value_text(constraint, data)
            except ConstraintError:  # more is asked of the sets than the grammar needed
                continue
            valid = is_valid(constraint, data)
            assert valid == (ours is not None), (constraint, data)
            if valid:
                assert accepts(grammar, ours) or accepts_some_order(grammar, data), (
                    constraint,
                    data,
                )
            else:
                assert not accepts(grammar, json.dumps(data, ensure_ascii=False)), (
                    constraint,
                    data,
                )


def test_best_effort_refuses_nothing_valid():
    for seed in range(COUNT):
        rng = random.Random(seed)
        constraint = json_schema(schema(rng), enforce="best_effort")
        grammar, refusal = compiled(constraint)
        if refusal is not None:
            continue
        for _ in range(10):
            data = value(rng)
            if is_valid(constraint, data):
                assert accepts_some_order(grammar, data), (constraint, data)


def test_samples_are_valid_and_accepted():
    for seed in range(COUNT):
        rng = random.Random(seed)
        constraint = json_schema(schema(rng))
        try:
            text = sample(constraint, rng)
        except ConstraintError:
            continue
        assert accepts(compiled(constraint)[0], text), (constraint, text)
        parse_json(constraint, text)
