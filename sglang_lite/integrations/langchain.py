"""LangChain: a chat model, and programs as runnables. Needs the package langchain-core."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    convert_to_openai_messages,
    message_chunk_to_message,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
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
from sglang_lite.server.conversation.sample_reader import CallDelta


class ChatSglangLite(BaseChatModel):
    """Chat model that an engine of this process runs.

    Args:
        engine: the engine, which stays open.
        temperature, max_tokens, stop, timeout: defaults of calls; without them the engine's.
        streaming: whether `invoke` streams, for callbacks that want the text while it arrives.
        fields: further fields of each chat completion, such as `seed` or `response_format`; docs/server.md lists them.
            A call's own keywords take precedence.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", ignored_types=(cached_property,))
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
        return {"model": self.model, **self._asked([], None, {})}

    def _asked(self, messages: list[BaseMessage], stop: list[str] | None, given: dict[str, Json]) -> dict[str, Json]:
        """Fields of a call. Names that only LangChain's tracer reads (`ls_…`) are left out."""
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens, "stop": stop or self.stop or None}
        asked = {"timeout": self.timeout, **self.fields, **{k: v for k, v in own.items() if v is not None}, **given}
        asked["messages"] = convert_to_openai_messages(messages)
        return {name: value for name, value in asked.items() if not name.startswith("ls_")}

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Json,
    ) -> ChatResult:  # fmt: skip
        return _result(self.chat.answer(**self._asked(messages, stop, kwargs)), self.model)

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Json,
    ) -> ChatResult:  # fmt: skip
        return _result(await self.chat.answer_async(**self._asked(messages, stop, kwargs)), self.model)

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Json,
    ) -> Iterator[ChatGenerationChunk]:  # fmt: skip
        for event in self.chat.stream(**self._asked(messages, stop, kwargs)):
            chunk = _chunk(event, self.model)
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Json,
    ) -> AsyncIterator[ChatGenerationChunk]:  # fmt: skip
        async for event in self.chat.stream_async(**self._asked(messages, stop, kwargs)):
            chunk = _chunk(event, self.model)
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def bind_tools(
        self, tools: Sequence[dict[str, Json] | type | Callable[..., UserValue] | BaseTool], *,
        tool_choice: str | dict[str, Json] | bool | None = None, strict: bool | None = None, **kwargs: Json,
    ) -> Runnable[LanguageModelInput, AIMessage]:  # fmt: skip
        shown = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        named = {tool["function"]["name"]: {"type": "function", "function": {"name": tool["function"]["name"]}}
                 for tool in shown}  # fmt: skip
        if isinstance(tool_choice, bool):
            tool_choice = "required" if tool_choice else None
        choice = named.get(tool_choice, tool_choice) if isinstance(tool_choice, str) else tool_choice
        return self.bind(tools=shown, tool_choice="required" if choice == "any" else choice, **kwargs)

    def with_structured_output(
        self, schema: dict[str, Json] | type, *, include_raw: bool = False, method: str = "function_calling",
        strict: bool | None = None, **kwargs: Json,
    ) -> Runnable[LanguageModelInput, Any]:  # fmt: skip
        """Runnable whose output is a value of a schema, by `method`: a call of a tool ("function_calling"), an answer
        that fits the schema ("json_schema"), or JSON whose form the prompt asks for ("json_mode").
        Calls and answers fit the schema also without `strict`.

        Raises:
            ParameterError: `method` is none of these.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, strict=strict, **kwargs)
        if method not in ("json_schema", "json_mode"):
            raise ParameterError("method", f"{method!r:.60} is not function_calling, json_schema or json_mode.")
        form: dict[str, Json] = {"type": "json_object"}
        if method == "json_schema":
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": convert_to_json_schema(schema)}}
        typed = isinstance(schema, type) and is_basemodel_subclass(schema)
        parser: Any = PydanticOutputParser(pydantic_object=schema) if typed else JsonOutputParser()
        model = self.bind(response_format=form, **kwargs)
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")

    def get_token_ids(self, text: str) -> list[int]:
        return self.engine.tokenizer.encode(text, first=False)


def runnable(program: SglFunction) -> Runnable[dict[str, Json], UserValue]:
    """A program as a runnable of its arguments by name, whose output is what the program returns, or else its finished
    state. `batch` and `abatch` run it once for each input; equal beginnings are computed once."""

    def run(given: dict[str, Json]) -> Any:
        return _output(program.run(**given))

    async def arun(given: dict[str, Json]) -> Any:
        return _output(await program.arun(**given))

    return RunnableLambda(run, arun, name=program.func.__name__)


def _output(state: Any) -> Any:
    state.sync()
    return state if state.ret_value is None else state.ret_value


def _chunk(event: ChatEvent, model: str) -> ChatGenerationChunk:
    if isinstance(event, ChatAnswer):
        last = AIMessageChunk("", chunk_position="last", **_facts(event, model))
        return ChatGenerationChunk(message=last)
    parts: dict[int, list[CallDelta]] = {}  # of each call, which is one chunk
    for part in event.calls:
        parts.setdefault(part.call.index, []).append(part)
    calls = []
    for index, (first, *others) in parts.items():
        new = "".join(part.arguments for part in (first, *others))
        named = (first.call.name, first.call.id) if first.begins else (None, None)
        calls.append(tool_call_chunk(name=named[0], args=new, id=named[1], index=index))
    thought = {"reasoning_content": event.reasoning} if event.reasoning else {}
    return ChatGenerationChunk(message=AIMessageChunk(event.content, tool_call_chunks=calls, additional_kwargs=thought))


def _result(answer: ChatAnswer, model: str) -> ChatResult:
    calls = [tool_call_chunk(name=c.name, args=c.arguments, id=c.id, index=c.index) for c in answer.calls]
    thought = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    read = AIMessageChunk(  # which parses the arguments
        answer.text, tool_call_chunks=calls, additional_kwargs=thought, chunk_position="last", **_facts(answer, model)
    )
    return ChatResult(generations=[ChatGeneration(message=message_chunk_to_message(read))])


def _facts(answer: ChatAnswer, model: str) -> dict[str, Json]:
    """Fields of a message about a finished answer."""
    usage = answer.usage
    metadata: dict[str, Json] = {"finish_reason": answer.finish, "model_name": model}
    if answer.logprobs is not None:
        metadata["logprobs"] = {"content": answer.logprobs}
    tokens = UsageMetadata(
        input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details={"cache_read": usage.cached_tokens},
    )  # fmt: skip
    return {"response_metadata": metadata, "usage_metadata": tokens}
