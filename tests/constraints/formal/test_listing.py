"""Texts of finite languages against `re` and all texts of some letters."""

import itertools
import random
import re

import pytest

from sglang_lite.constraints.formal.listing import list_texts
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Choices, Ebnf, Regex
from tests.counts import some


def texts_of(constraint, most=64):
    return list_texts(language_for_constraint(constraint), most)


def test_all_texts_of_finite_regexes_are_listed():
    dice = random.Random(1)
    candidates = ["".join(t) for k in range(9) for t in itertools.product("ab", repeat=k)]
    listed = 0
    for _ in range(some(200, 2000)):
        pattern = "".join(
            dice.choice(["a", "b", "[ab]", "(a|ab)", "a?", "(b|a{2})?", "b{1,2}", "(ab|)"])
            for _ in range(dice.randint(1, 4))
        )
        expected = sorted(text for text in candidates if re.fullmatch(pattern, text))
        listed += len(expected) <= 20
        assert texts_of(Regex(pattern), 20) == (tuple(expected) if len(expected) <= 20 else None)
    assert listed > 100


@pytest.mark.parametrize("pattern", ["a*", "a*b", "(ab)*c?", "a+|b"])
def test_infinite_languages_have_no_list(pattern):
    assert texts_of(Regex(pattern)) is None


def test_texts_of_other_constraints_are_listed():
    assert texts_of(Choices(("no", "yes", "no", ""))) == ("", "no", "yes")
    assert texts_of(Ebnf('root ::= a a\na ::= "x" | "y"')) == ("xx", "xy", "yx", "yy")
    assert texts_of(json_schema({"enum": [True, None, "é"]})) == ('"é"', "null", "true")
    assert texts_of(Regex("[0-9]{2}"), 100) == tuple(f"{i:02}" for i in range(100))
    assert texts_of(Regex("[0-9]{2}"), 99) is None
    assert (
        texts_of(json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})) is None
    )
    assert texts_of(Regex("x{4096}")) == ("x" * 4096,)
    assert texts_of(Regex("x{4097}")) is None
