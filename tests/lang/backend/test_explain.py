"""`backend.explain`: the table, its data, sums and prices; that it asks nothing."""

import json

import pytest
from plain_server import server
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.lang.backend.profiles.prices import price as price_known
from sglang_lite.protocol import Usage


class City(BaseModel):
    name: str


@sgl.function
def program(s, question):
    s += sgl.system("Be brief.")
    s += sgl.user("About: " + question)
    s += sgl.assistant(sgl.gen("city", type=City, max_tokens=50))
    s += sgl.user("Which?")
    s += sgl.assistant(sgl.select("pet", ["dog", "cat"]))
    s += sgl.user("A code.")
    s += sgl.assistant(sgl.gen("code", regex="[ab]+", max_tokens=10))


def price(usage, model):
    assert model == "gpt-4o"
    return usage.prompt_tokens + 10 * usage.completion_tokens


def test_each_node_has_its_strategy_calls_tokens_and_line():
    found = sgl.OpenAI("gpt-4o", api_key="key").explain(program)
    city, pet, code = found.nodes
    assert [(n.kind, n.name, n.mode, n.strategy, n.calls) for n in found.nodes] == [
        ("gen", "city", "native", "json_schema", (1, 1)),
        ("select", "pet", "native", "token_logprobs", (1, 2)),
        ("gen", "code", "refused", "", (0, 0)),
    ]
    assert 0 < city.prompt_tokens < pet.prompt_tokens < code.prompt_tokens
    assert city.completion_tokens == 50
    assert found.refused == (code,)
    assert code.where.line == city.where.line + 4
    assert "a regex" in code.refusal
    assert found.complete
    assert (found.calls, found.price) == ((2, 3), None)  # of the selection no limit is set
    tokens = Usage(city.prompt_tokens), Usage(city.prompt_tokens, completion_tokens=50)
    assert city.price == tuple(price_known(each, "gpt-4o") for each in tokens)


def test_emulation_is_priced_at_best_and_at_worst():
    backend = sgl.OpenAI("gpt-4o", api_key="key", policy="emulate")
    code = backend.explain(program, count=lambda text: 100, price=price).nodes[2]
    assert (code.mode, code.strategy, code.calls) == ("emulated", "repair", (1, 3))
    assert code.price == (100, 3 * (100 + 100))
    assert "stated in the prompt, checked" in code.warnings[0]


def test_it_is_a_table_and_data():
    found = sgl.OpenAI("gpt-4o", api_key="key").explain(program, price=price)
    lines = str(found).splitlines()
    assert lines[0] == "OpenAI('gpt-4o')"
    assert lines[1].split() == [
        "line",
        "node",
        "served",
        "calls",
        "prompt",
        "tokens",
        "at",
        "most",
        "price",
    ]
    assert "json_schema (native)" in lines[2]
    assert "refused" in lines[4]
    assert lines[5].startswith("test_explain.py:")
    data = json.loads(json.dumps(found.to_dict()))
    assert [node["strategy"] for node in data["nodes"]] == ["json_schema", "token_logprobs", ""]


@sgl.function
def look(s):
    s += sgl.user(sgl.image("https://a.example/i.png") + "What is it?")
    s += sgl.assistant(sgl.gen("seen", max_tokens=5))


def test_what_a_model_sees_is_told_and_what_it_does_not():
    found = sgl.OpenAI("gpt-4o", api_key="key").explain(look, price=price)
    image, seen = found.nodes
    assert (image.kind, image.mode, image.strategy, image.calls) == (
        "image",
        "native",
        "shown to the model",
        (0, 0),
    )
    assert image.where.line == seen.where.line - 1
    assert found.price == seen.price
    blind = sgl.OpenAI("davinci-002", api_key="key").explain(look)
    assert next((node.kind, node.refusal) for node in blind.refused) == ("image", "images")


def test_nothing_is_asked_of_a_model():
    with server({}) as (url, came):
        sgl.OpenAI("gpt-4o", api_key="key", base_url=url).explain(program, question="Paris")
        assert came == []


def test_what_stands_in_a_wrong_place_is_refused_in_the_words_of_the_run():
    @sgl.function
    def outside(s):
        s += "Some introduction."
        s += sgl.user("x")
        s += sgl.assistant(sgl.gen("a"))

    (node,) = sgl.OpenAI("gpt-4o", api_key="key").explain(outside).nodes
    assert "would not see the text outside the turns" in node.refusal


def test_several_generations_of_a_turn_are_told_together():
    @sgl.function
    def fields(s):
        s += sgl.user("x")
        s += sgl.assistant(
            "Name: " + sgl.gen("a", regex="[a-z]+") + " Year: " + sgl.gen("b", type=int)
        )

    nodes = sgl.OpenAI("gpt-4o", api_key="key", policy="emulate").explain(fields).nodes
    assert [node.strategy for node in nodes] == ["turn", "turn"]


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-5", "claude-opus-5", "claude-sonnet-5-5"])
def test_tools_are_served_as_explained(model):
    @sgl.function
    def calls(s):
        s += sgl.user("1 and 2?")
        s += sgl.assistant(sgl.gen("call", tools=[add]))

    with sgl.server_for_tests(None) as running:
        kind, arguments = (
            (sgl.Anthropic, running.anthropic)
            if "claude" in model
            else (sgl.OpenAI, running.openai)
        )
        backend = kind(model, max_retries=0, **arguments)
        (node,) = backend.explain(calls).nodes
        state = calls.run(backend=backend)
        assert state.get_meta_info("call")["strategy"] == node.strategy
        backend.shutdown()


def test_all_ways_through_a_body_are_explained():
    @sgl.function
    def asks(s, hard):
        s += sgl.user("x")
        if hard:
            s += sgl.assistant(sgl.gen("a", regex="a"))
        else:
            s += sgl.assistant(sgl.gen("b"))

    found = sgl.OpenAI("gpt-4o", api_key="key").explain(asks)
    assert sorted(node.mode for node in found.nodes) == ["native", "refused"]
    assert [
        node.name for node in sgl.OpenAI("gpt-4o", api_key="key").explain(asks, hard=False).nodes
    ] == ["b"]


def test_a_body_that_decides_by_what_only_a_run_knows_is_an_error():
    @sgl.function
    def asks(s):
        s += sgl.user("x")
        s += sgl.assistant(sgl.gen("a"))
        s += "x" * len(s["a"])

    with pytest.raises(sgl.TraceError):
        sgl.OpenAI("gpt-4o", api_key="key").explain(asks)
