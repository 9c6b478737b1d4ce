"""`reasoning_effort`: sent where the API has it, refused by name everywhere else; and profiles that
say more than a backend can ask for.
"""

import asyncio

import pytest
from openai_answers import said

import sglang_lite as sgl
from sglang_lite.lang.backend.anthropic import Anthropic
from sglang_lite.lang.backend.capabilities import Demands
from sglang_lite.lang.backend.ladder.strategy import Strategy
from sglang_lite.lang.backend.remote.backend import RemoteBackend
from sglang_lite.protocol import Prompt, Regex


@sgl.function
def hello(s):
    s += sgl.user("Hi")
    s += sgl.assistant(sgl.gen("a", max_tokens=5))


@pytest.mark.parametrize("model", ["gpt-4o", "davinci-002"])
def test_effort_that_a_model_of_openai_does_not_take_is_refused_before_a_call(api, openai, model):
    backend = openai(model, reasoning_effort="low")
    with pytest.raises(sgl.CapabilityError, match="can't honour reasoning_effort"):
        hello.run(backend=backend)
    assert "reasoning_effort" in backend.explain(hello).nodes[0].refusal
    assert api.requests == []


@pytest.mark.parametrize(
    ("model", "taken"),
    [("claude-opus-5", True), ("claude-opus-4-5", True), ("claude-haiku-4-5", False), ("claude-3-haiku", False),
     ("claude-sonnet-5-5", False)],
)  # fmt: skip
def test_effort_on_claude(api, connected, model, taken):
    backend = connected(Anthropic, model, reasoning_effort="low")
    if taken:
        hello.run(backend=backend).sync()
        assert api.last["output_config"] == {"effort": "low"}
        return
    with pytest.raises(sgl.CapabilityError, match="can't honour reasoning_effort"):
        hello.run(backend=backend)
    assert api.requests == []


def test_effort_of_which_nothing_is_known_is_refused_or_left_out_with_a_word(api, openai):
    with pytest.raises(sgl.CapabilityError, match="reasoning_effort") as caught:
        hello.run(backend=openai("local", profile="compatible", reasoning_effort="low"))
    assert "Whether it accepts reasoning_effort is not known" in caught.value.hint
    api.answers = [said("x")]
    state = hello.run(
        backend=openai("local", profile="compatible", reasoning_effort="low", policy="warn")
    )
    assert state.get_meta_info("a")["warnings"] == [
        "reasoning_effort is left out: the model does not accept it"
    ]
    assert "reasoning_effort" not in api.last


def test_effort_is_not_dropped_by_a_decision(openai):
    @sgl.function
    def choose(s):
        s += sgl.user("Which?")
        s += sgl.assistant(sgl.select("pet", ["dog", "cat"]))

    assert openai("gpt-6-luna").explain(choose).nodes[0].strategy == "decisions"
    assert openai("gpt-6-luna", reasoning_effort="low").explain(choose).nodes[0].strategy == "enum"


# ----------------------------------------------------------------------- profiles that say too much


@sgl.function
def choose(s, heat=0.0):
    s += sgl.user("Which?")
    s += sgl.assistant(sgl.select("pet", ["dog", "cat"], temperature=heat))


def test_a_profile_with_decisions_on_a_backend_without_such_a_call_serves_on_another_strategy(
    api, connected
):
    backend = connected(Anthropic, "claude-x", profile="openai/gpt-6-luna")
    assert backend.explain(choose, heat=0.0).nodes[0].strategy == "enum"
    assert choose.run(backend=backend)["pet"] in ("dog", "cat")
    with pytest.raises(sgl.CapabilityError, match="the choices' probabilities"):
        choose.run(1.0, backend=backend)


def test_a_profile_with_grammars_on_a_backend_without_such_a_request_refuses_them(connected):
    backend = connected(Anthropic, "claude-x", profile="openai/gpt-5")

    @sgl.function
    def code(s):
        s += sgl.user("A code.")
        s += sgl.assistant(sgl.gen("a", regex="[ab]+"))

    with pytest.raises(sgl.CapabilityError, match="a regex"):
        code.run(backend=backend)
    assert Regex not in backend.capabilities.constraints


def test_a_completions_model_with_a_servers_profile_keeps_no_constraint(openai):
    backend = openai("local", profile="vllm", api="completions")
    with pytest.raises(sgl.CapabilityError, match="a regex"):
        backend.check("node", Demands("gen", sgl.OpenAI.select_params, Regex("a")), None)


def test_a_subclass_without_calls_says_so(connected):
    backend = connected(Anthropic, "claude-opus-5")
    with pytest.raises(sgl.CapabilityError, match="has no `decide`"):
        asyncio.run(RemoteBackend.decide(backend, Prompt(()), ("a", "b")))
    with pytest.raises(sgl.CapabilityError, match="has no `target`"):
        RemoteBackend.target(backend, Strategy("free", "chat"))
