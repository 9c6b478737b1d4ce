"""Requests of OpenAI's chat completions: converts messages, tools and formats to a conversation,
and that to a request of the engine. A server reads them from bodies; `sglang_lite.integrations`
makes them from other libraries' calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec

from sglang_lite.protocol import ParameterError, Prompt, Span
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.conversation.images import (
    Part,
    RequestImages,
    join_parts,
    unreadable_part_error,
)
from sglang_lite.server.conversation.sample_reader import SampleReader
from sglang_lite.server.conversation.tools import (
    INPUT,
    CustomDefinition,
    FunctionDefinition,
    GrammarText,
    effort_variables,
    parse_earlier_arguments,
    split_template_kwargs,
    with_tools,
)
from sglang_lite.server.fields import CHAT_NEUTRAL, CHAT_REFUSED, Fields
from sglang_lite.server.http.body import convert
from sglang_lite.server.parameters import sampling
from sglang_lite.server.parameters.completion_fields import CompletionFields, StreamOptions
from sglang_lite.server.parameters.prompt_logprobs import RequestedLogprobs
from sglang_lite.server.parameters.running_usage import count_prompt_tokens
from sglang_lite.server.parameters.thinking import report_ignored_thinking, set_thinking_limit
from sglang_lite.server.parameters.truncation import truncated_ids
from sglang_lite.server.reader import RequestReader
from sglang_lite.text.chat_format import Conversation, RenderedConversation


class _Part(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    pass


class TextPart(_Part, tag="text"):
    text: str
    cache_control: dict[str, Any] | None = None  # ignored: every prefix is cached
    prompt_cache_breakpoint: dict[str, Any] | None = None


class RefusalPart(_Part, tag="refusal"):
    refusal: str


class ImageUrlPart(_Part, tag="image_url"):
    image_url: Any
    # SGLang's field, whose other values change how some models see images
    modalities: Literal["image"] = "image"


class AudioPart(_Part, tag="input_audio"):
    input_audio: Any


class VideoUrlPart(_Part, tag="video_url"):
    video_url: Any


class FilePart(_Part, tag="file"):
    file: Any


Content: TypeAlias = (
    str | list[TextPart | RefusalPart | ImageUrlPart | AudioPart | VideoUrlPart | FilePart]
)


class _Message(msgspec.Struct, kw_only=True, tag_field="role", forbid_unknown_fields=True):
    name: str | None = None


class SystemMessage(_Message, tag="system"):
    content: Content


class DeveloperMessage(_Message, tag="developer"):
    content: Content


class UserMessage(_Message, tag="user"):
    content: Content


class ToolMessage(_Message, tag="tool"):
    content: Content
    tool_call_id: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] = "{}"


class CalledCustom(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    input: str


class FunctionCall(
    msgspec.Struct, kw_only=True, tag_field="type", tag="function", forbid_unknown_fields=True
):
    function: CalledFunction
    id: str | None = None
    index: int | None = None


class CustomCall(
    msgspec.Struct, kw_only=True, tag_field="type", tag="custom", forbid_unknown_fields=True
):
    custom: CalledCustom
    id: str | None = None
    index: int | None = None


class AssistantMessage(_Message, tag="assistant"):
    content: Content | None = None
    tool_calls: list[FunctionCall | CustomCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # of an earlier answer, returned by the client unchanged
    audio: None = None
    function_call: None = None


Message: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class TextFormat(
    msgspec.Struct, kw_only=True, tag_field="type", tag="text", forbid_unknown_fields=True
):
    pass


class GrammarFormat(
    msgspec.Struct, kw_only=True, tag_field="type", tag="grammar", forbid_unknown_fields=True
):
    grammar: GrammarText


class Custom(CustomDefinition, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | GrammarFormat | None = None

    @property
    def grammar(self) -> GrammarText | None:
        return self.format.grammar if isinstance(self.format, GrammarFormat) else None


class FunctionTool(
    msgspec.Struct, kw_only=True, tag_field="type", tag="function", forbid_unknown_fields=True
):
    function: FunctionDefinition
    cache_control: dict[str, Any] | None = None


class CustomTool(
    msgspec.Struct, kw_only=True, tag_field="type", tag="custom", forbid_unknown_fields=True
):
    custom: Custom


class Allowed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class AllowedTools(
    msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True
):
    """Choice that limits which tools may be called. With the mode "required", one of them must be
    called.
    """

    allowed_tools: Allowed


class ChatRequest(CompletionFields, kw_only=True):
    """Request for a chat completion."""

    messages: list[Message]
    tools: list[FunctionTool | CustomTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    max_think_tokens: int | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    echo: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None

    @property
    def scores(self) -> RequestedLogprobs:
        """The log-probabilities that the request asks for. Raises ParameterError if a field about
        log-probabilities needs another field that is missing.
        """
        if not self.logprobs and self.top_logprobs:
            raise ParameterError("top_logprobs", "needs logprobs: true.")
        return RequestedLogprobs.of_body(self, (self.top_logprobs or 0) if self.logprobs else None)


CHAT = Fields(ChatRequest, CHAT_NEUTRAL, CHAT_REFUSED)
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "thinking_token_budget": "thinking",
    "max_think_tokens": "thinking",
}


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Chat request whose messages and tools are rendered as a prompt.

    Attributes:
        body: the request without its messages and tools.
        rendered: its conversation.
        echoed: text that comes before the answer: the message that the model continues, if the
            request has `echo`.
        prompt_tokens: number of the prompt's tokens, if each chunk of the answer has it.
    """

    body: ChatRequest
    rendered: RenderedConversation
    echoed: str = ""
    prompt_tokens: int | None = None

    def engine_request(self, context_length: int) -> GenerateRequest:
        """Converts the chat to a request of the engine. `context_length` limits the answer's tokens
        if the chat sets no limit.

        Raises:
            ParameterError: a parameter isn't supported, or needs another parameter that is missing.
        """
        body = self.body
        params = sampling.read_sampling_params(
            body,
            _NAMES,
            max_tokens=context_length,
            **body.scores.sampling_values(),
            return_prompt_token_ids=body.asks_for_ids,
        )
        params = set_thinking_limit(params, self.rendered, body.reasoning_effort)
        return GenerateRequest(
            self.rendered.prompt,
            params,
            self.rendered.constraint,
            stream=bool(body.stream),
            namespace=body.cache_salt or "",
            priority=body.priority or 0,
            rid=body.name,
            routed_dp_rank=body.replica,
        )

    def new_sample_reader(self) -> SampleReader:
        """Creates a reader for a new sample."""
        separate = self.body.separate_reasoning is not False
        stream_reasoning = self.body.stream_reasoning is not False
        return SampleReader(self.rendered, separate, stream_reasoning)


