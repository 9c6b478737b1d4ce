"""Answers of OpenAI's APIs, made of the SDK's types, and a program that asks for one."""

from typing import Any

from api_server import Events, Reply
from openai.types import CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
)
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputRefusal,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseReasoningSummaryTextDeltaEvent,
    ResponseTextDeltaEvent,
)
from openai.types.responses.response_reasoning_item import Summary
from openai.types.responses.response_usage import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseUsage,
)

import sglang_lite as sgl

PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU\x00\x00\x00\n"
    b"IDATx\x9cc\xf8\x0f\x00\x01\x01\x01\x00\x1b\xb6\xeeV\x00\x00\x00\x00IEND\xaeB`\x82"
)
USAGE = CompletionUsage(
    prompt_tokens=10,
    completion_tokens=5,
    total_tokens=15,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=4),
    completion_tokens_details=CompletionTokensDetails(reasoning_tokens=3),
)


def said(*texts, finish="stop", refusal=None, logprobs=None, usage=USAGE):
    """A chat completion with a choice for each text."""
    choices = [
        Choice(
            index=i,
            finish_reason=finish,
            logprobs=logprobs,
            message=ChatCompletionMessage(role="assistant", content=text, refusal=refusal),
        )
        for i, text in enumerate(texts)
    ]
    return Reply(
        ChatCompletion(
            id="chat-1",
            choices=choices,
            created=1,
            model="gpt-4o-x",
            object="chat.completion",
            usage=usage,
        )
    )


def calling(*calls):
    """A chat completion that calls tools: of each its id, name and arguments."""
    reply = said(None, finish="tool_calls")
    reply.body.choices[0].message.tool_calls = [
        ChatCompletionMessageFunctionToolCall(
            id=i, type="function", function=Function(name=name, arguments=arguments)
        )
        for i, name, arguments in calls
    ]
    return reply


def chunk(text=None, finish=None, index=0, usage=None, choices=True, refusal=None):
    delta = ChoiceDelta(content=text, refusal=refusal)
    each = [ChunkChoice(index=index, delta=delta, finish_reason=finish)] if choices else []
    return ChatCompletionChunk(
        id="chat-1",
        choices=each,
        created=1,
        model="gpt-4o-x",
        object="chat.completion.chunk",
        usage=usage,
    )


def streamed(*pieces, finish="stop"):
    last = [chunk(finish=finish), chunk(choices=False, usage=USAGE), "[DONE]"]
    return Events([*[chunk(piece) for piece in pieces], *last])


def response(*output, **fields):
    """A response with these items."""
    usage = ResponseUsage(
        input_tokens=20,
        output_tokens=9,
        total_tokens=29,
        input_tokens_details=InputTokensDetails(cached_tokens=8, cache_write_tokens=0),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=6),
    )
    known = dict(
        id="resp-1",
        created_at=1,
        model="gpt-5",
        object="response",
        output=list(output),
        usage=usage,
    )
    return Response(
        **{**known, **dict(parallel_tool_calls=False, tool_choice="auto", tools=[]), **fields}
    )


def called(*inputs, **fields):
    """A response in which the custom tool is called."""
    calls = [
        ResponseCustomToolCall(call_id="c", input=i, name="answer", type="custom_tool_call")
        for i in inputs
    ]
    return Reply(response(*calls, **fields))


THOUGHT = ResponseReasoningItem(
    id="rs-1",
    type="reasoning",
    encrypted_content="c2VjcmV0",
    summary=[Summary(text="Hm.", type="summary_text")],
)


def message(text):
    """An item of a response: text."""
    content: list[ResponseOutputText | ResponseOutputRefusal] = [
        ResponseOutputText(annotations=[], text=text, type="output_text")
    ]
    return ResponseOutputMessage(
        id="m-1", role="assistant", status="completed", type="message", content=content
    )


def function_call(name, arguments):
    """An item of a response: a call of a tool."""
    return ResponseFunctionToolCall(
        call_id="call-1", name=name, arguments=arguments, type="function_call"
    )


def responded(*pieces, **fields):
    """The events of a response that thinks and says the pieces."""
    whole = response(THOUGHT, message("".join(pieces)), **fields)
    place: dict[str, Any] = dict(content_index=0, item_id="m-1", output_index=1, sequence_number=0)
    texts = [
        ResponseTextDeltaEvent(delta=piece, logprobs=[], type="response.output_text.delta", **place)
        for piece in pieces
    ]
    return [
        ResponseCreatedEvent(response=response(status="in_progress"), sequence_number=0, type="response.created"),
        ResponseReasoningSummaryTextDeltaEvent(
            delta="Hm.", item_id="rs-1", output_index=0, sequence_number=0, summary_index=0,
            type="response.reasoning_summary_text.delta",
        ),
        *texts,
        ResponseCompletedEvent(response=whole, sequence_number=9, type="response.completed"),
    ]  # fmt: skip


def failure(status, message, code=None, **headers):
    body = {"error": {"message": message, "type": "some_error", "param": None, "code": code}}
    return Reply(body, status, {"x-request-id": "req-7", **headers})


def run(backend, before="", *, user="Hi", stream=False, **options):
    @sgl.function
    def program(s):
        s += sgl.system("Be brief.")
        s += sgl.user(user)
        s += sgl.assistant(before + sgl.gen("a", **options))

    return program.run(backend=backend, stream=stream)


def ask(backend, before="", **options):
    return run(backend, before, **options)["a"]
