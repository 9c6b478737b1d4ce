"""Cases of what is inside the fields of responses, of Anthropic's messages, of Ollama's requests
and of sessions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_lite.server.anthropic import messages_request as messages
from sglang_lite.server.ollama import ollama_request as ollama
from sglang_lite.server.openai import responses_items as items
from sglang_lite.server.openai import responses_request as responses
from tests.effects.fields.case import Ask, at, differs, refused, reported
from tests.effects.fields.inside import Inside
from tests.effects.fields.inside_chat import ARGUMENTS, takes_what_can_not_be_enforced
from tests.effects.fields.openai import ONE, USER, json_like

# ---------------------------------------------------------------------------------------- responses

LONGER = differs("usage.input_tokens")
_in_input = partial(Inside, door="ResponsesRequest", outer="input", shows=LONGER)
_in_tools = partial(Inside, door="ResponsesRequest", outer="tools", shows=LONGER)
FORCED = {"tool_choice": "required", "max_output_tokens": 60}


def item(kind: str = "message", **own: Any) -> list[Any]:
    """Input of an item, and a message after it."""
    return [{"type": kind, **own}, {"role": "user", "content": "x"}]


def message(content: Any, role: str = "user", **own: Any) -> list[Any]:
    return item(role=role, content=content, **own)


def call(**own: Any) -> list[Any]:
    return item("function_call", **{"call_id": "c", "name": "add", "arguments": "{}", **own})


def custom_call(**own: Any) -> list[Any]:
    return item("custom_tool_call", **{"call_id": "c", "name": "add", "input": "a", **own})


def output(kind: str = "function_call_output", **own: Any) -> list[Any]:
    return item(kind, **{"call_id": "c", "output": "a", **own})


def reasoning(**own: Any) -> list[Any]:
    return item("reasoning", **{"summary": [], **own})


def function(**own: Any) -> list[Any]:
    return [{"type": "function", "name": "add", "parameters": ONE, **own}]


def custom(**own: Any) -> list[Any]:
    return [{"type": "custom", "name": "add", **own}]


def regex(text: str, syntax: str = "regex") -> dict[str, Any]:
    return {"type": "grammar", "syntax": syntax, "definition": text}


def stored(name: str, value: Any) -> Any:
    """Shows that a stored response keeps a field of its input's first item."""

    def shows(ask: Ask) -> bool:
        made = ask().get("id")
        return bool(
            ask.send(f"/v1/responses/{made}/input_items?order=asc", None, "GET").get(
                f"data.0.{name}"
            )
            == value
        )

    return shows


