"""Conversations: converts messages and tools to a prompt and a constraint, and parses the generated
text.

Text of users, tools and earlier answers is never encoded as special tokens, even if it spells one.
"""

from __future__ import annotations

import contextlib
import marshal
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from sglang_lite.protocol import (
    CapabilityError,
    Constraint,
    JsonSchema,
    Media,
    OneOf,
    ParameterError,
    Prompt,
    Span,
    TemplateError,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.text.chat_template import JinjaTemplate, to_json
from sglang_lite.text.plain_bytes import UnchangedDict
from sglang_lite.text.reasoning import (
    FORMATS,
    ReasoningParser,
    allow_reasoning_before,
    detect_model_type,
    reasoning_format,
)
from sglang_lite.text.tool_calls import Pieces, ToolParser, call_text, calls_constraint
from sglang_lite.text.tool_formats import DEFAULT, detect_tool_family

_HIDDEN = re.compile("\ue000([0-9]+)\ue001")
_CUT = "\ue002"  # end of a message that the model continues
_MEDIUM = "\ue003"  # an image, video or sound in a message, for templates that show none
_TEXT_KINDS = {str, type(None)}
_MARKS = ("\ue000", "\ue001", "\ue002", _MEDIUM)


@dataclass(frozen=True, slots=True)
class Tool:
    """Function that a model may call.

    Attributes:
        parameters: JSON Schema of the arguments.
        strict: True if keywords that can't be enforced are an error. If False, such keywords are
            left to the caller and the others are enforced.
        custom: True if the tool's only argument is a text.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )
    strict: bool = False
    custom: bool = False

    @property
    def schema(self) -> JsonSchema:
        from sglang_lite.constraints.schema import client_schema

        return client_schema(self.parameters, enforce="strict" if self.strict else "unchecked")

    @property
    def shown(self) -> dict[str, Json]:
        """Tool in the form that chat templates expect."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation to continue, independent of any protocol.

    Attributes:
        messages: messages in the form that templates expect: role and content as text, tool calls
            with their arguments as objects. Content of a user that isn't only text is a list of
            parts: {"type": "text", "text": …} and {"type": "image"}, "video" or "audio".
        tools: tools that may be called.
        tool_choice: "auto": text and calls; "required": calls only; "named": one call of the
            allowed tool; "none": text that contains no calls; "shown": text of any kind. The model
            sees the tools in each case, so that the choice doesn't change the prompt.
        allowed: names of the tools that may be called (or one of which must be called); None for
            all.
        parallel: True if there may be several calls, unless a tool is named.
        answer: constraint on the text of the answer.
        input_of: name of the custom tool whose input is the whole answer, or None.
        continue_final: True if the model continues the last message instead of answering it.
        complete: True if the conversation is only read and no message follows.
        variables: further variables for the template, such as `enable_thinking`, keyed by the field
            of the request that sets them. If a variable has two values, the last one counts.
        images: images, videos and sounds of the messages, in order.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: Literal["auto", "required", "named", "shown", "none"] = "auto"
    allowed: Sequence[str] | None = None
    parallel: bool = True
    answer: Constraint | None = None
    input_of: str | None = None
    continue_final: bool = False
    complete: bool = False
    variables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    images: Sequence[Media] = ()


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """Conversation as a prompt, ready for generation.

    Attributes:
        prompt: the rendered messages.
        constraint: constraint on the whole generated text.
        family, reasoning: formats that separate calls and reasoning from the text. With None, calls
            or reasoning count as content.
        schemas: JSON Schemas of the arguments, by name, for the tools that may be called.
        unused: names of the request's fields that the template doesn't show.
        custom_tools: names of the custom tools.
        input_of: see Conversation.
        bare: whether JSON objects that name a tool are calls. False if the answer has a constraint,
            because that may allow such objects.
        parallel: see Conversation.
    """

    prompt: Prompt
    constraint: Constraint | None
    family: str | None
    reasoning: str | None
    schemas: Mapping[str, JsonSchema]
    unused: Sequence[str] = ()
    custom_tools: frozenset[str] = frozenset()
    input_of: str | None = None
    bare: bool = True
    parallel: bool = True

    def new_answer_reader(self, *, separate: bool = True) -> AnswerReader:
        """Returns a reader for the text of one sample.

        Args:
            separate: whether to separate reasoning from the answer; otherwise reasoning counts as
                content, including its marks.
        """
        reasoning = self.reasoning if separate else None
        if self.family is not None:
            tools = ToolParser(
                self.family, reasoning, self.schemas, bare=self.bare, parallel=self.parallel
            )
            return AnswerReader(tools, None)
        return AnswerReader(
            None, None if reasoning is None else ReasoningParser(reasoning, once=True)
        )


class AnswerReader:
    """Incremental parser of a sample's text. Separates reasoning, content and calls.

    Attributes:
        open: True while a call has begun and has not ended.
        ended: number of calls that have ended.
    """

    def __init__(self, tools: ToolParser | None, reasoning: ReasoningParser | None) -> None:
        self._tools = tools
        self._reasoning = reasoning

    @property
    def open(self) -> bool:
        return self._tools is not None and self._tools.open

    @property
    def ended(self) -> int:
        return 0 if self._tools is None else self._tools.ended

    def push(self, text: str) -> Pieces:
        """Parses more text, and returns the pieces that are complete."""
        if self._tools is not None:
            return self._tools.push(text)
        return Pieces("", text) if self._reasoning is None else Pieces(*self._reasoning.push(text))

    def flush(self) -> Pieces:
        """Ends the text, and returns the remaining pieces."""
        if self._tools is not None:
            return self._tools.flush()
        return Pieces("", "") if self._reasoning is None else Pieces(*self._reasoning.flush())


class ChatFormat:
    """Format of a model's conversations.

    Args:
        template: chat template of the model, or None if it has none.
        control: texts of the control tokens that a prompt can spell.
        family: format of the model's tool calls; None detects it from the template.
        reasoning: format of the model's reasoning; None detects it from the template.
    """

    def __init__(
        self,
        template: JinjaTemplate | None,
        control: Sequence[str],
        family: str | None,
        reasoning: str | None,
    ) -> None:
        self._template = template
        source = "" if template is None else template.source
        self.family = family or detect_tool_family(source) or DEFAULT
        self.reasoning = reasoning or detect_model_type(source)
        self._developer = "developer" in source
        self._shows_tools = "tools" in source
        self._shows_calls = "tool_calls" in source
        self._system = template is None or template.has_system
        spelled = sorted(
            (re.escape(each) for each in (*control, *_MARKS) if each), key=len, reverse=True
        )
        self._control = re.compile("|".join(spelled))
        self._control_bytes = re.compile(self._control.pattern.encode("utf-8", "surrogatepass"))

    def render(self, conversation: Conversation) -> RenderedConversation:
        """Renders a conversation, and derives the constraint on the generated text.

        Raises:
            CapabilityError: the model has no chat template.
            TemplateError: the template refuses the messages.
            ParameterError: two tools have the same name, or a chosen tool doesn't exist.
            ConstraintError: a constraint of the answer or of arguments can't be enforced.
        """
        prompt = self.prompt(conversation)
        reasoning = (
            None if conversation.continue_final else self._reasoning_format_after(prompt.text)
        )
        names = [tool.name for tool in conversation.tools]
        if len(set(names)) < len(names):
            raise ParameterError("tools", "two tools have the same name.")
        schemas = {tool.name: tool.schema for tool in conversation.tools}
        allowed = _select_schemas(schemas, conversation.allowed)
        choice = conversation.tool_choice if allowed else "shown"
        family = None if choice in ("none", "shown") else self.family
        constraint = conversation.answer
        if family is not None or (choice == "none" and constraint is None):
            constraint = self._constrain_calls(conversation, allowed, reasoning)
        elif constraint is not None and reasoning is not None:
            constraint = allow_reasoning_before(reasoning, constraint)
        unused = [*self._unread_fields(conversation), *self._unshown_names(conversation, prompt)]
        custom = frozenset(tool.name for tool in conversation.tools if tool.custom)
        return RenderedConversation(
            prompt,
            constraint,
            family,
            reasoning,
            allowed,
            unused,
            custom,
            conversation.input_of,
            bare=conversation.answer is None,
            parallel=conversation.parallel,
        )

    def _constrain_calls(
        self, conversation: Conversation, schemas: Mapping[str, JsonSchema], reasoning: str | None
    ) -> Constraint:
        answer = conversation.answer
        choice = conversation.tool_choice
        assert choice != "shown"
        if choice != "auto" or answer is None:
            return calls_constraint(
                self.family, schemas, choice, reasoning=reasoning, parallel=conversation.parallel
            )
        either = OneOf(
            (
                calls_constraint(self.family, schemas, "required", parallel=conversation.parallel),
                answer,
            )
        )
        return either if reasoning is None else allow_reasoning_before(reasoning, either)

    # ------------------------------------------------------------------------------------ rendering

    def prompt(self, conversation: Conversation) -> Prompt:
        """Returns the prompt that the model continues with its answer.

        Raises:
            CapabilityError: the model has no chat template.
            TemplateError: the template refuses the messages.
            ParameterError: a variable has the name of one that the template always gets.
        """
        if self._template is None:
            raise CapabilityError(
                "the model has no chat template.", hint="Serve with --chat-template."
            )
        hidden: list[str] = []
        messages = [self._adapt_message_to_template(message) for message in conversation.messages]
        kinds = {type(message.get("content")) for message in messages}
        if not kinds <= _TEXT_KINDS or self._may_spell_control_tokens(messages):
            messages = [self._hide_control_tokens(message, hidden) for message in messages]
        if not all(map(self._template.shows_media, {image.kind for image in conversation.images})):
            messages = [_with_media_marks(message) for message in messages]
        tools = [self._hide_control_tokens(tool.shown, hidden) for tool in conversation.tools]
        values = {
            name: value for each in conversation.variables.values() for name, value in each.items()
        }
        for name in values:
            if name in ("messages", "tools", "add_generation_prompt"):
                raise ParameterError(
                    "chat_template_kwargs", f"{name!r} is set by the server. Leave it out."
                )
        variables = self._hide_control_tokens(values, hidden)
        if tools:
            if self._shows_tools:
                variables["tools"] = tools
            else:
                messages = self._with_tools(messages, tools)
        if conversation.continue_final:
            last = messages[-1]
            messages[-1] = {**last, "content": f"{last.get('content') or ''}{_CUT}"}
        follows = not (conversation.continue_final or conversation.complete)
        text = self._render_text(messages, {"add_generation_prompt": follows, **variables})
        if conversation.continue_final:
            text, found, _ = text.rpartition(_CUT)
            if not found:
                raise TemplateError(
                    "the chat template changes the last message, so the message can't be continued."
                )
        return Prompt(tuple(_restore_hidden(text, hidden)), images=tuple(conversation.images))

    def _render_text(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        assert self._template is not None
        try:
            return self._template.render(messages, **variables)
        except TemplateError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            # DeepSeek's templates add the arguments of calls to text.
            return self._template.render(
                [_with_arguments_as_text(message) for message in messages], **variables
            )

    @cached_property
    def _content_without_text(self) -> str | None:
        """Content of a message that has calls and no text: None or "". It is None, as in chat APIs,
        because some templates render calls only then. It is "" if the template fails on None or
        prints it.
        """
        call = {"id": "0" * 9, "type": "function", "function": {"name": "f", "arguments": {}}}
        texts: list[str | None] = []
        for content in (None, ""):
            answer = {"role": "assistant", "content": content, "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "x"}
            try:
                texts.append(
                    self._render_text([{"role": "user", "content": "x"}, answer, result], {})
                )
            except TemplateError:
                texts.append(None)
        none, empty = texts
        return (
            None
            if none is not None and (empty is None or none.count("None") <= empty.count("None"))
            else ""
        )

    def _unread_fields(self, conversation: Conversation) -> list[str]:
        """Returns the fields of a request whose variables have no effect. Either this template
        doesn't read the variables, or later fields override them.
        """
        setters = {
            name: field for field, values in conversation.variables.items() for name in values
        }
        known = () if self._template is None else self._template.variables
        read = {field for name, field in setters.items() if name in known}
        return [field for field in conversation.variables if field not in read]

    def _unshown_names(self, conversation: Conversation, prompt: Prompt) -> list[str]:
        """Returns the `name` fields that don't change the prompt, such as `messages[0].name`. Tries
        each role once, because templates show names by role.
        """
        unshown: list[str] = []
        messages = conversation.messages
        for role in dict.fromkeys(message["role"] for message in messages if "name" in message):
            named = [
                i
                for i, message in enumerate(messages)
                if message["role"] == role and "name" in message
            ]
            bare = [
                {name: value for name, value in message.items() if name != "name"}
                if message["role"] == role
                else message
                for message in messages
            ]
            with contextlib.suppress(TemplateError):  # the template needs the names
                if self.prompt(replace(conversation, messages=bare)) == prompt:
                    unshown += [f"messages[{i}].name" for i in named]
        return unshown

    def _adapt_message_to_template(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a message in the form that this template expects."""
        if message["role"] == "developer" and not self._developer:
            return {**message, "role": "system"}
        calls = message.get("tool_calls")
        if calls and not self._shows_calls:
            written = [
                call_text(self.family, c["function"]["name"], c["function"]["arguments"])
                for c in calls
            ]
            return {**message, "content": "\n".join(filter(None, (message["content"], *written)))}
        return (
            {**message, "content": self._content_without_text}
            if calls and not message["content"]
            else message
        )

    def _with_tools(self, messages: list[Any], tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Returns the messages with a description of the tools in the first one, for a template
        that doesn't render tools.
        """
        listed = "\n".join(to_json(tool) for tool in tools)
        example = call_text(self.family, "NAME", {"ARGUMENT": "VALUE"})
        return prepend_description(
            messages,
            f"You can call these functions:\n{listed}\nA call is written so:\n{example}",
            self._system,
        )

    def _may_spell_control_tokens(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Returns False if no text of the messages spells a control token. Searches all texts at
        once, in the messages' bytes as `marshal` writes them.
        """
        try:
            pieces = [
                (type(message) is UnchangedDict and message.__plain__.data)
                or marshal.dumps(dict(message), 2)
                for message in messages
            ]
        except ValueError:  # not only plain data
            return True
        return self._control_bytes.search(b"".join(pieces)) is not None

    def _hide_control_tokens(self, value: Any, hidden: list[str]) -> Any:
        """Returns plain data in which placeholders replace the parts of texts that spell control
        tokens. Appends these parts to `hidden`.
        """
        if isinstance(value, str):
            if self._control.search(value) is None:
                return value
            return self._control.sub(lambda found: _add_placeholder(found[0], hidden), value)
        if isinstance(value, Mapping):
            return {
                self._hide_control_tokens(name, hidden): self._hide_control_tokens(each, hidden)
                for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._hide_control_tokens(each, hidden) for each in value]
        return value

    def _reasoning_format_after(self, text: str) -> str | None:
        """Returns the format of the reasoning that follows a prompt, or None. The template may
        already have opened or closed the reasoning.
        """
        if self.reasoning is None:
            return None
        known = reasoning_format(self.reasoning)
        end = text.rstrip()
        if end.endswith(known.end):
            return None
        if end.endswith(known.start) and not known.open:
            marks = (known.start, known.end)
            opened = (
                name
                for name, each in FORMATS.items()
                if each.open and (each.start, each.end) == marks
            )
            return next(opened, self.reasoning)
        return self.reasoning


def prepend_description(
    messages: Sequence[Mapping[str, Json]], text: str, system: bool
) -> list[Mapping[str, Json]]:
    """Returns the messages with a text for the model at the beginning: in the system message, or in
    the first message if the template has no system messages.
    """
    if messages and (messages[0]["role"] == "system" or not system):
        first, *rest = messages
        if isinstance(first["content"], list):  # with images
            return [
                {**first, "content": [{"type": "text", "text": f"{text}\n\n"}, *first["content"]]},
                *rest,
            ]
        parts = (first["content"], text) if first["role"] == "system" else (text, first["content"])
        return [{**first, "content": "\n\n".join(filter(None, parts))}, *rest]
    return [{"role": "system", "content": text}, *messages]


def _with_media_marks(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message with its content as plain text. Marks stand for its images, videos and
    sounds.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {
        **message,
        "content": "".join(each["text"] if each["type"] == "text" else _MEDIUM for each in content),
    }


def _with_arguments_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    functions = [(call, call["function"]) for call in message["tool_calls"]]
    written = [
        {**call, "function": {**each, "arguments": to_json(each["arguments"])}}
        for call, each in functions
    ]
    return {**message, "tool_calls": written}


def _select_schemas(
    schemas: Mapping[str, JsonSchema], names: Sequence[str] | None
) -> Mapping[str, JsonSchema]:
    """Returns the schemas of the named tools. Raises ParameterError if a tool doesn't exist."""
    for name in names or ():
        if name not in schemas:
            raise ParameterError(
                "tool_choice",
                f"{name!r} is not the name of a tool.",
                hint=f"Tools: {', '.join(schemas)}.",
            )
    return schemas if names is None else {name: schemas[name] for name in names}


def _add_placeholder(text: str, hidden: list[str]) -> str:
    hidden.append(text)
    return f"\ue000{len(hidden) - 1}\ue001"


def _restore_hidden(text: str, hidden: Sequence[str]) -> Sequence[Span]:
    spans = []
    at = 0
    for found in _HIDDEN.finditer(text):
        spans += [Span(text[at : found.start()]), Span(hidden[int(found[1])], special=False)]
        at = found.end()
    return [
        part
        for span in (*spans, Span(text[at:]))
        for part in _split_at_media(span)
        if part.text or part.ids == ()
    ]


def _split_at_media(span: Span) -> Sequence[Span]:
    """Splits a span of rendered text at its media marks, which become placeholders."""
    if not span.special or _MEDIUM not in span.text:
        return (span,)
    first, *others = span.text.split(_MEDIUM)
    return [Span(first), *(each for text in others for each in (Span("", ()), Span(text)))]
