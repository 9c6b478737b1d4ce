"""Test versions of OpenAI's chat completions and completions, with the types of its SDK."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from sglang_lite.protocol import Constraint, JsonSchema, Lark, Regex
from sglang_lite.protocol.anything import Json
from sglang_lite.testing import refusals
from sglang_lite.testing.answers import Fail, RenderedAnswer, RequestSummary, ToolCall
from sglang_lite.testing.api import collect_texts, find_type_error

_FINISH = {"stop": "stop", "length": "length", "filter": "content_filter", "pause": "stop"}
_RUST_CHARACTER = re.compile(r"\\x\{([0-9A-Fa-f]+)\}")
_KINDS = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "invalid_request_error",
    404: "invalid_request_error",
    429: "requests",
}


class OpenAiApi:
    """Refusals and error responses, which all of OpenAI's APIs share.

    Attributes:
        params: name of the SDK's request types in `openai.types`, without "Streaming" or
            "NonStreaming".
        refused: returns the refusal of a request that fits these types, or None.
    """

    params: ClassVar[str]
    refused: ClassVar[Callable[[Mapping[str, Json]], Fail | None]]

    def refusal(self, body: Mapping[str, Json], *, compatible: bool) -> Fail | None:
        if compatible:
            return None
        module, _, name = self.params.rpartition(".")
        kinds = import_module(f"openai.types.{module}")
        kind = getattr(kinds, f"{name}{'Streaming' if body.get('stream') else 'NonStreaming'}")
        return refusals.openai_type_refusal(find_type_error(kind, body)) or type(self).refused(body)

    def error_body(self, fail: Fail, number: int) -> Json:
        from openai.types import ErrorObject

        answer = ErrorObject(
            message=fail.message,
            type=fail.kind or _KINDS.get(fail.status, "server_error"),
            param=fail.parameter,
            code=fail.code,
        )
        return {"error": json.loads(answer.to_json())}

    def error_event(self, fail: Fail, number: int) -> Json:
        return self.error_body(fail, number)


class Chat(OpenAiApi):
    """API of `/chat/completions`."""

    params = "chat.completion_create_params.CompletionCreateParams"
    refused = refusals.chat_refusal

    def summarize_request(self, body: Mapping[str, Json]) -> RequestSummary:
        tool, custom, constraint = _forced_tool(body)
        form = body.get("response_format") or {}
        if tool is None and form.get("type") == "json_schema":
            constraint = JsonSchema(json.dumps(form["json_schema"].get("schema", {})))
        elif tool is None and form.get("type") == "json_object":
            constraint = JsonSchema('{"type": "object"}')
        return RequestSummary(
            body["model"],
            "\n".join(collect_texts(body.get("messages"))),
            bool(body.get("stream")),
            body.get("n") or 1,
            body.get("max_completion_tokens", body.get("max_tokens")),
            list_stop_strings(body.get("stop")),
            constraint,
            tool,
            custom,
            (body.get("top_logprobs") or 0) if body.get("logprobs") else None,
        )

    def response(
        self, answers: Sequence[RenderedAnswer], request: RequestSummary, number: int
    ) -> Json:
        from openai.types.chat import ChatCompletion, ChatCompletionMessage
        from openai.types.chat.chat_completion import Choice

        choices = []
        for index, each in enumerate(answers):
            calls: Any = [
                _build_sdk_call(call, f"call_{number}_{i}") for i, call in enumerate(each.calls)
            ] or None
            message = ChatCompletionMessage(
                role="assistant",
                content=each.text if not calls and not each.say.refusal else None,
                refusal=each.say.refusal or None,
                tool_calls=calls,
            )
            choices.append(
                Choice(
                    index=index,
                    finish_reason=_openai_finish_reason(each),
                    message=message,
                    logprobs=_logprobs(each, request),
                )
            )
        return ChatCompletion(
            id=f"chatcmpl-{number}",
            choices=choices,
            created=number,
            model=request.model,
            object="chat.completion",
            usage=build_fake_usage(answers),
        )

    def events(
        self,
        answers: Sequence[RenderedAnswer],
        request: RequestSummary,
        body: Mapping[str, Json],
        number: int,
    ) -> list[Json]:
        from openai.types.chat.chat_completion_chunk import Choice, ChoiceDelta, ChoiceDeltaToolCall

        found: list[Any] = []

        def add_chunk(
            index: int, delta: ChoiceDelta, finish: Any = None, logprobs: Any = None
        ) -> None:
            choice = Choice(index=index, delta=delta, finish_reason=finish, logprobs=logprobs)
            found.append(_build_chat_chunk(request, number, [choice]))

        for index, each in enumerate(answers):
            add_chunk(index, ChoiceDelta(role="assistant", content=""))
            if each.say.refusal:
                add_chunk(index, ChoiceDelta(refusal=each.say.refusal))
            for piece in [] if each.calls or each.say.refusal else each.pieces:
                add_chunk(
                    index, ChoiceDelta(content=piece), None, _logprobs(each, request, [piece])
                )
            for i, call in enumerate(each.calls):
                name = {"name": call.name, "arguments": ""}
                arguments = _call_arguments_text(call)
                first_delta: dict[str, Any] = {
                    "index": i,
                    "id": f"call_{number}_{i}",
                    "type": "function",
                    "function": name,
                }
                add_chunk(index, ChoiceDelta(tool_calls=[ChoiceDeltaToolCall(**first_delta)]))
                for part in (arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]):
                    next_delta: dict[str, Any] = {"index": i, "function": {"arguments": part}}
                    add_chunk(index, ChoiceDelta(tool_calls=[ChoiceDeltaToolCall(**next_delta)]))
            add_chunk(index, ChoiceDelta(), _openai_finish_reason(each))
        if (body.get("stream_options") or {}).get("include_usage"):
            found.append(_build_chat_chunk(request, number, [], build_fake_usage(answers)))
        return [*found, "[DONE]"]


class Completions(OpenAiApi):
    """API of `/completions`."""

    params = "completion_create_params.CompletionCreateParams"
    refused = refusals.stop_count_refusal

    def summarize_request(self, body: Mapping[str, Json]) -> RequestSummary:
        return RequestSummary(
            body["model"],
            "\n".join(collect_texts(body.get("prompt"))),
            bool(body.get("stream")),
            body.get("n") or 1,
            body.get("max_tokens", 16),
            list_stop_strings(body.get("stop")),
            logprobs=body.get("logprobs"),
        )

    def response(
        self, answers: Sequence[RenderedAnswer], request: RequestSummary, number: int
    ) -> Json:
        return _build_completion(
            request,
            number,
            [_build_completion_choice(i, each, request) for i, each in enumerate(answers)],
            build_fake_usage(answers),
        )

    def events(
        self,
        answers: Sequence[RenderedAnswer],
        request: RequestSummary,
        body: Mapping[str, Json],
        number: int,
    ) -> list[Json]:
        found = []
        for index, each in enumerate(answers):
            pieces = each.pieces or [""]
            found += [
                _build_completion(
                    request,
                    number,
                    [_build_completion_choice(index, each, request, piece, finished=False)],
                    None,
                )
                for piece in pieces[:-1]
            ]
            found.append(
                _build_completion(
                    request,
                    number,
                    [_build_completion_choice(index, each, request, pieces[-1])],
                    None,
                )
            )
        if (body.get("stream_options") or {}).get("include_usage"):
            found.append(_build_completion(request, number, [], build_fake_usage(answers)))
        return [*found, "[DONE]"]


def list_stop_strings(stop: Json) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def build_fake_usage(answers: Sequence[RenderedAnswer]) -> Json:
    from openai.types import CompletionUsage
    from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails

    prompt = answers[0].prompt_tokens
    completion = sum(each.completion_tokens for each in answers)
    say = answers[0].say
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=say.cached, cache_write_tokens=say.written
        ),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(t.reasoning_tokens for t in answers)
        ),
    )


def _forced_tool(body: Mapping[str, Any]) -> tuple[str | None, bool, Constraint | None]:
    """Returns the tool that must be called: its name (None if no tool is forced), True if its input
    is text, and the input's constraint.
    """
    choice = body.get("tool_choice")
    if not isinstance(choice, Mapping) or choice.get("type") not in ("function", "custom"):
        return None, False, None
    kind = choice["type"]
    name = choice[kind]["name"]
    tool = next(
        each[kind]
        for each in body.get("tools", ())
        if each.get("type") == kind and each[kind]["name"] == name
    )
    if kind == "function":
        return name, False, JsonSchema(json.dumps(tool.get("parameters") or {}))
    return name, True, constraint_from_grammar((tool.get("format") or {}).get("grammar"))


def constraint_from_grammar(grammar: Mapping[str, Json] | None) -> Constraint | None:
    """Returns the constraint for a custom tool's input, or None if its input is free text."""
    if grammar is None:
        return None
    definition = grammar["definition"]
    return (
        Lark(definition)
        if grammar["syntax"] == "lark"
        else Regex(_RUST_CHARACTER.sub(_convert_escape, definition))
    )


