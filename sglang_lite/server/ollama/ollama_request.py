"""Requests of Ollama's `/api/chat` and `/api/generate`: options become sampling parameters,
messages a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from sglang_lite.constraints.schema import client_schema
from sglang_lite.protocol import Constraint, ParameterError, Prompt, SamplingParams, Span
from sglang_lite.server.conversation.images import Part, RequestImages, join_parts
from sglang_lite.server.conversation.tools import effort_variables
from sglang_lite.server.endpoint import HttpRequest
from sglang_lite.server.fields import (
    OLLAMA_NEUTRAL,
    OLLAMA_OPTIONS_NEUTRAL,
    OLLAMA_OPTIONS_REFUSED,
    Fields,
)
from sglang_lite.server.parameters import sampling
from sglang_lite.server.reader import RequestReader
from sglang_lite.text.chat_format import Conversation, RenderedConversation, Tool


class OllamaRequest(msgspec.Struct, kw_only=True):
    """Fields that all of Ollama's requests to a model have."""

    model: str
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None  # reported: the model stays loaded


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Options of a generation. Options without effect, such as `num_ctx`, are reported."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_ctx: int | None = None
    num_keep: int | None = None
    repeat_last_n: int | None = None
    penalize_newline: bool | None = None


class _AnswerRequest(OllamaRequest, kw_only=True):
    stream: bool | None = True
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CalledTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Function of an earlier call, and its arguments."""

    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None


class OllamaCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Earlier call of a tool."""

    function: CalledTool
    id: str = ""
    type: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Message of a chat. `images` are in base64."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ToolFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Function that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OllamaTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tool of a chat."""

    function: ToolFunction
    type: Literal["function"] = "function"


class OllamaChat(_AnswerRequest, kw_only=True):
    """Ollama's request to answer a conversation."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class OllamaGenerate(_AnswerRequest, kw_only=True):
    """Ollama's request to answer a prompt, or with `raw` to continue it."""

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None


_OF_GENERATE: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "width": (0,),
    "height": (0,),
    "steps": (0,),
}
CHAT = Fields(OllamaChat, OLLAMA_NEUTRAL, {})
GENERATE = Fields(OllamaGenerate, OLLAMA_NEUTRAL, _OF_GENERATE)
OPTIONS = Fields(OllamaOptions, OLLAMA_OPTIONS_NEUTRAL, OLLAMA_OPTIONS_REFUSED)
_WITHOUT_EFFECT = ("num_ctx", "num_keep", "repeat_last_n", "penalize_newline")
_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# templates' names of fields of messages
_OF_TEMPLATES = {"name": "tool_name", "reasoning_content": "thinking"}

Read: TypeAlias = tuple[OllamaChat | OllamaGenerate, RenderedConversation | None, SamplingParams]


def read_chat(reader: RequestReader, call: HttpRequest) -> Read:
    """Returns the request without its messages, the rendered conversation and the sampling
    parameters. The conversation is None if there are no messages.
    """
    body = call.read_fields(CHAT)
    images = RequestImages(reader.media_kinds)
    messages = [
        _convert_ollama_message(each, f"messages[{i}]", images)
        for i, each in enumerate(body.messages or ())
    ]
    tools = [
        Tool(
            each.name,
            each.description,
            _parse_arguments_schema(each.parameters),
            each.strict is True,
        )
        for each in (tool.function for tool in body.tools or ())
    ]
    body.messages = None
    return (
        body,
        _render_messages(reader, call, body, messages, images, tools),
        _read_ollama_sampling(reader, call, body),
    )


def read_generate(reader: RequestReader, call: HttpRequest) -> Read:
    """Returns the request without its prompt, the rendered conversation and the sampling
    parameters. The conversation is None if there is no prompt.
    """
    body = call.read_fields(GENERATE)
    params = _read_ollama_sampling(reader, call, body)
    text = body.prompt or ""
    images = RequestImages(reader.media_kinds)
    if body.raw:
        for name in ("system", "images", "think"):
            if getattr(body, name):
                raise ParameterError(
                    name, "can't be combined with raw, whose prompt is the whole text."
                )
        prompt = reader.prepare_prompt(Prompt((Span(text),)))
        assert isinstance(prompt, Prompt)
        rendered = (
            RenderedConversation(prompt, _constraint_from_format(body.format), None, None, {})
            if text
            else None
        )
    else:
        asked = OllamaMessage(role="user", content=text, images=body.images)
        messages = [_convert_ollama_message(asked, "", images)] if text or body.images else []
        if body.system and messages:
            messages.insert(0, {"role": "system", "content": body.system})
        rendered = _render_messages(reader, call, body, messages, images)
    body.prompt = None
    body.images = None
    return body, rendered, params


