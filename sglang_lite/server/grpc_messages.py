"""Interceptor that answers malformed gRPC messages with a status, instead of raising and logging a
traceback.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

_MALFORMED: Final = object()  # stands for a message that can't be read
_PROBLEM: Final = "the message is damaged, or of another type."


class MessageCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc] # has no types
    """Answers INVALID_ARGUMENT to a malformed message, in calls with a single request message."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:  # gRPC's records, which have no types
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler

        def deserialize(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError:
                return _MALFORMED

        async def answer_unary(request: Any, context: Any) -> Any:
            if request is _MALFORMED:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _PROBLEM)
            return await handler.unary_unary(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            if request is _MALFORMED:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _PROBLEM)
            async for each in handler.unary_stream(request, context):
                yield each

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                stream, deserialize, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            answer_unary, deserialize, handler.response_serializer
        )