def _convert_escape(found: re.Match[str]) -> str:
    """Converts a character escape of Rust's regex syntax to the syntax of this package."""
    code = int(found[1], 16)
    return f"\\u{code:04x}" if code < 2**16 else chr(code)


def _openai_finish_reason(answer: RenderedAnswer) -> Any:
    return "tool_calls" if answer.calls and answer.finish == "stop" else _FINISH[answer.finish]


def _call_arguments_text(call: ToolCall) -> str:
    return call.input if isinstance(call.input, str) else json.dumps(call.input)


def _build_sdk_call(call: ToolCall, key: str) -> Any:
    from openai.types.chat import (
        ChatCompletionMessageCustomToolCall,
        ChatCompletionMessageFunctionToolCall,
    )
    from openai.types.chat.chat_completion_message_custom_tool_call import Custom
    from openai.types.chat.chat_completion_message_function_tool_call import Function

    if isinstance(call.input, str):
        custom = Custom(input=call.input, name=call.name)
        return ChatCompletionMessageCustomToolCall(id=key, custom=custom, type="custom")
    function = Function(arguments=_call_arguments_text(call), name=call.name)
    return ChatCompletionMessageFunctionToolCall(id=key, function=function, type="function")


def _build_chat_chunk(
    request: RequestSummary, number: int, choices: list[Any], usage: Any = None
) -> Any:
    from openai.types.chat import ChatCompletionChunk

    return ChatCompletionChunk(
        id=f"chatcmpl-{number}",
        choices=choices,
        created=number,
        model=request.model,
        object="chat.completion.chunk",
        usage=usage,
    )