INPUT = [
    _in_input(items.MessageItem, "content", given=message("abc"), without=message("a"), empty="a"),
    _in_input(items.MessageItem, "role", given=message("a", "assistant"), without=message("a"), empty="user"),
    *(
        _in_input(kind, name, given=given, without=without, shows=stored(name, value))
        for kind, given, without in (
            (items.MessageItem, message("a", id="mine", status="incomplete"), message("a")),
            (items.FunctionCallItem, call(id="mine", status="incomplete"), call()),
            (items.CustomCallItem, custom_call(id="mine", status="incomplete"), custom_call()),
            (items.FunctionOutputItem, output(id="mine", status="incomplete"), output()),
            (items.CustomOutputItem, output("custom_tool_call_output", id="mine", status="incomplete"),
             output("custom_tool_call_output")),
            (items.ReasoningItem, reasoning(id="mine", status="incomplete"), reasoning()),
        )
        for name, value in {"id": "mine", "status": "incomplete"}.items()
    ),
    _in_input(items.InputText, "text", given=message([{"type": "input_text", "text": "abc"}]),
              without=message([{"type": "input_text", "text": "a"}]), empty="a"),
    _in_input(items.OutputText, "text", given=message([{"type": "output_text", "text": "abc"}], "assistant"),
              without=message([{"type": "output_text", "text": "a"}], "assistant"), empty="a"),
    _in_input(items.OutputRefusal, "refusal", given=message([{"type": "refusal", "refusal": "abc"}], "assistant"),
              without=message([{"type": "refusal", "refusal": "a"}], "assistant"), empty="a"),
    _in_input(items.FunctionCallItem, "name", given=call(name="adding"), without=call(), empty="add"),
    _in_input(items.FunctionCallItem, "arguments", given=call(arguments='{"n": 1}'), without=call(), empty="{}"),
    _in_input(items.FunctionCallItem, "call_id", given=call(call_id="calling"), without=call(), empty="c"),
    _in_input(items.CustomCallItem, "name", given=custom_call(name="adding"), without=custom_call(), empty="add"),
    _in_input(items.CustomCallItem, "input", given=custom_call(input="abc"), without=custom_call(), empty="a"),
    _in_input(items.CustomCallItem, "call_id", given=custom_call(call_id="calling"), without=custom_call(), empty="c"),
    _in_input(items.FunctionOutputItem, "output", given=output(output="abc"), without=output(), empty="a"),
    _in_input(items.FunctionOutputItem, "call_id", given=output(call_id="calling"), without=output(), empty="c"),
    _in_input(items.CustomOutputItem, "output", given=output("custom_tool_call_output", output="abc"),
              without=output("custom_tool_call_output"), empty="a"),
    _in_input(items.CustomOutputItem, "call_id", given=output("custom_tool_call_output", call_id="calling"),
              without=output("custom_tool_call_output"), empty="c"),
    _in_input(items.ReasoningItem, "summary", given=reasoning(summary=[{"type": "summary_text", "text": "abc"}]),
              without=reasoning(), empty=[]),
    _in_input(items.ReasoningItem, "content", given=reasoning(content=[{"type": "reasoning_text", "text": "abc"}]),
              without=reasoning()),
    _in_input(items.ReasoningItem, "encrypted_content", given=reasoning(encrypted_content="abc"), without=reasoning(),
              shows=reported("input[0].encrypted_content")),
    _in_input(items.SummaryText, "text", given=reasoning(summary=[{"type": "summary_text", "text": "abc"}]),
              without=reasoning(summary=[{"type": "summary_text", "text": "a"}]), empty="a"),
    _in_input(items.ReasoningText, "text", given=reasoning(content=[{"type": "reasoning_text", "text": "abc"}]),
              without=reasoning(content=[{"type": "reasoning_text", "text": "a"}]), empty="a"),
]  # fmt: skip

TOOLS = [
    _in_tools(responses.FunctionTool, "name", given=function(name="adding"), without=function(), empty="add"),
    _in_tools(responses.FunctionTool, "description", given=function(description="Adds."), without=function()),
    _in_tools(responses.FunctionTool, "parameters", given=function(), without=[{"type": "function", "name": "add"}]),
    _in_tools(responses.FunctionTool, "strict", given=function(parameters=ARGUMENTS, strict=False),
              without=function(parameters=ARGUMENTS), shows=takes_what_can_not_be_enforced),
    _in_tools(responses.FunctionTool, "allowed_callers", given=function(allowed_callers=["code"]), without=function()),
    *(
        _in_tools(kind, name, given=made(**{name: value}), without=made(), shows=reported(f"tools[0].{name}"))
        for kind, made, values in (
            (responses.FunctionTool, function, {"async": True, "defer_loading": True, "output_schema": ONE}),
            (responses.CustomTool, custom, {"async": True, "defer_loading": True}),
        )
        for name, value in values.items()
    ),
    _in_tools(responses.CustomTool, "name", given=custom(name="adding"), without=custom(), empty="add"),
    _in_tools(responses.CustomTool, "description", given=custom(description="Adds."), without=custom()),
    _in_tools(responses.CustomTool, "allowed_callers", given=custom(allowed_callers=["code"]), without=custom()),
    _in_tools(responses.CustomTool, "format", given=custom(format=regex("a{5}")), without=custom(), shows=at("output.0.input", "aaaaa"),
              beside=FORCED),
    _in_tools(responses.GrammarInput, "definition", given=custom(format=regex("a{5}")), without=custom(format=regex("b{5}")),
              shows=at("output.0.input", "aaaaa"), beside=FORCED, empty="b{5}"),
    _in_tools(responses.GrammarInput, "syntax", given=custom(format=regex('start: "aaaaa"', "lark")),
              without=custom(format=regex("b{5}")), shows=at("output.0.input", "aaaaa"),
              beside={**FORCED, "tool_choice": {"type": "custom", "name": "add"}}, empty="regex"),
]  # fmt: skip

