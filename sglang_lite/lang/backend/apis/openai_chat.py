"""OpenAI's chat completions API, also for compatible servers, and its completions API for base
models. Builds requests and reads answers. Also contains code that all of OpenAI's APIs share.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sglang_lite.lang.backend.apis.api import (
    ANSWER,
    Api,
    ApiReader,
    ApiRequest,
    ApiTool,
    JsonFormat,
    JsonTool,
    OwnField,
    PartialAnswer,
    PartialCall,
    Tools,
    cache_key,
    iterate_turns,
    split_parameters,
)
from sglang_lite.lang.results import messages_to_dicts
from sglang_lite.protocol import Delta, TokenLogprob, Usage
from sglang_lite.protocol.anything import Foreign, Json
from sglang_lite.text.tool_use import split_call_results

# The API's names for parameters, ours or others. Log-probabilities always have texts.
_NAMES = {
    **{name: name for name in ("stop", "n", "seed", "temperature", "top_p", "frequency_penalty", "presence_penalty")},
    "logit_bias": "logit_bias", "return_logprob": "logprobs", "top_logprobs_num": "top_logprobs",
    "return_text_in_logprobs": "",
}  # fmt: skip


def request_arguments(request: ApiRequest) -> dict[str, Json]:
    """Builds the arguments of `chat.completions.create` for a request."""
    arguments = {"model": request.target.model, **request_parameters(request)}
    if request.target.effort is not None:
        arguments["reasoning_effort"] = request.target.effort
    match request.shape:
        case JsonFormat(schema, strict):
            form = {"name": ANSWER, "schema": json.loads(schema), "strict": strict}
            arguments["response_format"] = {"type": "json_schema", "json_schema": form}
        case JsonTool() as shape:
            arguments["tools"] = [{"type": "function", "function": function_tool(shape.tool)}]
            arguments["tool_choice"] = {"type": "function", "function": {"name": ANSWER}}
            arguments["parallel_tool_calls"] = False
        case Tools(tools, choice, parallel):
            arguments["tools"] = [
                {"type": "function", "function": function_tool(tool)} for tool in tools
            ]
            arguments["tool_choice"] = choice
            arguments["parallel_tool_calls"] = parallel
        case OwnField(fields):
            arguments["extra_body"] = {**arguments.get("extra_body", {}), **fields}
    key = cache_key(request.prompt) if request.target.cache_hints else None
    if key is not None:
        arguments["prompt_cache_key"] = key
    messages = _messages(request)
    if request.prompt.partial.strip():  # only set for servers whose models continue it
        messages.append({"role": "assistant", "content": request.prompt.partial})
        arguments["extra_body"] = {
            **arguments.get("extra_body", {}),
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
    return arguments | {"messages": messages}


def _messages(request: ApiRequest) -> list[dict[str, Any]]:
    """Converts the conversation to the API's form. A turn with tool calls is sent in the form that
    the model wrote, and the results of the calls as tool messages.
    """
    messages: list[dict[str, Any]] = []
    for message, stored, calls in iterate_turns(
        request.prompt.messages, request.provider_items, _extract_tool_calls
    ):
        (turn,) = messages_to_dicts([message])
        if stored is not None:
            messages += stored
        elif calls:
            content, shown = _text_and_images(turn["content"])
            results = split_call_results([call["function"]["name"] for call in calls], content)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(calls, results)
            ]
            # a tool's message accepts only text
            messages += [{"role": "user", "content": shown}] if shown else []
        else:
            messages.append(turn)
    return messages


def _extract_tool_calls(items: Sequence[Any]) -> list[Any]:
    return [call for item in items for call in item["tool_calls"]]


def _text_and_images(content: Any) -> tuple[str, list[dict[str, Any]]]:
    if isinstance(content, str):
        return content, []
    texts = [part["text"] for part in content if part["type"] == "text"]
    return "".join(texts), [part for part in content if part["type"] != "text"]


def function_tool(tool: ApiTool) -> dict[str, Json]:
    """Converts a tool to a function definition. Chat and responses use the same form."""
    described = {"description": tool.description} if tool.description else {}
    return {
        "name": tool.name,
        **described,
        "parameters": json.loads(tool.schema),
        "strict": tool.strict,
    }


def request_parameters(request: ApiRequest) -> dict[str, Json]:
    """Returns the request fields for the parameters that were set, under the names of the chat and
    completions APIs. Parameters that only other servers support go into `extra_body`.
    """
    names = {**_NAMES, "max_tokens": request.target.max_tokens_field}
    arguments, extra = split_parameters(request.params, names)
    if "seed" in arguments:
        arguments["seed"] %= 2**63  # the API's seeds are signed 64-bit integers
    if "logit_bias" in arguments:
        arguments["logit_bias"] = {str(token): bias for token, bias in arguments["logit_bias"]}
    return arguments | ({"extra_body": extra} if extra else {})


class ChatReader(ApiReader):
    """Reads a chat completion or its chunks."""

    def read_whole_answer(self, response: Foreign) -> None:
        self.read_event(response)
        for sample in self.samples.values():
            if sample.finish_reason is None:  # not every server reports it
                sample.finish_reason = "stop"
                sample.end_assumed = True

    def read_event(self, chunk: Foreign) -> Sequence[Delta]:
        usage = getattr(chunk, "usage", None)
        if usage is not None:
            self.usage = parse_usage(usage)
        self.meta |= {"id": getattr(chunk, "id", None), "model": getattr(chunk, "model", None)}
        return [self._add_choice(choice) for choice in getattr(chunk, "choices", None) or ()]

    def _add_choice(self, choice: Any) -> Delta:
        """Adds a choice, or a chunk of one, to its sample, and returns its new text."""
        sample = self.samples.setdefault(choice.index, PartialAnswer())
        delta = self.choice_delta(choice, sample)
        sample.text += delta.text
        sample.logprobs += delta.logprobs
        sample.finish_reason = choice.finish_reason or sample.finish_reason
        sample.truncated = sample.finish_reason == "length"
        if sample.finish_reason == "content_filter":
            sample.refusal = sample.refusal or "a content filter stopped the answer"
        if sample.calls and sample.finish_reason is not None:
            sample.provider_items = [_tool_call_turn(sample)]
        return delta

    def choice_delta(self, choice: Foreign, sample: PartialAnswer) -> Delta:
        """Returns the delta of a choice, for a stream. Adds refusal, reasoning and tool calls to
        the sample.
        """
        message = getattr(choice, "message", None)
        message = choice.delta if message is None else message
        sample.refusal += getattr(message, "refusal", None) or ""
        # Compatible servers report reasoning under one of these names.
        thought = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
        if thought:
            sample.reasoning = (sample.reasoning or "") + thought
        for call in getattr(message, "tool_calls", None) or ():
            _add_tool_call(sample, call)
        logprobs = parse_logprobs(getattr(choice, "logprobs", None))
        return Delta(
            message.content or "", logprobs=logprobs, index=choice.index, reasoning=thought or ""
        )


def _add_tool_call(sample: PartialAnswer, chunk: Any) -> None:
    """Adds a tool call, or a chunk of one, to the sample."""
    index = getattr(chunk, "index", None)
    index = len(sample.calls) if index is None else index
    call = sample.calls.setdefault(index, PartialCall())
    call.id = getattr(chunk, "id", None) or call.id
    call.name += getattr(chunk.function, "name", None) or ""
    call.arguments += getattr(chunk.function, "arguments", None) or ""


def _tool_call_turn(sample: PartialAnswer) -> dict[str, Any]:
    """Returns a turn with tool calls in the form that the API expects back."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for _, call in sorted(sample.calls.items())
    ]
    return {"role": "assistant", "content": sample.text or None, "tool_calls": calls}


