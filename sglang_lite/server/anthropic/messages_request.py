"""Requests of Anthropic's protocol: converts messages, tools and formats to a conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from sglang_lite.constraints.schema import client_schema
from sglang_lite.protocol import CapabilityError, Constraint, ParameterError
from sglang_lite.server.conversation.images import Part, RequestImages, join_parts
from sglang_lite.server.fields import BILLING_HEADER
from sglang_lite.server.http.body import convert
from sglang_lite.text.chat_format import Conversation, Tool


class _Block(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    cache_control: dict[str, Any] | None = None  # ignored: every prefix is cached


class TextBlock(_Block, tag="text"):
    text: str
    citations: list[Any] | None = None  # of an earlier answer, returned by the client unchanged


class TextSource(
    msgspec.Struct, kw_only=True, tag_field="type", tag="text", forbid_unknown_fields=True
):
    data: str
    media_type: Literal["text/plain"] = "text/plain"


class ContentSource(
    msgspec.Struct, kw_only=True, tag_field="type", tag="content", forbid_unknown_fields=True
):
    content: str | list[TextBlock]


class OtherSource(msgspec.Struct, kw_only=True, tag_field="type", tag="base64"):
    pass


class UrlSource(OtherSource, tag="url"):
    pass


class FileSource(OtherSource, tag="file"):
    pass


class Citations(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    enabled: bool = False


class ImageBlock(_Block, tag="image"):
    source: dict[str, Any]
    transformations: Any = None


class DocumentBlock(_Block, tag="document"):
    source: TextSource | ContentSource | OtherSource | UrlSource | FileSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResultBlock(_Block, tag="search_result"):
    content: list[TextBlock]
    source: str
    title: str
    citations: Citations | None = None


class ThinkingBlock(
    msgspec.Struct, kw_only=True, tag_field="type", tag="thinking", forbid_unknown_fields=True
):
    thinking: str
    signature: str | None = None


class RedactedBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    data: str


class ToolUseBlock(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: None = None


Shown: TypeAlias = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[Shown] | None = None
    is_error: bool | None = None
    toolset_name: None = None


class UserMessage(
    msgspec.Struct, kw_only=True, tag_field="role", tag="user", forbid_unknown_fields=True
):
    content: (
        str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock]
    )


class AssistantMessage(
    msgspec.Struct, kw_only=True, tag_field="role", tag="assistant", forbid_unknown_fields=True
):
    content: str | list[TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock]


class SystemMessage(
    msgspec.Struct, kw_only=True, tag_field="role", tag="system", forbid_unknown_fields=True
):
    content: str | list[TextBlock]


class OwnTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tool that the caller has defined, as opposed to one that Anthropic hosts."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None  # ignored: arguments are always streamed
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutputFormat(
    msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None
    task_budget: None = None


# Types of tools that run at Anthropic, or that its models were trained for.
HOSTED = re.compile(r"[a-z][a-z0-9_]*_20[0-9]{6}|tool_search_tool_(bm25|regex)|mcp_toolset")


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Request to count the tokens of a prompt."""

    messages: list[UserMessage | AssistantMessage | SystemMessage]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None

    @property
    def budget_tokens(self) -> int | None:
        """Limit on thinking, in tokens."""
        return None if self.thinking is None else self.thinking.budget_tokens

    @property
    def effort(self) -> str | None:
        return None if self.output_config is None else self.output_config.effort

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"


