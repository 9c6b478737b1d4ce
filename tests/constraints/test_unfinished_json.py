"""JSON that a limit has cut: what is left has only values that were written to their end.

The oracle has the whole text, and reads it with Python's json and a scanner of its own.
"""

import json
import random
import re

import pytest

from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.constraints.unfinished_json import create_unfinished_json
from sglang_lite.protocol import Continuation, Regex
from sglang_lite.text.reasoning import allow_reasoning_before
from tests.counts import some

ANY = json_schema(True)
PERSON = json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"id": {"type": "integer"}, "price": {"type": "number"}},
                    "required": ["id", "price"],
                },
            },
            "note": {"type": "string", "x-prose": True},
        },
        "required": ["name"],
    }
)


def close(constraint, text, first=0):
    """The closed text and the pointer of what is missing, read in pieces; None if there is none."""
    reader = create_unfinished_json(constraint)
    for at in range(0, len(text), 3):
        reader.push(text[at : at + 3])
    closed = reader.close(first)
    return None if closed is None else (text[: closed.kept] + closed.brackets, closed.left_out)


def random_value(rng, depth=0):
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 2:
        return rng.choice([0, -7, 12, 345, 1.5, -2.25e10, 77100])
    if kind < 4:
        return rng.choice(["", "a", 'b"c', "d\\", "[1, {", "é€😀", "12", "\n\t", "\x01"])
    if kind < 6:
        return rng.choice([True, False, None])
    if kind < 8:
        return {
            rng.choice('ab"/~é') + str(i): random_value(rng, depth + 1)
            for i in range(rng.randrange(4))
        }
    return [random_value(rng, depth + 1) for i in range(rng.randrange(4))]


def escape(name):
    return name.replace("~", "~0").replace("/", "~1")


def scalars(value, pointer=""):
    """Scalars of a value by their JSON Pointers."""
    if not isinstance(value, dict | list):
        return {pointer: value}
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    below = [scalars(each, f"{pointer}/{escape(str(step))}") for step, each in steps]
    return {at: each for found in below for at, each in found.items()}


def containers(value, pointer=""):
    """JSON Pointers of the objects and lists of a value."""
    if not isinstance(value, dict | list):
        return set()
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    below = [containers(each, f"{pointer}/{escape(str(step))}") for step, each in steps]
    return {pointer}.union(*below)


@pytest.mark.parametrize("ascii_only", [True, False])
def test_each_value_that_is_left_is_one_of_the_whole_text(ascii_only):
    rng = random.Random(1)
    for _ in range(some(60, 2000)):
        value = {"first": random_value(rng), "rest": [random_value(rng)]}
        text = json.dumps(value, ensure_ascii=ascii_only, indent=rng.choice([None, 1]))
        whole = scalars(value)
        for cut in range(1, len(text)):
            found = close(ANY, text[:cut])
            assert found is not None
            left = json.loads(found[0])
            assert all(at in whole and whole[at] == each for at, each in scalars(left).items()), (
                text[:cut],
                found,
            )
            assert containers(left) <= containers(value)


def test_nothing_that_has_ended_is_lost():
    """Where any JSON is valid, everything is kept up to the last value that has ended."""
    text = '{"a": [1, 22, {"b": "x", "c": true}], "d": -3.5e7, "e": null}'
    for cut in range(1, len(text)):
        closed, _ = close(ANY, text[:cut])
        kept = closed.rstrip("]}")
        rest = text[len(kept) : cut].lstrip("]}")
        # What is dropped begins no second value: a separator, a name and the beginning of one value
        # at most.
        assert re.fullmatch(r',? ?("(\w("(: ?)?)?)?)?(-?[\d.e]*|"\w?|t|tr|tru|n|nu|nul)?', rest), (
            text[:cut],
            closed,
        )


CUTS = {
    '{"name": "Do': None,
    '{"name": "Dora"': ('{"name": "Dora"}', "/-"),
    '{"name": "Dora", "items": [{"id": 1, "price": 7': ('{"name": "Dora", "items": []}', "/items/0"),
    '{"name": "Dora", "items": [{"id": 1, "price": 7}': ('{"name": "Dora", "items": [{"id": 1, "price": 7}]}', "/items/1"),
    '{"name": "Dora", "items": [{"id": 1, "price": 7}, {"id": 2, "price": 35':
        ('{"name": "Dora", "items": [{"id": 1, "price": 7}]}', "/items/1"),
    '{"name": "Dora", "note': ('{"name": "Dora"}', "/-"),
    '{"name": "Dora", "note": "It is ': ('{"name": "Dora", "note": "It is "}', "/note"),
    '{"name": "Dora", "note": "It is \\': ('{"name": "Dora", "note": "It is "}', "/note"),
    '{"name": "Dora", "note": "It is \\\\u12': ('{"name": "Dora", "note": "It is \\\\u12"}', "/note"),
    '{"name": "Dora", "note": "It is \\u12': ('{"name": "Dora", "note": "It is "}', "/note"),
    '{"name": "Dora", "note": "It is \\ud83d': ('{"name": "Dora", "note": "It is "}', "/note"),
    '{"name": "Dora", "note": "It is \\ud83d\\ude00': ('{"name": "Dora", "note": "It is \\ud83d\\ude00"}', "/note"),
}  # fmt: skip


@pytest.mark.parametrize("text", CUTS)
def test_cuts_of_a_schema(text):
    assert close(PERSON, text) == CUTS[text]
    if CUTS[text] is not None:
        parse_json(PERSON, CUTS[text][0])


def test_what_has_to_stay_stays():
    text = '{"name": "Dora", "items": [{"id": 1, "price": 7}, {"id": 2, "pri'
    closed, _ = close(PERSON, text)
    kept = len(closed) - 2
    assert close(PERSON, text, first=kept) == (closed, "/items/1")
    assert close(PERSON, text, first=kept + 1) is None


def test_a_text_that_was_begun_and_one_behind_reasoning():
    begun = Continuation(PERSON, '{"name": "Do')
    assert close(begun, 'ra", "it') == ('ra"}', "/-")
    assert close(begun, "r") is None
    thought = allow_reasoning_before("qwen3", PERSON)
    assert close(thought, '<think>{"a": [</think>\n\n{"name": "x", "n') == (
        '<think>{"a": [</think>\n\n{"name": "x"}',
        "/-",
    )
    assert close(thought, '{"name": "</think>", "n') == ('{"name": "</think>"}', "/-")
    assert close(thought, "<think>never ends") is None


def test_other_texts_are_not_closed():
    assert create_unfinished_json(Regex("[[]1(, 1)*]")) is None


def test_prose_is_found_through_references_and_alternatives():
    schema = json_schema(
        {
            "$defs": {"text": {"anyOf": [{"type": "string", "x-prose": True}, {"type": "null"}]}},
            "type": "array",
            "items": {"type": "object", "additionalProperties": {"$ref": "#/$defs/text"}},
        }
    )
    assert close(schema, '[{"a": null, "b": "It w') == ('[{"a": null, "b": "It w"}]', "/0/b")
    assert close(schema, '[{"a": null, "b": nu') == ('[{"a": null}]', "/0/b")