def parse_logprobs(logprobs: Foreign) -> tuple[TokenLogprob, ...]:
    """Converts log-probabilities of tokens. OpenAI reports tokens only as text, so the ids are -1."""
    return tuple(
        TokenLogprob(
            t.logprob,
            -1,
            t.token,
            tuple((top.logprob, -1, top.token) for top in t.top_logprobs or ()),
        )
        for t in (getattr(logprobs, "content", logprobs) or ())
    )


CHAT = Api(
    request_arguments,
    lambda client: wrap_with_extra_body(client.chat.completions.create, "messages"),
    {"stream": True, "stream_options": {"include_usage": True}},
    ChatReader,
)


def wrap_with_extra_body(
    create: Callable[..., Awaitable[Foreign]], *empty: str
) -> Callable[..., Awaitable[Json]]:
    """Wraps a method of the SDK so that it sends nearly the whole request in `extra_body`. Only the
    model and `stream` stay ordinary arguments.

    Args:
        empty: names of list arguments that the SDK requires. They are passed empty, and the
            request's own lists replace them in the body.
    """

    def call(
        *, model: str, extra_body: dict[str, Any] | None = None, **arguments: Any
    ) -> Awaitable[Any]:
        keywords: dict[str, Any] = {name: [] for name in empty}
        if "stream" in arguments:
            keywords["stream"] = arguments.pop("stream")
        return create(model=model, extra_body={**arguments, **(extra_body or {})}, **keywords)

    return call