def render_chat(reader: RequestReader, body: ChatRequest, unused: list[str]) -> RenderedChat:
    """Renders the conversation of a request. Appends the names of fields without effect to
    `unused`.

    Raises:
        SglError: see `conversation_from_chat` and `ChatFormat.render`.
    """
    images = RequestImages(reader.media_kinds)
    conversation = conversation_from_chat(body, unused, images)
    echoed = _text_to_echo(body, conversation)
    body.messages = []
    body.tools = None
    rendered = reader.render(conversation, unused)
    budgets = {name: getattr(body, name) for name in ("thinking_token_budget", "max_think_tokens")}
    report_ignored_thinking(rendered, budgets, ("reasoning_effort", body.reasoning_effort), unused)
    limit = body.max_tokens or body.max_completion_tokens or body.n_predict or 1
    cut = truncated_ids(reader, body, rendered.prompt, limit)
    if cut is not None:
        rendered = replace(rendered, prompt=Prompt((Span("", tuple(cut)),)))
    prompt_tokens = None
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        prompt_tokens = count_prompt_tokens(reader, rendered.prompt)
    return RenderedChat(body, rendered, echoed, prompt_tokens)


def _text_to_echo(body: ChatRequest, conversation: Conversation) -> str:
    """Returns the text before the answer: with `echo`, that of the message that the model
    continues. Raises ParameterError if the model continues none.
    """
    if not body.echo:
        return ""
    if not conversation.continue_final:
        raise ParameterError(
            "echo",
            "repeats the message that the answer continues, and it continues none.",
            hint="Set continue_final_message: true, or leave echo out.",
        )
    content = conversation.messages[-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


# --------------------------------------------------------------------------------------- conversion


def conversation_from_chat(
    body: ChatRequest, unused: list[str], images: RequestImages
) -> Conversation:
    """Converts a request to the conversation that it continues.

    Args:
        unused: list to which the names of fields without effect are appended.
        images: collects the messages' images.

    Raises:
        ParameterError: a message, tool or choice is invalid.
        CapabilityError: a message has an image or another part that the model can't read.
        ConstraintError: a constraint of the answer can't be enforced.
    """
    messages = to_template_messages(body.messages, images)
    constraint = body.constraint()
    choice, allowed = _parse_chat_tool_choice(body.tool_choice, has_tools=bool(body.tools))
    continues = bool(body.continue_final_message)
    if continues and not isinstance(body.messages[-1], AssistantMessage):
        raise ParameterError(
            "continue_final_message",
            "the last message is not an assistant message, so it can't be continued.",
        )
    if body.add_generation_prompt is not None and body.add_generation_prompt == continues:
        raise ParameterError(
            "add_generation_prompt",
            "and continue_final_message must differ. Leave add_generation_prompt out.",
        )
    if body.verbosity not in (None, "medium"):
        unused.append("verbosity")  # the model has no such setting
    effort = (
        {}
        if body.reasoning_effort is None
        else {"reasoning_effort": effort_variables(body.reasoning_effort)}
    )
    shown = {} if body.documents is None else {"documents": {"documents": body.documents}}
    variables = {**effort, **shown, **split_template_kwargs(body.chat_template_kwargs)}
    conversation = Conversation(
        messages=messages,
        parallel=body.parallel_tool_calls is not False,
        answer=constraint,
        continue_final=continues,
        variables=variables,
        images=images.found,
    )
    tools = [
        tool.function if isinstance(tool, FunctionTool) else tool.custom
        for tool in body.tools or ()
    ]
    return with_tools(conversation, tools, choice, allowed)


def to_template_messages(
    messages: Sequence[Message], images: RequestImages
) -> list[dict[str, Json]]:
    """Converts messages to the form that templates take, and adds their images to `images`.

    Raises:
        ParameterError: the list is empty, or a message is invalid.
        CapabilityError: a message has an image or another part that the model can't read.
    """
    if not messages:
        raise ParameterError("messages", "is empty.")
    return [
        _convert_chat_message(message, f"messages[{i}]", images)
        for i, message in enumerate(messages)
    ]


def _parse_chat_tool_choice(
    given: str | dict[str, Any] | None, *, has_tools: bool
) -> tuple[Literal["auto", "required", "named", "none"], list[str] | None]:
    """Returns the mode of tool calling, and the names of the tools that may be called, or None for
    all.
    """
    if given is None or given == "auto":
        return "auto", None
    if given == "none":
        return "none", None
    if not has_tools:
        raise ParameterError("tool_choice", "the request has no tools. Give some in tools.")
    if given == "required":
        return "required", None
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        allowed = convert(given, AllowedTools, "tool_choice").allowed_tools
        if not allowed.tools and allowed.mode == "required":
            raise ParameterError("tool_choice.allowed_tools.tools", "is empty.")
        return allowed.mode, [
            _read_chosen_tool_name(each, f"tool_choice.allowed_tools.tools[{i}]")
            for i, each in enumerate(allowed.tools)
        ]
    if isinstance(given, dict):
        return "named", [_read_chosen_tool_name(given, "tool_choice")]
    raise ParameterError("tool_choice", f"{given!r:.80} is not auto, none, required or a tool.")


def _read_chosen_tool_name(given: dict[str, Any], where: str) -> str:
    named = given.get(given["type"]) if given.get("type") in ("function", "custom") else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str):
        raise ParameterError(where, f"{given!r:.80} does not name a tool.")
    return name


