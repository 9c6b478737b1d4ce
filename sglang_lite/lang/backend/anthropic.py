"""Backend for Anthropic's Messages API, through the official SDK."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.apis.anthropic_messages import MESSAGES
from sglang_lite.lang.backend.apis.api import Api, Target
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.http.rate_limit import RateLimit
from sglang_lite.lang.backend.ladder.rung import Policy, Rung
from sglang_lite.lang.backend.profiles.profile import Profile, resolve_profile
from sglang_lite.lang.backend.remote.backend import RemoteBackend
from sglang_lite.lang.backend.remote.connection import Connector, sdk_client, sdk_errors
from sglang_lite.lang.backend.rendering import without_marks
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.protocol import CapabilityError, Delta, Generation, ParameterError, Prompt, SamplingParams
from sglang_lite.protocol.anything import Foreign


class Anthropic(RemoteBackend):
    """Backend for Claude models. Native structured outputs enforce schemas, types and choices. Requests contain only
    the parameters that were set, and `max_tokens`, which the API requires (128 if unset).

    Args:
        model_name: name of the model.
        *args, **kwargs: arguments of the SDK's client: `api_key`, `base_url`, `timeout`, `max_retries` …
        profile: features of the model, by profile name ("anthropic/claude-opus-5") or as a Profile; None to look the
            model up by its name.
        policy: treatment of features that the model does not support: "strict" (the default), "emulate" or "warn"; see
            docs/backends.md.
        capabilities: features of the model; overrides `profile`.
        reasoning_effort: amount of reasoning: "low", "medium", "high" …; None for the provider's default.
        client: existing `AsyncAnthropic` client to use, instead of arguments for a new one.
        rate_limit: limit on calls; None for the limit shared by all backends with the same server and key (see
            RateLimit).

    Attributes:
        token_usage: tokens used so far, as `prompt_tokens` and `completion_tokens`; `reset()` sets them to 0.

    Raises:
        BackendError: the SDK is not installed.
        ParameterError: the SDK rejects the arguments, or no API key is given.
    """

    provider = "anthropic"
    select_params = SamplingParams(max_tokens=4096)  # generous, because the choices bound the length

    @explains_wrong_arguments
    def __init__(
        self,
        model_name: str,
        *args: Foreign,
        profile: str | Profile | None = None,
        policy: Policy = "strict",
        capabilities: Capabilities | None = None,
        reasoning_effort: str | None = None,
        client: Foreign = None,
        rate_limit: RateLimit | None = None,
        **kwargs: Foreign,
    ) -> None:
        make = sdk_client("AsyncAnthropic", args, kwargs, client)
        super().__init__(
            model_name, Connector("anthropic", "anthropic", make, sdk_errors("AnthropicError"), existing_client=client),
            resolve_profile(profile, "anthropic", model_name), policy, capabilities,
            without_marks(get_chat_template("claude")), rate_limit,
        )  # fmt: skip
        made = self._connection.latest_client
        if made.api_key is made.auth_token is made.credentials is None and "default_headers" not in kwargs:
            raise ParameterError("api_key", "no key is given.", hint="Give api_key=, or set ANTHROPIC_API_KEY.")
        self.reasoning_effort = reasoning_effort

    def check_prompt(self, prompt: Prompt) -> None:
        super().check_prompt(prompt)
        turns = [message for message in prompt.messages if message.role != "system"]
        if not turns or turns[-1].role != "user":
            raise CapabilityError(
                f"{self._name} only answers a user's turn, and the last turn is not one.", hint="Add sgl.user(…)."
            )

    def target(self, rung: Rung) -> tuple[Api, Target]:
        return MESSAGES, Target(self.model_name, effort=rung.effort, cache_hints=self.profile.supports("cache_control"))

    async def call(
        self, prompt: Prompt, params: SamplingParams, rung: Rung, *, constrained: bool, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        blanks = RepeatedWhitespace(prompt.partial)
        answer = super().call(prompt, params, rung, constrained=constrained, stream=stream)
        async with aclosing(answer) as events:
            async for event in events:
                trimmed = blanks.trim(event)
                if trimmed is not None:
                    yield trimmed


class RepeatedWhitespace:
    """Filter for whitespace at the end of a begun turn. The API receives the turn without it, so an answer may begin
    with the same whitespace, which is removed."""

    def __init__(self, begun: str) -> None:
        self._blanks = begun[len(begun.rstrip()) :]
        self._left, self._held = self._blanks, ""

    def trim(self, event: Delta | Generation) -> Delta | Generation | None:
        """Returns the event without the repeated whitespace, or None if no new text or reasoning is left in the
        event."""
        if isinstance(event, Generation):
            return msgspec.structs.replace(event, text=event.text.removeprefix(self._blanks))
        text = self._held + event.text
        if self._left.startswith(text) and text != self._left:
            text, self._held = "", text
        else:
            text, self._held, self._left = text.removeprefix(self._left), "", ""
        return msgspec.structs.replace(event, text=text) if text or event.reasoning else None
