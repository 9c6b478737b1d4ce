"""Answers of Anthropic's API, made of the SDK's types."""

from anthropic.types import (
    InputJSONDelta,
    Message,
    MessageDeltaUsage,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from anthropic.types.raw_message_delta_event import Delta
from api_server import Events


def started():
    usage = Usage(
        input_tokens=7, output_tokens=1, cache_read_input_tokens=4, cache_creation_input_tokens=2
    )
    return RawMessageStartEvent(
        type="message_start",
        message=Message(
            id="msg-1", content=[], model="claude-x", role="assistant", type="message", usage=usage
        ),
    )


def piece(text):
    delta = TextDelta(text=text, type="text_delta")
    return RawContentBlockDeltaEvent(type="content_block_delta", index=1, delta=delta)


def ended(reason="end_turn", **fields):
    delta = Delta(stop_reason=reason, **fields)
    return RawMessageDeltaEvent(
        type="message_delta", delta=delta, usage=MessageDeltaUsage(output_tokens=5)
    )


def said(*pieces, reason="end_turn", **fields):
    """A message that thinks, and then says the pieces."""
    thought = ThinkingDelta(thinking="Hm.", type="thinking_delta")
    return Events(
        [
            started(),
            RawContentBlockStartEvent(
                type="content_block_start",
                index=0,
                content_block=ThinkingBlock(thinking="", signature="", type="thinking"),
            ),
            RawContentBlockDeltaEvent(type="content_block_delta", index=0, delta=thought),
            RawContentBlockDeltaEvent(
                type="content_block_delta",
                index=0,
                delta=SignatureDelta(signature="sig", type="signature_delta"),
            ),
            RawContentBlockStartEvent(
                type="content_block_start", index=1, content_block=TextBlock(text="", type="text")
            ),
            *map(piece, pieces),
            ended(reason, **fields),
            RawMessageStopEvent(type="message_stop"),
        ]
    )


def calling(*calls, reason="tool_use"):
    """A message that calls tools: of each its id, name, and its arguments in two pieces."""
    events: list[object] = []
    for i, (id, name, arguments) in enumerate(calls):
        block = ToolUseBlock(id=id, name=name, input={}, type="tool_use")
        events.append(
            RawContentBlockStartEvent(type="content_block_start", index=i, content_block=block)
        )
        for part in (arguments[:5], arguments[5:]):
            delta = InputJSONDelta(partial_json=part, type="input_json_delta")
            events.append(
                RawContentBlockDeltaEvent(type="content_block_delta", index=i, delta=delta)
            )
    return Events([started(), *events, ended(reason), RawMessageStopEvent(type="message_stop")])
