"""Backend for every provider that LiteLLM supports, through LiteLLM's own package."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.apis.api import Api, Target
from sglang_lite.lang.backend.apis.openai_chat import CHAT
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.http.rate_limit import RateLimit
from sglang_lite.lang.backend.ladder.strategy import Policy, Strategy
from sglang_lite.lang.backend.profiles.profile import Profile, resolve_profile
from sglang_lite.lang.backend.remote.backend import RemoteBackend
from sglang_lite.lang.backend.remote.connection import Connector, ResponseHook
from sglang_lite.lang.backend.rendering import without_stops_and_placeholders
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.text.chat_template import TurnTemplate


class LiteLLM(RemoteBackend):
    """Backend for models of any provider that LiteLLM supports. LiteLLM is called like OpenAI's
    chat API. It does not report the features of a model, so `profile=` specifies them
    ("openai/gpt-4o", "anthropic/claude-opus-5" …). Without a profile, the model is assumed to
    accept the parameters of OpenAI's protocol and to enforce no constraints.

    Args:
        model_name: LiteLLM's name of the model: "groq/llama-3.3-70b", "gemini/gemini-2.5-pro" …
        chat_template: template that renders turns as text in `state.text()`.
        api_key, organization, base_url, timeout, max_retries, default_headers: arguments of each
            call; None for LiteLLM's own.
        profile: features of the model, by profile name or as a Profile.
        policy: treatment of features that the model does not support: "strict" (refuse, the
            default), "emulate" or "warn"; see docs/backends.md.
        capabilities: features of the model; overrides `profile`.
        reasoning_effort: amount of reasoning: "low", "high" …; None for the provider's default.
        rate_limit: limit on calls; None for a shared one (see RateLimit).

    Attributes:
        token_usage: tokens used so far, as `prompt_tokens` and `completion_tokens`; `reset()` sets
            them to 0.

    Raises:
        BackendError: the SDK is not installed.
        ParameterError: an argument is not valid.
    """

    provider = "litellm"
    strategies = frozenset(
        {"json_schema", "strict_tool", "structured_outputs", "regex", "ebnf", "grammar", "tools"}
    )

    @explains_wrong_arguments
    def __init__(
        self,
        model_name: str,
        chat_template: TurnTemplate | None = None,
        api_key: str | None = None,
        organization: str | None = None,
        base_url: str | None = None,
        timeout: float | None = 600,
        max_retries: int | None = None,
        default_headers: Mapping[str, str] | None = None,
        *,
        profile: str | Profile | None = None,
        policy: Policy = "strict",
        capabilities: Capabilities | None = None,
        reasoning_effort: str | None = None,
        rate_limit: RateLimit | None = None,
    ) -> None:
        values = {
            "api_key": api_key,
            "organization": organization,
            "base_url": base_url,
            "timeout": timeout,
            "max_retries": max_retries,
            "extra_headers": default_headers and dict(default_headers),
        }
        options = {name: value for name, value in values.items() if value is not None}

        def make(sdk: Any, on_response: ResponseHook, before: Any) -> Any:
            return SimpleNamespace(
                completion=sdk.acompletion, options=options, api_key=api_key, base_url=base_url
            )

        super().__init__(
            model_name,
            Connector("litellm", "litellm", make, _litellm_error_types, close=_keep_open),
            resolve_profile(profile, "compatible", model_name),
            policy,
            capabilities,
            without_stops_and_placeholders(chat_template or get_chat_template("default")),
            rate_limit,
        )
        self.reasoning_effort = reasoning_effort

    def target(self, strategy: Strategy) -> tuple[Api, Target]:
        return LITELLM, Target(self.model_name, effort=strategy.effort)


def _wrap_completion_call(client: Any) -> Any:
    async def create(**arguments: Any) -> Any:
        response = await client.completion(**arguments, **client.options)
        return aclosing(response) if arguments.get("stream") else response

    return create


def _litellm_error_types(sdk: Any) -> Any:
    import openai  # base of LiteLLM's error classes

    return openai.OpenAIError, openai.APITimeoutError, openai.APIConnectionError


async def _keep_open(client: Any) -> None:
    """Does nothing, because LiteLLM manages its connections itself."""


LITELLM = Api(CHAT.arguments, _wrap_completion_call, CHAT.streamed, CHAT.reader)
