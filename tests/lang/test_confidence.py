"""How sure a model is of a value: against `select`, the log-probabilities of all texts, and brute
force.
"""

import asyncio
import json
import math
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite.constraints.json_schema.json_spans import locate_values
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Regex, SamplingParams
from tests.server.conftest import serving

COLOURS = ("red", "dark green", "blue")


class Thing(BaseModel):
    colour: Literal["red", "dark green", "blue"]
    heavy: bool
    name: Annotated[str, Field(max_length=6)]
    age: Annotated[int, Field(ge=0, le=12)]
    maybe: Literal["x", "y"] | None
    tags: Annotated[list[Literal["é", 'q"t']], Field(max_length=2, min_length=1)]


PROMPT = "A thing, as JSON:\n"


@sgl.function
def things(s, /, **options):
    s += PROMPT
    s += sgl.gen(
        "x", type=Thing, **{"confidence": True, "temperature": 0, "max_tokens": 200, **options}
    )


def leaves(confidence, place):
    """All leaves, with their places in the text."""
    if place.parts is None:
        yield confidence, place
    for part in place.parts or ():
        yield from leaves(confidence[part], place.parts[part])


def test_the_tree_has_the_shape_of_the_value(engine):
    state = things.run(backend=engine)
    found, value = state.confidence("x"), json.loads(state.raw("x"))
    assert found.text == state.raw("x")
    assert list(found.parts) == list(value) == list(Thing.model_fields)
    assert [json.loads(found["tags"][i].text) for i in range(len(value["tags"]))] == value["tags"]
    assert found["colour"].probs.keys() == set(COLOURS)
    assert found["heavy"].probs.keys() == {True, False}
    assert found["maybe"].probs.keys() == {"x", "y", None}
    assert found["tags"][0].probs.keys() == {"é", 'q"t'}
    assert found["age"].probs is found["name"].probs is found.probs is found["tags"].probs is None
    scores = state.branch.names.variables["x"].record.scores
    assert found.mass == pytest.approx(sum(scores.allowed), abs=1e-3)
    assert found.logprob == pytest.approx(sum(scores.logprobs) - sum(scores.allowed), abs=1e-3)
    for leaf, _ in leaves(found, locate_values(found.text)):
        assert 0 <= leaf.prob <= 1
        assert leaf.mass <= 0
        if leaf.probs is not None:
            assert sum(leaf.probs.values()) == pytest.approx(1)
            assert leaf.prob == pytest.approx(leaf.probs[json.loads(leaf.text)])


def test_choices_have_the_probabilities_that_select_gives_them(small_engine):
    """After the text before them, each with the text that ends it."""

    @sgl.function
    def selecting(s, before, choices):
        s += PROMPT + before
        s += sgl.select("choice", choices)

    state = things.run(backend=small_engine)
    found, text, compared = state.confidence("x"), state.raw("x"), 0
    ids = state.branch.names.variables["x"].record.token_ids
    for leaf, place in leaves(found, locate_values(text)):
        before, tail = text[: place.start], text[place.end]
        usual = [*small_engine.tokenizer.encode(PROMPT + before.rstrip())]
        if (
            leaf.probs is None
            or [*small_engine.tokenizer.encode(PROMPT), *ids][: len(usual)] != usual
        ):
            continue  # `select` would have other tokens before it
        texts = [json.dumps(each, ensure_ascii=False) + tail for each in leaf.probs]
        probs = selecting.run(before, texts, backend=small_engine).selection("choice").probs
        assert [leaf.probs[json.loads(each[:-1])] for each in probs] == pytest.approx(
            list(probs.values()), abs=1e-4
        )
        compared += 1
    assert compared >= 2