TWO = [*function(name="sub"), *function()]
ALLOWED = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "add"}],
}
NAMED = {"type": "function", "name": "add"}
_in_choice = partial(
    Inside, door="ResponsesRequest", outer="tool_choice", without="auto", beside={"tools": TWO, "max_output_tokens": 60},
    shows=at("output.0.name", "add"),
)  # fmt: skip
_OTHER = {"type": "function", "name": "sub"}
CHOICES = [
    _in_choice(responses.Allowed, "mode", given=ALLOWED, empty="auto"),
    _in_choice(responses.Allowed, "tools", given=ALLOWED, empty=[_OTHER]),
    _in_choice(responses.NamedTool, "name", given=NAMED, empty="sub"),
    _in_choice(responses.NamedTool, "type", given=NAMED, empty="custom"),
]
TEXT_FORMAT = {"type": "json_schema", "name": "one", "schema": ONE}
OTHERS = [
    Inside(responses.Reasoning, "effort", "ResponsesRequest", "reasoning", {"effort": "low"}, {}, LONGER),
    *(
        Inside(responses.Reasoning, name, "ResponsesRequest", "reasoning", {name: "auto"}, {}, reported("reasoning.summary"))
        for name in ("summary", "generate_summary")
    ),
    Inside(responses.TextConfig, "format", "ResponsesRequest", "text", {"format": TEXT_FORMAT}, {}, json_like,
           {"max_output_tokens": 40}),
    Inside(responses.TextConfig, "verbosity", "ResponsesRequest", "text", {"verbosity": "low"}, {}, reported("text.verbosity")),
    Inside(None, "format.schema", "ResponsesRequest", "text", {"format": TEXT_FORMAT}, {"format": {"type": "text"}}, json_like,
           {"max_output_tokens": 40}),
    Inside(responses.EventOptions, "include_obfuscation", "ResponsesRequest", "stream_options", {"include_obfuscation": True}, {},
           reported("stream_options.include_obfuscation"), {"stream": True}),
    Inside(responses.ImageCompression, "context_compression", "ResponsesRequest", "image", {"context_compression": "enabled"}, {},
           refused(word="context_compression")),
]  # fmt: skip

# ---------------------------------------------------------------------------------------- Anthropic

COUNT = differs("input_tokens")  # which no cache changes
_in_messages = partial(Inside, door="CountTokensRequest", outer="messages", shows=COUNT)


