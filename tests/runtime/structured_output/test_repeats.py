"""Equal items of a list come at most as often in a row as `repeats` and `x-repeats` say, where
anything else can come.
"""

import itertools
import json
from concurrent.futures import Future
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.constraints.coerce import as_constraint
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import Continuation, InOrder, Regex, SamplingParams
from tests.constraints.test_generation import TOKENS, random_model
from tests.counts import some
from tests.server.conftest import serving

TEXT: dict[str, Any] = {"type": "string"}
THING: dict[str, Any] = {"type": "object", "properties": {"a": TEXT, "ok": {"type": "boolean"}}, "required": ["a", "ok"],
         "additionalProperties": False}  # fmt: skip
MANY: dict[str, Any] = {"type": "array", "minItems": 8, "maxItems": 14}
LISTS: dict[str, dict[str, Any]] = {
    "strings": {**MANY, "items": TEXT},
    "short strings": {**MANY, "items": {"type": "string", "maxLength": 1}},
    "objects": {**MANY, "items": THING},
    "lists": {**MANY, "items": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 2}},
    "lists of numbers": {**MANY, "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    "tuples": {**MANY, "items": {"type": "array", "prefixItems": [TEXT, {"type": "boolean"}], "minItems": 2,
                                 "items": False}},
    "names": {**MANY, "items": {"type": "object", "additionalProperties": TEXT, "minProperties": 1,
                              "maxProperties": 1}},
    "a list in an object": {"type": "object", "properties": {"x": {**MANY, "items": TEXT}}, "required": ["x"]},
}  # fmt: skip
EXEMPT: dict[str, dict[str, Any]] = {
    "integers": {**MANY, "items": {"type": "integer", "minimum": 0, "maximum": 9}},
    "numbers": {**MANY, "items": {"type": "number"}},
    "booleans": {**MANY, "items": {"type": "boolean"}},
    "an enum": {**MANY, "items": {"enum": ["a", None, 1]}},
    "null": {**MANY, "items": {"type": "null"}},
}
# Makes strings, lists and objects end as soon as they may, so that lists repeat their items.
LOOPS = tuple((TOKENS.index(each), bias) for each, bias in
              ((b'"', 40.0), (b"}", 20.0), (b"]", 20.0), (b",", 25.0), (b"false", 20.0), (b"7", 19.0)))  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model()) as engine:
        yield engine


def params(**options):
    return SamplingParams(**{"max_tokens": 300, "logit_bias": LOOPS, "temperature": 1.0, **options})


def answers(engine, schema, count, **options):
    constraint = json_schema(schema)
    jobs = [engine_job(engine, constraint, params(seed=seed, **options)) for seed in range(count)]
    found = [job.result(timeout=120) for job in jobs]
    for answer in found:
        parse_json(constraint, answer.text)
    return found


def engine_job(engine, constraint, asked):
    done = Future()
    engine.submit("x", asked, constraint, sink=done.set_result)
    return done


NEVER_COUNTED = (int, float, bool, type(None))


