"""Client that asks an API: makes the call and the calls that continue it, yields the deltas of a stream, and builds the
samples of the answer.

Independent of providers: an `Api` builds their requests and reads their answers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from sglang_lite.errors import Origin
from sglang_lite.lang.backend.connection import Connection
from sglang_lite.lang.backend.provider_items import ReturnedItems
from sglang_lite.lang.backend.remote_api import Api, JsonTool, PartialAnswer, Question, Reader, Tools
from sglang_lite.lang.backend.remote_errors import Failures, shortened
from sglang_lite.lang.backend.token_usage import TokenUsage
from sglang_lite.protocol import BackendError, Delta, Generation, SglError, Unset, Usage, ValueValidationError
from sglang_lite.text.tool_use import answer_object, call_object, calls_object

_MOST_PAUSES = 16  # calls for one answer, if the model keeps pausing and has to be asked to continue


@dataclass(frozen=True, slots=True)
class ApiClient:
    """Client of one backend's API.

    Attributes:
        connection: client of the SDK and rate limit.
        failures: translator of the SDK's errors; has the backend's name, provider and model.
        tokens: total usage of the backend.
        given_back: provider items of earlier turns, which the API expects back.
    """

    connection: Connection
    failures: Failures
    tokens: TokenUsage
    given_back: ReturnedItems

    async def ask(
        self, api: Api, question: Question, *, constrained: bool, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Asks a question. Yields deltas if `stream`, then the finished samples.

        Args:
            constrained: whether the answer has a constraint, so that an answer that was cut short is an error.
            stream: whether to yield deltas.

        Raises:
            BackendError: the call failed, or the answer is incomplete or can't be read.
            ValueValidationError: a constrained answer was cut short, or has several tool calls where one is allowed.
        """
        reader = api.reader()
        try:
            with self.failures.translated():
                async with aclosing(self._read(api, question, reader, stream=stream)) as deltas:
                    async for delta in deltas:
                        yield delta
            for each in self._samples(reader, question, constrained=constrained):
                yield each
        except SglError as error:
            if error.origin is None:
                known = self.failures.origin
                error.origin = Origin(known.provider, known.model, reader.meta.get("id"))
            error.usage = reader.usage
            raise

    async def _read(self, api: Api, question: Question, reader: Reader, *, stream: bool) -> AsyncGenerator[Delta, None]:
        """Makes the call, and further calls while the model pauses. Yields the deltas of a stream."""
        request = api.request(question)
        waited = await self.connection.limit.wait(_estimate(question))
        began, first = time.perf_counter(), 0.0
        for _ in range(_MOST_PAUSES):
            create = api.create(self.connection.client())
            if stream or api.always_streams:
                async with await create(**request, **api.streamed) as events:
                    async for event in events:
                        for delta in reader.event(event):
                            first = first or time.perf_counter() - began
                            if stream and (delta.text or delta.reasoning):
                                yield delta
            else:
                said = await create(**request)
                if isinstance(said, str):  # SDKs return a body that is not JSON as a string
                    raise self.failures.unreadable(f"the answer is not JSON, but {shortened(said)[:200] or 'empty'}")
                reader.whole(said)
            if not reader.paused:
                break
            request = api.resumed(request, reader)
        reader.meta |= {"provider": self.failures.origin.provider} | ({"waited_s": waited} if waited else {})
        times = {"first_token_s": first, "total_s": time.perf_counter() - began}
        reader.usage = msgspec.structs.replace(reader.usage, **times)

    def _samples(self, reader: Reader, question: Question, *, constrained: bool) -> Iterator[Generation]:
        """Yields the finished samples of an answer, and adds its usage to the totals."""
        self.tokens.add(reader.usage)
        if reader.failure:
            raise self.failures.failed(reader.failure)
        if reader.paused:
            raise self.failures.unreadable(f"the model paused {_MOST_PAUSES} times")
        wanted = question.params.samples
        if len(reader.samples) != wanted:
            raise self.failures.unreadable(f"{len(reader.samples)} samples arrived instead of {wanted}")
        for index, sample in sorted(reader.samples.items()):
            if sample.reason is None:
                raise self.failures.unreadable("the stream ended before the answer was complete")
            # Providers report one usage for all samples together; the first sample carries it.
            usage = Usage() if index else reader.usage
            text = self._text(sample, question, usage, constrained=constrained)
            if sample.items and wanted == 1 and not question.prompt.partial:
                self.given_back.keep(question.prompt.messages, text, sample.items)
            yield Generation(
                text,
                finish_reason="length" if sample.cut else "stop",
                matched=sample.matched,
                usage=usage,
                index=index,
                output_logprobs=sample.logprobs,
                meta=reader.meta,
                reasoning=sample.thoughts,
            )

    def _text(self, said: PartialAnswer, question: Question, usage: Usage, *, constrained: bool) -> str:
        """Text of a sample. Tool calls become JSON text: the arguments, or an object that names the tool.

        Raises:
            RefusalError: the model refused to answer.
            ValueValidationError: a constrained answer was cut short, or has several tool calls where one is allowed.
            BackendError: the answer is empty.
        """
        name = self.failures.name
        if said.refusal:
            raise self.failures.refused(said.refusal)
        if said.cut and constrained:
            thoughts = ", which reasoning may have used up" if not said.text and not said.calls else ""
            problem = f"{name} was cut short after {usage.completion_tokens} tokens{thoughts}."
            raise ValueValidationError(problem, text=said.text, hint="Raise max_tokens.")
        if isinstance(question.shape, Tools | JsonTool) and said.calls:
            return self._called(said, question.shape)
        if not said.text and (said.cut or isinstance(question.params.stop, Unset)):
            spent = f" after {usage.completion_tokens} tokens, which reasoning may have used up" if said.cut else ""
            raise BackendError(f"{name} returned no text{spent}.", hint="Raise max_tokens, or change the prompt.")
        return answer_object(said.text) if isinstance(question.shape, Tools) else said.text

    def _called(self, said: PartialAnswer, shape: Tools | JsonTool) -> str:
        """JSON text of a sample's tool calls, in their order."""
        calls = [call for _, call in sorted(said.calls.items())]
        if isinstance(shape, Tools) and shape.parallel:
            return calls_object([(call.name, call.arguments) for call in calls])
        if len(calls) > 1:
            names = ", ".join(call.name for call in calls)
            problem = (
                f"{self.failures.name} called {len(calls)} tools at once ({names}), but this node accepts one call."
            )
            hint = "Ask for one call in the prompt, set parallel_tool_calls=True, or set retries."
            raise ValueValidationError(problem, text=said.text, hint=hint)
        return calls[0].arguments if isinstance(shape, JsonTool) else call_object(calls[0].name, calls[0].arguments)


def _estimate(question: Question) -> float:
    """Estimated tokens of a call: a quarter of the prompt's characters, plus `max_tokens` if set."""
    limit = question.params.max_tokens
    chars = sum(len(span.text) for span in question.prompt.spans)
    return chars / 4 + (0 if isinstance(limit, Unset) else limit)
