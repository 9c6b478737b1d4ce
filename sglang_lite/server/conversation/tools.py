"""Tools and reasoning effort in the form that several protocols share.

A custom tool takes text. The model calls it like a function with one argument or, if the tool is
forced, writes the tool's input as the whole answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from sglang_lite.protocol import CapabilityError, Constraint, Lark, ParameterError, Regex
from sglang_lite.protocol.anything import Json
from sglang_lite.text.chat_format import Conversation, Tool

INPUT = "input"  # name of the argument of a custom tool that is called like a function


class GrammarText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Grammar of a custom tool's input."""

    syntax: Literal["regex", "lark"]
    definition: str


class FunctionDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Custom tool that the model may call. A protocol's subclass adds a `format`."""

    name: str
    description: str | None = None

    @property
    def grammar(self) -> GrammarText | None:
        """Grammar of its input, if it has one."""
        return None


def with_tools(
    conversation: Conversation,
    definitions: Sequence[FunctionDefinition | CustomDefinition],
    choice: Literal["auto", "required", "named", "none"],
    allowed: Sequence[str] | None,
) -> Conversation:
    """Adds tools to a conversation. If one custom tool is forced, the whole answer is its input.

    Args:
        choice, allowed: as in Conversation.

    Raises:
        ParameterError: a custom tool is forced, and the answer has another constraint.
        CapabilityError: a grammar can't be enforced inside a call.
    """
    forced: CustomDefinition | None = None
    if choice in ("required", "named"):
        only = [each for each in definitions if [each.name] == allowed]
        forced = next((each for each in only if isinstance(each, CustomDefinition)), None)
    tools = [_convert_to_template_tool(each, forced=each is forced) for each in definitions]
    if forced is None:
        return replace(conversation, tools=tools, tool_choice=choice, allowed=allowed)
    if conversation.answer is not None:
        raise ParameterError(
            "tool_choice",
            "a custom tool is forced, which excludes another format of the answer. Give one of them.",
        )
    constraint: Constraint | None = None
    if (grammar := forced.grammar) is not None:
        constraint = (
            Regex(grammar.definition) if grammar.syntax == "regex" else Lark(grammar.definition)
        )
    return replace(
        conversation, tools=tools, tool_choice="shown", answer=constraint, input_of=forced.name
    )


def _convert_to_template_tool(
    definition: FunctionDefinition | CustomDefinition, *, forced: bool
) -> Tool:
    """Converts a definition to a tool as templates show it; a custom tool becomes a function of one
    argument.

    Args:
        forced: whether the tool must be called, so that its grammar applies to the whole answer.
    """
    name = definition.name
    if isinstance(definition, FunctionDefinition):
        empty = {"type": "object", "properties": {}}
        parameters = empty if definition.parameters is None else definition.parameters
        return Tool(name, definition.description, parameters, strict=definition.strict is not False)
    text: dict[str, Any] = {"type": "string"}
    if (grammar := definition.grammar) is not None:
        if grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
        elif not forced:
            raise CapabilityError(
                f"the Lark grammar of the tool {name!r:.80} can't be enforced unless the tool is forced.",
                parameter="tools",
                hint="Name the tool in tool_choice, or give it a regex.",
            )
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return Tool(name, definition.description, parameters, strict=True, custom=True)


def parse_custom_input(arguments: str) -> str:
    """Returns the input of a custom tool that was called like a function, or the unparsed arguments
    if the call was cut.
    """
    try:
        return str(msgspec.json.decode(arguments)[INPUT])
    except (msgspec.DecodeError, KeyError, TypeError):
        return arguments


def parse_earlier_arguments(given: str | dict[str, Json], name: str) -> dict[str, Json]:
    """Returns the arguments of an earlier call. Raises ParameterError if they aren't a JSON object."""
    found: Any = given
    if isinstance(given, str):
        try:
            found = msgspec.json.decode(given or "{}")
        except msgspec.DecodeError as error:
            raise ParameterError(name, f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ParameterError(name, "is not a JSON object.")
    return found


def split_template_kwargs(given: Mapping[str, Json] | None) -> dict[str, dict[str, Json]]:
    """Returns the variables in a request's `chat_template_kwargs`, grouped by the name of the field
    that sets them.
    """
    return {f"chat_template_kwargs.{name}": {name: value} for name, value in (given or {}).items()}


def effort_variables(effort: str) -> dict[str, Json]:
    """Returns the chat template's variables for a `reasoning_effort`."""
    thinks = {} if effort not in ("none", "minimal") else {"enable_thinking": False}
    return {"reasoning_effort": effort, **thinks}