def excess(value, most, exempt=NEVER_COUNTED):
    """Number of items that come more often in a row than permitted, in all lists of a value."""
    if isinstance(value, dict):
        return sum(excess(each, most, exempt) for each in value.values())
    if not isinstance(value, list):
        return 0
    runs = (
        len(list(run)) for item, run in itertools.groupby(value) if not isinstance(item, exempt)
    )
    return sum(max(0, run - most) for run in runs) + sum(
        excess(each, most, exempt) for each in value
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("most", [3, 5])
@pytest.mark.parametrize("name", LISTS)
def test_no_item_comes_more_often_in_a_row(engine, name, most):
    free = answers(engine, LISTS[name], some(8, 100))
    assert sum(excess(json.loads(each.text), most) for each in free) > 0
    assert all("repeats" not in each.meta for each in free)
    refused = 0
    for each in answers(engine, LISTS[name], some(8, 100), repeats=most):
        assert excess(json.loads(each.text), most) == each.meta["repeats"]["repeated"] == 0
        refused += each.meta["repeats"]["refused"]
    assert refused > 0


@pytest.mark.parametrize("name", EXEMPT)
def test_numbers_booleans_and_enums_may_repeat_unless_a_schema_asks(engine, name):
    free = answers(engine, EXEMPT[name], 8)
    texts = [each.text for each in free]
    assert [each.text for each in answers(engine, EXEMPT[name], 8, repeats=3)] == texts
    assert sum(excess(json.loads(text), 3, ()) for text in texts) > 0
    for each in answers(engine, {**EXEMPT[name], "x-repeats": 3}, 8):
        left = excess(json.loads(each.text), 3, ())
        assert left == each.meta["repeats"]["repeated"]
        assert left == 0 or name == "null"


def test_the_smaller_of_two_limits_holds(engine):
    both = {"allOf": [{**LISTS["strings"], "x-repeats": 6}, {"type": "array", "x-repeats": 4}]}
    for schema, options in (
        (both, {}),
        ({**LISTS["strings"], "x-repeats": 6}, {"repeats": 4}),
        (both, {"repeats": 5}),
    ):
        runs = [excess(json.loads(each.text), 3) for each in answers(engine, schema, 8, **options)]
        assert max(runs) > 0
        assert all(
            excess(json.loads(each.text), 4) == 0 for each in answers(engine, schema, 8, **options)
        )


def test_where_nothing_else_is_possible_the_item_comes_again(engine):
    only = {"type": "array", "items": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
            "additionalProperties": False}, "minItems": 6, "maxItems": 9}  # fmt: skip
    for each in answers(engine, only, 8, repeats=3):
        value = json.loads(each.text)
        assert len(value) == 6  # it ends as soon as it may
        assert each.meta["repeats"]["repeated"] == 3


def test_a_list_that_may_end_ends_in_place_of_its_only_item(engine):
    only = {"type": "array", "items": {"type": "array", "maxItems": 0}, "minItems": 1}
    for each in answers(engine, only, 8, repeats=3, logit_bias=((TOKENS.index(b","), 99.0),)):
        assert json.loads(each.text) == [[]] * 3
        assert each.meta["repeats"] == {"refused": 1, "repeated": 0}


@pytest.mark.parametrize(
    "settings", [{"jump_forward": "off"}, {"overlap": False}, {"max_total_tokens": 512}], ids=str
)
def test_other_ways_of_running_give_the_same(engine, settings):
    """The last one retracts requests."""
    expected = [each.text for each in answers(engine, LISTS["strings"], 12, repeats=3)]
    with Engine.of(random_model(), **settings) as other:
        assert [each.text for each in answers(other, LISTS["strings"], 12, repeats=3)] == expected


def test_an_output_that_is_continued_goes_on_as_it_would_have(engine):
    constraint, asked = json_schema(LISTS["objects"]), params(seed=3, repeats=3)
    whole = engine.complete("x", asked, constraint)
    assert whole.meta["repeats"]["refused"] > 0
    for cut in range(1, len(whole.token_ids), 11):
        done = Future()
        engine.submit(
            "x", asked, constraint, sink=done.set_result, output_ids=whole.token_ids[:cut]
        )
        assert done.result(timeout=60).token_ids == whole.token_ids


@pytest.mark.parametrize("backend", ["xgrammar", "outlines"])
def test_engines_whose_endings_are_not_known_refuse_the_end_of_an_item(backend):
    with Engine.of(random_model(), constraint_backend=backend) as engine:
        for each in answers(engine, LISTS["strings"], 6, repeats=3):
            assert excess(json.loads(each.text), 3) == each.meta["repeats"]["repeated"] == 0


def test_a_text_that_a_grammar_continues_counts_as_well(engine):
    constraint = Continuation(json_schema(LISTS["strings"]), '["", "", "", ')
    for seed in range(6):
        answer = engine.complete("x", params(seed=seed, repeats=3), constraint)
        assert excess(json.loads(constraint.text + answer.text), 3) == 0


class Tags(BaseModel):
    kind: Literal["a", "b"]
    tags: list[Annotated[str, Field(max_length=4)]]


@sgl.function
def program(s, bias):
    s += "Tags: "
    s += sgl.gen("tags", type=Tags, max_tokens=90, temperature=0, repeats=3, logit_bias=bias)


def looping(engine):
    """Bias that ends strings, but no lists, as soon as they may end."""
    tokens = engine.tokenizer
    return {
        tokens.encode(each)[0]: bias
        for each, bias in (('"', 90), ('",', 99), (",", 80), (', "', 0))
    }


