"""Answers without calls: `tool_choice="none"` shows a model its tools and lets it call none."""

import json
from dataclasses import replace

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.testing import Say, ToolCall
from tests.constraints.test_generation import random_model
from tests.lang.test_tool_prompts import SIGNS, TEMPLATE, Model, add, answers, weather
from tests.lang.test_tools import Native, answer, call, qwen


@sgl.function
def last(s, /, choice=add, **options):
    s += sgl.user("2+3?")
    s += sgl.assistant(sgl.gen("call", tools=[add, weather], tool_choice=choice, max_tokens=300))
    s += sgl.user("Result of add: 5")
    s += sgl.assistant(
        sgl.gen("answer", tools=[add, weather], tool_choice="none", max_tokens=20, **options)
    )


def test_the_answer_is_text_in_a_models_own_format():
    texts = iter([qwen("add", a=2, b=3), "It is 5."])
    assert last.run(backend=Native(lambda _: next(texts)))["answer"] == "It is 5."
    texts = iter([qwen("add", a=2, b=3), qwen("add", a=2, b=3)])
    with pytest.raises(sgl.BackendError, match="does not satisfy"):
        last.run(backend=Native(lambda _: next(texts)))["answer"]


def test_an_object_like_a_call_is_text_too():
    text = '{"name": "add", "arguments": {"a": 2}}'
    texts = iter([qwen("add", a=2, b=3), text])
    assert last.run(backend=Native(lambda _: next(texts)))["answer"] == text


@pytest.mark.parametrize("parallel", [False, True])
def test_the_answer_is_text_in_a_json_object(parallel):
    first = call("add", a=2)

    def answered(text):
        texts = iter([first, text])
        backend = sgl.ScriptedBackend(lambda _: next(texts))
        return last.run(backend=backend, parallel_tool_calls=parallel)["answer"]

    assert answered(answer("It is 5.")) == "It is 5."
    for wrong in (first, json.dumps({"calls": [json.loads(first)]})):
        with pytest.raises(sgl.BackendError, match="does not satisfy"):
            answered(wrong)


def test_the_prompt_shows_the_tools_as_before():
    model = Model(TEMPLATE.replace("SIGNS", SIGNS["qwen"]), [answers("qwen")[0], "5"], "qwen")
    last.run(backend=model).text()
    first, second = model.read
    assert second.startswith(first)


PROVIDERS = {
    "chat": (lambda server: sgl.OpenAI("gpt-4o", max_retries=0, **server.openai), "none"),
    "responses": (
        lambda server: sgl.OpenAI("gpt-4o", api="responses", max_retries=0, **server.openai),
        "none",
    ),
    "messages": (
        lambda server: sgl.Anthropic("claude-opus-5", max_retries=0, **server.anthropic),
        {"type": "none"},
    ),
}


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_call_in_spite_of_that_is_named(api):
    make, _ = PROVIDERS[api]
    calls = (ToolCall("add", {"a": 2, "b": 3}),)
    with sgl.server_for_tests([Say(calls=calls), Say(calls=calls)]) as server:
        backend = make(server)
        problem = "the model called 'add', where only an answer is allowed"
        with pytest.raises(sgl.ValueValidationError, match=problem) as caught:
            last.run(backend=backend)["answer"]
        backend.shutdown()
    assert json.loads(caught.value.text)["tool"] == "add"


@pytest.mark.parametrize("api", PROVIDERS)
def test_providers_are_asked_for_no_call_and_get_the_same_tools(api):
    make, choice = PROVIDERS[api]
    says = [Say(calls=(ToolCall("add", {"a": 2, "b": 3}),)), Say("It is 5.")]
    with sgl.server_for_tests(says) as server:
        backend = make(server)
        state = last.run("auto", backend=backend)
        assert state["answer"] == "It is 5."
        first, second = [request.body for request in server.requests]
        backend.shutdown()
    assert second["tool_choice"] == choice
    assert second["tools"] == first["tools"]
    assert len(first["tools"]) == 2


@pytest.mark.parametrize("signs", ["qwen", ""], ids=["own format", "JSON"])
def test_an_engine_computes_only_what_is_new(signs):
    as_written = (
        '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
        "{{ call.function.arguments | tojson }}}\n</tool_call>"
    )
    shown = "[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]"
    template = TEMPLATE.replace("SIGNS", SIGNS.get(signs, "")).replace(shown, as_written)
    model = replace(random_model(), context_length=8192)
    with Engine.of(model, chat_template=template) as engine:
        for seed in range(3):
            state = last.run(backend=engine, seed=seed, temperature=0.3, shortened="keep")
            usage, before = state.usage("answer"), state.usage("call")
            new = usage.prompt_tokens - before.prompt_tokens - before.completion_tokens
            assert usage.prompt_tokens - usage.cached_tokens <= new + 32
            assert before.prompt_tokens > 300
            assert isinstance(state["answer"], str)
