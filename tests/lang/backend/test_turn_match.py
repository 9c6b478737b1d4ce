"""Reading several generations out of one answer, by itself."""

import json
import random
import re
from pathlib import Path

import pytest

from sglang_lite.lang.backend.remote.turn import (
    TurnHole,
    TurnValue,
    UnstoppedAnswer,
    parse_turn_pieces,
)

WRITTEN = json.loads((Path(__file__).parent / "turns" / "written.json").read_text())
LINE = TurnHole(("\n",))
FIELDS = ("Name:", LINE, "\nYear:", LINE, "\nCity:", LINE)


def answer(text, *, ended=True, count=None, tokens=()):
    return UnstoppedAnswer(text, ended, len(text.split()) if count is None else count, tokens)


def texts(text, parts=FIELDS, **told):
    return [value.text for value in parse_turn_pieces(answer(text, **told), parts).values]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Name: Ann\nYear: 1910\nCity: Rome", [" Ann", " 1910", " Rome"]),
        ("Name: Ann\nYear: 1910\nCity: Rome\nJob: cook", [" Ann", " 1910", " Rome"]),
        # blanks, and a line before
        ("Sure!\n\nName: Ann\n\nYear: 1910\n City:Rome\n", [" Ann", " 1910", "Rome"]),
        # no place for that line
        ("Name: Ann\nJob: cook\nYear: 1910\nCity: Rome", [" Ann", " 1910", " Rome"]),
        ("- Name: Ann\n- Year: 1910\n2) City : Rome", [" Ann", " 1910", " Rome"]),
        # too far down
        ("a\nb\nName: Ann\nc\n\nd\nYear: 1910\ne\nf\ng\nCity: Rome", [" Ann", " 1910"]),
        ("a\nb\nc\nName: Ann", []),
        ("Name: Ann Year: 1910 City: Rome", [" Ann Year: 1910 City: Rome"]),
        ("Name: Ann\nBorn Year: 1910", [" Ann"]),
        ("Name: Ann\nyear: 1910\nCity: Rome", [" Ann"]),
        ("Name: Ann\nYear 1910\nCity: Rome", [" Ann"]),
        ("**Name:** Ann\nYear: 1910", []),
        ("Name:\nYear: 1910\nCity: Rome", []),  # an empty value is none
        ("Name:   \nYear: 1910", []),
        ("Ann, 1910, Rome", []),
        ("My Name: Ann\nYear: 1910", []),  # not where a line begins
        ("", []),
    ],
)
def test_constants_and_stops_are_matched_against_an_answer(text, found):
    assert texts(text) == found


def test_a_generation_without_a_stop_goes_to_the_end():
    assert texts("Name: Ann\nBio: a cook\nof Rome", ("Name:", LINE, "\nBio:", TurnHole())) == [
        " Ann",
        " a cook\nof Rome",
    ]
    assert texts(
        "Name: Ann\nBio: a cook\nof", ("Name:", LINE, "\nBio:", TurnHole()), ended=False
    ) == [" Ann"]


def test_what_a_limit_has_cut_is_no_value():
    assert texts("Name: Ann\nYear: 19", ended=False) == [" Ann"]
    assert texts("Name: Ann\nYear: 19", ended=True) == [" Ann", " 19"]


def test_the_first_of_several_stops_ends_a_value():
    reading = parse_turn_pieces(
        answer("a, b; c"), (TurnHole((";", ",")), " ", TurnHole((";",)), TurnHole())
    )
    assert reading.values[0] == TurnValue("a", ",")
    assert [value.text for value in reading.values] == ["a", "b", "; c"]


def test_the_stop_may_stand_in_the_constant_behind_it_or_not():
    assert texts("One. Two", (TurnHole((".",)), ". ", TurnHole())) == ["One", "Two"]
    assert texts("One. Two", (TurnHole((".",)), " ", TurnHole())) == ["One", "Two"]


