"""The judge of benchmarks/shortened.py: right answers pass, and each kind of wrong one is counted."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from shortened_oracle import Draws, Judge, Outcome, Scan

SCHEMA = {
    "type": "object", "required": ["shop"], "additionalProperties": False,
    "properties": {"shop": {"type": "string"}, "items": {"type": "array", "items": {
        "type": "object", "properties": {"name": {"type": "string"}, "price": {"type": "number"}},
        "required": ["name", "price"]}}, "paid": {"type": "boolean"}},
}  # fmt: skip
WHOLE = '{"shop": "A\\"}]", "items": [{"name": "tea", "price": 12.5}, {"name": "é", "price": 3}], "paid": true}'


class Bytes:
    """A token a byte."""

    def text(self, ids):
        return bytes(ids).decode("utf-8", "ignore")


def draws(text, finish="stop"):
    return Draws((), tuple(text.encode()), finish)


def judged(limit, got, *, schema=SCHEMA, whole=WHOLE, finish="stop", drawn=None):
    judge, free = Judge(Bytes()), draws(whole, finish)
    judge.judge(
        "way", schema, limit, free, drawn or Draws((), free.ids[:limit], "length"), got, "case"
    )
    return judge


def kinds(judge):
    return dict(judge.violations.get("way", {}))


def closed(limit):
    """What has to be answered under a limit: cuts tried from the end with a plain reader of JSON."""
    raw = WHOLE.encode()[:limit].decode("utf-8", "ignore")
    for end in range(len(raw), 0, -1):
        drawn_end = raw[end - 1] in '"}]{[el' or (
            raw[end - 1].isdigit() and raw[end : end + 1] in (",", "}", "]")
        )
        for closing in ("}", "]}", "}]}") if drawn_end else ():
            try:
                value = json.loads(raw[:end] + closing)
            except ValueError:
                continue
            if "shop" in value and all(
                set(item) == {"name", "price"} for item in value.get("items", [])
            ):
                return raw[:end] + closing, value
    return raw, None


def missing(value, whole, at=""):
    """Pointers to what a value lacks."""
    if isinstance(whole, list):
        for i, inner in enumerate(value):
            yield from missing(inner, whole[i], f"{at}/{i}")
        if len(value) < len(whole):
            yield f"{at}/{len(value)}"
    elif isinstance(whole, dict):
        for name, inner in whole.items():
            if name not in value:
                yield f"{at}/{name}"
            else:
                yield from missing(value[name], inner, f"{at}/{name}")


def test_right_answers_pass_at_every_limit():
    for limit in range(1, len(WHOLE.encode())):
        text, value = closed(limit)
        pointers = [""] if value is None else [*missing(value, json.loads(WHOLE))]
        judge = judged(limit, Outcome(text, "length", pointers))
        assert not kinds(judge), (limit, judge.examples)
        assert not judge.notes, (limit, judge.notes, judge.examples)
    judge = judged(len(WHOLE.encode()), Outcome(WHOLE, "stop", []), drawn=draws(WHOLE))
    assert not kinds(judge)
    assert judge.counts["way"] == {"cases": 1, "unmarked": 1}


@pytest.mark.parametrize(
    ("limit", "got", "kind"),
    [
        (
            40,
            Outcome('{"shop": "A\\"}]", "items": []}', "stop", []),
            "unmarked, and not the unlimited answer",
        ),
        (12, Outcome('{"shop": "A"}', "length", ["/items"]), "text is not as drawn"),
        (
            12,
            Outcome('{"shop": "A"}', "length", ["/items"]),
            "a scalar differs from the unlimited answer",
        ),
        (12, Outcome('{"shop": "A', "length", [""]), "no value, and its text is not as cut"),
        (
            20,
            Outcome('{"shop": "A\\"}]"}', "length", []),
            "nothing is shortened, and the unlimited answer has more",
        ),
        (20, Outcome('{"shop": "A\\"}]"}', "stop", ["/items"]), "marked, and its reason is 'stop'"),
        (20, Outcome('{"shop": "A\\"}]"}', "length", ["/shop"]), "a pointer names what is there"),
        (20, Outcome('{"shop": "A\\"}]"}', "length", ["/what/else"]), "a pointer names no place"),
        (999, Outcome(WHOLE, "length", [""]), "marked, though the unlimited answer fits"),
        (40, Outcome(None, error="ParameterError: no"), "error"),
    ],
)
def test_wrong_answers_are_counted(limit, got, kind):
    assert kind in kinds(judged(limit, got))


def test_a_number_ends_where_its_end_was_drawn():
    schema, whole = {"type": "array", "items": {"type": "integer"}}, "[1, 234, 5]"
    right = judged(6, Outcome("[1]", "length", ["/1"]), schema=schema, whole=whole)
    assert not kinds(right)
    assert not right.notes
    bent = judged(6, Outcome("[1, 23]", "length", ["/2"]), schema=schema, whole=whole)
    assert set(kinds(bent)) == {
        "a number's end was not drawn",
        "a scalar differs from the unlimited answer",
    }
    unsure = judged(7, Outcome("[1, 234]", "length", ["/2"]), schema=schema, whole=whole)
    assert set(kinds(unsure)) == {"a number's end was not drawn"}


def test_draws_have_to_be_those_of_the_unlimited_answer():
    judge = judged(6, Outcome('{"a": ', "length", [""]), drawn=draws('{"a": ', "length"))
    assert "draws differ from the unlimited ones" in kinds(judge)


def test_a_value_that_could_be_kept_is_noted():
    judge = judged(40, Outcome(WHOLE[:40], "length", [""]))
    assert not kinds(judge)
    assert judge.notes["way"] == {"no value, though one closes": 1}
    judge = judged(70, Outcome('{"shop": "A\\"}]"}', "length", ["/items"]))
    assert judge.notes["way"] == {"keeps less than closes": 1}


def test_a_scan_reads_beginnings():
    scan = Scan('{"a": [1, "x\\"y", tru')
    assert scan.scalars == {("a", 0): 1, ("a", 1): 'x"y'}
    assert scan.begun == {(), ("a",), ("a", 0), ("a", 1), ("a", 2)}
    assert scan.cuts == [(1, "}"), (7, "]}"), (8, "]}"), (16, "]}")]
    assert not scan.whole
    assert Scan("[[], {}] ").whole