def conversation_from_messages(
    body: CountTokensRequest, unused: list[str], images: RequestImages
) -> Conversation:
    """Converts a request to the conversation that it continues.

    Args:
        unused: list to which the names of fields and blocks without effect are appended.
        images: collects the messages' images.

    Raises:
        ParameterError: a message, tool or choice is invalid.
        CapabilityError: a message has an image or another part that the model can't read.
        ConstraintError: the format can't be enforced.
    """
    if not body.messages:
        raise ParameterError("messages", "is empty.")
    messages: list[dict[str, Any]] = []
    if system := _build_system_message(body.system, unused):
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(body.messages):
        messages += _convert_to_template_messages(message, f"messages[{i}].content", unused, images)
    tools, hosted = _split_hosted_tools(body.tools or (), unused)
    choice = body.tool_choice or ToolChoice(type="auto")
    continues = isinstance(body.messages[-1], AssistantMessage)
    if continues and messages[-1].get("tool_calls"):
        raise ParameterError(
            "messages",
            "the last message calls tools without their results. Add a user message with tool_result blocks.",
        )
    variables: dict[str, dict[str, Any]] = {}
    if body.thinking is not None:
        variables["thinking.type"] = {"enable_thinking": body.thinking.type != "disabled"}
    if body.output_config is not None and body.output_config.effort is not None:
        variables["output_config.effort"] = {"reasoning_effort": body.output_config.effort}
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=_parse_messages_tool_choice(choice, tools, hosted),
        allowed=None if choice.name is None else [choice.name],
        parallel=not choice.disable_parallel_tool_use,
        answer=_output_format_constraint(body),
        continue_final=continues,
        variables=variables,
        images=images.found,
    )


def _output_format_constraint(body: CountTokensRequest) -> Constraint | None:
    configured = None if body.output_config is None else body.output_config.format
    if configured is not None and body.output_format is not None:
        raise ParameterError(
            "output_format", "and output_config.format are both given. Give one of them."
        )
    found = configured or body.output_format
    return None if found is None else client_schema(found.schema)


def _parse_messages_tool_choice(
    choice: ToolChoice, tools: Sequence[Tool], hosted: Mapping[str, str]
) -> Literal["auto", "required", "named", "none"]:
    if choice.type == "tool":
        if choice.name is None:
            raise ParameterError("tool_choice.name", "is missing.")
        if choice.name in hosted:
            raise ParameterError(
                "tool_choice",
                f"{choice.name!r:.80} is a hosted tool ({hosted[choice.name]:.60}), which this server does not run.",
            )
    elif choice.name is not None:
        raise ParameterError("tool_choice.name", f"needs the type 'tool', not {choice.type!r}.")
    if choice.type in ("any", "tool"):
        if not tools:
            raise ParameterError(
                "tool_choice", "the request has no tools that can be called. Give some in tools."
            )
        return "required" if choice.type == "any" else "named"
    return "auto" if choice.type == "auto" else "none"


def _split_hosted_tools(
    given: Sequence[Mapping[str, Any]], unused: list[str]
) -> tuple[list[Tool], dict[str, str]]:
    """Separates the caller's tools from Anthropic's hosted tools, which are never called. Returns
    the caller's tools, and the types of the hosted tools by their names.
    """
    tools: list[Tool] = []
    hosted: dict[str, str] = {}
    for i, each in enumerate(given):
        kind = each.get("type")
        where = f"tools[{i}]"
        if isinstance(kind, str) and HOSTED.fullmatch(kind):
            hosted[str(each.get("name", kind))] = kind
            unused.append(f"{where} {kind}")
            continue
        tool = convert(each, OwnTool, where)
        if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
            unused.append(f"{where} {tool.name}")  # callable only by code that runs at Anthropic
            continue
        unused += [
            f"{where}.{name}" for name in ("defer_loading", "input_examples") if getattr(tool, name)
        ]
        tools.append(Tool(tool.name, tool.description, tool.input_schema, strict=bool(tool.strict)))
    return tools, hosted


# ----------------------------------------------------------------------------------------- messages


def _build_system_message(system: str | list[TextBlock] | None, unused: list[str]) -> str:
    if isinstance(system, list):
        _require_nonempty_texts(system, "system")
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    told = [text for text in texts if not _is_billing(text)]
    if len(told) < len(texts):
        unused.append(BILLING_HEADER)
    return "\n".join(told)


def _is_billing(text: str) -> bool:
    """Returns whether a text is a billing line that a client has added. It changes with every
    request, so keeping it would prevent every cache hit.
    """
    return text.startswith(f"{BILLING_HEADER}:") and "\n" not in text.strip()