def _render_messages(
    reader: RequestReader,
    call: HttpRequest,
    body: OllamaChat | OllamaGenerate,
    messages: list[dict[str, Any]],
    images: RequestImages,
    tools: list[Tool] | None = None,
) -> RenderedConversation | None:
    if not messages:
        return None
    variables: dict[str, Any] = {}
    if body.think is not None:
        think = body.think
        variables = {
            "think": effort_variables(think)
            if isinstance(think, str)
            else {"enable_thinking": think}
        }
    conversation = Conversation(
        messages,
        tools or (),
        answer=_constraint_from_format(body.format),
        variables=variables,
        images=images.found,
        continue_final=messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"),
    )
    unused: list[str] = []
    rendered = reader.render(conversation, unused)
    call.unused.extend(map(_ollama_field_name, unused))
    return rendered


def _ollama_field_name(name: str) -> str:
    """Returns Ollama's name of a message field, from the templates' name."""
    message, dot, last = name.rpartition(".")
    return f"{message}{dot}{_OF_TEMPLATES.get(last, last)}"


def _parse_arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the schema of a tool's arguments. Ollama's client writes the types of a union as one
    text: "integer, string".
    """
    found: dict[str, Any] = dict(parameters or {"type": "object", "properties": {}})
    if isinstance(found.get("properties"), dict):
        found["properties"] = {
            name: _split_type_list(each) for name, each in found["properties"].items()
        }
    return found


def _split_type_list(schema: object) -> object:
    if isinstance(schema, dict) and isinstance(schema.get("type"), str) and ", " in schema["type"]:
        return {**schema, "type": schema["type"].split(", ")}
    return schema


def _convert_ollama_message(
    message: OllamaMessage, where: str, images: RequestImages
) -> dict[str, Any]:
    """Converts a message to the form that templates take."""
    parts: list[Part] = [
        images.add_part(image, "image", f"{where}.images[{i}]".lstrip("."), role=message.role)
        for i, image in enumerate(message.images or ())
    ]
    shown: dict[str, Any] = {
        "role": message.role,
        "content": join_parts([*parts, message.content or ""]) if parts else message.content or "",
    }
    if message.thinking is not None:
        shown["reasoning_content"] = message.thinking
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "type": "function",
                "id": each.id,
                "function": {"name": each.function.name, "arguments": each.function.arguments},
            }
            for each in message.tool_calls
        ]
    if message.tool_name is not None:
        shown["name"] = message.tool_name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _constraint_from_format(format: str | Mapping[str, Any] | None) -> Constraint | None:
    if not format and not isinstance(format, Mapping):
        return None
    if isinstance(format, str) and format != "json":
        raise ParameterError("format", f"{format!r:.60} is neither json nor a JSON Schema.")
    return client_schema({"type": "object"} if isinstance(format, str) else format)


def _read_ollama_sampling(
    reader: RequestReader, call: HttpRequest, body: OllamaChat | OllamaGenerate
) -> SamplingParams:
    options = read_options(body, call)
    if not body.logprobs and body.top_logprobs:
        raise ParameterError("top_logprobs", "needs logprobs: true.")
    scored = bool(body.logprobs)
    try:
        return sampling.read_sampling_params(
            options,
            _NAMES,
            max_tokens=reader.context_length,
            return_logprob=scored,
            top_logprobs_num=body.top_logprobs or 0,
            return_text_in_logprobs=scored,
        )
    except ParameterError as error:
        own = (
            "top_logprobs"
            if error.parameter == "top_logprobs_num"
            else f"options.{error.parameter}"
        )
        raise _rename_parameter(error, own) from None


def _rename_parameter(error: ParameterError, name: str) -> ParameterError:
    return ParameterError(name, error.message.removeprefix(f"{error.parameter}: "), hint=error.hint)


def read_options(body: OllamaRequest, call: HttpRequest) -> OllamaOptions:
    """Returns the options of a request. Reports `keep_alive`, and options without effect such as
    `num_ctx`.

    Raises:
        ParameterError: an option is unknown or refused, or a value has the wrong type.
    """
    unknown: list[str] | None = [] if call.reports else None
    try:
        options = OPTIONS.parse_record(body.options or {}, unknown)
    except ParameterError as error:
        raise _rename_parameter(error, f"options.{error.parameter}") from None
    call.unused.extend(f"options.{name}" for name in unknown or ())
    if body.keep_alive is not None:
        call.unused.append("keep_alive")
    call.unused.extend(
        f"options.{name}" for name in _WITHOUT_EFFECT if getattr(options, name) is not None
    )
    # In Ollama, negative values mean no limit and no seed.
    if options.num_predict is not None and options.num_predict < 0:
        options.num_predict = None
    if options.seed is not None and options.seed < 0:
        options.seed = None
    return options
