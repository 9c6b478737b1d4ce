"""Backend for Anthropic's Messages API, through the official SDK or, where it is not installed, a
built-in client. Also builds the API's requests and reads its answers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.apis.api import (
    ANSWER,
    Api,
    ApiReader,
    ApiRequest,
    ApiTool,
    JsonFormat,
    JsonTool,
    PartialAnswer,
    PartialCall,
    Target,
    Tools,
    iterate_turns,
    split_parameters,
    with_cache_control,
)
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.http.rate_limit import RateLimit
from sglang_lite.lang.backend.ladder.strategy import Policy, Strategy
from sglang_lite.lang.backend.profiles.profile import Profile, resolve_profile
from sglang_lite.lang.backend.remote.backend import RemoteBackend
from sglang_lite.lang.backend.remote.connection import (
    Connector,
    sdk_client_factory,
    sdk_error_getter,
)
from sglang_lite.lang.backend.rendering import without_stops_and_placeholders
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.results import data_url
from sglang_lite.protocol import (
    CapabilityError,
    Delta,
    Generation,
    Media,
    Message,
    ParameterError,
    Prompt,
    SamplingParams,
    Usage,
    total_usage,
)
from sglang_lite.protocol.anything import Foreign, Json
from sglang_lite.text.tool_use import split_call_results


class Anthropic(RemoteBackend):
    """Backend for Claude models. Native structured outputs enforce schemas, types and choices.
    Requests contain only the parameters that were set, and `max_tokens`, which the API requires
    (128 if unset).

    Args:
        model_name: name of the model.
        *args, **kwargs: arguments of the client: `api_key`, `base_url`, `timeout`,
            `max_retries` …
        profile: features of the model, by profile name ("anthropic/claude-opus-5") or as a Profile;
            None to look the model up by its name.
        policy: treatment of features that the model does not support: "strict" (the default),
            "emulate" or "warn"; see docs/backends.md.
        capabilities: features of the model; overrides `profile`.
        reasoning_effort: amount of reasoning: "low", "medium", "high" …; None for the provider's
            default.
        client: existing `AsyncAnthropic` client to use, instead of arguments for a new one.
        rate_limit: limit on calls; None for the limit shared by all backends with the same server
            and key (see RateLimit).

    Attributes:
        token_usage: tokens used so far, as `prompt_tokens` and `completion_tokens`; `reset()` sets
            them to 0.

    Raises:
        ParameterError: the client rejects the arguments, or no API key is given.
    """

    provider = "anthropic"
    # generous, because the choices bound the length
    select_params = SamplingParams(max_tokens=4096)

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
        make = sdk_client_factory("AsyncAnthropic", args, kwargs, client)
        super().__init__(
            model_name,
            Connector(
                "anthropic",
                "anthropic",
                make,
                sdk_error_getter("AnthropicError"),
                existing_client=client,
                major=2,
            ),
            resolve_profile(profile, "anthropic", model_name),
            policy,
            capabilities,
            without_stops_and_placeholders(get_chat_template("claude")),
            rate_limit,
        )
        made = self._connection.latest_client
        if (
            made.api_key is made.auth_token is made.credentials is None
            and "default_headers" not in kwargs
        ):
            raise ParameterError(
                "api_key", "no key is given.", hint="Give api_key=, or set ANTHROPIC_API_KEY."
            )
        self.reasoning_effort = reasoning_effort

    def check_prompt(self, prompt: Prompt) -> None:
        super().check_prompt(prompt)
        turns = [message for message in prompt.messages if message.role != "system"]
        if not turns or turns[-1].role != "user":
            raise CapabilityError(
                f"{self._name} only answers a user's turn, and the last turn is not one.",
                hint="Add sgl.user(…).",
            )

    def target(self, strategy: Strategy) -> tuple[Api, Target]:
        return MESSAGES, Target(
            self.model_name,
            effort=strategy.effort,
            cache_hints=self.profile.supports("cache_control"),
        )

    async def call_api(
        self,
        prompt: Prompt,
        params: SamplingParams,
        strategy: Strategy,
        *,
        constrained: bool,
        stream: bool,
    ) -> AsyncGenerator[Delta | Generation, None]:
        blanks = RepeatedWhitespace(prompt.partial)
        answer = super().call_api(prompt, params, strategy, constrained=constrained, stream=stream)
        async with aclosing(answer) as events:
            async for event in events:
                trimmed = blanks.trim(event)
                if trimmed is not None:
                    yield trimmed


class RepeatedWhitespace:
    """Filter that removes whitespace that the model repeats at the beginning of its answer. The API
    receives the open turn without its trailing whitespace, so the model may write that whitespace
    again.
    """

    def __init__(self, begun: str) -> None:
        self._blanks = begun[len(begun.rstrip()) :]
        self._left = self._blanks
        self._pending = ""

    def trim(self, event: Delta | Generation) -> Delta | Generation | None:
        """Returns the event without the repeated whitespace. Returns None if this leaves neither
        text nor reasoning.
        """
        if isinstance(event, Generation):
            return msgspec.structs.replace(event, text=event.text.removeprefix(self._blanks))
        text = self._pending + event.text
        if self._left.startswith(text) and text != self._left:
            text, self._pending = "", text
        else:
            text = text.removeprefix(self._left)
            self._pending = ""
            self._left = ""
        return msgspec.structs.replace(event, text=text) if text or event.reasoning else None


# for generations that set none, like other backends; the API requires the field
DEFAULT_MAX_TOKENS = 128
MIN_THINKING = 1_024  # smallest token limit for thinking that the API accepts
_SAMPLERS = frozenset({"temperature", "top_p", "top_k"})  # which later versions of the API refuse
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def request_arguments(request: ApiRequest) -> dict[str, Json]:
    """Builds the arguments of `messages.create` for a request.

    Raises:
        CapabilityError: the API does not accept an image of the prompt, or the prompt has text in
            its open turn and the answer a constraint.
        ParameterError: the API does not accept such a thinking limit.
    """
    messages = _messages(request)
    system = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    arguments: dict[str, Any] = {
        "model": request.target.model,
        "max_tokens": DEFAULT_MAX_TOKENS,
        "messages": messages[len(system) :],
    }
    if system:
        arguments["system"] = "\n\n".join(str(message["content"]) for message in system)
    prefill = request.prompt.partial.rstrip()  # the API rejects a prefill that ends in whitespace
    if prefill:
        if request.shape is not None:
            raise CapabilityError(
                f"{request.target.model} can't continue an assistant's turn that has text already under a constraint.",
                hint="Move the text before the value to the user's turn.",
            )
        arguments["messages"].append({"role": "assistant", "content": prefill})
    own, extra = split_parameters(
        request.params,
        {"max_tokens": "max_tokens", "stop": "stop_sequences", "thinking": "thinking"},
    )
    if "thinking" in own:
        own["thinking"] = _thinking_field(
            own["thinking"], own.get("max_tokens", DEFAULT_MAX_TOKENS)
        )
    # The SDK has no keyword for parameters that only older models accept.
    arguments |= own | ({"extra_body": extra} if extra else {}) | _answer_format_fields(request)
    if not _SAMPLERS.isdisjoint(extra):
        arguments["extra_headers"] = {"anthropic-version": "2023-06-01"}
    return (
        with_cache_control(arguments, request.prompt) if request.target.cache_hints else arguments
    )


def _thinking_field(budget: int, limit: int) -> dict[str, Any]:
    """Returns the field that limits the tokens of the model's thinking.

    Raises:
        ParameterError: the API does not accept such a limit.
    """
    if budget < MIN_THINKING:
        raise ParameterError(
            "thinking",
            f"Claude takes {MIN_THINKING:,} tokens or more, not {budget:,}.",
            hint="Raise it, or leave it out: then the model does not think.",
        )
    if budget >= limit:
        raise ParameterError(
            "thinking",
            f"Claude's thoughts of {budget:,} tokens need a larger max_tokens, which counts them, than {limit:,}.",
            hint=f"Set max_tokens to {budget:,} and what the answer needs.",
        )
    return {"type": "enabled", "budget_tokens": budget}


def _answer_format_fields(request: ApiRequest) -> dict[str, Any]:
    """Returns the request fields that specify the form of the answer."""
    output: dict[str, Any] = (
        {} if request.target.effort is None else {"effort": request.target.effort}
    )
    arguments: dict[str, Any] = {}
    match request.shape:
        case JsonFormat(schema, _):
            output["format"] = {"type": "json_schema", "schema": json.loads(schema)}
        case JsonTool(schema):
            arguments["tools"] = [
                _tool(ApiTool(ANSWER, "Its input is your whole answer.", schema, strict=True))
            ]
            arguments["tool_choice"] = {
                "type": "tool",
                "name": ANSWER,
                "disable_parallel_tool_use": True,
            }
        case Tools(tools, "none"):
            arguments["tools"] = [_tool(tool) for tool in tools]
            arguments["tool_choice"] = {"type": "none"}
        case Tools(tools, choice, parallel):
            arguments["tools"] = [_tool(tool) for tool in tools]
            arguments["tool_choice"] = {
                "type": "any" if choice == "required" else "auto",
                "disable_parallel_tool_use": not parallel,
            }
    return arguments | ({"output_config": output} if output else {})


def _tool(tool: ApiTool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "input_schema": json.loads(tool.schema)} | (
        {"strict": True} if tool.strict else {}
    )


def _messages(request: ApiRequest) -> list[dict[str, Any]]:
    """Converts the conversation to the API's form. If the provider's original blocks are stored for
    a turn, such as thinking or tool calls, they are sent instead of text. Results of tool calls are
    sent as `tool_result` blocks.
    """
    messages: list[dict[str, Any]] = []
    for message, stored, calls in iterate_turns(
        request.prompt.messages, request.provider_items, _extract_tool_calls
    ):
        content: Any = (
            list(stored) if stored is not None else _content(message, request.target.model)
        )
        if calls:
            results = split_call_results([call["name"] for call in calls], content)
            content = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": result}
                for call, result in zip(calls, results)
            ]
        messages.append({"role": message.role, "content": content})
    return messages


def _extract_tool_calls(blocks: Sequence[Any]) -> list[Any]:
    return [block for block in blocks if block["type"] == "tool_use"]


def _content(message: Message, model: str) -> str | list[dict[str, Any]]:
    if all(isinstance(part, str) for part in message.content):
        return "".join(map(str, message.content))
    if message.role == "system":
        raise CapabilityError(
            f"{model} accepts no images in a system turn.", hint="Move them to a user's turn."
        )
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "source": _source(part, model)}
        for part in message.content
        if part
    ]


def _source(image: Media, model: str) -> dict[str, str]:
    if image.url and not image.url.startswith("data:"):
        return {"type": "url", "url": image.url}
    head, _, data = data_url(image).removeprefix("data:").partition(",")
    media_type = head.partition(";")[0]
    if media_type not in _IMAGES:
        raise CapabilityError(
            f"{model} accepts no images of type {media_type}.",
            hint=f"It accepts: {', '.join(_IMAGES)}.",
        )
    return {"type": "base64", "media_type": media_type, "data": data}


class MessagesReader(ApiReader):
    """Reads the events of one message, or of several messages that each continue the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self._sample = PartialAnswer(reasoning="")
        self.samples = {0: self._sample}
        self._start: Any = None  # usage that `message_start` reported
        # index of its first block in the sample's items, after the blocks of earlier messages
        self._first = 0

    def read_event(self, event: Foreign) -> Sequence[Delta]:
        sample = self._sample
        match event.type:
            case "message_start":
                self.meta |= {"id": event.message.id, "model": event.message.model}
                self._start = event.message.usage
                self._first = len(sample.provider_items)
                self.paused = False
            case "content_block_start":
                sample.provider_items.append(event.content_block.to_dict(mode="json"))
                if event.content_block.type == "tool_use":
                    block = event.content_block
                    sample.calls[len(sample.provider_items) - 1] = PartialCall(
                        block.name, "", block.id
                    )
            case "content_block_delta":
                return self._add_delta(event.delta, self._first + event.index)
            case "message_delta":
                self._end_message(event)
            case "error":
                self.failure = str(getattr(event, "message", None) or "no reason is given")
        return ()

    def _add_delta(self, delta: Any, index: int) -> Sequence[Delta]:
        """Adds a block's delta to the sample and returns its new text or thinking."""
        sample = self._sample
        block = sample.provider_items[index] if index < len(sample.provider_items) else {}
        match delta.type:
            case "text_delta":
                block["text"] = block.get("text", "") + delta.text
                sample.text += delta.text
                return [Delta(delta.text)]
            case "thinking_delta":
                block["thinking"] = block.get("thinking", "") + delta.thinking
                sample.reasoning = f"{sample.reasoning}{delta.thinking}"
                return [Delta("", reasoning=delta.thinking)]
            case "signature_delta":
                block["signature"] = delta.signature
            case "input_json_delta" if index in sample.calls:
                sample.calls[index].arguments += delta.partial_json
        return ()

    def _end_message(self, event: Any) -> None:
        """Reads the end of a message: stop reason, refusal, tool inputs and usage."""
        sample = self._sample
        sample.finish_reason = event.delta.stop_reason
        sample.matched = event.delta.stop_sequence
        sample.truncated = sample.finish_reason in ("max_tokens", "model_context_window_exceeded")
        self.paused = sample.finish_reason == "pause_turn"
        if sample.finish_reason == "refusal":
            details = event.delta.stop_details
            sample.refusal = (
                details and (details.explanation or details.category)
            ) or "no reason is given"
        for index, call in sample.calls.items():
            sample.provider_items[index]["input"] = _parse_call_input(call.arguments)
        if not any(
            block["type"] in ("thinking", "redacted_thinking", "tool_use")
            for block in sample.provider_items
        ):
            # later turns contain its text anyway
            plain = sample.provider_items
            sample.provider_items = []
            if self.paused:
                sample.provider_items = plain
        self.usage = total_usage((self.usage, _message_usage(self._start, event.usage)))