def test_a_bare_choice_is_select(engine):
    @sgl.function
    def both(s):
        s += "The sky is "
        a, b = s.fork(2)
        a += sgl.gen("x", type=Literal["red", "dark green", "blue"], confidence=True, seed=1)
        b += sgl.select("x", list(COLOURS))
        a.sync(), b.sync()
        s.set_var("pair", (a.confidence("x"), b.selection("x")))

    confidence, selection = both.run(backend=engine)["pair"]
    assert confidence.probs == pytest.approx(selection.probs, abs=1e-4)
    assert confidence.prob == pytest.approx(confidence.probs[confidence.text])


def test_a_choice_that_others_begin_with_counts_with_its_end(engine):
    """What the model gives it, less what it gives to the tokens that go on from there."""
    options = (" blue", " blue and green", " red")

    @sgl.function
    def both(s):
        s += "The sky is"
        a, b = s.fork(2)
        a += sgl.gen("x", constraint=sgl.Choices(options), confidence=True, seed=1)
        b += sgl.select("x", options)
        a.sync(), b.sync()
        s.set_var("pair", (a.confidence("x"), b.selection("x")))

    confidence, selection = both.run(backend=engine)["pair"]
    blue, green, red = selection.scores
    assert green.token_ids[: len(blue.token_ids)] == blue.token_ids
    goes_on = math.exp(sum(green.logprobs[len(blue.logprobs) :]))
    own = math.exp(sum(blue.logprobs)) * (1 - goes_on)
    others = [math.exp(sum(each.logprobs)) for each in (green, red)]
    total = own + sum(others)
    shares = [each / total for each in (own, *others)]
    assert [confidence.probs[each] for each in options] == pytest.approx(shares, abs=1e-4)


LANGUAGES = {
    "numbers in a list": json_schema(
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 12},
            "maxItems": 1,
            "minItems": 1,
        }
    ),
    "texts": Regex("[ab]{2}|c"),
    "strings": json_schema({"type": "string", "pattern": "^[ab]?$"}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_legal_values_of_a_small_language_have_the_probability_1(small_engine, language):
    """All ways to spell all values, which draws at a high temperature find; each is scored at
    temperature 1.
    """

    @sgl.function
    def drawn(s, seed):
        s += "It is "
        s += sgl.gen(
            "x", constraint=LANGUAGES[language], confidence=True, temperature=100, n=200, seed=seed
        )

    found = {}
    for seed in range(3):
        state = drawn.run(seed, backend=small_engine)
        state.sync()
        answers = state.branch.names.variables["x"].record
        for i, answer in enumerate(answers):
            confidence = state.confidence("x", i)
            assert found.setdefault(answer.token_ids, confidence.prob) == pytest.approx(
                confidence.prob, abs=1e-6
            )
    assert sum(found.values()) == pytest.approx(1, abs=1e-4)


def test_a_number_counts_with_its_end(small_engine):
    """1 is no part of 10, 11 and 12: brute force over the next tokens."""

    @sgl.function
    def one(s):
        s += "It is "
        s += sgl.gen("x", constraint=LANGUAGES["numbers in a list"], confidence=True, seed=3)

    state = one.run(backend=small_engine)
    state.sync()
    record, found = state.branch.names.variables["x"].record, state.confidence("x")
    first = next(i for i, end in enumerate(record.scores.ends) if end > 1)
    last = next(i for i, end in enumerate(record.scores.ends) if end > len(found[0].text) + 1)
    each = [own - allowed for own, allowed in zip(record.scores.logprobs, record.scores.allowed)]
    assert found[0].logprob == pytest.approx(sum(each[first : last + 1]), abs=1e-5)


def test_choices_that_the_text_before_has_ruled_out_have_no_part(engine):
    schema = {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, "value": {"enum": values}},
         "required": ["kind", "value"], "additionalProperties": False}
        for kind, values in (("a", ["x", "y"]), ("b", ["y", "z"]))
    ]}  # fmt: skip

    @sgl.function
    def program(s, seed):
        s += "Say: "
        s += sgl.gen("x", json_schema=schema, confidence=True, seed=seed, max_tokens=60)

    for seed in range(4):
        state = program.run(seed, backend=engine)
        found = state.confidence("x")
        assert found["kind"].probs.keys() == {"a", "b"}
        assert found["value"].probs.keys() == (
            {"x", "y"} if json.loads(state["x"])["kind"] == "a" else {"y", "z"}
        )