def said(*blocks: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": [*blocks]}, *([] if role == "user" else USER)]


def document(**own: Any) -> list[Any]:
    return said({"type": "document", "source": {"type": "text", "data": "a"}, **own})


def found(**own: Any) -> list[Any]:
    return said(
        {
            "type": "search_result",
            "content": [{"type": "text", "text": "a"}],
            "source": "a",
            "title": "a",
            **own,
        }
    )


def used(**own: Any) -> list[Any]:
    """Conversation in which a tool was used."""
    use = {"type": "tool_use", "id": "t", "name": "add", "input": {}, **own}
    return [
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
    ]


def result(**own: Any) -> list[Any]:
    return said({"type": "tool_result", "tool_use_id": "t", **own})


def own_tool(**own: Any) -> list[Any]:
    return [{"name": "add", "input_schema": ONE, **own}]


def text(told: str) -> dict[str, str]:
    return {"type": "text", "text": told}


TEXT_SOURCE = messages.TextSource(data="a")
BLOCKS = [
    *(
        _in_messages(kind, "content", given=said(text("abc"), role=role), without=said(text("a"), role=role), empty="a")
        for role, kind in {
            "user": messages.UserMessage, "assistant": messages.AssistantMessage, "system": messages.SystemMessage,
        }.items()
    ),
    _in_messages(messages.TextBlock, "text", given=said(text("abc")), without=said(text("a")), empty="a"),
    _in_messages(messages.TextSource, "data", given=document(source={"type": "text", "data": "abc"}), without=document(), empty="a"),
    _in_messages(messages.ContentSource, "content", given=document(source={"type": "content", "content": "abc"}),
                 without=document(), empty="a"),
    _in_messages(messages.DocumentBlock, "source", given=document(source={"type": "text", "data": "abc"}), without=document(),
                 empty=TEXT_SOURCE),
    _in_messages(messages.DocumentBlock, "title", given=document(title="abc"), without=document()),
    _in_messages(messages.DocumentBlock, "context", given=document(context="abc"), without=document()),
    _in_messages(messages.DocumentBlock, "citations", given=document(citations={"enabled": True}), without=document(),
                 shows=refused(word="citations")),
    _in_messages(messages.Citations, "enabled", given=document(citations={"enabled": True}), without=document(citations={}),
                 shows=refused(word="citations")),
    _in_messages(messages.SearchResultBlock, "content", given=found(content=[text("abc")]), without=found(),
                 empty=[messages.TextBlock(text="a")]),
    _in_messages(messages.SearchResultBlock, "source", given=found(source="abc"), without=found(), empty="a"),
    _in_messages(messages.SearchResultBlock, "title", given=found(title="abc"), without=found(), empty="a"),
    _in_messages(messages.SearchResultBlock, "citations", given=found(citations={"enabled": True}), without=found(),
                 shows=refused(word="citations")),
    _in_messages(messages.ThinkingBlock, "thinking", given=said({"type": "thinking", "thinking": "abc"}, role="assistant"),
                 without=said({"type": "thinking", "thinking": "a"}, role="assistant"), empty="a"),
    _in_messages(messages.ToolUseBlock, "id", given=used(id="mine"), without=used(), empty="t"),
    _in_messages(messages.ToolUseBlock, "name", given=used(name="adding"), without=used(), empty="add"),
    _in_messages(messages.ToolUseBlock, "input", given=used(input={"n": 1}), without=used(), empty={}),
    _in_messages(messages.ToolResultBlock, "tool_use_id", given=result(tool_use_id="mine"), without=result(), empty="t"),
    _in_messages(messages.ToolResultBlock, "content", given=result(content="abc"), without=result()),
    _in_messages(messages.ToolResultBlock, "is_error", given=result(content="a", is_error=True), without=result(content="a")),
    _in_messages(messages.ImageBlock, "transformations", shows=refused(word="transformations"),
                 given=said({"type": "image", "source": {"type": "base64", "data": "aa"}, "transformations": [1]}), without=USER),
]  # fmt: skip
_in_own_tools = partial(Inside, door="CountTokensRequest", outer="tools", shows=COUNT)
OWN_TOOLS = [
    _in_own_tools(messages.OwnTool, "name", given=own_tool(name="adding"), without=own_tool(), empty="add"),
    _in_own_tools(messages.OwnTool, "input_schema", given=own_tool(), without=own_tool(input_schema={"type": "object"}),
                  empty={"type": "object"}),
    _in_own_tools(messages.OwnTool, "description", given=own_tool(description="Adds."), without=own_tool()),
    _in_own_tools(messages.OwnTool, "allowed_callers", given=own_tool(allowed_callers=["code"]), without=own_tool()),
    *(
        _in_own_tools(messages.OwnTool, name, given=own_tool(**{name: value}), without=own_tool(), shows=reported(f"tools[0].{name}"))
        for name, value in {"defer_loading": True, "input_examples": [{"n": 1}]}.items()
    ),
]  # fmt: skip
HELD = Inside(messages.OwnTool, "strict", "MessagesRequest", "tools", own_tool(input_schema=ARGUMENTS, strict=True),
              own_tool(input_schema=ARGUMENTS), refused(word="uniqueItems"))  # fmt: skip
_in_use = partial(
    Inside,
    messages.ToolChoice,
    door="MessagesRequest",
    outer="tool_choice",
    without={"type": "auto"},
)
STRICT = own_tool(strict=True)
TWO_TOOLS = {"tools": [*own_tool(name="sub", strict=True), *STRICT], "max_tokens": 80}
USES = [
    _in_use("type", given={"type": "any"}, shows=at("content.0.name", "add"), beside={"tools": STRICT, "max_tokens": 80}, empty="auto"),
    _in_use("name", given={"type": "tool", "name": "add"}, shows=at("content.0.name", "add"), beside=TWO_TOOLS, empty="sub"),
    _in_use("disable_parallel_tool_use", given={"type": "any", "disable_parallel_tool_use": True}, without={"type": "any"},
            shows=differs("usage.output_tokens"), beside={"tools": STRICT, "max_tokens": 200}, empty=None),
]  # fmt: skip
THINKING = {"type": "enabled", "budget_tokens": 15}
THINKS = [
    Inside(messages.Thinking, "budget_tokens", "MessagesRequest", "thinking", THINKING, {"type": "enabled"},
           at("content.1.text", "ABC"), {"max_tokens": 60}, server="thinker"),
    Inside(messages.Thinking, "display", "MessagesRequest", "thinking", {**THINKING, "display": "omitted"}, THINKING,
           at("content.0.thinking", ""), {"max_tokens": 60}, server="thinker"),
    Inside(messages.Thinking, "type", "CountTokensRequest", "thinking", {"type": "disabled"}, {"type": "enabled"}, COUNT,
           empty="enabled"),
    Inside(messages.OutputConfig, "effort", "CountTokensRequest", "output_config", {"effort": "low"}, {}, COUNT),
    Inside(messages.OutputConfig, "format", "MessagesRequest", "output_config",
           {"format": {"type": "json_schema", "schema": ONE}}, {}, json_like, {"max_tokens": 40}),
    Inside(messages.JsonOutputFormat, "schema", "MessagesRequest", "output_format", {"type": "json_schema", "schema": ONE},
           {"type": "json_schema", "schema": {"type": "string"}}, json_like, {"max_tokens": 40}, empty={"type": "string"}),
]  # fmt: skip

# ------------------------------------------------------------------------------------------- Ollama

COUNTED = differs("prompt_eval_count")
_in_chat = partial(Inside, door="OllamaChat", outer="messages", shows=COUNTED)
_in_chat_tools = partial(Inside, door="OllamaChat", outer="tools", shows=COUNTED)


def told(role: str = "user", content: str | None = "a", **own: Any) -> list[Any]:
    return [{"role": role, "content": content, **own}, *USER]


def calls(**own: Any) -> list[Any]:
    return told("assistant", "", tool_calls=[{"function": {"name": "add"}, **own}])


def tool(**own: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "add", "parameters": ONE, **own}}]