def _parse_call_input(arguments: str) -> Any:
    """Parses the input of a tool call, which the API expects back as an object. Returns {} if the
    model's text is not JSON; that error is reported when the value is read.
    """
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}


def _continuation_arguments(arguments: dict[str, Any], reader: Any) -> dict[str, Any]:
    """Builds the arguments of a request that makes the model continue. They are the previous
    arguments plus an assistant message with the output so far.
    """
    turn = {"role": "assistant", "content": list(reader.samples[0].provider_items)}
    return {**arguments, "messages": [*arguments["messages"], turn]}


def _message_usage(start: Any, end: Any) -> Usage:
    """Returns the usage of a message. The API reports counts at the start and some of them again at
    the end. The counts at the end take precedence.
    """

    def tokens(name: str) -> int:
        return getattr(end, name, None) or getattr(start, name, None) or 0

    cached = tokens("cache_read_input_tokens")
    written = tokens("cache_creation_input_tokens")
    details = getattr(end, "output_tokens_details", None) or getattr(
        start, "output_tokens_details", None
    )
    thoughts = getattr(details, "thinking_tokens", None) or 0
    prompt = tokens("input_tokens") + written + cached
    return Usage(
        prompt, cached, tokens("output_tokens"), reasoning_tokens=thoughts, written_tokens=written
    )


MESSAGES = Api(
    request_arguments,
    lambda client: client.messages.create,
    {"stream": True},
    MessagesReader,
    # The SDK rejects requests that may take long unless they stream.
    always_streams=True,
    resumed=_continuation_arguments,
)
