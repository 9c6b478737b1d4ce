"""The end of a number in free text is the same whatever pieces the text comes in."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_lite.constraints.matching import matches
from sglang_lite.constraints.number_text import NumberText, extract_leading_number
from sglang_lite.protocol import Number, ParameterError

INTEGER, FLOAT = Number("integer"), Number("float")
PIECES = st.lists(st.text("0123456789,.+-eE a\n", max_size=4), max_size=8)
# Each comma with exactly three digits, and none of them part of more.
WHOLE = r"[-+]?(?:[1-9]\d?\d?(?:,\d\d\d)+(?!\d)|\d+)"


@pytest.mark.parametrize(
    ("text", "integer", "floating"),
    [
        ("24 hours", "24", None), ("24", "24", None), ("24.", "24", None), ("24.\n5", "24", None), ("-3C", "-3", None),
        ("2,873,000 people", "2,873,000", None), ("1, 2 and 3", "1", None), ("1,2345", "1", None), ("7,", "7", None),
        ("1,234,5678", "1,234", None), ("2024,100", "2024", None), ("0,123", "0", None), ("12,34", "12", None),
        ("3.14159,", "3", "3.14159"), ("6.02e23 atoms", "6", "6.02e23"), ("5e", "5", None), ("5e-", "5", None),
        ("1,234.50", "1,234", "1,234.50"), ("1.5.2", "1", "1.5"), ("+7", "+7", None), ("007", "007", None),
        ("", "", None), ("-", "", None), ("--1", "", None), ("x1", "", None), ("٣", "", None), ("1²", "1", None),
    ],
)  # fmt: skip
def test_the_number_that_a_text_begins_with(text, integer, floating):
    assert extract_leading_number(INTEGER, text) == integer
    assert extract_leading_number(FLOAT, text) == (integer if floating is None else floating)


@given(st.sampled_from([INTEGER, FLOAT]), PIECES)
@example(INTEGER, ["1", ",234", "5"])
@example(FLOAT, ["1,234", ".", "e"])
def test_a_growing_text_says_what_is_certain(number, pieces):
    """The certain part never shrinks, and the whole text begins with it; before the end something
    was open.
    """
    growing, text, shown = NumberText(number), "", ""
    assert growing.certain_text == ""
    whole = extract_leading_number(number, "".join(pieces))
    for piece in pieces:
        assert not growing.finished
        assert any(
            extract_leading_number(number, text + more)
            not in ("", extract_leading_number(number, text))
            for more in MORE
        )
        growing.push(piece)
        text += piece
        assert growing.certain_text.startswith(shown)
        shown = growing.certain_text
        assert whole.startswith(shown)
        assert growing.committed == shown
        if growing.finished:
            break
    growing.close()
    assert growing.certain_text == extract_leading_number(number, text) == whole
    kept = growing.tokens
    assert len("".join(pieces[:kept])) <= len(whole)
    assert kept == len(pieces) or len("".join(pieces[: kept + 1])) > len(whole)


MORE = [digits for count in range(4) for digits in ("1" * count,)] + [
    "0",
    "+1",
    "1e5",
    "5",
    "25",
    "345",
]


@given(PIECES)
def test_a_whole_number_is_what_its_pattern_finds(pieces):
    text = "".join(pieces)
    found = re.match(WHOLE, text, re.ASCII)
    assert extract_leading_number(INTEGER, text) == (found[0] if found else "")


@given(st.sampled_from([INTEGER, FLOAT]), st.text("0123456789,.+-e", max_size=9))
def test_the_language_of_a_number_is_the_texts_that_are_one(number, text):
    assert matches(number, text) == (extract_leading_number(number, text) == text != "")


@given(st.sampled_from([INTEGER, FLOAT]), st.text("0123456789,.e", max_size=5), PIECES)
def test_a_number_that_has_begun_goes_on(number, before, pieces):
    growing = NumberText(number, before)
    shown = growing.certain_text
    for piece in pieces:
        if growing.finished:
            break
        growing.push(piece)
        assert growing.certain_text.startswith(shown)
        shown = growing.certain_text
    growing.close()
    assert (
        growing.certain_text
        == extract_leading_number(number, before + "".join(pieces))[len(before) :]
    )


def test_a_token_that_has_stopped_it_is_no_part_of_a_number():
    growing = NumberText(INTEGER, "1")
    for piece in ("2", "3"):
        growing.push(piece)
    growing.close(1)
    assert (growing.certain_text, growing.tokens) == ("2", 1)


@pytest.mark.parametrize("kind", ["int", "", None, 3, ["integer"]])
def test_a_number_of_no_known_kind_is_refused(kind):
    with pytest.raises(ParameterError, match="is not 'integer' or 'float'"):
        Number(kind)