def parse_usage(usage: Foreign) -> Usage:
    """Converts the usage that an API reports. Counts that are missing or invalid are 0."""
    details = getattr(usage, "prompt_tokens_details", None) or getattr(
        usage, "input_tokens_details", None
    )
    generated = getattr(usage, "completion_tokens_details", None) or getattr(
        usage, "output_tokens_details", None
    )
    return Usage(
        _count_or_zero(usage, "prompt_tokens") or _count_or_zero(usage, "input_tokens"),
        _count_or_zero(details, "cached_tokens"),
        _count_or_zero(usage, "completion_tokens") or _count_or_zero(usage, "output_tokens"),
        written_tokens=_count_or_zero(details, "cache_write_tokens"),
        reasoning_tokens=_count_or_zero(generated, "reasoning_tokens"),
        image_tokens=_count_or_zero(details, "image_tokens"),
        cached_image_tokens=_count_or_zero(details, "cached_image_tokens"),
    )


def _count_or_zero(counts: Foreign, name: str) -> int:
    found = getattr(counts, name, None)
    return found if isinstance(found, int) and found > 0 else 0


def completion_arguments(request: ApiRequest) -> dict[str, Json]:
    """Builds the arguments of `completions.create` for a request. The API can't specify the form of
    an answer.
    """
    arguments = {"model": request.target.model, **request_parameters(request)}
    if arguments.pop("logprobs", False):
        arguments["logprobs"] = arguments.pop("top_logprobs", 0)
    return arguments | {"prompt": request.prompt.text}


class CompletionsReader(ChatReader):
    """Reads a completion or its chunks. Differs from ChatReader only in the field with a choice's
    text.
    """

    def choice_delta(self, choice: Foreign, sample: PartialAnswer) -> Delta:
        return Delta(
            choice.text or "",
            logprobs=_parse_completion_logprobs(choice.logprobs),
            index=choice.index,
        )


def _parse_completion_logprobs(logprobs: Any) -> tuple[TokenLogprob, ...]:
    """Converts log-probabilities of tokens. The API reports tokens only as text, so the ids are -1."""
    if getattr(logprobs, "tokens", None) is None:
        return ()
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return tuple(
        TokenLogprob(
            logprob, -1, token, tuple((each, -1, text) for text, each in (top or {}).items())
        )
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, tops)
    )


COMPLETIONS = Api(
    completion_arguments, lambda client: client.completions.create, CHAT.streamed, CompletionsReader
)
