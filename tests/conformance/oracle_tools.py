"""Texts of calls of tools, and what they mean to a plain interpreter. Imports nothing of the
package.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MOST = 90  # characters of a call


@dataclass(frozen=True)
class ToolCall:
    """As the package's own, whose `repr` programs see as well."""

    name: str
    arguments: dict[str, Any]


def fails(call: ToolCall) -> bool:
    """Whether the tool raises."""
    return call.name == "pick" and call.arguments["x"] == "xy" and call.arguments["sure"]


def result(call: ToolCall) -> str:
    """Result of a tool as the model is shown it."""
    if fails(call):
        return "Result of pick: Error: OwnError"
    if call.name == "count":
        return "Result of count: 3"
    x, sure = call.arguments["x"], call.arguments["sure"]
    return f"Result of pick: {json.dumps([x, sure])}"


def written(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"tool": name, "arguments": arguments})


PICK: dict[str, Any] = {
    written("pick", {"x": x, **given}): ToolCall("pick", {"x": x, "sure": False, **given})
    for x in ("x", "xy")
    for given in ({}, {"sure": True}, {"sure": False})
}
COUNT: dict[str, Any] = {written("count", {}): ToolCall("count", {})}
# a script's
ANSWERS: dict[str, Any] = {json.dumps({"answer": answer}): answer for answer in ("a", "x", "é")}
# The texts of each choice of tools that a program may have, and their values.
TOOLS: dict[str, dict[str, Any]] = {
    "one": PICK,
    "several": PICK | COUNT,
    "named": PICK,
    "named, in a list": {f'{{"calls": [{text}]}}': [call] for text, call in PICK.items()},
    "auto": PICK | COUNT | ANSWERS,
}


def offered(prompt: str, words: frozenset[str]) -> frozenset[str]:
    """Those of the words that the model may take: with a choice, calls after some prompts and
    answers after others.
    """
    calls = words - ANSWERS.keys()
    return calls if len(prompt) % 3 or calls == words else words - calls
