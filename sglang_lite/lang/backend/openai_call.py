"""Calls of OpenAI's SDK with requests that are plain JSON.

The SDK walks through each request by its types, for what is not JSON yet: a third of the processor time of a call. What
stands in `extra_body` it takes as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sglang_lite.protocol.anything import Foreign, Json


def as_it_is(create: Callable[..., Awaitable[Foreign]], *empty: str) -> Callable[..., Awaitable[Json]]:
    """The SDK's call, with all of a request in `extra_body` but the model and `stream`.

    Args:
        empty: lists that the SDK wants to be given, for which those of the request stand in the end.
    """

    def call(*, model: str, extra_body: dict[str, Any] | None = None, **asked: Any) -> Awaitable[Any]:
        given: dict[str, Any] = {name: [] for name in empty}
        if "stream" in asked:
            given["stream"] = asked.pop("stream")
        return create(model=model, extra_body={**asked, **(extra_body or {})}, **given)

    return call
