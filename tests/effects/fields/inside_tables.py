"""Cases of what is inside fields, and the records that requests have inside."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any

import msgspec

from sglang_lite.server.anthropic import messages_request as messages
from sglang_lite.server.openai import chat_request as chat
from sglang_lite.server.openai import responses_items as items
from sglang_lite.server.openai import responses_request as responses
from sglang_lite.server.routes import ROUTES
from tests.effects.fields import inside_chat, inside_others
from tests.effects.fields.case import differs
from tests.effects.fields.inside import Inside, records_inside


@cache
def picture(width: int, height: int) -> str:
    """A picture in base64, so small that the server's own process reads it."""
    from PIL import Image

    from tests.runtime.media.seeing import encoded

    return base64.b64encode(encoded(Image.new("RGB", (width, height)), "PNG")).decode()


WIDE, NARROW = (
    f"data:image/png;base64,{picture(400, 60)}",
    f"data:image/png;base64,{picture(30, 30)}",
)


def _seen(
    record: type[msgspec.Struct] | None,
    name: str,
    door: str,
    given: Any,
    without: Any,
    at: str,
    empty: Any,
) -> Inside:
    """Case of a picture, whose size the prompt's tokens show."""
    outer = "input" if door == "ResponsesRequest" else "messages"
    return Inside(
        record, name, door, outer, given, without, differs(at), server="seeing", empty=empty
    )


def _in_chat(url: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]


def _in_response(url: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]


def _in_block(data: str) -> list[Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return [{"role": "user", "content": [{"type": "image", "source": source}]}]


IMAGES = [
    _seen(chat.ImageUrlPart, "image_url", "ChatRequest", _in_chat(WIDE), _in_chat(NARROW), "usage.prompt_tokens", NARROW),
    _seen(chat.ImageUrlPart, "image_url", "ChatRequest", _in_chat({"url": WIDE}), _in_chat({"url": NARROW}),
          "usage.prompt_tokens", {"url": NARROW}),
    _seen(items.InputImage, "image_url", "ResponsesRequest", _in_response(WIDE), _in_response(NARROW), "usage.input_tokens", NARROW),
    _seen(messages.ImageBlock, "source", "CountTokensRequest", _in_block(picture(400, 60)), _in_block(picture(30, 30)), "input_tokens",
          {"type": "base64", "data": picture(30, 30)}),
]  # fmt: skip
CASES = [*inside_chat.CASES, *inside_others.CASES, *IMAGES]
NEUTRAL = {**inside_chat.NEUTRAL, **inside_others.NEUTRAL}
# Requests whose inner fields have tests of their own.
ELSEWHERE = {
    "VertexRequest": "tests/server/test_clouds.py", "DecisionRequest": "tests/server/openai/test_decisions.py",
    "PlayRequest": "tests/server/programs/test_program.py", "ProgramAnswers": "tests/server/programs/test_program.py",
    "GenerateBody": "tests/server/test_sessions.py",
}  # fmt: skip
_REQUESTS = {route.fields.record for route in ROUTES if route.fields is not None}
_PARSED_LATER = (  # from objects, which the request's record has as they come
    responses.FunctionTool, responses.CustomTool, responses.NamedTool, responses.Allowed, messages.OwnTool, chat.AllowedTools,
    items.MessageItem, items.FunctionCallItem, items.CustomCallItem, items.FunctionOutputItem, items.CustomOutputItem,
    items.ReasoningItem, items.ItemReference,
)  # fmt: skip
RECORDS = (
    records_inside(*(each for each in _REQUESTS if each.__name__ not in ELSEWHERE), *_PARSED_LATER)
    - _REQUESTS
)