OLLAMA = [
    _in_chat(ollama.OllamaMessage, "role", given=told("assistant"), without=told(), empty="user"),
    _in_chat(ollama.OllamaMessage, "content", given=told(content="abc"), without=told(content=None)),
    _in_chat(ollama.OllamaMessage, "thinking", given=told("assistant", thinking="abc"), without=told("assistant")),
    _in_chat(ollama.OllamaMessage, "tool_calls", given=calls(), without=told("assistant", "")),
    _in_chat(ollama.OllamaMessage, "tool_name", given=told("tool", tool_name="add"), without=told("tool")),
    _in_chat(ollama.OllamaMessage, "tool_call_id", given=told("tool", tool_call_id="mine"), without=told("tool")),
    _in_chat(ollama.OllamaMessage, "images", given=told(images=["aa"]), without=told(), shows=refused(word="images")),
    _in_chat(ollama.OllamaCall, "function", given=calls(function={"name": "adding"}), without=calls(),
             empty=ollama.CalledTool(name="add")),
    _in_chat(ollama.OllamaCall, "id", given=calls(id="mine"), without=calls()),
    _in_chat(ollama.CalledTool, "name", given=calls(function={"name": "adding"}), without=calls(), empty="add"),
    _in_chat(ollama.CalledTool, "arguments", given=calls(function={"name": "add", "arguments": {"n": 1}}), without=calls(), empty={}),
    _in_chat_tools(ollama.OllamaTool, "function", given=tool(name="adding"), without=tool(),
                   empty=ollama.ToolFunction(name="add", parameters=ONE)),
    _in_chat_tools(ollama.ToolFunction, "name", given=tool(name="adding"), without=tool(), empty="add"),
    _in_chat_tools(ollama.ToolFunction, "description", given=tool(description="Adds."), without=tool()),
    _in_chat_tools(ollama.ToolFunction, "strict", given=tool(parameters=ARGUMENTS, strict=True),
                   without=tool(parameters=ARGUMENTS), shows=refused(word="uniqueItems")),
    _in_chat_tools(ollama.ToolFunction, "parameters", given=tool(), without=tool(parameters=None)),
]  # fmt: skip

