"""Conversations: messages and tools become a prompt and a constraint, and what is generated is read back.

What users, tools and earlier answers say is never read as special tokens, whatever it spells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_lite.protocol import (
    CapabilityError,
    Constraint,
    JsonSchema,
    OneOf,
    ParameterError,
    Prompt,
    Span,
    TemplateError,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.text.chat_template import JinjaTemplate, to_json
from sglang_lite.text.reasoning import FORMATS, ReasoningParser, format_of, model_type_of, reasoned
from sglang_lite.text.tool_calls import Pieces, ToolParser, call_text, calls_constraint
from sglang_lite.text.tool_formats import DEFAULT, family_of

_HIDDEN = re.compile("\ue000([0-9]+)\ue001")
_CUT = "\ue002"  # where a message that is to be continued ends
_MARKS = ("\ue000", "\ue001", "\ue002")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        parameters: JSON Schema of its arguments.
        strict: what of that can't be enforced is an error; else it is left to the caller.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    @property
    def schema(self) -> JsonSchema:
        from sglang_lite.constraints.schema import json_schema

        return json_schema(self.parameters, enforce="strict" if self.strict else "best_effort")

    @property
    def shown(self) -> dict[str, Json]:
        """The tool, as templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class Conversation:
    """
    Attributes:
        messages: as templates take them: role and content as text, calls with their arguments as objects.
        tools: that may be called.
        tool_choice: "auto": text and calls; "required": calls alone; "shown": no call, but the model sees the tools;
            "none": neither.
        allowed: the names of those that may be called, or of which one has to be; None: of all.
        parallel: there may be several calls.
        answer: what the text of the answer must be.
        continue_final: the last message is continued, and not followed by another one.
        complete: no message follows: it is read, and not answered.
        variables: further ones for the template, as `enable_thinking`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: Literal["auto", "required", "shown", "none"] = "auto"
    allowed: Sequence[str] | None = None
    parallel: bool = True
    answer: Constraint | None = None
    continue_final: bool = False
    complete: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreparedConversation:
    """A conversation, ready to be continued.

    Attributes:
        prompt: the rendered messages.
        constraint: on the whole text that is generated.
        family, reasoning: formats of calls and reasoning to be read back; None: such text is content.
        schemas: of the tools' arguments by name.
    """

    prompt: Prompt
    constraint: Constraint | None
    family: str | None
    reasoning: str | None
    schemas: Mapping[str, JsonSchema]

    def reader(self, *, separate: bool = True) -> AnswerReader:
        """Reader of one sample.

        Args:
            separate: reasoning is split off; else it is content, marks and all.
        """
        return AnswerReader(self.family, self.reasoning if separate else None, self.schemas)


class AnswerReader:
    """Reads the text of a sample as it comes: reasoning, content, calls.

    Attributes:
        open: a call has begun and has not ended.
    """

    def __init__(self, family: str | None, reasoning: str | None, schemas: Mapping[str, JsonSchema]) -> None:
        self._tools = None if family is None else ToolParser(family, reasoning, schemas)
        self._reasoning = None
        if family is None and reasoning is not None:
            self._reasoning = ReasoningParser(reasoning, once=True)

    @property
    def open(self) -> bool:
        return self._tools is not None and self._tools.open

    def push(self, text: str) -> Pieces:
        """Takes the next text."""
        if self._tools is not None:
            return self._tools.push(text)
        return Pieces("", text) if self._reasoning is None else Pieces(*self._reasoning.push(text))

    def flush(self) -> Pieces:
        """Ends the text."""
        if self._tools is not None:
            return self._tools.flush()
        return Pieces("", "") if self._reasoning is None else Pieces(*self._reasoning.flush())


class ChatFormat:
    """Format in which a model converses.

    Args:
        template: its chat template; None: it has none.
        control: texts of the tokens that a prompt can name.
        family: the format of its calls; None finds it in the template.
        reasoning: the format of its reasoning; None finds it there.
    """

    def __init__(
        self, template: JinjaTemplate | None, control: Sequence[str], family: str | None, reasoning: str | None
    ) -> None:
        self._template = template
        source = "" if template is None else template.source
        self.family = family or family_of(source) or DEFAULT
        self.reasoning = reasoning or model_type_of(source)
        self._developer = "developer" in source
        self._shows_tools, self._shows_calls = "tools" in source, "tool_calls" in source
        spelled = sorted((re.escape(each) for each in (*control, *_MARKS) if each), key=len, reverse=True)
        self._control = re.compile("|".join(spelled))

    def prepare(self, conversation: Conversation) -> PreparedConversation:
        """
        Raises:
            CapabilityError: the model has no chat template.
            TemplateError: it does not take these messages.
            ParameterError: a tool's name, or a tool that is chosen and not there.
            ConstraintError: what is asked of the answer or of arguments can't be enforced.
        """
        prompt = self._prompt(conversation)
        reasoning = None if conversation.continue_final else self._reasoning_after(prompt.text)
        names = [tool.name for tool in conversation.tools]
        if len(set(names)) < len(names):
            raise ParameterError("tools", "two tools have the same name.")
        schemas = {tool.name: tool.schema for tool in conversation.tools}
        allowed = _allowed(schemas, conversation.allowed)
        family = self.family if allowed and conversation.tool_choice in ("auto", "required") else None
        constraint = conversation.answer
        if family is not None:
            constraint = self._calls(conversation, allowed, reasoning)
        elif constraint is not None and reasoning is not None:
            constraint = reasoned(reasoning, constraint)
        return PreparedConversation(prompt, constraint, family, reasoning, schemas)

    def _calls(
        self, conversation: Conversation, schemas: Mapping[str, JsonSchema], reasoning: str | None
    ) -> Constraint:
        answer = conversation.answer
        choice: Literal["auto", "required"] = "auto" if conversation.tool_choice == "auto" else "required"
        if choice == "required" or answer is None:
            return calls_constraint(self.family, schemas, choice, reasoning=reasoning, parallel=conversation.parallel)
        either = OneOf((calls_constraint(self.family, schemas, "required", parallel=conversation.parallel), answer))
        return either if reasoning is None else reasoned(reasoning, either)

    # ------------------------------------------------------------------------------------------- rendering

    def _prompt(self, conversation: Conversation) -> Prompt:
        if self._template is None:
            raise CapabilityError("the model has no chat template.", hint="Serve with --chat-template.")
        hidden: list[str] = []
        messages = [self._hide(self._shown(message), hidden) for message in conversation.messages]
        tools = [self._hide(tool.shown, hidden) for tool in conversation.tools]
        for name in conversation.variables:
            if name in ("messages", "tools", "add_generation_prompt"):
                raise ParameterError("chat_template_kwargs", f"{name!r} is set by the server. Leave it out.")
        variables = self._hide(conversation.variables, hidden)
        if conversation.tool_choice != "none" and tools:
            if self._shows_tools:
                variables["tools"] = tools
            else:
                messages = self._with_tools(messages, tools)
        if conversation.continue_final:
            last = messages[-1]
            last["content"] = f"{last.get('content') or ''}{_CUT}"
        follows = not (conversation.continue_final or conversation.complete)
        text = self._template.render(messages, add_generation_prompt=follows, **variables)
        if conversation.continue_final:
            text, found, _ = text.rpartition(_CUT)
            if not found:
                raise TemplateError("the chat template changes the last message, so the message can't be continued.")
        return Prompt(tuple(_spans(text, hidden)))

    def _shown(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message as this template takes it."""
        if message["role"] == "developer" and not self._developer:
            return {**message, "role": "system"}
        calls = message.get("tool_calls")
        if calls and not self._shows_calls:
            written = [call_text(self.family, c["function"]["name"], c["function"]["arguments"]) for c in calls]
            return {**message, "content": "\n".join(filter(None, (message["content"], *written)))}
        return message

    def _with_tools(self, messages: list[Any], tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Messages for a template that shows no tools: they are told of in the first one."""
        listed = "\n".join(to_json(tool) for tool in tools)
        example = call_text(self.family, "NAME", {"ARGUMENT": "VALUE"})
        told = f"You can call these functions:\n{listed}\nA call is written so:\n{example}"
        if messages and messages[0]["role"] == "system":
            first = {**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}
            return [first, *messages[1:]]
        return [{"role": "system", "content": told}, *messages]

    def _hide(self, value: Any, hidden: list[str]) -> Any:  # of plain data
        """Plain data, in whose texts marks stand for what spells control tokens."""
        if isinstance(value, str):
            return self._control.sub(lambda found: _hidden(found[0], hidden), value)
        if isinstance(value, Mapping):
            return {self._hide(name, hidden): self._hide(each, hidden) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(each, hidden) for each in value]
        return value

    def _reasoning_after(self, text: str) -> str | None:
        """The format of reasoning after a prompt: its template may have opened it, or closed it already."""
        if self.reasoning is None:
            return None
        known, end = format_of(self.reasoning), text.rstrip()
        if end.endswith(known.end):
            return None
        if end.endswith(known.start) and not known.open:
            marks = (known.start, known.end)
            opened = (name for name, each in FORMATS.items() if each.open and (each.start, each.end) == marks)
            return next(opened, self.reasoning)
        return self.reasoning


def _allowed(schemas: Mapping[str, JsonSchema], names: Sequence[str] | None) -> Mapping[str, JsonSchema]:
    """Schemas of the tools that are named. Raises ParameterError: there is no such tool."""
    for name in names or ():
        if name not in schemas:
            raise ParameterError(
                "tool_choice", f"{name!r} is not the name of a tool.", hint=f"Tools: {', '.join(schemas)}."
            )
    return schemas if names is None else {name: schemas[name] for name in names}


def _hidden(text: str, hidden: list[str]) -> str:
    hidden.append(text)
    return f"\ue000{len(hidden) - 1}\ue001"


def _spans(text: str, hidden: Sequence[str]) -> Sequence[Span]:
    spans, at = [], 0
    for found in _HIDDEN.finditer(text):
        spans += [Span(text[at : found.start()]), Span(hidden[int(found[1])], special=False)]
        at = found.end()
    return [span for span in (*spans, Span(text[at:])) if span.text]
