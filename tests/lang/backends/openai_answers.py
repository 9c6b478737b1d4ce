"""Answers of OpenAI's APIs, made of the SDK's types, and a program that asks for one."""

from api_server import Events, Reply
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from openai.types.responses import Response, ResponseCustomToolCall
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails, ResponseUsage

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
        ChatCompletion(id="chat-1", choices=choices, created=1, model="gpt-4o-x", object="chat.completion", usage=usage)
    )


def chunk(text=None, finish=None, index=0, usage=None, choices=True, refusal=None):
    delta = ChoiceDelta(content=text, refusal=refusal)
    each = [ChunkChoice(index=index, delta=delta, finish_reason=finish)] if choices else []
    return ChatCompletionChunk(
        id="chat-1", choices=each, created=1, model="gpt-4o-x", object="chat.completion.chunk", usage=usage
    )


def streamed(*pieces, finish="stop"):
    last = [chunk(finish=finish), chunk(choices=False, usage=USAGE), "[DONE]"]
    return Events([*[chunk(piece) for piece in pieces], *last])


def called(*inputs, **fields):
    """A response in which the custom tool is called."""
    output = [ResponseCustomToolCall(call_id="c", input=i, name="answer", type="custom_tool_call") for i in inputs]
    usage = ResponseUsage(
        input_tokens=20,
        output_tokens=9,
        total_tokens=29,
        input_tokens_details=InputTokensDetails(cached_tokens=8, cache_write_tokens=0),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=6),
    )
    return Reply(
        Response(
            **{
                **dict(id="resp-1", created_at=1, model="gpt-5", object="response", output=output, usage=usage),
                **dict(parallel_tool_calls=False, tool_choice="auto", tools=[]),
                **fields,
            }
        )
    )


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
