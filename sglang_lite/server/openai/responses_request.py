"""Requests of OpenAI's Responses API: converts items, tools and formats to a conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from sglang_lite.protocol import CapabilityError, Constraint, ParameterError
from sglang_lite.server.conversation.images import RequestImages
from sglang_lite.server.conversation.tools import (
    CustomDefinition,
    FunctionDefinition,
    GrammarText,
    effort_variables,
    with_tools,
)
from sglang_lite.server.fields import (
    INPUT_TOKENS_NEUTRAL,
    INPUT_TOKENS_REFUSED,
    RESPONSES_NEUTRAL,
    RESPONSES_REFUSED,
    Fields,
)
from sglang_lite.server.http.body import convert
from sglang_lite.server.openai.responses_items import Item, build_template_messages
from sglang_lite.server.parameters import constraints, sampling
from sglang_lite.server.parameters.completion_fields import EventOptions
from sglang_lite.text.chat_format import Conversation


class FunctionTool(
    FunctionDefinition, kw_only=True, tag_field="type", tag="function", forbid_unknown_fields=True
):
    is_async: bool | None = msgspec.field(name="async", default=None)
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None


class TextInput(
    msgspec.Struct, kw_only=True, tag_field="type", tag="text", forbid_unknown_fields=True
):
    pass


class GrammarInput(GrammarText, tag_field="type", tag="grammar"):
    pass


class CustomTool(
    CustomDefinition, kw_only=True, tag_field="type", tag="custom", forbid_unknown_fields=True
):
    format: TextInput | GrammarInput | None = None
    is_async: bool | None = msgspec.field(name="async", default=None)
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None

    @property
    def grammar(self) -> GrammarText | None:
        return self.format if isinstance(self.format, GrammarInput) else None


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Reference to a tool by its name, in a tool choice."""

    type: Literal["function", "custom"]
    name: str


class Allowed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Choice that limits which tools may be called. With the mode "required", one of them must be
    called.
    """

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ImageCompression(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options for compressing the images of a request. Compression isn't supported, so enabling it
    is refused.
    """

    context_compression: Literal["auto", "enabled", "disabled"] | None = None