def test_line_ends_of_a_constant_are_counted():
    """Else the next field would be taken for an empty one's value."""
    parts = ("Bio:\n", LINE, "\n", LINE)
    assert texts("Bio:\nred\nblue", parts) == ["red", "blue"]
    assert texts("Bio:\n\nblue", parts) == []
    assert texts("red\n\nblue", (LINE, "\n", LINE)) == ["red"]


def test_a_limit_counts_tokens_and_not_characters():
    limited = ("Name:", TurnHole(("\n",), 2), "\nYear:", LINE)
    said = "Name: Annabella\nYear: 1910"
    tokens = ("Name", ":", " Anna", "bella", "\n", "Year", ":", " 1910")
    assert texts(said, limited, count=8, tokens=tokens) == [" Annabella", " 1910"]
    assert texts(said, limited, count=8) == []  # nobody knows how many they are
    assert texts(said, limited, count=2) == [" Annabella", " 1910"]  # no more than in all of it
    assert texts("Name: x\nYear: 1910", limited, count=8) == [" x", " 1910"]  # no more than bytes
    cut = parse_turn_pieces(
        answer(said, count=8, tokens=tokens), ("Name:", TurnHole(("\n",), 1), "\nYear:", LINE)
    )
    assert cut.values == (TurnValue(" Anna", cut=True),)


def test_a_constraint_ends_a_value_before_the_next_constant():
    year = TurnHole(fits=lambda text: re.fullmatch(r"[0-9]{4}", text) is not None)
    assert texts("In 1910, in Rome.", ("In ", year, ", in ", TurnHole((".",)))) == ["1910", "Rome"]
    assert texts("In May 1910, in Rome.", ("In ", year, ", in ", TurnHole((".",)))) == []
    # a value by itself has no blanks around it
    assert texts("Year: 1910\n", ("Year:", year)) == ["1910"]
    pair = TurnHole(fits=lambda text: re.fullmatch(r"\w+, \w+", text) is not None)
    assert texts("(a, b, c)", ("(", pair, ", ", TurnHole((")",)))) == ["a, b", "c"]


def test_tokens_that_are_not_used_are_counted():
    assert (
        parse_turn_pieces(
            answer("Name: Ann\nYear: 1910", count=10), ("Name:", LINE, "\nYear:", LINE)
        ).unused_tokens
        == 0
    )
    assert (
        parse_turn_pieces(
            answer("0123456789" * 2, count=10), (TurnHole(("5",)), "x", TurnHole())
        ).unused_tokens
        == 8
    )
    assert parse_turn_pieces(answer("nothing of it", count=7), FIELDS).unused_tokens == 7


@pytest.mark.parametrize(
    "case", WRITTEN["answers"], ids=lambda case: f"{case['level']}-{case['text']}"
)
def test_a_written_answer_is_read_right_or_not_at_all(case):
    fields = WRITTEN["texts"][case["text"]]
    for found, name in zip(texts(case["answer"]), ("name", "year", "city")):
        # how it is written is the model's
        plain = " ".join(re.sub(r"""["'`*~]""", "", found).split())
        assert plain.startswith(fields[name].replace("'", "")), found
        rest = plain.removeprefix(fields[name].replace("'", ""))
        assert re.fullmatch(r"|[.,;!]|[,.]? ?\(?[\w ]+\)?\.?", rest), found


def test_whatever_is_said_values_stand_in_it_in_order_and_are_not_empty():
    draw = random.Random(7)
    words = ["Name:", "Year:", "City:", "\n", " ", "Ann", "1910", "Rome", ":", "x", "\n\n"]
    for _ in range(2000):
        text = "".join(draw.choices(words, k=draw.randrange(1, 16)))
        at = 0
        for value in texts(text, ended=draw.random() < 0.5):
            assert value.strip()
            assert "\n" not in value
            at = text.index(value, at) + len(value)
