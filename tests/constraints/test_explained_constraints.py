"""`sgl.grammar.explain`: what it says of a constraint is what generations then do."""

from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field

import sglang_lite as sgl
from sglang_lite import grammar as g
from sglang_lite.constraints.coerce import as_constraint
from sglang_lite.protocol import CapabilityError, ConstraintError, ParameterError, SamplingParams


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Person(BaseModel):
    name: Annotated[str, AfterValidator(str.title)]
    age: int
    colour: Colour
    tags: Annotated[list[str], Field(json_schema_extra={"x-repeats": 4})]


SOURCE = "The bridge was closed on Monday."
KINDS: dict[str, Any] = {
    "type": Person,
    "int": int,
    "float": float,
    "literal": Literal["yes", "no"],
    "json_schema": {
        "type": "object",
        "properties": {"at": {"format": "hostname", "type": "string"}},
        "required": ["at"],
    },
    "any json": "json",
    "regex": sgl.Regex("[a-z]{3,8}!"),
    "grammar": sgl.Grammar('root ::= "(" root ")" | "x"'),
    "lark": sgl.Grammar('start: "a" | "b" start'),
    "quote": Annotated[str, sgl.quote(SOURCE, min_words=2)],
    "choices": sgl.Choices(("yes", "no")),
}
REFUSED = {
    "lookbehind": sgl.Regex("a(?<=ab)"),
    "no array of different items": {"not": {"type": "array", "uniqueItems": True}},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", KINDS)
def test_an_engine_does_as_it_says(small_engine, name):
    found = g.explain(KINDS[name], small_engine)
    constraint = as_constraint(KINDS[name])
    assert (found.mode, found.refused) == ("native", ())
    assert found.checked == g.check(KINDS[name]).checked
    fewest = found.fewest_tokens or 60
    answer = small_engine.complete("Say: ", SamplingParams(max_tokens=fewest, seed=1), constraint)
    assert answer.meta["constraint_backend"] == found.by
    assert "fewest_tokens" not in answer.meta
    if answer.finish_reason == "stop":
        assert g.matches(constraint, answer.text)
    if (found.fewest_tokens or 0) > 1:
        answer = small_engine.complete("Say: ", SamplingParams(max_tokens=fewest - 1), constraint)
        assert (answer.finish_reason, answer.meta["fewest_tokens"]) == ("length", fewest)


def test_limits_are_told(small_engine):
    told = {name: " / ".join(g.explain(KINDS[name], small_engine).limits) for name in KINDS}
    assert "at most 19 digits" in told["int"]
    assert "19" not in told["float"]
    assert "/properties/tags/x-repeats: at most 4 equal items" in told["type"]
    assert "/properties/at/format: not all that is valid is generated" in told["json_schema"]
    assert told["regex"] == told["grammar"] == ""
    assert any(pointer == "/properties/name" for pointer, _ in g.explain(Person).checked)


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_engine_refuses_is_told(small_engine, name):
    found = g.explain(REFUSED[name], small_engine)
    assert found.mode == "refused"
    assert found.refused == g.check(REFUSED[name]).refused != ()
    with pytest.raises(ConstraintError):
        small_engine.complete("x", SamplingParams(), as_constraint(REFUSED[name]))


def backends():
    for model in ("gpt-4o-mini", "gpt-4", "gpt-5"):
        for policy in ("strict", "emulate"):
            yield sgl.OpenAI(model, api_key="-", policy=policy)
    yield sgl.Anthropic("claude-haiku-4-5", api_key="-")


@pytest.mark.parametrize(
    "backend", list(backends()), ids=lambda backend: f"{backend.model_name}, {backend.policy}"
)
@pytest.mark.parametrize("name", [*KINDS, "select"])
def test_a_provider_is_explained_as_for_a_program(backend, name):
    @sgl.function
    def program(s):
        s += sgl.user("Say:")
        if name == "select":
            s += sgl.assistant(sgl.select("x", ["yes", "no"]))
        elif isinstance(KINDS[name], type) or name in ("literal", "quote"):
            s += sgl.assistant(sgl.gen("x", type=KINDS[name]))
        else:
            s += sgl.assistant(sgl.gen("x", constraint=KINDS[name]))

    try:
        (node,) = backend.explain(program).nodes
    except CapabilityError as error:  # at the line that adds it
        node, refusal = None, str(error)
    found = g.explain(["yes", "no"] if name == "select" else KINDS[name], backend)
    if node is None:
        assert found.mode == "refused", refusal
        return
    assert found.mode == node.mode
    if node.mode == "refused":
        assert found.refused
    else:
        assert found.by == (
            f"{node.strategy} or {node.otherwise}" if node.otherwise else node.strategy
        )
    if found.by == "repair":
        assert found.checked[0] == ("", "all of it: the provider does not enforce it")


def test_provider_limits_of_a_schema_are_told():
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 3}, "b": {"type": "integer"}},
              "required": ["b"], "additionalProperties": False}  # fmt: skip
    found = g.explain(schema, sgl.OpenAI("gpt-4o-mini", api_key="-"))
    assert ("/properties/a/minLength", "not enforced by the provider") in found.checked
    assert any("/properties/a" in each and "required" in each for each in found.limits)
    refused = g.explain({"not": {"type": "string"}}, sgl.OpenAI("gpt-4o-mini", api_key="-"))
    assert refused.mode == "refused"
    assert any(pointer == "/not" for pointer, _ in refused.refused)


def test_the_other_forms(small_engine):
    assert g.explain(["a", "b"], small_engine).by == "scores"
    assert g.explain(["a", "b"]).mode == "native"
    scripted = g.explain(Person, sgl.ScriptedBackend())
    assert scripted.mode == "native"
    text = str(g.explain(Person, small_engine))
    assert text.startswith("a JSON schema on ")
    assert "native by llguidance" in text
    assert "checked in the finished value: /properties/name: " in text
    assert "shortest text: " in text
    with pytest.raises(ConstraintError):
        g.explain(3, small_engine)
    with pytest.raises(ParameterError):
        g.explain(Person, 3)  # type: ignore[arg-type]  # as users do
