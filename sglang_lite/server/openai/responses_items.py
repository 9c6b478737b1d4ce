"""Items of OpenAI's Responses API: checked, completed with ids, and converted to messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.media.data_url import parse_medium
from sglang_lite.server.conversation.images import RequestImages, join_parts, unreadable_part_error
from sglang_lite.server.conversation.tools import INPUT, parse_earlier_arguments
from sglang_lite.server.http.body import convert

Item: TypeAlias = dict[str, Any]


class ContentPart(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Part of a message's content."""


class InputText(ContentPart, tag="input_text"):
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None  # ignored: every prefix is cached


class OutputText(ContentPart, tag="output_text"):
    text: str
    annotations: list[Any] | None = None  # of an earlier answer, returned by the client unchanged
    logprobs: list[Any] | None = None
    parsed: Any = None


class OutputRefusal(ContentPart, tag="refusal"):
    refusal: str


class SummaryText(ContentPart, tag="summary_text"):
    text: str


class ReasoningText(ContentPart, tag="reasoning_text"):
    text: str


class _Unseen(msgspec.Struct, kw_only=True, tag_field="type"):
    pass


class InputImage(_Unseen, tag="input_image", forbid_unknown_fields=True):
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None  # neutral, as in chats


class InputFile(_Unseen, tag="input_file"):
    pass


class InputAudio(_Unseen, tag="input_audio"):
    pass


Content: TypeAlias = (
    str | list[InputText | OutputText | OutputRefusal | InputImage | InputFile | InputAudio]
)


