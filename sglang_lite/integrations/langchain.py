"""LangChain: a chat model, and programs as runnables. Needs the package langchain-core."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict, Field

from sglang_lite.engine.engine import Engine
from sglang_lite.integrations.chat import ChatAnswer, ChatEvent, EngineChat
from sglang_lite.lang.function import SglFunction
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Json, UserValue


class ChatSglangLite(BaseChatModel):
    """LangChain chat model that runs on an engine of this process.

    Args:
        engine: the engine, which stays open.
        temperature, max_tokens, stop, timeout: defaults of calls; None for the engine's defaults.
        streaming: whether `invoke` streams, for callbacks that want the text as it arrives.
        fields: further fields of each chat completion, such as `seed` or `response_format`;
            docs/server.md lists them. A call's own keywords take precedence.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid", ignored_types=(cached_property,)
    )
    engine: Engine = Field(exclude=True, repr=False)
    temperature: float | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    timeout: float | None = None
    streaming: bool = False
    fields: dict[str, Json] = Field(default_factory=dict)

    @cached_property
    def chat(self) -> EngineChat:
        return EngineChat(self.engine)

    @property
    def model(self) -> str:
        return self.engine.model_name

    @property
    def _llm_type(self) -> str:
        return "sglang_lite"

    @property
    def _identifying_params(self) -> dict[str, Json]:
        return {"model": self.model, **self._call_fields([], None, {})}

    def _call_fields(
        self, messages: list[BaseMessage], stop: list[str] | None, given: dict[str, Json]
    ) -> dict[str, Json]:
        """Returns the fields of a call. Keywords that only LangChain's callbacks and tracer read
        are left out (`run_manager`, `ls_…`).
        """
        own = {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stop": stop or self.stop or None,
        }
        asked = {
            "timeout": self.timeout,
            **self.fields,
            **{k: v for k, v in own.items() if v is not None},
            **given,
        }
        asked["messages"] = convert_to_openai_messages(messages)
        return {
            name: value
            for name, value in asked.items()
            if name != "run_manager" and not name.startswith("ls_")
        }

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, **kwargs: Json
    ) -> Iterator[ChatGenerationChunk]:
        return map(self._to_chunk, self.chat.stream(**self._call_fields(messages, stop, kwargs)))

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, **kwargs: Json
    ) -> AsyncIterator[ChatGenerationChunk]:
        async for event in self.chat.stream_async(**self._call_fields(messages, stop, kwargs)):
            yield self._to_chunk(event)

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, **kwargs: Json
    ) -> ChatResult:
        events = self.chat.stream(False, **self._call_fields(messages, stop, kwargs))
        return generate_from_stream(map(self._to_chunk, events))

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, **kwargs: Json
    ) -> ChatResult:
        events = self.chat.stream_async(False, **self._call_fields(messages, stop, kwargs))
        return await agenerate_from_stream(self._to_chunk(event) async for event in events)

    def _to_chunk(self, event: ChatEvent) -> ChatGenerationChunk:
        if isinstance(event, ChatAnswer):
            return ChatGenerationChunk(message=self._last_chunk(event))
        thought = {"reasoning_content": event.reasoning} if event.reasoning else {}
        message = AIMessageChunk(event.content, additional_kwargs=thought)
        for part in event.calls:  # parts of one call are joined by their index
            name, id = (part.call.name, part.call.id) if part.begins else (None, None)
            call = tool_call_chunk(name=name, args=part.arguments, id=id, index=part.call.index)
            message += AIMessageChunk("", tool_call_chunks=[call])
        return ChatGenerationChunk(message=message)

    def _last_chunk(self, answer: ChatAnswer) -> AIMessageChunk:
        """Returns the last chunk of a message: its finish reason, log-probabilities, and the number
        of tokens used.
        """
        metadata: dict[str, Json] = {"finish_reason": answer.finish, "model_name": self.model}
        if answer.logprobs is not None:
            metadata["logprobs"] = {"content": answer.logprobs}
        prompt = answer.usage.prompt_tokens
        completion = answer.usage.completion_tokens
        tokens = UsageMetadata(
            input_tokens=prompt,
            output_tokens=completion,
            total_tokens=prompt + completion,
            input_token_details={"cache_read": answer.usage.cached_tokens},
        )
        return AIMessageChunk(
            "", chunk_position="last", response_metadata=metadata, usage_metadata=tokens
        )

    def bind_tools(
        self,
        tools: Sequence[dict[str, Json] | type | Callable[..., UserValue] | BaseTool],
        *,
        tool_choice: str | dict[str, Json] | bool | None = None,
        strict: bool | None = None,
        **kwargs: Json,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        shown = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if tool_choice in [tool["function"]["name"] for tool in shown]:
            tool_choice = {"type": "function", "function": {"name": tool_choice}}
        elif tool_choice in (True, "any"):
            tool_choice = "required"
        return self.bind(tools=shown, tool_choice=tool_choice or None, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Json] | type,
        *,
        include_raw: bool = False,
        method: str = "function_calling",
        strict: bool | None = None,
        **kwargs: Json,
    ) -> Runnable[
        LanguageModelInput, Any
    ]:  # the schema's type, which LangChain's base doesn't name
        """Returns a runnable whose output is a value of a schema. `method` is "function_calling"
        for a tool call, "json_schema" for an answer that fits the schema, or "json_mode" for JSON
        whose form the prompt describes. Calls and answers fit the schema even without `strict`.

        Raises:
            ParameterError: `method` is none of these.
        """
        if method == "function_calling":
            return super().with_structured_output(
                schema, include_raw=include_raw, strict=strict, **kwargs
            )
        if method not in ("json_schema", "json_mode"):
            raise ParameterError(
                "method", f"{method!r:.60} is not function_calling, json_schema or json_mode."
            )
        form: dict[str, Json] = {"type": "json_object"}
        if method == "json_schema":
            form = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": convert_to_json_schema(schema)},
            }
        typed = isinstance(schema, type) and is_basemodel_subclass(schema)
        parser: Any = PydanticOutputParser(pydantic_object=schema) if typed else JsonOutputParser()
        model = self.bind(response_format=form, **kwargs)
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        )
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks(
            [failed], exception_key="parsing_error"
        )

    def get_token_ids(self, text: str) -> list[int]:
        return self.engine.tokenizer.encode(text, first=False)


def runnable(program: SglFunction) -> Runnable[dict[str, Json], UserValue]:
    """Wraps a program as a runnable that takes a dict of the program's arguments. The runnable's
    output is what the program returns or, if it returns nothing, its finished state. `batch` and
    `abatch` run the program once for each input.
    """

    def output(state: Any) -> Any:
        state.sync()
        return state if state.ret_value is None else state.ret_value

    async def arun(given: dict[str, Json]) -> Any:
        return output(await program.arun(**given))

    return RunnableLambda(
        lambda given: output(program.run(**given)), arun, name=program.func.__name__
    )
