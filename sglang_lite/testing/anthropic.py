"""Test version of Anthropic's Messages API, with the types of its SDK."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_lite.protocol import Constraint, JsonSchema
from sglang_lite.protocol.anything import Json
from sglang_lite.testing import refusals
from sglang_lite.testing.answers import Fail, RenderedAnswer, RequestSummary, count_words
from sglang_lite.testing.api import collect_texts, find_type_error

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class Messages:
    """API of `/v1/messages`."""

    def summarize_request(self, body: Mapping[str, Json]) -> RequestSummary:
        tool, constraint = _forced_tool(body)
        form = (body.get("output_config") or {}).get("format")
        if tool is None and form is not None:
            constraint = JsonSchema(json.dumps(form["schema"]))
        prompt = "\n".join(
            collect_texts({"system": body.get("system"), "messages": body.get("messages")})
        )
        return RequestSummary(
            body["model"],
            prompt,
            bool(body.get("stream")),
            1,
            body.get("max_tokens"),
            tuple(body.get("stop_sequences") or ()),
            constraint,
            tool,
        )

    def refusal(self, body: Mapping[str, Json], *, compatible: bool) -> Fail | None:
        from anthropic.types.message_create_params import (
            MessageCreateParamsNonStreaming,
            MessageCreateParamsStreaming,
        )

        if compatible:
            return None
        kind: Any = (
            MessageCreateParamsStreaming if body.get("stream") else MessageCreateParamsNonStreaming
        )
        typed = {name: value for name, value in body.items() if name not in refusals.SAMPLERS}
        return refusals.anthropic_type_refusal(
            find_type_error(kind, typed)
        ) or refusals.messages_refusal(body)

    def response(
        self, answers: Sequence[RenderedAnswer], request: RequestSummary, number: int
    ) -> Json:
        (each,) = answers
        reason, stop, details = _message_end(each)
        return _build_sdk_message(
            each,
            request,
            number,
            _content_blocks(each, number),
            reason,
            stop,
            details,
            each.completion_tokens,
        )

    def events(
        self,
        answers: Sequence[RenderedAnswer],
        request: RequestSummary,
        body: Mapping[str, Json],
        number: int,
    ) -> list[Json]:
        from anthropic import types

        (only,) = answers
        head = _build_sdk_message(only, request, number, [], None, None, None, 1)
        found: list[Any] = [types.RawMessageStartEvent(message=head, type="message_start")]
        for index, block in enumerate(_content_blocks(only, number)):
            empty, deltas = _split_block_into_deltas(block, only)
            found.append(
                types.RawContentBlockStartEvent(
                    content_block=empty, index=index, type="content_block_start"
                )
            )
            found += [
                types.RawContentBlockDeltaEvent(
                    delta=delta, index=index, type="content_block_delta"
                )
                for delta in deltas
            ]
            found.append(types.RawContentBlockStopEvent(index=index, type="content_block_stop"))
        from anthropic.types.raw_message_delta_event import Delta

        reason, stop, details = _message_end(only)
        usage = types.MessageDeltaUsage(
            output_tokens=only.completion_tokens, output_tokens_details=_thoughts(only)
        )
        delta = Delta(stop_reason=reason, stop_sequence=stop, stop_details=details)
        found.append(types.RawMessageDeltaEvent(delta=delta, type="message_delta", usage=usage))
        return [*found, types.RawMessageStopEvent(type="message_stop")]

    def error_body(self, fail: Fail, number: int) -> Json:
        kind = fail.kind or _KINDS.get(fail.status, "api_error")
        return {
            "type": "error",
            "error": {"type": kind, "message": fail.message},
            "request_id": f"req_{number}",
        }

    def error_event(self, fail: Fail, number: int) -> Json:
        return self.error_body(fail, number)


def token_count_answer(body: Mapping[str, Json]) -> Json:
    """Builds the answer of `/v1/messages/count_tokens`."""
    from anthropic.types import MessageTokensCount

    prompt = "\n".join(
        collect_texts({"system": body.get("system"), "messages": body.get("messages")})
    )
    return MessageTokensCount(input_tokens=count_words(prompt))


def _forced_tool(body: Mapping[str, Any]) -> tuple[str | None, Constraint | None]:
    choice = body.get("tool_choice") or {}
    tools: Sequence[Any] = body.get("tools") or ()
    if choice.get("type") == "tool":
        tool = next(each for each in tools if each.get("name") == choice["name"])
    elif choice.get("type") == "any" and len(tools) == 1:
        tool = tools[0]
    else:
        return None, None
    return tool["name"], JsonSchema(json.dumps(tool["input_schema"]))


def _message_end(answer: RenderedAnswer) -> tuple[Any, str | None, Any]:
    """Returns how a message ends: stop reason, stop sequence, and details of a refusal."""
    from anthropic.types import RefusalStopDetails

    if answer.say.refusal or answer.finish == "filter":
        return (
            "refusal",
            None,
            RefusalStopDetails(type="refusal", explanation=answer.say.refusal or None),
        )
    if answer.finish in ("length", "pause"):
        return ("max_tokens" if answer.finish == "length" else "pause_turn"), None, None
    if answer.stop is not None:
        return "stop_sequence", answer.stop, None
    return ("tool_use" if answer.calls else "end_turn"), None, None


def _content_blocks(answer: RenderedAnswer, number: int) -> list[Any]:
    from anthropic.types import TextBlock, ThinkingBlock, ToolUseBlock

    blocks: list[Any] = []
    if answer.say.thinking:
        blocks.append(
            ThinkingBlock(
                thinking=answer.say.thinking, signature=f"signed-{number}", type="thinking"
            )
        )
    for i, call in enumerate(answer.calls):
        if isinstance(call.input, str):
            raise TypeError("a tool's input is an object here")
        blocks.append(
            ToolUseBlock(
                id=f"toolu_{number}_{i}", input=dict(call.input), name=call.name, type="tool_use"
            )
        )
    if not answer.calls and not answer.say.refusal:
        blocks.append(TextBlock(text=answer.text, type="text"))
    return blocks


def _split_block_into_deltas(block: Any, answer: RenderedAnswer) -> tuple[Any, list[Any]]:
    """Returns a block without content, and the deltas of its content."""
    from anthropic import types

    if block.type == "thinking":
        signed = types.SignatureDelta(signature=block.signature, type="signature_delta")
        empty = types.ThinkingBlock(thinking="", signature="", type="thinking")
        return empty, [types.ThinkingDelta(thinking=block.thinking, type="thinking_delta"), signed]
    if block.type == "tool_use":
        text = json.dumps(block.input)
        parts = (text[: len(text) // 2], text[len(text) // 2 :])
        empty_call = types.ToolUseBlock(id=block.id, input={}, name=block.name, type="tool_use")
        return empty_call, [
            types.InputJSONDelta(partial_json=part, type="input_json_delta") for part in parts
        ]
    pieces = [types.TextDelta(text=piece, type="text_delta") for piece in answer.pieces]
    return types.TextBlock(text="", type="text"), pieces


def _build_sdk_message(
    answer: RenderedAnswer,
    request: RequestSummary,
    number: int,
    blocks: list[Any],
    reason: Any,
    stop: str | None,
    details: Any,
    output: int,
) -> Any:
    from anthropic.types import Message, Usage

    say = answer.say
    usage = Usage(
        input_tokens=max(answer.prompt_tokens - say.cached - say.written, 0),
        output_tokens=output,
        cache_read_input_tokens=say.cached,
        cache_creation_input_tokens=say.written,
        output_tokens_details=_thoughts(answer),
    )
    return Message(
        id=f"msg_{number}",
        content=blocks,
        model=request.model,
        role="assistant",
        stop_reason=reason,
        stop_sequence=stop,
        stop_details=details,
        type="message",
        usage=usage,
    )


def _thoughts(answer: RenderedAnswer) -> Any:
    from anthropic.types import OutputTokensDetails

    return OutputTokensDetails(thinking_tokens=answer.reasoning_tokens)
