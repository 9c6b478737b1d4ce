"""Answers of OpenAI's chat completions as JSON: messages, deltas of streams, usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang_lite.protocol import Usage
from sglang_lite.protocol.anything import Json
from sglang_lite.server.conversation.sample_reader import CallDelta, PartialToolCall, SampleDelta


def build_assistant_reply(
    text: str, reasoning: str, calls: Sequence[PartialToolCall]
) -> dict[str, Json]:
    """Creates the assistant's message."""
    message: dict[str, Json] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = text or None
        message["tool_calls"] = [_encode_tool_call(call) for call in calls]
    return {**message, "refusal": None}


def _encode_tool_call(call: PartialToolCall) -> dict[str, Json]:
    """Converts a call, as received so far, to the protocol's form."""
    if call.custom:
        return {
            "id": call.id,
            "type": "custom",
            "custom": {"name": call.name, "input": call.arguments},
        }
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def encode_chat_delta(new: SampleDelta) -> dict[str, Json]:
    """Converts what is new in a sample to the delta of a chunk."""
    delta: dict[str, Json] = {}
    if new.reasoning:
        delta["reasoning_content"] = new.reasoning
    if new.content:
        delta["content"] = new.content
    if new.calls:
        delta["tool_calls"] = [_encode_call_chunk(part) for part in new.calls]
    return delta


def _encode_call_chunk(part: CallDelta) -> dict[str, Json]:
    call = part.call
    new = part.arguments
    if part.begins:
        return {"index": call.index, **_encode_tool_call(replace(call, arguments=new))}
    return {
        "index": call.index,
        **({"custom": {"input": new}} if call.custom else {"function": {"arguments": new}}),
    }


def chat_token_counts(usages: Sequence[Usage], reasoning: int) -> dict[str, Json]:
    """Returns the token counts of an answer, whose samples share their prompt."""
    prompt = usages[0].prompt_tokens
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": usages[0].cached_tokens,
            **usages[0].image_counts,
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