class _Item(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None


class _CallItem(_Item, kw_only=True):
    call_id: str
    caller: dict[str, Any] | None = None
    is_async: bool | None = msgspec.field(name="async", default=None)
    namespace: None = None


class FunctionCallItem(_CallItem, kw_only=True, tag="function_call"):
    name: str
    arguments: str
    parsed_arguments: Any = None


class CustomCallItem(_CallItem, kw_only=True, tag="custom_tool_call"):
    name: str
    input: str


class FunctionOutputItem(_Item, tag="function_call_output"):
    output: Content
    call_id: str | None = None
    name: str | None = None
    caller: dict[str, Any] | None = None
    namespace: None = None


class CustomOutputItem(_Item, tag="custom_tool_call_output"):
    output: Content
    call_id: str
    caller: dict[str, Any] | None = None


class ReasoningItem(_Item, tag="reasoning"):
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class ItemReference(
    msgspec.Struct, kw_only=True, tag_field="type", tag="item_reference", forbid_unknown_fields=True
):
    id: str


_ITEMS: Mapping[str, Any] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "custom_tool_call": CustomCallItem,
    "function_call_output": FunctionOutputItem,
    "custom_tool_call_output": CustomOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def new_id(kind: str) -> str:
    """Creates a random id for a new item, with the prefix of the item's type."""
    return f"{_PREFIXES[kind]}_{random_id()}"


def complete_input_items(
    given: str | Sequence[Item] | None,
    known: Callable[[str], Item],
    unused: list[str],
    *,
    reads_images: bool,
) -> list[Item]:
    """Returns the items of an input, each complete and with an id.

    Args:
        known: function that takes an id and returns the item of an earlier response with this id.
        unused: list to which the names of fields without effect are appended.
        reads_images: whether the model reads images.

    Raises:
        ParameterError: an item is invalid.
        CapabilityError: the model can't read an item, or an item belongs to a hosted tool.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [
        _complete_input_item(each, f"input[{i}]", known, unused, reads_images)
        for i, each in enumerate(given or ())
    ]


def _complete_input_item(
    given: Item, where: str, known: Callable[[str], Item], unused: list[str], reads_images: bool
) -> Item:
    kind = given.get("type")
    if kind is None:
        kind = "message" if "role" in given else "item_reference"
    if not isinstance(kind, str):
        raise ParameterError(f"{where}.type", "is not a string.")
    if kind not in _ITEMS:
        raise CapabilityError(
            f"{kind!r:.60} is an item of a tool that this server does not have.", parameter=where
        )
    named = {**{name: value for name, value in given.items() if value is not None}, "type": kind}
    item = convert(named, _ITEMS[kind], where)
    if isinstance(item, ItemReference):
        return known(item.id)
    whole: Item = {
        "type": kind,
        "id": item.id or new_id(kind),
        "status": item.status or "completed",
    }
    match item:
        case MessageItem():
            shows = reads_images and item.role == "user"
            content = _convert_content_parts(
                item.content, item.role, f"{where}.content", images=shows
            )
            return {**whole, "role": item.role, "content": content}
        case FunctionCallItem():
            parse_earlier_arguments(item.arguments, f"{where}.arguments")
            return {
                **whole,
                "call_id": item.call_id,
                "name": item.name,
                "arguments": item.arguments,
            }
        case CustomCallItem():
            return {**whole, "call_id": item.call_id, "name": item.name, "input": item.input}
        case ReasoningItem():
            if item.encrypted_content is not None and not item.content and not item.summary:
                # only the model that wrote this reasoning can decrypt it
                unused.append(f"{where}.encrypted_content")
            return {
                **whole,
                "summary": [{"type": "summary_text", "text": part.text} for part in item.summary],
                "content": [
                    {"type": "reasoning_text", "text": part.text} for part in item.content or ()
                ],
            }
        case _:
            output = item.output
            told = (
                output
                if isinstance(output, str)
                else _convert_content_parts(output, "user", f"{where}.output")
            )
            return {**whole, "call_id": item.call_id or "", "output": told}


def _convert_content_parts(
    content: Content, role: str, where: str, *, images: bool = False
) -> list[Item]:
    parts: list[Item] = []
    for i, part in enumerate([InputText(text=content)] if isinstance(content, str) else content):
        if isinstance(part, OutputRefusal):
            parts.append({"type": "refusal", "refusal": part.refusal})
        elif isinstance(part, InputText | OutputText):
            told = {"type": "input_text", "text": part.text}
            parts.append(
                {**told, "type": "output_text", "annotations": []} if role == "assistant" else told
            )
        elif images and isinstance(part, InputImage):
            if part.image_url is None:
                raise CapabilityError(
                    "no files are stored here, so an image has no file_id.",
                    parameter=f"{where}[{i}]",
                    hint="Send the image as image_url: data:image/png;base64,…",
                )
            parse_medium(part.image_url, f"{where}[{i}].image_url")
            parts.append({"type": "input_image", "image_url": part.image_url, "detail": "auto"})
        else:
            raise unreadable_part_error(str(part.__struct_config__.tag), f"{where}[{i}]")
    return parts


def build_template_messages(items: Sequence[Item], images: RequestImages) -> list[dict[str, Json]]:
    """Converts items to messages in the form that templates take; calls and reasoning become parts
    of the assistant's messages. Adds the images to `images`.
    """
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []

    def assistant() -> dict[str, Any]:
        """Returns the assistant's message to extend: the last message, or a new one if the last one
        is not the assistant's. Pending reasoning always begins a new message.
        """
        if thoughts or not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        if thoughts:
            messages[-1]["reasoning_content"] = "\n".join(thoughts)
            thoughts.clear()
        return messages[-1]

    for item in items:
        match item["type"]:
            case "reasoning":
                thoughts += [part["text"] for part in item["content"] or item["summary"]]
            case "message" if item["role"] == "assistant":
                message = assistant()
                message["content"] = "\n".join(
                    filter(None, (message["content"], _text(item["content"])))
                )
            case "message":
                messages.append(
                    {
                        "role": item["role"],
                        "content": _join_message_content(item["content"], images),
                    }
                )
            case "function_call" | "custom_tool_call":
                custom = item["type"] == "custom_tool_call"
                arguments = (
                    {INPUT: item["input"]} if custom else _arguments_or_empty(item["arguments"])
                )
                function = {"name": item["name"], "arguments": arguments}
                call = {"type": "function", "id": item["call_id"], "function": function}
                assistant().setdefault("tool_calls", []).append(call)
            case _:
                output = item["output"]
                text = output if isinstance(output, str) else _text(output)
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    if thoughts:
        assistant()
    return messages


def _arguments_or_empty(arguments: str) -> dict[str, Any]:
    """Parses the arguments of a call. Returns {} if they aren't a JSON object, as in an earlier
    answer that was cut.
    """
    try:
        return parse_earlier_arguments(arguments, "arguments")
    except ParameterError:
        return {}


def _join_message_content(
    parts: Sequence[Item], images: RequestImages
) -> str | list[dict[str, Any]]:
    """Returns the content of a message that is not the assistant's."""
    return join_parts(
        [
            images.add_part(part["image_url"], "input_image", "input")
            if part["type"] == "input_image"
            else _text([part])
            for part in parts
        ]
    )


def _text(parts: Sequence[Item]) -> str:
    return "\n".join(
        part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts
    )