def test_values_that_are_equal_in_python_are_told_apart_by_their_texts(engine):
    @sgl.function
    def program(s):
        s += "Say: "
        s += sgl.gen("x", json_schema={"enum": [1, True, "b"]}, confidence=True, seed=1)

    assert program.run(backend=engine).confidence("x").probs.keys() == {"1", "true", '"b"'}


def test_an_enum_is_scored_in_one_step(small_engine):
    @sgl.function
    def program(s):
        s += "A word, as JSON: "
        s += sgl.gen(
            "x", json_schema={"enum": ["red", "green", "blue", "violet"]}, confidence=True, seed=1
        )

    state = program.run(backend=small_engine)
    state.sync()
    before = small_engine.stats()["steps"]
    assert len(state.confidence("x").probs or ()) == 4
    assert small_engine.stats()["steps"] - before == 1


def test_scores_are_in_the_usage_of_the_run_and_within_its_budget(engine):
    state = things.run(backend=engine)
    state.sync()
    before = state.usage()
    assert state.confidence("x")["heavy"].probs
    after = state.usage()
    assert after.prompt_tokens > before.prompt_tokens
    assert after.total_s == before.total_s
    assert after.completion_tokens == before.completion_tokens
    assert state.usage("x").prompt_tokens < after.prompt_tokens
    used = before.prompt_tokens + before.completion_tokens
    scarce = things.run(backend=engine, max_total_tokens=used + 210)
    scarce.sync()
    with pytest.raises(sgl.errors.BudgetError, match="max_total_tokens"):
        [scarce.confidence("x") for _ in range(20)]


def test_a_node_with_another_backend_is_scored_there(small_engine):
    @sgl.function
    def program(s):
        s += "The sky is "
        s += sgl.gen(
            "x", type=Literal["red", "blue"], confidence=True, seed=1, backend=small_engine
        )

    @sgl.function
    def selecting(s):
        s += "The sky is " + sgl.select("x", ["red", "blue"])

    found = program.run(backend=sgl.ScriptedBackend()).confidence("x")
    assert found.probs == pytest.approx(
        selecting.run(backend=small_engine).selection("x").probs, abs=1e-4
    )


def test_what_is_no_json_is_one_value(engine):
    @sgl.function
    def program(s):
        with s.grammar(Regex("a(b|c)+, [0-9]")):
            s += "a"
            s += sgl.gen("x", regex="[bc]{2}", confidence=True, seed=1)
            s += ", "
            s += sgl.gen("y", confidence=True, seed=1)
        s += sgl.gen("z", type=int, confidence=True, seed=1, max_tokens=6)

    state = program.run(backend=engine)
    for name in "xyz":
        confidence = state.confidence(name)
        assert confidence.text == str(state.raw(name))
        assert not confidence.parts
        assert confidence.logprob <= 0


def test_a_server_gives_the_same(small_engine):
    here = things.run(backend=small_engine)
    with serving(small_engine) as url:
        endpoint = sgl.RuntimeEndpoint(url)
        for push_down in (True, False):
            there = things.run(backend=endpoint, push_down=push_down)
            assert there["x"] == here["x"]
            for a, b in zip(
                *(leaves(s.confidence("x"), locate_values(s.raw("x"))) for s in (here, there))
            ):
                assert a[0].logprob == pytest.approx(b[0].logprob, abs=1e-3)
                assert a[0].probs == pytest.approx(b[0].probs, abs=1e-4)
        endpoint.shutdown()