def _convert_chat_message(message: Message, where: str, images: RequestImages) -> dict[str, Any]:
    """Converts a message to the form that templates take."""
    role = str(message.__struct_config__.tag)
    shown: dict[str, Any] = {
        "role": role,
        "content": _convert_message_content(message.content, where, role, images),
    }
    if message.name is not None:
        shown["name"] = message.name
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        thought = (
            message.reasoning_content
            if message.reasoning_content is not None
            else message.reasoning
        )
        if thought is not None:
            shown["reasoning_content"] = thought
        if message.refusal is not None and not shown["content"]:
            shown["content"] = message.refusal
        if message.tool_calls:
            shown["tool_calls"] = [
                _convert_earlier_call(c, f"{where}.tool_calls[{i}]")
                for i, c in enumerate(message.tool_calls)
            ]
    return shown


def _convert_message_content(
    content: Content | None, where: str, role: str, images: RequestImages
) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Part] = []
    for i, part in enumerate(content):
        if isinstance(part, TextPart):
            parts.append(part.text)
        elif isinstance(part, RefusalPart):
            parts.append(part.refusal)
        elif isinstance(part, ImageUrlPart):
            parts.append(
                images.add_part(part.image_url, "image_url", f"{where}.content[{i}]", role=role)
            )
        elif isinstance(part, VideoUrlPart):
            parts.append(
                images.add_part(
                    part.video_url, "video_url", f"{where}.content[{i}]", role=role, kind="video"
                )
            )
        elif isinstance(part, AudioPart):
            sound = part.input_audio
            parts.append(
                images.add_part(
                    sound, "input_audio", f"{where}.content[{i}]", role=role, kind="audio"
                )
            )
        else:
            raise unreadable_part_error(str(part.__struct_config__.tag), f"{where}.content[{i}]")
    return join_parts(parts)


def _convert_earlier_call(call: FunctionCall | CustomCall, where: str) -> dict[str, Any]:
    if isinstance(call, CustomCall):
        function = {"name": call.custom.name, "arguments": {INPUT: call.custom.input}}
    else:
        arguments = parse_earlier_arguments(call.function.arguments, f"{where}.function.arguments")
        function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "id": call.id or "", "function": function}
