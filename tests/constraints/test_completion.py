"""`sgl.grammar.complete`: what is forced next, and what may follow."""

import random

import pytest
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.grammar import Completion, complete


class City(BaseModel):
    name: str
    inhabitants: int


def brute(options, text):
    """The same, from a list of all texts."""
    rests = [option[len(text) :] for option in options if option.startswith(text)]
    forced = ""
    while "" not in rests and len({rest[0] for rest in rests}) == 1:
        forced += rests[0][0]
        rests = [rest[1:] for rest in rests]
    follows = {rest[0] for rest in rests if rest}
    ascii_ = "".join(sorted(char for char in follows if char.isascii()))
    return Completion(
        forced, ascii_, any(not char.isascii() for char in follows), "" in rests, text in options
    )


def test_of_choices_it_is_what_their_list_says():
    draw = random.Random(1)
    for _ in range(60):
        options = tuple(
            {
                "".join(draw.choices("abcéü€", k=draw.randint(0, 6)))
                for _ in range(draw.randint(1, 5))
            }
        )
        whole = draw.choice(options)
        text = whole[: draw.randint(0, len(whole))]
        assert complete(sgl.Choices(options), text) == brute(options, text), (options, text)


def test_what_a_schema_forces_is_told():
    assert complete(City).forced == '{"name": "'
    ahead = complete(City, '{"name": "Rome", "i')
    assert (ahead.forced, ahead.follows) == ('nhabitants": ', "-0123456789")
    assert not ahead.complete
    end = complete(City, '{"name": "Rome", "inhabitants": 3')
    assert "}" in end.follows
    assert complete(City, '{"name": "Rome", "inhabitants": 3}') == Completion(
        "", "", False, True, True
    )


def test_a_number_may_end_or_continue():
    ahead = complete(int, "12")
    assert ahead.complete
    assert ahead.ends
    assert set("0123456789") <= set(ahead.follows)


def test_a_grammar_of_endless_forced_text_is_looked_at_only_so_far():
    assert len(complete(sgl.Regex("(abcd){5000}")).forced) == 10_000


def test_what_masks_watch_is_told():
    members = {f"p{i}": {"type": "null"} for i in range(12)}
    closed = {"type": "object", "properties": members, "additionalProperties": False}
    any_order = sgl.grammar.json_schema({**closed, "required": ["p3", "p11"]}, order="any")
    assert complete(any_order, '{"p3": null').forced == ', "p'
    assert complete(any_order, '{"p3": null, "p').follows == "012456789"
    assert complete(any_order, '{"p11": null, "p1": null, "p1').forced == '0": null, "p'
    assert complete(any_order, '{"p3": null, "p11": null').follows == ",}"
    with pytest.raises(sgl.ConstraintError, match="has to come would be missing"):
        complete(any_order, '{"p3": null}')
    assert '"' not in complete(dict[str, int], '{"a": 1, "a').follows
    assert complete(list[float], "[1, 1").complete is False


@pytest.mark.parametrize("text", ["x", "yex", "yes!!"])
def test_a_text_that_is_not_allowed_is_refused(text):
    with pytest.raises(sgl.ConstraintError, match="does not allow"):
        complete(sgl.Regex("(yes|yellow)!"), text)


def test_what_is_no_text_is_refused():
    with pytest.raises(sgl.ParameterError, match="text"):
        complete(sgl.Regex("a"), 3)  # type: ignore[arg-type] # wrong on purpose
