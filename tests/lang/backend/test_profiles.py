"""Profiles: data that names its sources, and what is found in it by a model's name."""

import datetime
import importlib.resources
import tomllib
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.profiles.profile import (
    FEATURES,
    find_profile,
    profile_by_name,
    profiles,
    providers,
)
from sglang_lite.testing.anthropic import Messages
from sglang_lite.testing.openai_chat import Chat

DATA = importlib.resources.files("sglang_lite.lang.backend") / "profiles"


def test_the_providers_are_those_with_a_file():
    assert {
        "openai",
        "anthropic",
        "vllm",
        "sglang",
        "llamacpp",
        "sglang_lite",
        "compatible",
    } <= set(providers())


@pytest.mark.parametrize("provider", providers())
def test_every_fact_has_a_source_and_the_day_it_was_read(provider):
    for profile in profiles(provider):
        assert profile.features
        assert profile.features.keys() <= FEATURES
        for feature in profile.features.values():
            assert "/" in feature.source
            assert datetime.date(2026, 1, 1) < feature.read <= datetime.date.today()


@pytest.mark.parametrize("provider", providers())
def test_every_source_is_used_and_every_trait_is(provider):
    text = (DATA / f"{provider}.toml").read_text()
    data = tomllib.loads(text)
    for name in data["sources"] if "like" not in data else ():
        assert text.count(f'"{name}"') >= 1, name
    for name in data.get("traits", ()):
        assert text.count(f'"{name}"') >= 1, name


@pytest.mark.parametrize(
    ("provider", "asked", "found"),
    [
        ("openai", "gpt-4o", "gpt-4o"),
        ("openai", "gpt-4o-2024-05-13", "gpt-4o-2024-05-13"),  # listed: it differs from gpt-4o
        ("openai", "gpt-4o-2026-01-01", "gpt-4o"),
        ("openai", "ft:gpt-4o-2024-08-06:me::1", "gpt-4o-2024-08-06"),
        ("openai", "openai/gpt-5-nano-2025-08-07", "gpt-5-nano"),
        ("openai", "gpt-5.2-pro-2025-12-11", "gpt-5.2-pro"),
        ("openai", "gpt-99", ""),
        ("openai", "gpt-oss-20b", ""),
        ("anthropic", "us.anthropic.claude-haiku-4-5-20251001-v1:0", "claude-haiku-4-5"),
        ("anthropic", "claude-opus-4-1@20250805", "claude-opus-4-1"),
        ("anthropic", "claude-9", ""),
        ("vllm", "Qwen/Qwen3-8B", ""),
    ],
)
def test_a_model_is_found_by_its_name(provider, asked, found):
    assert find_profile(provider, asked).model == found


def test_what_no_entry_says_is_unknown():
    unlisted = find_profile("openai", "gpt-99")
    assert not unlisted.supports("json_schema")
    assert not unlisted.lacks("json_schema")
    assert unlisted.supports("max_tokens")
    assert find_profile("openai", "gpt-4").lacks("json_schema")


def test_a_provider_that_serves_anothers_software_has_its_facts():
    crusoe, vllm = find_profile("crusoe", "x"), find_profile("vllm", "x")
    assert crusoe.provider == "crusoe"
    assert crusoe.features == vllm.features


def test_a_profile_is_chosen_by_name():
    assert profile_by_name("vllm").api == "chat"
    assert profile_by_name("openai/gpt-5") == find_profile("openai", "gpt-5")
    for wrong in ("nobody", "openai/gpt-99"):
        with pytest.raises(sgl.ParameterError, match="profile: "):
            profile_by_name(wrong)


def test_what_the_user_says_wins():
    told = find_profile("openai", "gpt-5").with_capabilities(
        Capabilities(params=frozenset({"top_k"}), prefill=False)
    )
    assert told.params == {"top_k"}
    assert not told.supports("images")
    assert told.supports("json_schema")


SPELLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 3},
    "n": {"n": 2},
    "seed": {"seed": 1},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {"1": 1}},
    "return_logprob": {"logprobs": True},
}


@pytest.mark.parametrize(("provider", "api"), [("openai", Chat()), ("anthropic", Messages())])
def test_the_server_for_tests_refuses_nothing_that_a_profile_takes(provider, api):
    """Two accounts of the same providers, written apart."""
    for profile in profiles(provider):
        if profile.api not in ("chat", "messages"):
            continue
        plain = {
            "model": profile.model or "new",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "x"}],
        }
        if provider == "openai":
            plain["max_completion_tokens"] = plain.pop("max_tokens")
        for name, fields in SPELLED.items():
            if profile.supports(name):
                assert api.refusal({**plain, **fields}, compatible=False) is None, (
                    profile.name,
                    name,
                )