def test_programs_here_and_at_servers(small_engine):
    bias = looping(small_engine)
    state = program.run(bias, backend=small_engine)
    assert excess(state["tags"].tags, 3) == state.get_meta_info("tags")["repeats"]["repeated"] == 0
    assert state.get_meta_info("tags")["repeats"]["refused"] > 0
    with serving(small_engine) as url:
        there = program.run(bias, backend=sgl.RuntimeEndpoint(url))
        assert there.raw("tags") == state.raw("tags")
        assert there.get_meta_info("tags")["repeats"] == state.get_meta_info("tags")["repeats"]


@pytest.mark.parametrize(
    "options", [{"repeats": 3}, {"json_schema": {**LISTS["strings"], "x-repeats": 3}}], ids=str
)
def test_other_backends_refuse_it_by_name(options):
    @sgl.function
    def tags(s):
        s += sgl.user("Tags?")
        s += sgl.assistant(sgl.gen("tags", **{"json_schema": LISTS["strings"], **options}))

    for backend in (
        sgl.OpenAI("gpt-4o-mini", api_key="-"),
        sgl.OpenAI("gpt-4o-mini", api_key="-", policy="emulate"),
        sgl.Anthropic("claude-haiku-4-5", api_key="-", policy="emulate"),
    ):
        with pytest.raises(sgl.CapabilityError, match="repeats"):
            tags.run(backend=backend)


def test_a_grammar_over_several_nodes(small_engine):
    @sgl.function
    def inside(s):
        with s.grammar(Tags):
            s += '{"kind": "a", "tags": ["x", "x", "x", "x'
            s += sgl.gen("rest", max_tokens=400, repeats=3, temperature=0)

    state = inside.run(backend=small_engine)
    assert not state.text().startswith('{"kind": "a", "tags": ["x", "x", "x", "x"')


WRONG = [
    (None, "the text is free"),
    (Regex("[0-9]+"), "its constraint is no JSON schema"),
    (
        json_schema({"type": "object", "properties": {"a": TEXT}, "additionalProperties": False}),
        "has no list",
    ),
    (json_schema({"type": "array", "maxItems": 0}), "has no list"),
    (InOrder((Regex("x"), json_schema(LISTS["strings"]))), "its constraint is no JSON schema"),
]


@pytest.mark.parametrize(("constraint", "why"), WRONG, ids=str)
def test_what_has_no_list_is_refused(engine, constraint, why):
    with pytest.raises(sgl.ParameterError, match=rf"repeats.*{why}"):
        engine.complete("x", SamplingParams(repeats=3), constraint)


@pytest.mark.parametrize("value", [2, 0, -1, True, 3.5, "3"])
def test_bad_limits(value):
    with pytest.raises(sgl.ParameterError, match="repeats"):
        SamplingParams(repeats=value)
    with pytest.raises(
        sgl.ConstraintError, match="x-repeats must be a whole number of at least 3"
    ) as error:
        json_schema({"type": "object", "properties": {"a": {"type": "array", "x-repeats": value}}})
    assert error.value.pointer == "/properties/a/x-repeats"


def test_a_schema_that_asks_where_nobody_counts(engine):
    with pytest.raises(sgl.ConstraintError, match="x-repeats counts equal items of a list"):
        engine.compile_grammar(json_schema({"type": "string", "x-repeats": 3}))
    asking = json_schema({**LISTS["strings"], "x-repeats": 3})
    with pytest.raises(
        sgl.ConstraintError, match="x-repeats is enforced where a schema is the whole constraint"
    ):
        engine.complete("x", SamplingParams(), InOrder((Regex("x"), asking)))


def test_the_keyword_asserts_nothing():
    schema = {**LISTS["strings"], "x-repeats": 3}
    text = json.dumps(["a"] * 8)
    assert sgl.grammar.matches(schema, text)
    plain, asking = sgl.grammar.check(LISTS["strings"]), sgl.grammar.check(schema)
    assert (plain.enforced, plain.checked, plain.remarks) == (
        asking.enforced,
        asking.checked,
        asking.remarks,
    )


def test_a_field_of_a_type_can_ask(engine):
    asking = Annotated[list[str], Field(min_length=6, json_schema_extra={"x-repeats": 3})]
    answer = engine.complete("x", params(seed=1), as_constraint(asking))
    assert excess(json.loads(answer.text), 3) == 0 < answer.meta["repeats"]["refused"]