def test_generate_reports_it_over_http(small_engine):
    """Engine.generate and /generate have the same fields."""
    params = {"regex": "[0-9]{2}", "temperature": 0}
    meta = small_engine.complete(
        "It is ", SamplingParams(temperature=0, confidence=True), Regex("[0-9]{2}")
    ).scores
    with serving(small_engine) as url:
        answer = sgl.RuntimeEndpoint(url)
        body = {"text": "It is ", "sampling_params": params, "return_confidence": True}
        found = asyncio.run(_post(url, body))["meta_info"]
        answer.shutdown()
    assert found["output_model_logprobs"] == pytest.approx(meta.logprobs, abs=1e-4)
    assert found["output_allowed_logprobs"] == pytest.approx(meta.allowed, abs=1e-4)


async def _post(url, body):
    import httpx2

    async with httpx2.AsyncClient() as client:
        return (await client.post(f"{url}/generate", json=body)).json()


# ------------------------------------------------------------------------------------------- errors


def test_what_has_no_confidence_is_told(engine, tmp_path):
    @sgl.function
    def program(s):
        s += "Say: "
        s += sgl.gen("free", confidence=True, max_tokens=3)
        s += sgl.gen("unasked", regex="[0-9]", max_tokens=3)
        s += sgl.select("chosen", ["a", "b"])
        s += sgl.gen(
            "cut", json_schema={"type": "array", "minItems": 9}, confidence=True, max_tokens=3
        )
        s += sgl.gen("good", regex="[0-9]", confidence=True)
        s.set_var("own", 3)

    state = program.run(backend=engine)
    for name, why in {
        "free": "'free': free text has no value to be sure of", "cut": "'cut': max_tokens has cut its text",
        **dict.fromkeys(("unasked", "chosen", "own"), "no record from which to compute its confidence. Use gen"),
    }.items():  # fmt: skip
        with pytest.raises(sgl.ProgramError, match=why) as caught:
            state.confidence(name)
        assert "test_confidence.py" in str(caught.value)
    with pytest.raises(sgl.ParameterError, match="sample: 1 is no index of 1 samples"):
        state.confidence("good", 1)
    with pytest.raises(sgl.UnknownVariableError):
        state.confidence("nothing")
    state.save(tmp_path / "state.json")
    with pytest.raises(
        sgl.ProgramError,
        match=r"'good': .* read its confidence before the state is saved and loaded",
    ):
        sgl.load(tmp_path / "state.json", backend=engine).confidence("good")


def test_backends_that_do_not_score_tokens_refuse_or_say_so():
    for backend in (
        sgl.OpenAI("gpt-4o-mini", api_key="-"),
        sgl.Anthropic("claude-haiku-4-5", api_key="-"),
    ):
        with pytest.raises(sgl.CapabilityError, match="can't honour confidence"):
            things.run(backend=backend)["x"]
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("x", regex="a", confidence=True))).run(
        backend=sgl.ScriptedBackend(default="a")
    )
    with pytest.raises(
        sgl.ProgramError, match=r"'x': the backend has not scored its tokens. Use a local engine"
    ):
        state.confidence("x")


def test_a_coroutine_reads_it_after_the_run(engine):
    @sgl.function
    async def program(s):
        s += "Say: "
        s += sgl.gen("x", regex="[0-9]", confidence=True)
        await s.get("x")
        with pytest.raises(sgl.ProgramError, match="would block the event loop"):
            s.confidence("x")

    assert asyncio.run(program.arun(backend=engine)).confidence("x").prob <= 1


@pytest.mark.parametrize(
    "text",
    ["3", '"a\\"]}é"', " [ ] ", "{}", '{"a": [1, {"b\\"": null}], "c" : -1.5e3}', "[[], [true]]"],
)
def test_places_are_those_of_the_values(text):
    def check(place, value):
        if isinstance(value, list | dict):
            parts = dict(enumerate(value)) if isinstance(value, list) else value
            assert list(place.parts) == list(parts)
            for name, part in parts.items():
                check(place.parts[name], part)
        assert json.loads(text[place.start : place.end]) == value
        assert text[place.start : place.end].strip() == text[place.start : place.end]

    check(locate_values(text), json.loads(text))
