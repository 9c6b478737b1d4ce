"""Test version of OpenAI's Responses API, with the types of its SDK."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_lite.protocol import Constraint, JsonSchema
from sglang_lite.protocol.anything import Json
from sglang_lite.testing import refusals
from sglang_lite.testing.answers import Fail, RenderedAnswer, RequestSummary
from sglang_lite.testing.api import collect_texts
from sglang_lite.testing.openai_chat import OpenAiApi, constraint_from_grammar

_INCOMPLETE = {"length": "max_output_tokens", "filter": "content_filter"}


class Responses(OpenAiApi):
    """API of `/responses`."""

    params = "responses.response_create_params.ResponseCreateParams"
    refused = refusals.responses_refusal

    def summarize_request(self, body: Mapping[str, Json]) -> RequestSummary:
        tool, custom, constraint = _forced_tool(body)
        form = (body.get("text") or {}).get("format") or {}
        if tool is None and form.get("type") == "json_schema":
            constraint = JsonSchema(json.dumps(form.get("schema", {})))
        prompt = "\n".join(
            collect_texts({"instructions": body.get("instructions"), "input": body.get("input")})
        )
        return RequestSummary(
            body["model"],
            prompt,
            bool(body.get("stream")),
            1,
            body.get("max_output_tokens"),
            (),
            constraint,
            tool,
            custom,
        )

    def response(
        self, answers: Sequence[RenderedAnswer], request: RequestSummary, number: int
    ) -> Json:
        return _build_sdk_response(answers[0], request, number, _output_items(answers[0], number))

    def events(
        self,
        answers: Sequence[RenderedAnswer],
        request: RequestSummary,
        body: Mapping[str, Json],
        number: int,
    ) -> list[Json]:
        from openai.types import responses as types

        (each,) = answers
        numbers = itertools.count()
        items = _output_items(each, number)
        in_progress = _build_sdk_response(each, request, number, [], status="in_progress")
        found: list[Any] = [
            types.ResponseCreatedEvent(
                response=in_progress, sequence_number=next(numbers), type="response.created"
            ),
            types.ResponseInProgressEvent(
                response=in_progress, sequence_number=next(numbers), type="response.in_progress"
            ),
        ]
        for at, item in enumerate(items):
            found += _item_events(item, at, each, numbers)
        completed = _build_sdk_response(each, request, number, items)
        if each.finish in _INCOMPLETE:
            found.append(
                types.ResponseIncompleteEvent(
                    response=completed, sequence_number=next(numbers), type="response.incomplete"
                )
            )
        else:
            found.append(
                types.ResponseCompletedEvent(
                    response=completed, sequence_number=next(numbers), type="response.completed"
                )
            )
        return found

    def error_event(self, fail: Fail, number: int) -> Json:
        from openai.types.responses import ResponseErrorEvent

        return ResponseErrorEvent(
            code=fail.code or fail.kind or "server_error",
            message=fail.message,
            param=fail.parameter,
            sequence_number=0,
            type="error",
        )


def _forced_tool(body: Mapping[str, Any]) -> tuple[str | None, bool, Constraint | None]:
    choice = body.get("tool_choice")
    if not isinstance(choice, Mapping) or choice.get("type") not in ("function", "custom"):
        return None, False, None
    kind = choice["type"]
    name = choice["name"]
    tool = next(
        each
        for each in body.get("tools", ())
        if each.get("type") == kind and each.get("name") == name
    )
    if kind == "function":
        return name, False, JsonSchema(json.dumps(tool.get("parameters") or {}))
    form = tool.get("format") or {}
    return name, True, constraint_from_grammar(form if form.get("type") == "grammar" else None)


def _output_items(answer: RenderedAnswer, number: int) -> list[Any]:
    """Builds the output items of a response."""
    from openai.types import responses as types
    from openai.types.responses.response_reasoning_item import Summary

    items: list[Any] = []
    if answer.say.thinking:
        summary = [Summary(text=answer.say.thinking, type="summary_text")]
        items.append(
            types.ResponseReasoningItem(id=f"rs_{number}", summary=summary, type="reasoning")
        )
    for i, call in enumerate(answer.calls):
        if isinstance(call.input, str):
            items.append(
                types.ResponseCustomToolCall(
                    id=f"ctc_{number}_{i}",
                    call_id=f"call_{number}_{i}",
                    input=call.input,
                    name=call.name,
                    type="custom_tool_call",
                )
            )
        else:
            items.append(
                types.ResponseFunctionToolCall(
                    id=f"fc_{number}_{i}",
                    call_id=f"call_{number}_{i}",
                    arguments=json.dumps(call.input),
                    name=call.name,
                    type="function_call",
                    status="completed",
                )
            )
    if not answer.calls:
        part: Any = (
            types.ResponseOutputRefusal(refusal=answer.say.refusal, type="refusal")
            if answer.say.refusal
            else types.ResponseOutputText(
                annotations=[], text=answer.text, type="output_text", logprobs=[]
            )
        )
        items.append(
            types.ResponseOutputMessage(
                id=f"msg_{number}",
                content=[part],
                role="assistant",
                type="message",
                status="completed" if answer.finish == "stop" else "incomplete",
            )
        )
    return items


def _build_sdk_response(
    answer: RenderedAnswer,
    request: RequestSummary,
    number: int,
    items: list[Any],
    status: Any = None,
) -> Any:
    from openai.types.responses import Response
    from openai.types.responses.response import IncompleteDetails
    from openai.types.responses.response_usage import (
        InputTokensDetails,
        OutputTokensDetails,
        ResponseUsage,
    )

    why: Any = _INCOMPLETE.get(answer.finish)
    usage = ResponseUsage(
        input_tokens=answer.prompt_tokens,
        output_tokens=answer.completion_tokens,
        total_tokens=answer.prompt_tokens + answer.completion_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=answer.say.cached, cache_write_tokens=answer.say.written
        ),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=answer.reasoning_tokens),
    )
    return Response(
        id=f"resp_{number}",
        created_at=number,
        model=request.model,
        object="response",
        output=items,
        parallel_tool_calls=False,
        tool_choice="auto",
        tools=[],
        error=None,
        incomplete_details=IncompleteDetails(reason=why) if why and status is None else None,
        status=status or ("incomplete" if why else "completed"),
        usage=usage if status is None else None,
    )


def _item_events(item: Any, at: int, answer: RenderedAnswer, numbers: Any) -> list[Any]:
    """Builds the events of an item in a stream."""
    from openai.types import responses as types

    def step(kind: Any, name: str, /, **fields: Any) -> Any:
        return kind(output_index=at, sequence_number=next(numbers), type=name, **fields)

    key = item.id
    added = step(
        types.ResponseOutputItemAddedEvent,
        "response.output_item.added",
        item=_without_content(item),
    )
    found: list[Any] = []
    if item.type == "message":
        found = _message_events(item, answer, step)
    elif item.type == "custom_tool_call":
        name = "response.custom_tool_call_input"
        found = [
            step(
                types.ResponseCustomToolCallInputDeltaEvent,
                f"{name}.delta",
                item_id=key,
                delta=item.input,
            ),
            step(
                types.ResponseCustomToolCallInputDoneEvent,
                f"{name}.done",
                item_id=key,
                input=item.input,
            ),
        ]
    elif item.type == "function_call":
        name = "response.function_call_arguments"
        half = len(item.arguments) // 2
        found = [
            step(
                types.ResponseFunctionCallArgumentsDeltaEvent,
                f"{name}.delta",
                item_id=key,
                delta=part,
            )
            for part in (item.arguments[:half], item.arguments[half:])
        ]
        found.append(
            step(
                types.ResponseFunctionCallArgumentsDoneEvent,
                f"{name}.done",
                item_id=key,
                arguments=item.arguments,
                name=item.name,
            )
        )
    return [
        added,
        *found,
        step(types.ResponseOutputItemDoneEvent, "response.output_item.done", item=item),
    ]


def _without_content(item: Any) -> Any:
    """Copies an item without its content."""
    empty = {
        "message": {"content": []},
        "custom_tool_call": {"input": ""},
        "function_call": {"arguments": ""},
    }
    return item.model_copy(update=empty.get(item.type, {}))


def _message_events(item: Any, answer: RenderedAnswer, step: Any) -> list[Any]:
    from openai.types import responses as types

    (part,) = item.content
    ids = {"item_id": item.id, "content_index": 0}
    if part.type == "refusal":
        empty = part.model_copy(update={"refusal": ""})
        deltas = [
            step(
                types.ResponseRefusalDeltaEvent, "response.refusal.delta", delta=part.refusal, **ids
            ),
            step(
                types.ResponseRefusalDoneEvent, "response.refusal.done", refusal=part.refusal, **ids
            ),
        ]
    else:
        empty = part.model_copy(update={"text": ""})
        name = "response.output_text"
        deltas = [
            step(types.ResponseTextDeltaEvent, f"{name}.delta", delta=piece, logprobs=[], **ids)
            for piece in answer.pieces
        ]
        deltas.append(
            step(types.ResponseTextDoneEvent, f"{name}.done", text=part.text, logprobs=[], **ids)
        )
    return [
        step(types.ResponseContentPartAddedEvent, "response.content_part.added", part=empty, **ids),
        *deltas,
        step(types.ResponseContentPartDoneEvent, "response.content_part.done", part=part, **ids),
    ]
