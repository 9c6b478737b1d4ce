"""Calls of OpenAI's SDK whose requests are plain JSON already.

The SDK walks through each request by its types, to convert values that are not JSON yet, which takes a third of a
call's processor time. It sends `extra_body` unchanged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sglang_lite.protocol.anything import Foreign, Json


def with_raw_body(create: Callable[..., Awaitable[Foreign]], *empty: str) -> Callable[..., Awaitable[Json]]:
    """Wraps a method of the SDK so that all of the request except the model and `stream` is sent in `extra_body`.

    Args:
        empty: names of list arguments that the SDK requires. They are passed empty, and the request's own lists replace
            them in the body.
    """

    def call(*, model: str, extra_body: dict[str, Any] | None = None, **arguments: Any) -> Awaitable[Any]:
        keywords: dict[str, Any] = {name: [] for name in empty}
        if "stream" in arguments:
            keywords["stream"] = arguments.pop("stream")
        return create(model=model, extra_body={**arguments, **(extra_body or {})}, **keywords)

    return call
