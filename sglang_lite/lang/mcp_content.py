"""Converts the results, resources and prompts that MCP servers send to values and expressions."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sglang_lite.constraints.json_schema.validator import violations
from sglang_lite.lang.api import assistant, audio, image, user
from sglang_lite.lang.expressions import SglImage
from sglang_lite.lang.failure_text import redact
from sglang_lite.lang.plain_text import plain
from sglang_lite.lang.tools import ReportedFailure
from sglang_lite.program.nodes import Expression, Expressions
from sglang_lite.protocol import JsonSchema, ParameterError, ToolError
from sglang_lite.protocol.anything import Foreign, Json, UserValue

MAX_RESULT: Final = 1 << 20  # characters of a result, far more than fits in a prompt
_MAX_TOLD: Final = 300  # characters shown of a violation
MAX_BYTES: Final = 10_000_000  # bytes of a resource or prompt
_MEDIA: Final = {"image": image, "audio": audio}
_TURNS: Final = {"user": user, "assistant": assistant}


@dataclass(frozen=True, slots=True)
class McpResource:
    """Resource of an MCP server.

    Attributes:
        uri: its address, for `read_resource`.
        name: name, for people.
        description: description of its content; "" if the server gives none.
        media_type: type of its content, such as "text/plain"; "" if the server gives none.
        size: size in bytes; None if the server does not report it.
    """

    uri: str
    name: str
    description: str
    media_type: str
    size: int | None

    @staticmethod
    def of(listed: Foreign) -> McpResource:
        """Converts a resource from the SDK's type."""
        described, kind = listed.description or "", listed.mime_type or ""
        return McpResource(listed.uri, listed.name, described, kind, listed.size)


@dataclass(frozen=True, slots=True)
class McpPromptArgument:
    """Argument of a prompt, whose value is a text.

    Attributes:
        name: its name.
        description: meaning of the argument; "" if the server gives none.
        required: whether it has to be given.
    """

    name: str
    description: str
    required: bool


@dataclass(frozen=True, slots=True)
class McpPrompt:
    """Prompt of an MCP server.

    Attributes:
        name: its name, for `get_prompt`.
        description: purpose of the prompt; "" if the server gives none.
        arguments: its arguments.
    """

    name: str
    description: str
    arguments: tuple[McpPromptArgument, ...]

    @staticmethod
    def of(listed: Foreign) -> McpPrompt:
        """Converts a prompt from the SDK's type."""
        arguments = tuple(
            McpPromptArgument(each.name, each.description or "", bool(each.required))
            for each in listed.arguments or ()
        )
        return McpPrompt(listed.name, listed.description or "", arguments)

    def check_arguments(self, given: Mapping[str, UserValue]) -> None:
        """Raises ParameterError if the prompt does not take these arguments."""
        known = {each.name: each.required for each in self.arguments}
        shown = ", ".join(name if required else f"{name}?" for name, required in known.items())
        takes = f"It takes: {shown}." if known else "It takes none."
        for name, value in given.items():
            if name not in known:
                problem = f"the prompt {self.name} has no argument {name!r}."
                raise ParameterError("get_prompt", problem, hint=takes)
            if not isinstance(value, str):
                problem = f"{name}: {value!r:.60} is no text, like all arguments of prompts."
                raise ParameterError("get_prompt", problem)
        missing = [name for name, required in known.items() if required and name not in given]
        if missing:
            problem = f"the prompt {self.name} needs {', '.join(missing)}."
            raise ParameterError("get_prompt", problem, hint=takes)


def convert_tool_result(server: str, name: str, answer: Foreign, schema: JsonSchema | None) -> Json:
    """Converts the result of a tool: to its structured content, if there is any, else to its text.

    Args:
        server: the name of the server, for messages.
        name: name of the tool.
        answer: the result, as the SDK returned it.
        schema: schema of the structured content; None if there is none.

    Raises:
        ToolError: the result is too long, or breaks its schema.
    """
    text = "\n".join(map(_text_of_block, answer.content))
    found = answer.structured_content
    structured = None if found is None else json.dumps(found, ensure_ascii=False)
    length = max(len(text), len(structured or ""))
    if length > MAX_RESULT:
        raise ToolError(f"{name} gave {length:,} characters; at most {MAX_RESULT:,} are taken.")
    if answer.is_error:
        return ReportedFailure(f"Error: {text or structured or 'no reason was given'}")
    if schema is None:
        return text if found is None else found
    # with a schema, null is a value
    problem = "its result has no structured content"
    if "structured_content" in answer.model_fields_set:
        problem = _find_violation(schema, found)
    if problem:
        raise ToolError(
            f"the MCP server {server} failed in {name}: {problem}.",
            shown=f"its server failed: {redact(problem)}.",
        )
    return found


