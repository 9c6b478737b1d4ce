"""Tools and reasoning effort in the form that several protocols share: custom tools, arguments, effort.

A custom tool is called with text: as a function of one argument, or with the whole answer as its input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sglang_lite.protocol import CapabilityError, Constraint, Lark, ParameterError, Regex
from sglang_lite.protocol.anything import Json
from sglang_lite.text.chat_format import Tool

INPUT = "input"  # name of the argument of a custom tool that is called like a function


class GrammarText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Grammar of a custom tool's input."""

    syntax: Literal["regex", "lark"]
    definition: str


def input_constraint(grammar: GrammarText | None) -> Constraint | None:
    """Constraint of a custom tool's input that is the whole answer."""
    if grammar is None:
        return None
    return Regex(grammar.definition) if grammar.syntax == "regex" else Lark(grammar.definition)


def custom_tool(name: str, description: str | None, grammar: GrammarText | None, *, forced: bool) -> Tool:
    """Function that stands for a custom tool.

    Args:
        forced: whether the tool must be called, so that its grammar applies to the whole answer.

    Raises:
        CapabilityError: the grammar can't be enforced inside a call.
    """
    text: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        if grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
        elif not forced:
            raise CapabilityError(
                f"the Lark grammar of the tool {name!r:.80} can't be enforced unless the tool is forced.",
                parameter="tools",
                hint="Name the tool in tool_choice, or give it a regex.",
            )
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return Tool(name, description, parameters, strict=True)


def input_of(arguments: str) -> str:
    """Input of a custom tool that was called like a function; the unparsed arguments if the call was cut."""
    try:
        return str(msgspec.json.decode(arguments)[INPUT])
    except (msgspec.DecodeError, KeyError, TypeError):
        return arguments


def arguments_of(given: str | dict[str, Json], name: str) -> dict[str, Json]:
    """Arguments of an earlier call. Raises ParameterError if they aren't a JSON object."""
    found: Any = given
    if isinstance(given, str):
        try:
            found = msgspec.json.decode(given or "{}")
        except msgspec.DecodeError as error:
            raise ParameterError(name, f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ParameterError(name, "is not a JSON object.")
    return found


def variables_of_template(given: Mapping[str, Json] | None) -> dict[str, dict[str, Json]]:
    """Variables of a chat template in a request's `chat_template_kwargs`, by field."""
    return {f"chat_template_kwargs.{name}": {name: value} for name, value in (given or {}).items()}


def variables_of_effort(effort: str) -> dict[str, Json]:
    """Variables of a chat template for a `reasoning_effort`."""
    thinks = {} if effort not in ("none", "minimal") else {"enable_thinking": False}
    return {"reasoning_effort": effort, **thinks}