def _logprobs(
    answer: RenderedAnswer, request: RequestSummary, pieces: Sequence[str] | None = None
) -> Any:
    """Invents log-probabilities: each word is almost certain, and its alternatives are made up."""
    if request.logprobs is None or answer.calls:
        return None
    from openai.types.chat.chat_completion import ChoiceLogprobs
    from openai.types.chat.chat_completion_token_logprob import (
        ChatCompletionTokenLogprob,
        TopLogprob,
    )

    content = []
    for piece in answer.pieces if pieces is None else pieces:
        top = [
            TopLogprob(token=piece if not i else f"{piece}{i}", logprob=-0.01 - 5 * i)
            for i in range(request.logprobs)
        ]
        content.append(ChatCompletionTokenLogprob(token=piece, logprob=-0.01, top_logprobs=top))
    return ChoiceLogprobs(content=content, refusal=None)


def _build_completion(request: RequestSummary, number: int, choices: list[Any], usage: Any) -> Any:
    from openai.types import Completion

    return Completion(
        id=f"cmpl-{number}",
        choices=choices,
        created=number,
        model=request.model,
        object="text_completion",
        usage=usage,
    )


def _build_completion_choice(
    index: int,
    answer: RenderedAnswer,
    request: RequestSummary,
    piece: str | None = None,
    *,
    finished: bool = True,
) -> Any:
    from openai.types import CompletionChoice
    from openai.types.completion_choice import Logprobs

    text = answer.text if piece is None else piece
    tokens = answer.pieces if piece is None else [piece]
    logprobs = None
    if request.logprobs is not None:
        logprobs = Logprobs(
            tokens=tokens,
            token_logprobs=[-0.01] * len(tokens),
            top_logprobs=[{token: -0.01} for token in tokens],
            text_offset=[0] * len(tokens),
        )
    finish: Any = _FINISH[answer.finish] if finished else None
    return CompletionChoice.construct(
        index=index, text=text, finish_reason=finish, logprobs=logprobs
    )