CASES = [*INPUT, *TOOLS, *CHOICES, *OTHERS, *BLOCKS, *OWN_TOOLS, HELD, *USES, *THINKS, *OLLAMA]

_EARLIER = "it is of an earlier answer, which a client returns as it came"
_CACHE = "every prefix is cached as long as memory allows"
_ONE_VALUE = "it has one value, and any other is refused"
# Inner fields without an effect of their own, with the reason.
NEUTRAL = {
    (items.InputText, "prompt_cache_breakpoint"): _CACHE,
    **{(items.OutputText, name): _EARLIER for name in ("annotations", "logprobs", "parsed")},
    (items.MessageItem, "phase"): _EARLIER,
    **{(kind, "caller"): _EARLIER for kind in (
        items.FunctionCallItem, items.CustomCallItem, items.FunctionOutputItem, items.CustomOutputItem,
    )},
    **{(kind, "async"): _EARLIER for kind in (items.FunctionCallItem, items.CustomCallItem)},
    **{(kind, "namespace"): _ONE_VALUE for kind in (
        items.FunctionCallItem, items.CustomCallItem, items.FunctionOutputItem,
    )},
    (items.FunctionCallItem, "parsed_arguments"): _EARLIER,
    (items.FunctionOutputItem, "name"): _EARLIER,
    (items.ItemReference, "id"): "it is that of an earlier response's item: tests/server/openai/test_responses.py",
    (items.InputImage, "file_id"): "no files are stored: an image without image_url is refused by name",
    (items.InputImage, "detail"): "the model's processor scales images",
    (responses.Allowed, "type"): _ONE_VALUE,
    **{(responses.Reasoning, name): _ONE_VALUE for name in ("context", "mode")},
    **{(kind, "cache_control"): _CACHE for kind in (
        messages.TextBlock, messages.ImageBlock, messages.DocumentBlock, messages.SearchResultBlock, messages.ToolUseBlock,
        messages.ToolResultBlock, messages.OwnTool,
    )},
    (messages.TextBlock, "citations"): _EARLIER,
    (messages.TextSource, "media_type"): _ONE_VALUE,
    (messages.ThinkingBlock, "signature"): _EARLIER,
    (messages.RedactedBlock, "data"): "the block is reported: only the model that wrote it can decrypt it",
    (messages.ToolUseBlock, "caller"): _EARLIER,
    **{(kind, "toolset_name"): _ONE_VALUE for kind in (messages.ToolUseBlock, messages.ToolResultBlock)},
    (messages.OwnTool, "type"): _ONE_VALUE,
    (messages.OwnTool, "eager_input_streaming"): "arguments are always streamed as they come",
    (messages.OutputConfig, "task_budget"): _ONE_VALUE,
    (ollama.OllamaCall, "type"): _EARLIER,
    (ollama.CalledTool, "index"): _EARLIER,
    (ollama.OllamaTool, "type"): _ONE_VALUE,
}  # fmt: skip
