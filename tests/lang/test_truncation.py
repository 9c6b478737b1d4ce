"""Answers that a limit cuts, as a program's author sees them."""

import asyncio
import logging
import pickle
from typing import Annotated

import pytest
from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite.wire.failure import as_error, as_failure

BEGIN = 'As JSON: {"items": ["a", "b"]}\nAs JSON: '


class Items(BaseModel):
    items: list[str]


class Person(BaseModel):
    name: str
    age: int


@sgl.function
def items(s, own=None):
    s += BEGIN + sgl.gen("items", type=Items, max_tokens=12, temperature=0, shortened=own)


@sgl.function
def person(s, limit):
    s += 'As JSON: {"name": "Al", "age": 45}\nAs JSON, Dora is 62: '
    s += sgl.gen("person", type=Person, max_tokens=limit, temperature=0)


@pytest.mark.parametrize("way", ["gen", "run", "arun", "batch"])
def test_what_is_kept_has_the_values_that_were_written(smollm, way):
    match way:
        case "gen":
            state = items.run("keep", backend=smollm, shortened="raise")
        case "run":
            state = items.run(backend=smollm, shortened="keep")
        case "arun":
            state = asyncio.run(items.arun(backend=smollm, shortened="keep"))
        case "batch":
            (state,) = items.run_batch([{}], backend=smollm, shortened="keep")
    assert state["items"] == Items(items=["a", "b"])
    assert state.get_meta_info("items")["shortened"] == ["/items/2"]
    assert "warnings" not in state.get_meta_info("items")


def test_by_default_a_type_raises_with_what_is_known(smollm):
    with pytest.raises(
        sgl.TruncatedError,
        match=r"'items' was cut after 12 tokens: what is missing: /items/2\. Set ",
    ) as caught:
        items.run(backend=smollm)["items"]
    error = caught.value
    assert (error.value, error.left_out) == (Items(items=["a", "b"]), ("/items/2",))
    assert error.text == '{"items": ["a", "b"]}'
    assert isinstance(error, sgl.ValueValidationError)
    for again in (pickle.loads(pickle.dumps(error)), as_error(as_failure(error))):
        assert (again.text, tuple(again.left_out), again.max_tokens) == (
            error.text,
            error.left_out,
            error.max_tokens,
        )


class Poem(BaseModel):
    lines: list[Annotated[str, Field(max_length=40)]] = Field(min_length=6, max_length=6)


@pytest.mark.parametrize(("kind", "limit"), [(Person, 12), (Poem, 20)])
def test_the_limit_that_an_error_names_suffices(smollm, kind, limit):
    @sgl.function
    def write(s, limit):
        s += "As JSON, with Dora, who is 62, in it: " + sgl.gen(
            "x", type=kind, max_tokens=limit, temperature=0
        )

    with pytest.raises(sgl.TruncatedError) as caught:
        write.run(limit, backend=smollm)["x"]
    enough = caught.value.max_tokens
    assert write.run(enough, backend=smollm)["x"] == write.run(2_000, backend=smollm)["x"]


def test_a_number_at_the_limit_is_no_value(smollm):
    whole = person.run(60, backend=smollm)
    count = whole.get_meta_info("person")["completion_tokens"]
    for limit in range(8, count):
        state = person.run(limit, backend=smollm, shortened="keep")
        with pytest.raises((sgl.TruncatedError, sgl.ParameterError)):
            state["person"]
    assert person.run(count, backend=smollm)["person"] == whole["person"]


def test_a_limit_below_the_shortest_value_is_told_with_both_numbers(smollm):
    with pytest.raises(sgl.ParameterError, match=r"max_tokens: leaves 3 tokens .* has \d+\."):
        person.run(3, backend=smollm)["person"]


@pytest.mark.parametrize(
    "given", [{"regex": r"\d{30}"}, {"json_schema": Person}, {"dtype": int}], ids=str
)
def test_texts_are_kept_with_a_warning(smollm, caplog, given):
    @sgl.function
    def program(s):
        s += "1 2 3 4 5 6 7 8: " + sgl.gen("text", max_tokens=1, temperature=0, **given)

    with caplog.at_level(logging.WARNING):
        state = program.run(backend=smollm)
        assert isinstance(state["text"], str)
    assert state.get_meta_info("text")["finish_reason"]["type"] == "length"
    (warning,) = state.get_meta_info("text")["warnings"]
    assert warning.startswith("max_tokens cut 'text' after 1 tokens")
    with pytest.raises((sgl.TruncatedError, sgl.ParameterError)):
        program.run(backend=smollm, shortened="raise")["text"]


class Code(BaseModel):
    digits: str = Field(pattern="^[0-9]{140}$")  # each of them a token


def test_a_type_has_the_limit_that_its_values_need(smollm):
    @sgl.function
    def program(s):
        s += "A code as JSON: " + sgl.gen("code", type=Code, temperature=0)

    state = program.run(backend=smollm)
    assert len(state["code"].digits) == 140
    assert state.get_meta_info("code")["shortened"] == []
    with pytest.raises(sgl.ParameterError, match="leaves 6 tokens"):  # the run's limit wins
        program.run(backend=smollm, max_new_tokens=6)["code"]


def test_another_policy_is_refused():
    wrong: dict = {"shortened": "no"}
    for call in (lambda: sgl.gen("a", type=int, **wrong), lambda: items.run(**wrong)):
        with pytest.raises(
            sgl.ParameterError, match="shortened: 'no' is not one of 'raise', 'warn', 'keep'"
        ):
            call()


class Letter(BaseModel):
    to: str
    text: Annotated[str, sgl.prose] | None = None


def test_prose_is_kept_as_far_as_it_has_come(smollm):
    @sgl.function
    def write(s, limit):
        s += 'As JSON: {"to": "Ann", "text": "Thank you very much for the beautiful flowers"}\nAs JSON, a letter to Ben: '
        s += sgl.gen("letter", type=Letter, max_tokens=limit, temperature=0, shortened="keep")

    whole = write.run(200, backend=smollm)["letter"]
    for limit in (14, 17):
        state = write.run(limit, backend=smollm)
        assert state["letter"].to == whole.to
        assert 0 < len(state["letter"].text) < len(whole.text)
        assert whole.text.startswith(state["letter"].text)
        assert state.get_meta_info("letter")["shortened"] == ["/text"]


def test_prose_is_text():
    with pytest.raises(
        sgl.ConstraintError,
        match="only strings may be cut anywhere, and this is of the type 'array'",
    ):
        sgl.gen("x", type=Annotated[list[str], sgl.prose])
    with pytest.raises(sgl.ConstraintError, match="of the type 'integer' or 'null'"):
        sgl.gen("x", type=Annotated[int | None, sgl.prose])
    assert sgl.gen("x", type=list[Annotated[str, sgl.prose]])
    assert sgl.gen("x", type=Annotated[str | None, sgl.prose])
