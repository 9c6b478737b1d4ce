"""Random grammars, regexes and schemas: ours reads them as two libraries do that share no code with
it.

SGLANG_LITE_READINGS=5000 takes so many of each.
"""

import itertools
import json
import os
import re
from random import Random

import jsonschema
import jsonschema_rs
import pytest
import regex

import sglang_lite as sgl
from sglang_lite.constraints.matching import matches
from sglang_lite.protocol import ConstraintError, Ebnf, Lark, Regex
from tests.constraints import random_rules, random_schemas
from tests.constraints.engine import accepts, compiled
from tests.constraints.random_regexes import pattern, texts
from tests.constraints.readers import NotRead, by_lark, by_xgrammar

COUNT = int(os.environ.get("SGLANG_LITE_READINGS", "40"))
PART = 20
PARTS = [range(i, min(COUNT, i + PART)) for i in range(0, COUNT, PART)]
WORDS = ["".join(word) for length in range(6) for word in itertools.product("abc", repeat=length)]


def ours(constraint, texts):
    """Texts that masks and reference allow, which must be the same; None if no text satisfies the
    constraint.
    """
    grammar, refusal = compiled(constraint)
    if refusal is not None:
        assert "contradicts itself" in str(refusal), constraint
        return None
    found = [text for text in texts if accepts(grammar, text)]
    assert found == [text for text in texts if matches(constraint, text)], constraint
    return found


@pytest.mark.parametrize("seeds", PARTS, ids=str)
def test_grammars(seeds):
    for seed in seeds:
        rng = Random(seed)
        rules = random_rules.rules(rng)
        in_lark, in_gbnf = random_rules.in_lark(rules, rng), random_rules.in_gbnf(rules, rng)
        words = [*WORDS[:4], *rng.sample(WORDS, 26)]
        try:
            readers = by_lark(in_lark), by_xgrammar(in_gbnf)
        except NotRead as reason:  # one of twenty
            assert "Rules defined twice" in str(reason)  # noqa: PT017 # `lark` takes no alternative twice
            continue
        found = ours(Lark(in_lark), words)
        assert ours(Ebnf(in_gbnf), words) == found, in_gbnf
        for reads in readers:
            assert [word for word in words if reads(word)] == (found or []), in_lark


@pytest.mark.parametrize("seeds", PARTS, ids=str)
def test_regexes(seeds):
    for seed in seeds:
        rng = Random(seed)
        written = pattern(rng)
        some = texts(rng, written)
        found = ours(Regex(written), some)
        for library in (re, regex):
            theirs = [text for text in some if library.fullmatch(written, text)]
            assert theirs == (found or []), (written, library)


@pytest.mark.parametrize("seeds", PARTS, ids=str)
def test_schemas(seeds):
    for seed in seeds:
        rng = Random(seed)
        schema = random_schemas.schema(rng)
        values = [
            value
            for value in (random_schemas.value(rng) for _ in range(20))
            if "\n" not in str(value)
        ]
        readers = (
            jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.FormatChecker(["date"])
            ).is_valid,
            jsonschema_rs.Draft202012Validator(schema, validate_formats=True).is_valid,
        )
        for value in values:
            try:
                found = sgl.grammar.matches(schema, json.dumps(value))
            except ConstraintError:
                break
            assert [reads(value) for reads in readers] == [found, found], (schema, value)
