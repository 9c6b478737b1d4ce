"""Walking through the texts of a constraint piece by piece, held against whole texts."""

import random

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.byte_matcher import ByteMatcher
from sglang_lite.constraints.formal.earley import recognises
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import ConstraintError, Ebnf, InOrder, Regex, Repeated
from tests.constraints.random_grammars import grammar as random_grammar
from tests.counts import some

PERSON = json_schema(
    {
        "type": "object",
        "properties": {
            "näme": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "maximum": 130},
        },
        "required": ["näme", "age"],
        "additionalProperties": False,
    }
)


def walked(constraint, *texts):
    walk = ByteMatcher(constraint)
    for text in texts:
        walk.push(text)
    return walk


def ends(walk):
    try:
        walk.check_complete()
    except ConstraintError:
        return False
    return True


def test_a_walk_through_random_grammars_ends_where_a_text_is_in_the_language():
    seen = set()
    for seed in range(some(20, 80)):
        draw = random.Random(seed)
        constraint = Ebnf(random_grammar(draw))
        try:
            text = sample(constraint, draw)
        except ConstraintError:
            continue
        if len(text) > 40:  # the oracle takes the cube of it
            continue
        at = draw.randrange(len(text) + 1)
        walk = walked(constraint, text[:at])
        assert ends(walk) == recognises(language_for_constraint(constraint), text[:at])
        more = "".join(draw.choice("abc") for _ in range(3))
        twin = walk.copy()
        try:
            twin.push(more)
        except ConstraintError:
            assert not recognises(language_for_constraint(constraint), text[:at] + more)
            assert twin.text == walk.text
            twin.push(text[at:])  # it stayed where it was
        else:
            assert ends(twin) == recognises(language_for_constraint(constraint), text[:at] + more)
        walk.push(text[at:])
        assert walk.text == text
        assert ends(walk)
        seen.add(bool(at))
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("texts", "refused", "message"),
    [
        (
            (),
            "[",
            r"does not allow '\[' here, from character 1 of it on\. It continues with '\{\"näme\": \"'",
        ),
        (
            ('{"n',),
            'äme": "é\n',
            r"'äme\": \"é\\n' here, from character 9 of it on, after '\{\"näme\": \"é'\.$",
        ),
        (('{"näme": "abcde',), "f", "after '.*abcde'. It continues with"),
        (('{"näme": "", "age": 1',), "!", "continues with one of '0', '1', .*'9', '}'"),
        (('{"näme": "", "age": 1}',), " ", "It is complete"),
        ((), "{\ud800", "from character 2 of it on, after '{'"),
    ],
)
def test_what_is_not_allowed_is_said_with_its_place_and_what_is(texts, refused, message):
    walk = walked(PERSON, *texts)
    with pytest.raises(ConstraintError, match=message):
        walk.push(refused)
    assert walk.text == "".join(texts)


def test_an_end_may_be_one_of_the_few_things_that_come_next():
    with pytest.raises(ConstraintError, match="It continues with one of 'a', 'b', or is complete"):
        walked(sgl.Regex("x[ab]*"), "x").push("c")


def test_of_several_texts_the_possible_ones_are_left():
    walk = walked(PERSON, '{"näme": "a')
    assert walk.filter(["", "bcdef", "bcde", '", "age"', '","age"']) == ("", "bcde", '", "age"')
    walk.push('", ')
    with pytest.raises(
        ConstraintError, match=r"allows none of 'x', 'y' here. It continues with '\"age\": '"
    ):
        walk.filter(["x", "y"])


def test_what_a_schema_leaves_to_be_checked_is_checked_at_the_end():
    with pytest.raises(sgl.ValueValidationError, match="non-unique"):
        walked(
            json_schema(
                {"type": "array", "items": {"type": "object"}, "uniqueItems": True},
                enforce="best_effort",
            ),
            "[{}, ",
            "{}]",
        ).check_complete()


def test_what_can_not_be_enforced_is_refused_at_the_start():
    with pytest.raises(ConstraintError, match="multipleOf"):
        ByteMatcher(json_schema({"type": "integer", "multipleOf": 1234577}))


def test_numbers_that_can_not_be_read_greedily_are_taken_apart():
    number = json_schema({"type": "integer", "minimum": 0, "maximum": 99})
    several = Repeated(InOrder((number, Ebnf('root ::= "" | "(" root ")"'))), 1)
    walked(several, "12", "3", "(())", "4").check_complete()


@pytest.mark.parametrize("pattern", ["(a|aa|aaa)*a{10000}", "a{0,1000}" * 20 + "a{5000}"])
def test_forced_text_that_takes_much_work_to_find_is_followed_a_little(pattern):
    walk = walked(Regex(pattern))
    assert walk.completion().forced == "a" * 200
    walk.push("a" * 150)
    for ask in (lambda: walk.push("b"), walk.check_complete):
        with pytest.raises(ConstraintError, match="It continues with 'a'"):
            ask()


def test_a_long_text_may_take_the_work_of_many_masks():
    text = "".join(random.Random(0).choices("ab", k=5000))
    walk = walked(Regex("(a|b|ab|ba){1,9000}"))
    walk.completion()
    walk.push(text)
    walk.check_complete()


def test_a_pattern_that_takes_too_much_work_is_refused_with_a_cure():
    assert walked(Regex("(?!.*(c|ab|aac))(a|ab|b){0,1000}"), "a").completion().follows == "a", (
        "nothing is left to count"
    )
    walk = walked(Regex("(?!.*(c|ab|aac).*d?$)(a|ab|b){0,1000}"), "a")
    with pytest.raises(ConstraintError, match=r"too much work, .* Use smaller counts"):
        walk.completion()
