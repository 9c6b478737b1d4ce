"""Requests to OpenAI's Responses API, and readers of the answers. Nothing is stored at the
provider: a model's reasoning is sent back, encrypted, with its turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_lite.lang.backend.apis.api import (
    ANSWER,
    Api,
    ApiReader,
    ApiRequest,
    GrammarTool,
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
from sglang_lite.lang.backend.apis.openai_chat import (
    function_tool,
    parse_logprobs,
    parse_usage,
    wrap_with_extra_body,
)
from sglang_lite.lang.results import messages_to_dicts
from sglang_lite.protocol import Delta, Message
from sglang_lite.protocol.anything import Foreign, Json
from sglang_lite.text.tool_use import split_call_results

_THOUGHTS = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_NAMES = {
    "max_tokens": "max_output_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_logprobs_num": "top_logprobs",
    "return_logprob": "",
    "return_text_in_logprobs": "",
}
NOTHING: Mapping[int, Sequence[Any]] = {}


def request_arguments(request: ApiRequest) -> dict[str, Json]:
    """Builds the arguments of `responses.create` for a request."""
    target = request.target
    own, extra = split_parameters(request.params, _NAMES)
    arguments: dict[str, Any] = {
        "model": target.model,
        "input": input_items(request.prompt.messages, request.provider_items),
        "store": False,
        **own,
    }
    include = [_THOUGHTS] if target.may_reason else []
    key = cache_key(request.prompt) if target.cache_hints else None
    if key is not None:
        arguments["prompt_cache_key"] = key
    if target.effort is not None:
        arguments["reasoning"] = {"effort": target.effort}
    include += [_LOGPROBS] if request.params.return_logprob is True else []
    shape = _answer_format_fields(request)
    extra |= shape.pop("extra_body", {})
    return (
        arguments
        | shape
        | ({"include": include} if include else {})
        | ({"extra_body": extra} if extra else {})
    )


def _answer_format_fields(request: ApiRequest) -> dict[str, Any]:
    """Returns the request fields that specify the form of the answer."""
    match request.shape:
        case JsonFormat(schema, strict):
            form = {
                "type": "json_schema",
                "name": ANSWER,
                "schema": json.loads(schema),
                "strict": strict,
            }
            return {"text": {"format": form}}
        case GrammarTool(syntax, definition):
            grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
            described = "Its input is your whole answer."
            tool = {"type": "custom", "name": ANSWER, "description": described, "format": grammar}
            return _tool_fields([tool], {"type": "custom", "name": ANSWER})
        case JsonTool() as shape:
            return _tool_fields(
                [{"type": "function", **function_tool(shape.tool)}],
                {"type": "function", "name": ANSWER},
            )
        case Tools(tools, choice, parallel):
            functions = [{"type": "function", **function_tool(tool)} for tool in tools]
            return {
                **_tool_fields(functions, choice),
                "parallel_tool_calls": parallel,
            }
        case OwnField(fields):
            return {"extra_body": dict(fields)}
    return {}


def _tool_fields(tools: list[dict[str, Any]], choice: str | dict[str, str]) -> dict[str, Any]:
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


def input_items(
    messages: Sequence[Message], provider_items: Mapping[int, Sequence[Json]] = NOTHING
) -> list[dict[str, Json]]:
    """Converts the conversation to the API's form. `provider_items` has the items that the API
    expects back in place of turns, by message index.
    """
    items: list[dict[str, Any]] = []
    for message, stored, calls in iterate_turns(messages, provider_items, _extract_tool_calls):
        if stored is not None:
            items += stored
        elif calls:
            results = split_call_results([call["name"] for call in calls], _content(message))
            items += [
                {"type": "function_call_output", "call_id": call["call_id"], "output": result}
                for call, result in zip(calls, results)
            ]
        else:
            items.append({"role": message.role, "content": _content(message)})
    return items


def _extract_tool_calls(items: Sequence[Any]) -> list[Any]:
    return [item for item in items if item["type"] == "function_call"]


def _content(message: Message) -> str | list[dict[str, Any]]:
    (turn,) = messages_to_dicts([message])
    if isinstance(turn["content"], str):
        return turn["content"]
    return [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "detail": "auto", "image_url": part["image_url"]["url"]}
        for part in turn["content"]
    ]


class ResponsesReader(ApiReader):
    """Reads a response or its events. The last event contains the whole response."""

    def read_whole_answer(self, response: Foreign) -> None:
        self.samples = {}
        self.usage = parse_usage(getattr(response, "usage", None))
        self.meta |= {
            "id": getattr(response, "id", None),
            "model": getattr(response, "model", None),
        }
        error = getattr(response, "error", None)
        if error is not None:
            self.failure = error.message
            return
        why = getattr(getattr(response, "incomplete_details", None), "reason", None)
        silent = why is None and getattr(response, "status", None) is None
        sample = PartialAnswer(
            finish_reason=why or "stop", truncated=why == "max_output_tokens", end_assumed=silent
        )
        inputs = list[str]()
        for item in getattr(response, "output", None) or ():
            _read_output_item(item, sample, inputs)
        if why == "content_filter":
            sample.refusal = sample.refusal or "a content filter stopped the answer"
        if len(inputs) > 1:
            self.failure = f"the model answered {len(inputs)} times instead of once, by calls of the tool {ANSWER!r}."
        elif sample.provider_items or sample.refusal or sample.truncated:
            sample.text = "".join(inputs) or sample.text
            self.samples = {0: sample}

    def read_event(self, event: Foreign) -> Sequence[Delta]:
        self.samples = self.samples or {0: PartialAnswer()}
        match event.type:
            case "response.output_text.delta":
                return [Delta(event.delta, logprobs=parse_logprobs(event.logprobs))]
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                return [Delta("", reasoning=event.delta)]
            case "response.completed" | "response.incomplete" | "response.failed":
                self.read_whole_answer(event.response)
            case "error":
                self.failure = event.message
        return ()


def _read_output_item(item: Any, sample: PartialAnswer, inputs: list[str]) -> None:
    """Adds an item of the output to the sample. The input of a custom tool is added to `inputs`."""
    sample.provider_items.append(item.to_dict(mode="json"))
    match item.type:
        case "message":
            for part in item.content:
                if part.type == "refusal":
                    sample.refusal += part.refusal
                else:
                    sample.text += part.text
                    sample.logprobs += parse_logprobs(part.logprobs)
        case "reasoning":
            shown = [part.text for part in (item.content or item.summary)]
            sample.reasoning = (sample.reasoning or "") + "\n\n".join(shown)
        case "function_call":
            sample.calls[len(sample.calls)] = PartialCall(item.name, item.arguments, item.call_id)
        case "custom_tool_call":
            inputs.append(item.input)


RESPONSES = Api(
    request_arguments,
    lambda client: wrap_with_extra_body(client.responses.create),
    {"stream": True},
    ResponsesReader,
)
