"""Thousands of parts in a row: the engine's memory does not grow with their square, and their texts
stay the same.
"""

import re
from itertools import product
from random import Random

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Lark, Regex
from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine

MOST = 10 << 20  # bytes of a parser: as one group, the parts need ten times as many


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "part",
    [".*", ".?", ".{0,9}", "[^x]*", "(.*a)?", "(|.*a)", "(.*|b)", "(.?.?)", "(.?[^x]*){1,2}"],
)
@pytest.mark.parametrize("tail", ["", "x{9}"])
def test_a_parser_of_thousands_of_parts_that_may_be_empty_is_small(part, tail):
    assert LlguidanceEngine(None).prepare(Regex(part * 3_000 + tail)).parser_bytes < MOST


def test_so_it_is_in_a_grammar():
    grammar = Lark("start: " + "/.*/ X " * 1_500 + '"a"\nX: /.?/')
    assert LlguidanceEngine(None).prepare(grammar).parser_bytes < MOST


@pytest.mark.parametrize("part", [r"\w", r"\w*-", r"(a|\w?)", r"[^\w]{2}", r"\p{L}\d"])
def test_a_large_set_is_written_once(part):
    prepared = LlguidanceEngine(None).prepare(Regex(part * 5_000))
    assert len(prepared.text) < 500_000  # \w alone takes 12,000 characters
    assert prepared.parser_bytes < MOST


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(40))
def test_parts_in_groups_have_the_same_texts(seed):
    draw = Random(seed)
    parts = [
        "a?",
        "b?",
        "a*",
        "(ab)?",
        "[ab]{0,2}",
        "(a|)",
        "((a?b?)(b?a?))",
        "(b|a*)",
        "(c?a?){2}",
        "c",
    ]
    pattern = "".join(draw.choices(parts, [3] * 9 + [draw.choice((0, 1))], k=draw.randint(6, 40)))
    theirs = re.compile(pattern)
    for text in {
        "".join(letters)[:size] for letters in product("abc", repeat=4) for size in range(5)
    }:
        assert sgl.grammar.matches(Regex(pattern), text) == bool(theirs.fullmatch(text)), (
            pattern,
            text,
        )


@pytest.mark.parametrize("excluded", ["/a/", "/(a|b?)/", "/.+/"])
def test_parts_that_may_not_be_empty_are_never_left_out(excluded):
    part = f"~{excluded} & /a{{0,2}}/"
    grammar = Lark(f"start: X\nX: {'(Y) ' * 12}\nY: {part}")
    words = [
        word for word in ("", "a", "aa") if sgl.grammar.matches(Lark(f"start: Y\nY: {part}"), word)
    ]
    sizes = {sum(map(len, chosen)) for chosen in product(words, repeat=12)}
    assert {size for size in range(30) if sgl.grammar.matches(grammar, "a" * size)} == sizes


def below(calls, function):
    return below(calls - 1, function) if calls else function()


@pytest.mark.parametrize(
    ("constraint", "text", "wrong"),
    [
        (
            json_schema({"type": "integer", "minimum": -(10**400), "maximum": 10**400 - 7}),
            str(10**400 - 8),
            "9" * 400,
        ),
        (Regex(r"(?:\d{1,3},){1500}\d"), "12," * 1500 + "1", "12," * 1499 + "1"),
        (
            json_schema({"type": "array", "minItems": 1000, "items": {"enum": [1]}}),
            str([1] * 1000),
            str([1] * 999),
        ),
    ],
    ids=["digits", "repeats", "items"],
)
def test_digits_and_repeats_take_no_depth_of_the_stack(constraint, text, wrong):
    assert below(
        700, lambda: [sgl.grammar.matches(constraint, each) for each in (text, wrong)]
    ) == [True, False]
    assert below(700, lambda: LlguidanceEngine(None).prepare(constraint).shortest) is not None