def _convert_to_template_messages(
    message: UserMessage | AssistantMessage | SystemMessage,
    where: str,
    unused: list[str],
    images: RequestImages,
) -> list[dict[str, Any]]:
    """Converts a message to the form that templates take; each tool result becomes a message of its
    own.
    """
    if isinstance(message, AssistantMessage):
        return [_build_assistant_message(message, where, unused)]
    role = "system" if isinstance(message, SystemMessage) else "user"
    if not message.content:
        raise ParameterError(where, "is empty.", hint="Give text, or leave the message out.")
    if isinstance(message.content, str):
        return [{"role": role, "content": message.content}]
    _require_nonempty_texts(message.content, where)
    shown: list[dict[str, Any]] = []
    parts: list[Part] = []
    for i, block in enumerate(message.content):
        if isinstance(block, ImageBlock):
            parts.append(_add_image_block(block, f"{where}[{i}]", images))
            continue
        if not isinstance(block, ToolResultBlock):
            parts.append(_text(block, f"{where}[{i}]"))
            continue
        if parts:
            shown.append({"role": role, "content": join_parts(parts)})
            parts = []
        shown.append(_build_tool_result(block, f"{where}[{i}]"))
    if parts or not shown:
        shown.append({"role": role, "content": join_parts(parts)})
    return shown


def _require_nonempty_texts(blocks: Sequence[msgspec.Struct], where: str) -> None:
    """Raises ParameterError if a text block is empty."""
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock) and not block.text:
            raise ParameterError(
                f"{where}[{i}].text", "is empty.", hint="Give text, or leave the block out."
            )


def _add_image_block(block: ImageBlock, where: str, images: RequestImages) -> dict[str, str]:
    source = block.source
    for name, value in source.items():
        if name not in ("type", "data", "url", "file_id", "media_type") and value is not None:
            raise ParameterError(
                f"{where}.source.{name[:60]}",
                "is not supported by this server.",
                hint="Leave it out.",
            )
    if block.transformations is not None:
        raise CapabilityError("images are shown as they are.", parameter=f"{where}.transformations")
    given = source.get("data") if source.get("type") == "base64" else source.get("url")
    return images.add_part(given, "images", f"{where}.source")


def _build_assistant_message(
    message: AssistantMessage, where: str, unused: list[str]
) -> dict[str, Any]:
    blocks = (
        [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
    )
    texts = []
    thoughts = []
    calls = []
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"type": "function", "id": block.id, "function": function})
        else:
            # only the model that wrote this thinking can decrypt it
            unused.append(f"{where}[{i}] redacted_thinking")
    shown: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thought := "\n".join(filter(None, thoughts)):
        shown["reasoning_content"] = thought
    return {**shown, "tool_calls": calls} if calls else shown


def _build_tool_result(block: ToolResultBlock, where: str) -> dict[str, Any]:
    if isinstance(block.content, str):
        text = block.content
    else:
        text = "\n".join(
            _text(each, f"{where}.content[{i}]") for i, each in enumerate(block.content or ())
        )
    if block.is_error:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _text(block: Shown, where: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, ImageBlock):
        raise CapabilityError("the result of a tool can't have images here.", parameter=where)
    if block.citations is not None and block.citations.enabled:
        raise ParameterError(
            f"{where}.citations", "is not supported by this server.", hint="Leave it out."
        )
    if isinstance(block, SearchResultBlock):
        return "\n".join((block.title, block.source, *(each.text for each in block.content)))
    source = block.source
    if isinstance(source, TextSource):
        told = source.data
    elif isinstance(source, ContentSource):
        told = (
            source.content
            if isinstance(source.content, str)
            else "\n".join(each.text for each in source.content)
        )
    else:
        kind = source.__struct_config__.tag
        raise CapabilityError(f"documents are read as text, not of type {kind}.", parameter=where)
    return "\n".join(filter(None, (block.title, block.context, told)))
