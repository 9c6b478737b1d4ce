"""Converts what MCP servers send to values."""

from __future__ import annotations

import json
from typing import Final

from sglang_lite.lang.tools import ReportedFailure
from sglang_lite.protocol import ToolError
from sglang_lite.protocol.anything import Foreign, Json

MAX_RESULT: Final = 1 << 20  # characters of a result, far more than fits in a prompt


def convert_tool_result(name: str, answer: Foreign, schema: Json) -> Json:
    """Converts the result of a tool: to its structured content, if there is any, else to its text.

    Args:
        name: name of the tool.
        answer: the result, as the SDK has it.
        schema: schema of the structured content; None if there is none.

    Raises:
        ToolError: it is too long.
    """
    texts = [
        part.text if part.type == "text" else f"({part.type}, not shown)" for part in answer.content
    ]
    text = "\n".join(texts)
    found = answer.structured_content
    length = max(len(text), 0 if found is None else len(json.dumps(found)))
    if length > MAX_RESULT:
        raise ToolError(f"{name} gave {length:,} characters; at most {MAX_RESULT:,} are taken.")
    if answer.is_error:
        return ReportedFailure(f"Error: {text or 'no reason was given'}")
    # without a schema, null stands for nothing; with one, the SDK has checked that it is the value
    return text if found is None and schema is None else found