class ResponsesRequest(sampling.OpenAiSampling, kw_only=True):
    """Request to create a response."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    image: ImageCompression | None = None
    priority: int | None = None
    cache_salt: str | None = None


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """Request to count the tokens of a prompt. Has those fields of ResponsesRequest that affect the
    prompt.
    """

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None


RESPONSES = Fields(ResponsesRequest, RESPONSES_NEUTRAL, RESPONSES_REFUSED)
INPUT_TOKENS = Fields(InputTokensRequest, INPUT_TOKENS_NEUTRAL, INPUT_TOKENS_REFUSED)
HOSTED = re.compile(  # types of tools that run at OpenAI, or that its models were trained for
    r"(web_search|file_search|computer|code_interpreter|image_generation|tool_search|(local_)?shell|mcp|apply_patch"
    r"|programmatic_tool_calling)(_use)?(_preview)?(_20[0-9_]{8})?"
)
LOGPROBS = "message.output_text.logprobs"
_INCLUDED = {  # values without effect: of tools and models that this server doesn't have
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
}


def conversation_from_items(
    body: ResponsesRequest, items: Sequence[Item], unused: list[str]
) -> Conversation:
    """Converts a request to the conversation that it continues.

    Args:
        items: the whole conversation, without the instructions.
        unused: list to which the names of fields without effect are appended.

    Raises:
        ParameterError: a tool, choice or format is invalid.
        CapabilityError: a tool's grammar can't be enforced.
        ConstraintError: a constraint of the answer can't be enforced.
    """
    if not items:
        raise ParameterError("input", "is empty.")
    _check_include(body)
    tools, hosted = _separate_hosted_tools(body.tools or (), unused)
    choice, allowed = _parse_responses_tool_choice(body.tool_choice, tools, hosted)
    constraint = None if body.text is None else _text_format_constraint(body.text.format)
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        unused.append("text.verbosity")  # the model has no such setting
    if body.image is not None and body.image.context_compression == "enabled":
        raise CapabilityError(
            "images are not compressed here.",
            parameter="image.context_compression",
            hint='Use "auto", or leave it out.',
        )
    # `complete_input_items` refuses images if the model reads none
    images = RequestImages(frozenset({"image"}))
    messages = build_template_messages(items, images)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    conversation = Conversation(
        messages=messages,
        parallel=body.parallel_tool_calls is not False,
        answer=constraint,
        variables=_reasoning_variables(body.reasoning, unused),
        images=images.found,
    )
    return with_tools(conversation, list(tools.values()), choice, allowed)


def _check_include(body: ResponsesRequest) -> None:
    for i, name in enumerate(body.include or ()):
        if name != LOGPROBS and name not in _INCLUDED:
            raise ParameterError(
                f"include[{i}]", f"{name!r:.60} is unknown.", hint=f"Known: {LOGPROBS}."
            )
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise ParameterError("top_logprobs", f"needs {LOGPROBS!r} in `include`.")


def _reasoning_variables(
    reasoning: Reasoning | None, unused: list[str]
) -> dict[str, dict[str, Any]]:
    if reasoning is None:
        return {}
    if reasoning.summary is not None or reasoning.generate_summary is not None:
        unused.append("reasoning.summary")  # reasoning is returned whole
    return (
        {} if reasoning.effort is None else {"reasoning.effort": effort_variables(reasoning.effort)}
    )


def _text_format_constraint(format: Mapping[str, Any] | None) -> Constraint | None:
    if format is not None and format.get("type") == "json_schema":
        return constraints.schema(format, "text.format")
    if format is not None and format.get("type") not in ("text", "json_object"):
        raise ParameterError("text.format.type", "is not text, json_object or json_schema.")
    return constraints.response_format(format, "text.format")


def _separate_hosted_tools(
    given: Sequence[Mapping[str, Any]], unused: list[str]
) -> tuple[dict[str, FunctionTool | CustomTool], frozenset[str]]:
    """Separates the caller's tools from hosted tools, which are never called. Returns the caller's
    tools by name, and the types of the hosted tools.
    """
    tools: dict[str, FunctionTool | CustomTool] = {}
    hosted: set[str] = set()
    for i, each in enumerate(given):
        kind = each.get("type")
        where = f"tools[{i}]"
        if kind not in ("function", "custom"):
            if not (isinstance(kind, str) and HOSTED.fullmatch(kind)):
                raise ParameterError(
                    f"{where}.type",
                    "is missing." if kind is None else f"{kind!r:.60} is not supported.",
                )
            hosted.add(kind)
            unused.append(f"{where} {kind}")
            continue
        tool = (
            convert(each, FunctionTool, where)
            if kind == "function"
            else convert(each, CustomTool, where)
        )
        if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
            unused.append(f"{where} {tool.name}")  # callable only by code that runs at OpenAI
            continue
        unread = {
            "async": tool.is_async,
            "defer_loading": tool.defer_loading,
            "output_schema": _output_schema(tool),
        }
        unused += [f"{where}.{name}" for name, value in unread.items() if value]
        if tool.name in tools:
            raise ParameterError(
                where, f"another tool has the name {tool.name!r:.80}, too. Rename one."
            )
        tools[tool.name] = tool
    return tools, frozenset(hosted)


def _output_schema(tool: FunctionTool | CustomTool) -> dict[str, Any] | None:
    return tool.output_schema if isinstance(tool, FunctionTool) else None


def _parse_responses_tool_choice(
    given: str | dict[str, Any] | None,
    tools: Mapping[str, FunctionTool | CustomTool],
    hosted: frozenset[str],
) -> tuple[Literal["auto", "required", "named", "none"], list[str] | None]:
    """Returns the mode of tool calling, and the names of the tools that may be called, or None for
    all.
    """
    if given is None or given == "auto":
        return "auto", None
    if given == "none":
        return "none", None
    if given == "required":
        if not tools:
            raise ParameterError(
                "tool_choice", "the request has no tools that can be called. Give some in tools."
            )
        return "required", None
    kind = given.get("type") if isinstance(given, dict) else given
    if isinstance(given, dict) and kind in ("function", "custom"):
        return "named", [_require_known_tool_name(given, "tool_choice", tools)]
    if isinstance(given, dict) and kind == "allowed_tools":
        allowed = convert(given, Allowed, "tool_choice")
        names = [
            _require_known_tool_name(each, f"tool_choice.tools[{i}]", tools)
            for i, each in enumerate(allowed.tools)
            if str(each.get("type")) not in hosted
        ]
        if not names and allowed.mode == "required":
            raise ParameterError("tool_choice.tools", "names no tool that can be called.")
        return allowed.mode, names
    if isinstance(given, dict) and isinstance(kind, str) and HOSTED.fullmatch(kind):
        raise ParameterError(
            "tool_choice", f"{kind!r:.60} is a hosted tool, which this server does not run."
        )
    raise ParameterError("tool_choice", f"{given!r:.80} is not auto, none, required or a tool.")


def _require_known_tool_name(
    given: Mapping[str, Any], where: str, tools: Mapping[str, FunctionTool | CustomTool]
) -> str:
    named = convert(given, NamedTool, where)
    found = tools.get(named.name)
    if found is None or found.__struct_config__.tag != named.type:
        raise ParameterError(
            where,
            f"{named.name!r:.80} is not the name of a {named.type} tool.",
            hint=f"Tools: {', '.join(tools)[:400]}.",
        )
    return named.name
