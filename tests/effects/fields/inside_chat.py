"""Cases of what is inside the fields of chats and completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_lite.server.conversation import tools
from sglang_lite.server.openai import chat_request as chat
from sglang_lite.server.parameters import completion_fields
from tests.effects.fields.case import Ask, at, differs, reported
from tests.effects.fields.inside import Inside
from tests.effects.fields.openai import (
    FORMAT,
    ONE,
    TOOL,
    USER,
    ends_with_usage,
    every_chunk_counts,
    json_like,
)

LONGER = differs("usage.prompt_tokens")
_in_messages = partial(Inside, door="ChatRequest", outer="messages", shows=LONGER)
_in_tools = partial(Inside, door="ChatRequest", outer="tools", shows=LONGER)


def said(role: str, content: Any, **more: Any) -> list[Any]:
    """Conversation whose first message is the given one."""
    return [{"role": role, "content": content, **more}, *USER]


def parts(role: str, *given: Any) -> list[Any]:
    return said(role, list(given))


def called(**call: Any) -> list[Any]:
    """Conversation in which a tool was called."""
    return [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "so"}]


def function(**own: Any) -> dict[str, Any]:
    """Tool that is a function."""
    return {"type": "function", "function": {"name": "add", "parameters": ONE, **own}}


def custom(**own: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "add", **own}}


def grammar(definition: str, syntax: str = "regex") -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


def input_is(text: str) -> Any:
    """Shows that a custom tool is called with a text."""
    return at("choices.0.message.tool_calls.0.custom.input", text)


def takes_what_can_not_be_enforced(ask: Ask) -> bool:
    return ask().status == 200


UNENFORCED = {"not": {"type": "array", "uniqueItems": True}, "type": "array"}
# that calls can't be held to
ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {"n": UNENFORCED}}

FORCED = {"tool_choice": "required", "max_tokens": 60}
ADD = {"type": "function", "function": {"name": "add"}}
ALLOWED: dict[str, Any] = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [ADD]},
}


def calls_only_what_is_allowed(ask: Ask) -> bool:
    """Whether the call is that of the tool that is allowed, though another one comes first."""
    return ask().get("choices.0.message.tool_calls.0.function.name") == "add"


MESSAGES = [
    _in_messages(chat.TextPart, "text", given=parts("user", {"type": "text", "text": "abc"}),
                 without=parts("user", {"type": "text", "text": "a"}), empty="a"),
    _in_messages(chat.RefusalPart, "refusal", given=parts("assistant", {"type": "refusal", "refusal": "abc"}),
                 without=parts("assistant", {"type": "refusal", "refusal": "a"}), empty="a"),
    *(
        _in_messages(kind, "name", given=said(role, "ab", name="Ann"), without=said(role, "ab"))
        for role, kind in {
            "system": chat.SystemMessage, "developer": chat.DeveloperMessage, "user": chat.UserMessage,
            "assistant": chat.AssistantMessage, "tool": chat.ToolMessage,
        }.items()
    ),
    *(
        _in_messages(kind, "content", given=said(role, "abc"), without=said(role, "a"), empty="a")
        for role, kind in {
            "system": chat.SystemMessage, "developer": chat.DeveloperMessage, "user": chat.UserMessage,
            "assistant": chat.AssistantMessage, "tool": chat.ToolMessage,
        }.items()
    ),
    _in_messages(chat.ToolMessage, "tool_call_id", given=said("tool", "ab", tool_call_id="mine"), without=said("tool", "ab")),
    _in_messages(chat.AssistantMessage, "tool_calls", given=called(type="function", function={"name": "add"}),
                 without=[*USER, {"role": "assistant", "tool_calls": None}, {"role": "tool", "content": "so"}]),
    _in_messages(chat.AssistantMessage, "reasoning_content", given=said("assistant", "a", reasoning_content="abc"),
                 without=said("assistant", "a")),
    _in_messages(chat.AssistantMessage, "reasoning", given=said("assistant", "a", reasoning="abc"), without=said("assistant", "a")),
    _in_messages(chat.AssistantMessage, "refusal", given=said("assistant", None, refusal="abc"), without=said("assistant", None)),
    _in_messages(chat.FunctionCall, "id", given=called(type="function", function={"name": "add"}, id="mine"),
                 without=called(type="function", function={"name": "add"})),
    _in_messages(chat.FunctionCall, "function", given=called(type="function", function={"name": "adding"}),
                 without=called(type="function", function={"name": "add"}), empty=chat.CalledFunction(name="add")),
    _in_messages(chat.CalledFunction, "name", given=called(type="function", function={"name": "adding"}),
                 without=called(type="function", function={"name": "add"}), empty="add"),
    _in_messages(chat.CalledFunction, "arguments", given=called(type="function", function={"name": "add", "arguments": '{"n": 1}'}),
                 without=called(type="function", function={"name": "add"})),
    _in_messages(chat.CustomCall, "id", given=called(type="custom", custom={"name": "add", "input": "a"}, id="mine"),
                 without=called(type="custom", custom={"name": "add", "input": "a"})),
    _in_messages(chat.CustomCall, "custom", given=called(type="custom", custom={"name": "add", "input": "abc"}),
                 without=called(type="custom", custom={"name": "add", "input": "a"}), empty=chat.CalledCustom(name="add", input="a")),
    _in_messages(chat.CalledCustom, "name", given=called(type="custom", custom={"name": "adding", "input": "a"}),
                 without=called(type="custom", custom={"name": "add", "input": "a"}), empty="add"),
    _in_messages(chat.CalledCustom, "input", given=called(type="custom", custom={"name": "add", "input": "abc"}),
                 without=called(type="custom", custom={"name": "add", "input": "a"}), empty="a"),
]  # fmt: skip

TOOLS = [
    _in_tools(tools.FunctionDefinition, "name", given=[function(name="adding")], without=[function()], empty="add"),
    _in_tools(tools.FunctionDefinition, "description", given=[function(description="Adds.")], without=[function()]),
    _in_tools(tools.FunctionDefinition, "parameters", given=[TOOL], without=[ADD]),
    _in_tools(tools.FunctionDefinition, "strict", given=[function(parameters=ARGUMENTS, strict=False)],
              without=[function(parameters=ARGUMENTS)], shows=takes_what_can_not_be_enforced),
    _in_tools(chat.FunctionTool, "function", given=[function(name="adding")], without=[function()],
              empty=tools.FunctionDefinition(name="add", parameters=ONE)),
    _in_tools(chat.CustomTool, "custom", given=[custom(name="adding")], without=[custom()], empty=chat.Custom(name="add")),
    _in_tools(chat.Custom, "name", given=[custom(name="adding")], without=[custom()], empty="add"),
    _in_tools(chat.Custom, "description", given=[custom(description="Adds.")], without=[custom()]),
    _in_tools(chat.Custom, "format", given=[custom(format=grammar("a{5}"))], without=[custom()],
              shows=input_is("aaaaa"), beside=FORCED),
    _in_tools(chat.GrammarFormat, "grammar", given=[custom(format=grammar("a{5}"))], without=[custom(format=grammar("b{5}"))],
              shows=input_is("aaaaa"), beside=FORCED, empty=tools.GrammarText(syntax="regex", definition="b{5}")),
    _in_tools(tools.GrammarText, "definition", given=[custom(format=grammar("a{5}"))], without=[custom(format=grammar("b{5}"))],
              shows=input_is("aaaaa"), beside=FORCED, empty="b{5}"),
    _in_tools(tools.GrammarText, "syntax", given=[custom(format=grammar('start: "aaaaa"', "lark"))],
              without=[custom(format=grammar("b{5}"))], shows=input_is("aaaaa"),
              beside={**FORCED, "tool_choice": {"type": "custom", "custom": {"name": "add"}}}, empty="regex"),
]  # fmt: skip

_in_choice = partial(
    Inside,
    door="ChatRequest",
    outer="tool_choice",
    beside={"tools": [function(name="sub"), TOOL], "max_tokens": 60},
)
CHOICES = [
    _in_choice(chat.AllowedTools, "allowed_tools", given=ALLOWED, without="auto", shows=calls_only_what_is_allowed,
               empty=chat.Allowed(mode="auto", tools=[ADD])),
    _in_choice(chat.Allowed, "mode", given=ALLOWED, without="auto", shows=calls_only_what_is_allowed, empty="auto"),
    _in_choice(chat.Allowed, "tools", given=ALLOWED, without="auto", shows=calls_only_what_is_allowed,
               empty=[{"type": "function", "function": {"name": "sub"}}]),
]  # fmt: skip

_in_stream = partial(Inside, outer="stream_options", beside={"stream": True})
OPTIONS = [
    *(
        _in_stream(completion_fields.StreamOptions, "include_usage", door, given={"include_usage": True}, without={},
                   shows=ends_with_usage)
        for door in ("ChatRequest", "CompletionRequest")
    ),
    *(
        _in_stream(completion_fields.StreamOptions, "continuous_usage_stats", door, given={"continuous_usage_stats": True},
                   without={}, shows=every_chunk_counts)
        for door in ("ChatRequest", "CompletionRequest")
    ),
    *(
        _in_stream(completion_fields.StreamOptions, "include_obfuscation", door, given={"include_obfuscation": True},
                   without={}, shows=reported("stream_options.include_obfuscation"))
        for door in ("ChatRequest", "CompletionRequest")
    ),
]  # fmt: skip


def form(**inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": ONE, **inner}}


_in_format = partial(Inside, None, outer="response_format", beside={"max_tokens": 40})
FORMATS = [
    case
    for door in ("ChatRequest", "CompletionRequest")
    for case in (
        _in_format(name="json_schema.schema", door=door, given=FORMAT, without={"type": "text"}, shows=json_like),
        _in_format(name="type", door=door, given={"type": "json_object"}, without={"type": "text"},
                   shows=lambda ask: ask.text().startswith("{")),
        _in_format(name="schema", door=door, given={"type": "json_object", "schema": ONE}, without={"type": "json_object"},
                   shows=json_like),
        _in_format(name="json_schema.strict", door=door, given=form(schema=UNENFORCED, strict=False),
                   without=form(schema=UNENFORCED), shows=takes_what_can_not_be_enforced),
    )
]  # fmt: skip

CASES = [*MESSAGES, *TOOLS, *CHOICES, *OPTIONS, *FORMATS]

_EARLIER = "it is of an earlier answer, which a client returns as it came"
_CACHE = "every prefix is cached as long as memory allows"
_ONE_VALUE = "it has one value, and any other is refused"
_REFUSED = "the part is refused unless the model reads its kind: tests/server/test_images.py, tests/runtime/media"
# Inner fields without an effect of their own, with the reason.
NEUTRAL = {
    (chat.TextPart, "cache_control"): _CACHE,
    (chat.TextPart, "prompt_cache_breakpoint"): _CACHE,
    (chat.FunctionTool, "cache_control"): _CACHE,
    (chat.FunctionCall, "index"): _EARLIER,
    (chat.CustomCall, "index"): _EARLIER,
    (chat.AssistantMessage, "annotations"): _EARLIER,
    (chat.AssistantMessage, "audio"): _ONE_VALUE,
    (chat.AssistantMessage, "function_call"): _ONE_VALUE,
    (chat.ImageUrlPart, "modalities"): _ONE_VALUE,
    (chat.AudioPart, "input_audio"): _REFUSED,
    (chat.VideoUrlPart, "video_url"): _REFUSED,
    (chat.FilePart, "file"): "no file is read: the part is refused by name",
}
