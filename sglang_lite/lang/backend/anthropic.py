"""Anthropic's Messages API through the official SDK."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator
from typing import Any

from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.ladder import Policy, Rung
from sglang_lite.lang.backend.profile import Profile, named, profile_of
from sglang_lite.lang.backend.remote import RemoteBackend, without_marks
from sglang_lite.lang.backend.remote_api import JsonFormat, PartialAnswer, Shape
from sglang_lite.lang.backend.serving import shape_of
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.results import data_url
from sglang_lite.protocol import (
    CapabilityError,
    Delta,
    Generation,
    Image,
    Message,
    ParameterError,
    Prompt,
    SamplingParams,
    Usage,
)
from sglang_lite.protocol.sampling import given

DEFAULT_MAX_TOKENS = 128  # of a generation that sets none, as everywhere; the API wants one
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class Anthropic(RemoteBackend):
    """A Claude model. Schemas, types and choices are native structured outputs. Only parameters that were set are
    sent, and `max_tokens`, which the API wants (128 where it is unset).

    Args:
        model_name: the model.
        *args, **kwargs: for the SDK's client: `api_key`, `base_url`, `timeout`, `max_retries` …
        profile: what the model takes, by name ("anthropic/claude-opus-5") or as a Profile; None: its name decides.
        policy: "strict" (which refuses what the model does not take), "emulate" or "warn": see docs/backends.md.
        capabilities: what the model can do, where that is known better: it wins.

    Attributes:
        token_usage: `prompt_tokens` and `completion_tokens` so far; `reset()` starts anew.

    Raises:
        BackendError: the SDK is not installed.
        ParameterError: the SDK refuses the arguments, or has no API key.
    """

    select_params = SamplingParams(max_tokens=4096)  # the choices limit the length

    def __init__(
        self,
        model_name: str,
        *args: Any,
        profile: str | Profile | None = None,
        policy: Policy = "strict",
        capabilities: Capabilities | None = None,
        **kwargs: Any,
    ) -> None:
        if profile is None:
            profile = profile_of("anthropic", model_name)
        known = profile if isinstance(profile, Profile) else named(profile)

        def connect(sdk: Any) -> Any:
            return sdk.AsyncAnthropic(*args, **kwargs)

        template = without_marks(get_chat_template("claude"))
        super().__init__(
            model_name, "anthropic", "AnthropicError", connect, known, policy, capabilities, template
        )  # fmt: skip
        client = self._client
        if client.api_key is client.auth_token is client.credentials is None and "default_headers" not in kwargs:
            raise ParameterError("api_key", "there is none.", hint="Give api_key=, or set ANTHROPIC_API_KEY.")

    def check_prompt(self, prompt: Prompt) -> None:
        super().check_prompt(prompt)
        turns = [message for message in prompt.messages if message.role != "system"]
        if not turns or turns[-1].role != "user":
            raise CapabilityError(
                f"{self._name} answers a user: the turn before this one is not the user's.", hint="Add sgl.user(…)."
            )

    async def call(
        self, prompt: Prompt, params: SamplingParams, rung: Rung, *, constrained: bool, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        request = self._request(prompt, params, shape_of(rung))
        said, start, end = PartialAnswer(), None, None
        repeated = prompt.partial[len(prompt.partial.rstrip()) :]  # blanks that were not sent: the answer begins so
        held = ""
        began, first = time.perf_counter(), 0.0
        with self.errors():
            # Always a stream: the SDK refuses to wait for a long answer.
            async with await self.client().messages.create(**request, stream=True) as events:
                async for event in events:
                    if event.type == "message_start":
                        start = event.message
                    elif event.type == "message_delta":
                        end = event
                    elif event.type == "content_block_delta" and event.delta.type == "text_delta":
                        first = first or time.perf_counter() - began
                        text = held + event.delta.text
                        if repeated.startswith(text) and text != repeated:
                            held = text
                            continue
                        text, held, repeated = text.removeprefix(repeated), "", ""
                        said.text += text
                        if stream and text:
                            yield Delta(text)
        if start is None or end is None or end.delta.stop_reason is None:
            raise self.unreadable("the stream ended before the answer was complete")
        said.reason, said.matched = end.delta.stop_reason, end.delta.stop_sequence
        said.cut = said.reason in ("max_tokens", "model_context_window_exceeded")
        if said.reason == "refusal":
            details = end.delta.stop_details
            said.refusal = (details and (details.explanation or details.category)) or "no reason is given"
        elif said.reason in ("tool_use", "pause_turn"):
            raise self.unreadable(f"the answer stopped for {said.reason}")
        meta = {"id": start.id, "model": start.model}
        cost = _cost(start.usage, end.usage, began, first)
        yield self.generation(said, params, cost, meta, constrained=constrained)

    def _request(self, prompt: Prompt, params: SamplingParams, shape: Shape) -> dict[str, Any]:
        messages = [{"role": message.role, "content": self._content(message)} for message in prompt.messages]
        system = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
        request: dict[str, Any] = {
            "model": self.model_name, "max_tokens": DEFAULT_MAX_TOKENS, "messages": messages[len(system) :]
        }  # fmt: skip
        if system:
            request["system"] = "\n\n".join(str(message["content"]) for message in system)
        prefill = prompt.partial.rstrip()  # the API takes none that ends in blanks
        if prefill:
            if shape is not None:
                raise CapabilityError(
                    f"{self._name} can't continue a begun turn under a constraint.",
                    hint="Say in the user's turn what stands before the value.",
                )
            request["messages"].append({"role": "assistant", "content": prefill})
        extra: dict[str, Any] = {}
        for name, value in given(params).items():
            match name:
                case "max_tokens":
                    request["max_tokens"] = value
                case "stop":
                    request["stop_sequences"] = list(value)
                case _:  # the SDK knows no parameter that only older models take
                    extra[name] = list(value) if isinstance(value, tuple) else value
        if extra:
            request["extra_body"] = extra
        if isinstance(shape, JsonFormat):
            request["output_config"] = {"format": {"type": "json_schema", "schema": shape.schema}}
        return request

    def _content(self, message: Message) -> str | list[dict[str, Any]]:
        if all(isinstance(part, str) for part in message.content):
            return "".join(map(str, message.content))
        if message.role == "system":
            raise CapabilityError(f"{self._name} takes no images in a system turn.", hint="Move them to the user's.")
        return [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "source": self._source(part)}
            for part in message.content
            if part
        ]

    def _source(self, image: Image) -> dict[str, str]:
        if image.url and not image.url.startswith("data:"):
            return {"type": "url", "url": image.url}
        head, _, data = data_url(image).removeprefix("data:").partition(",")
        media_type = head.partition(";")[0]
        if media_type not in _IMAGES:
            raise CapabilityError(
                f"{self._name} takes no images of type {media_type}.", hint=f"It takes: {', '.join(_IMAGES)}."
            )
        return {"type": "base64", "media_type": media_type, "data": data}


def _cost(start: Any, end: Any, began: float, first: float) -> Usage:
    """Usage of a stream: told at its start, and again, for some of it, at its end."""

    def tokens(name: str) -> int:
        return getattr(end, name, None) or getattr(start, name, None) or 0

    cached = tokens("cache_read_input_tokens")
    prompt = tokens("input_tokens") + tokens("cache_creation_input_tokens") + cached
    total = time.perf_counter() - began
    return Usage(prompt, cached, tokens("output_tokens"), first_token_s=first, total_s=total)