def _text_of_block(block: Foreign) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    if block.type == "resource_link":
        return f"(resource {block.uri}: {block.name})"
    return f"({block.type}, not shown)"


def _find_violation(schema: JsonSchema, value: Json) -> str:
    """Describes how a value violates a schema. Returns "" if it does not."""
    try:
        for violation in violations(schema, value):
            message = " ".join(violation.message.split())[:_MAX_TOLD].rstrip(".")
            return f"its result breaks its schema: {message}"
    except RecursionError:
        return "its result is nested too deeply"
    return ""


def convert_resource(uri: str, contents: Sequence[Foreign], limit: int) -> Expression:
    """Converts the contents of a resource to text, images and sounds.

    Args:
        uri: address of the resource, for messages.
        contents: contents of the resource, as the SDK returned them.
        limit: maximum size in bytes.

    Raises:
        ToolError: the resource is too large, or contains something other than text, images and
            sounds.
    """
    name = f"the resource {uri}"
    size = sum(map(_size_of_contents, contents))
    _check_size(name, size, limit, hint="Give another limit: read_resource(uri, max_bytes=…).")
    parts = [_convert_contents(name, each) for each in contents]
    return parts[0] if len(parts) == 1 else Expressions(tuple(parts))


def convert_prompt(name: str, messages: Sequence[Foreign]) -> Expressions:
    """Converts a prompt to turns. Raises ToolError like `convert_resource`."""
    name = f"the prompt {name}"
    _check_size(name, sum(_size_of_block(each.content) for each in messages), MAX_BYTES)
    turns = [_TURNS[each.role](_convert_block(name, each.content)) for each in messages]
    return Expressions(tuple(turns))


def _check_size(name: str, size: int, limit: int, hint: str = "") -> None:
    if size > limit:
        raise ToolError(f"{name} has {size:,} bytes; at most {limit:,} are taken.", hint=hint)


def _size_of_contents(contents: Foreign) -> int:
    if hasattr(contents, "text"):
        return len(contents.text.encode("utf-8", "replace"))
    return len(contents.blob) * 3 // 4  # base64


def _size_of_block(block: Foreign) -> int:
    if block.type == "resource":
        return _size_of_contents(block.resource)
    return (
        len(getattr(block, "text", "").encode("utf-8", "replace"))
        or len(getattr(block, "data", "")) * 3 // 4
    )


def _convert_block(name: str, block: Foreign) -> Expression:
    """Converts the content of a message."""
    if block.type == "text":
        return plain(block.text)
    if block.type == "resource":
        return _convert_contents(f"the resource {block.resource.uri} of {name}", block.resource)
    if block.type == "resource_link":
        raise ToolError(
            f"{name} only has the address of a resource, {block.uri}, which is not followed."
        )
    return _convert_medium(name, block.data, block.mime_type)


def _convert_contents(name: str, contents: Foreign) -> Expression:
    """Converts the contents of a resource."""
    if hasattr(contents, "text"):
        return plain(contents.text)
    media_type = (contents.mime_type or "").lower()
    if media_type.startswith("text/") or media_type.partition(";")[0] == "application/json":
        return plain(_decode(name, contents.blob, media_type).decode("utf-8", "replace"))
    return _convert_medium(name, contents.blob, media_type)


def _convert_medium(name: str, encoded: str, media_type: str) -> SglImage:
    """Converts an image or sound in base64."""
    kind = media_type.lower().partition("/")[0]
    if kind not in _MEDIA:
        raise ToolError(
            f"{name} is of the type {media_type or 'unknown'}. Only text, images and sounds can be added."
        )
    try:
        medium = _MEDIA[kind](_decode(name, encoded, media_type))
        medium.load_media()  # checks the format now, so that an error can blame the server
    except ParameterError as error:
        raise ToolError(f"{name} is of the type {media_type}: {error.message}") from error
    return medium


def _decode(name: str, encoded: str, media_type: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise ToolError(f"{name} is of the type {media_type}, but no base64: {error}.") from error
