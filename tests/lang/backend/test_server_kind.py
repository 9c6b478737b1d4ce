"""Kinds of compatible servers, told by what each says of itself."""

import pytest
from openai_answers import ask
from plain_server import server

from sglang_lite.lang.backend.openai import OpenAI, kind_of_server
from sglang_lite.lang.backend.profiles.profile import find_profile


def owned_by(name):
    return {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": name}]}


@pytest.mark.parametrize(
    ("pages", "kind"),
    [
        ({"/v1/models": owned_by("vllm")}, "vllm"),
        ({"/v1/models": owned_by("sglang")}, "sglang"),
        ({"/v1/models": owned_by("llamacpp")}, "llamacpp"),
        ({"/v1/models": owned_by("sglang_lite")}, "sglang_lite"),
        ({"/v1/models": owned_by("me"), "/server_info": {"sglang_lite": {}}}, "sglang_lite"),
        ({"/server_info": {"internal_states": []}}, "sglang"),
        ({"/props": {"default_generation_settings": {}}}, "llamacpp"),
        ({"/version": {"version": "0.12.0"}}, "vllm"),
        ({"/v1/models": owned_by("me")}, None),
        ({"/v1/models": "<html>", "/version": "<html>"}, None),
        ({"/v1/models": {"data": ["x", 3, None]}, "/version": [1]}, None),
        ({"/v1/models": {"data": 3}}, None),
        ({}, None),
    ],
)
def test_a_server_says_what_it_is(pages, kind):
    with server(pages) as (url, _):
        assert kind_of_server(f"{url}/v1/", "key") == kind
        assert kind_of_server(url, None) == kind


def test_a_server_that_is_not_there_is_nothing():
    with server({}) as (url, _):
        pass
    assert kind_of_server(url, None) is None


def test_it_is_asked_once_and_only_when_it_is_needed():
    answer = {
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ab"}}
        ]
    }
    with server({"/v1/models": owned_by("sglang")}, answer) as (url, came):
        backend = OpenAI("local", api_key="key", base_url=f"{url}/v1", max_retries=0)
        assert came == []
        assert [ask(backend, regex="[ab]+"), ask(backend)] == ["ab", "ab"]
        assert [path for path, _ in came] == [
            "/v1/models",
            "/v1/chat/completions",
            "/v1/chat/completions",
        ]
        assert came[0][1] == "Bearer key"
        assert backend.profile == find_profile("sglang", "local")
        backend.shutdown()


def test_a_name_that_the_user_gives_wins_and_a_known_model_is_not_asked_for():
    with server({"/v1/models": owned_by("sglang")}) as (url, came):
        for model, profile, provider in (("local", "vllm", "vllm"), ("gpt-4o", None, "openai")):
            backend = OpenAI(model, profile=profile, api_key="key", base_url=url)
            assert backend.profile.provider == provider
            backend.shutdown()
        assert came == []
