"""LlamaIndex: a function-calling LLM. Needs the package llama-index-core."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from llama_index.core.base.llms.generic_utils import (
    achat_to_completion_decorator,
    astream_chat_to_completion_decorator,
    chat_to_completion_decorator,
    stream_chat_to_completion_decorator,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    ContentBlock,
    ImageBlock,
    LLMMetadata,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import BaseTool
from pydantic import ConfigDict, Field

from sglang_lite.engine.engine import Engine
from sglang_lite.integrations.chat import ChatAnswer, ChatEvent, EngineChat
from sglang_lite.protocol import CapabilityError
from sglang_lite.protocol.anything import Json


class SglangLite(FunctionCallingLLM):
    """LlamaIndex LLM that runs on an engine of this process. Tool calls and structured predictions
    always fit their schemas.

    Args:
        engine: the engine, which stays open.
        max_tokens: maximum number of tokens of an answer; None for as many as fit.
        fields: further fields of each chat completion, such as `temperature`; docs/server.md lists
            them. A call's own keywords take precedence.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid", ignored_types=(cached_property,)
    )
    engine: Engine = Field(exclude=True, repr=False)
    max_tokens: int | None = None
    fields: dict[str, Json] = Field(default_factory=dict)

    @classmethod
    def class_name(cls) -> str:
        return "SglangLite"

    @cached_property
    def engine_chat(self) -> EngineChat:
        """Chat interface to the engine."""
        return EngineChat(self.engine)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=self.engine.context_length,
            num_output=self.max_tokens or -1,
            is_chat_model=True,
            is_function_calling_model=True,
            model_name=self.engine.model_name,
        )

    def _completion_fields(
        self, messages: Sequence[ChatMessage], given: dict[str, Json]
    ) -> dict[str, Json]:
        written = [_to_chat_message(message) for message in messages]
        return {"max_tokens": self.max_tokens, **self.fields, **given, "messages": written}

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Json) -> ChatResponse:
        return _to_chat_response(
            self.engine_chat.answer(**self._completion_fields(messages, kwargs))
        )

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Json) -> ChatResponse:
        return _to_chat_response(
            await self.engine_chat.answer_async(**self._completion_fields(messages, kwargs))
        )

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Json) -> ChatResponseGen:
        text = ""
        for event in self.engine_chat.stream(**self._completion_fields(messages, kwargs)):
            text += "" if isinstance(event, ChatAnswer) else event.content
            yield _to_partial_response(event, text)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Json
    ) -> ChatResponseAsyncGen:
        async def responses() -> ChatResponseAsyncGen:
            text = ""
            async for event in self.engine_chat.stream_async(
                **self._completion_fields(messages, kwargs)
            ):
                text += "" if isinstance(event, ChatAnswer) else event.content
                yield _to_partial_response(event, text)

        return responses()

    @llm_completion_callback()
    # the decorator's
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Json) -> Any:
        return chat_to_completion_decorator(self.chat)(prompt, **kwargs)

    @llm_completion_callback()
    # as below
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Json) -> Any:
        return await achat_to_completion_decorator(self.achat)(prompt, **kwargs)

    @llm_completion_callback()
    # as below
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Json) -> Any:
        return stream_chat_to_completion_decorator(self.stream_chat)(prompt, **kwargs)

    @llm_completion_callback()
    # as below
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Json) -> Any:
        return await astream_chat_to_completion_decorator(self.astream_chat)(prompt, **kwargs)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Json] | None = None,
        **kwargs: Json,
    ) -> dict[str, Json]:
        asked = (
            []
            if user_msg is None
            else [ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg]
        )
        if tool_choice in [tool.metadata.get_name() for tool in tools]:
            tool_choice = {"type": "function", "function": {"name": tool_choice}}
        return {
            "messages": [*(chat_history or ()), *asked],
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
            or None,
            "tool_choice": tool_choice or ("required" if tool_required else None),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Json
    ) -> list[ToolSelection]:
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise ValueError(f"the model called no tool: {response.message.content!r:.200}")
        return [
            ToolSelection(
                tool_id=c.tool_call_id or "", tool_name=c.tool_name, tool_kwargs=c.tool_kwargs
            )
            for c in calls
        ]


def _to_chat_message(message: ChatMessage) -> dict[str, Json]:
    """Converts a LlamaIndex message to a message in the form of OpenAI's chat completions."""
    parts: list[dict[str, Json]] = []
    calls = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, ImageBlock):
            parts.append({"type": "image_url", "image_url": {"url": block.inline_url()}})
        elif isinstance(block, ToolCallBlock):
            function = {"name": block.tool_name, "arguments": block.tool_kwargs}
            calls.append({"id": block.tool_call_id, "type": "function", "function": function})
        elif not isinstance(block, ThinkingBlock):  # the model does not see earlier reasoning again
            raise CapabilityError(
                f"a message's {block.block_type} can't be read.", hint="Send texts and images."
            )
    written: dict[str, Json] = {"role": message.role.value, "content": parts}
    if all(part["type"] == "text" for part in parts):
        written["content"] = "\n".join(part["text"] for part in parts)
    if calls:
        written["tool_calls"] = calls
    if "tool_call_id" in message.additional_kwargs:
        written["tool_call_id"] = message.additional_kwargs["tool_call_id"]
    return written


def _to_chat_response(answer: ChatAnswer) -> ChatResponse:
    blocks: list[ContentBlock] = (
        [ThinkingBlock(content=answer.reasoning)] if answer.reasoning else []
    )
    blocks.append(TextBlock(text=answer.text))
    for call in answer.calls:
        given = json.loads(call.arguments) if answer.finish == "tool_calls" else call.arguments
        blocks.append(ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=given))
    raw = answer.as_completion("")
    return ChatResponse(
        message=ChatMessage(role="assistant", blocks=blocks),
        raw=raw,
        additional_kwargs=raw["usage"],
    )


def _to_partial_response(event: ChatEvent, text: str) -> ChatResponse:
    """Converts an event of a stream to a response with the text so far and the new part. The last
    response also has the tool calls.
    """
    if isinstance(event, ChatAnswer):
        return _to_chat_response(event).model_copy(update={"delta": ""})
    new = {"thinking_delta": event.reasoning} if event.reasoning else {}
    return ChatResponse(
        message=ChatMessage(role="assistant", content=text),
        delta=event.content,
        additional_kwargs=new,
    )
