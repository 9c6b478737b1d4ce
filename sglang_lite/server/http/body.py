"""Bodies of requests: JSON within limits, converted to the record of a protocol, with errors that
say where a fault is.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, TypeVar

import msgspec

from sglang_lite.protocol import ParameterError, WireError
from sglang_lite.protocol.anything import Json
from sglang_lite.server.errors import SlowRequestError, TooLargeError
from sglang_lite.wire.limits import Limits
from sglang_lite.wire.scan import scan_json

if TYPE_CHECKING:
    from starlette.requests import Request

T = TypeVar("T")
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")


async def read_bytes(request: Request, most: int, seconds: float) -> bytes:
    """Reads the body of a request.

    Raises:
        TooLargeError: the body, or its Content-Length, exceeds `most` bytes; the rest is not
            read.
        SlowRequestError: the body has not arrived after `seconds`.
    """
    if int(request.headers.get("content-length", 0)) > most:
        raise _body_too_large_error(most)
    parts = []
    size = 0
    try:
        async with asyncio.timeout(seconds):  # the request counts as open in the meantime
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _body_too_large_error(most)
                parts.append(part)
    except TimeoutError:
        told = f"the body did not arrive within {seconds:g} seconds."
        raise SlowRequestError(
            told, hint="Send as many bytes as Content-Length says, or raise body_timeout_s."
        ) from None
    return b"".join(parts)


def _body_too_large_error(most: int) -> TooLargeError:
    return TooLargeError(
        f"the body is larger than {most:,} bytes.", hint="Send less, or raise max_body_mb."
    )


def parse_object(data: bytes, limits: Limits) -> dict[str, Json]:
    """Parses a JSON object, in which no name may occur twice.

    Raises:
        WireError: the data isn't a JSON object, or is nested too deeply.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"the body is not UTF-8 at byte {error.start}") from None
    scan_json(text, limits)
    try:
        body = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise WireError("the body is not a JSON object")
    return body


def convert(body: object, kind: type[T], where: str = "", *, strict: bool = True) -> T:
    """Converts plain data to a record of type `kind`.

    Args:
        where: place of the data in the body, such as `tools[0]`.
        strict: False if numbers and flags may be text.

    Raises:
        ParameterError: the data is invalid; the error has the path to the fault, such as
            `messages[0].role`.
    """
    try:
        return msgspec.convert(body, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _locate_validation_error(str(error), where) from None
    except RecursionError:
        raise ParameterError(where or "body", "is nested too deeply.") from None


def _locate_validation_error(told: str, where: str) -> ParameterError:
    found = _PLACE.search(told)
    path = ".".join(filter(None, (where, found[1] if found else "")))
    problem = told[: found.start()] if found else told
    missing = re.search(r"missing required field `(\w+)`", problem)
    if missing:
        return ParameterError(f"{path}.{missing[1]}".lstrip("."), "is missing.")
    return ParameterError(path or "body", f"{problem[:1].lower()}{problem[1:]}.")
