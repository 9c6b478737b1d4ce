"""Client of an API: makes a call and any calls that continue it, yields the deltas of a stream, and
builds the samples of the answer.

Independent of providers: an `Api` builds their requests and reads their answers.
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    suppress,
)
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import msgspec

from sglang_lite.errors import Origin
from sglang_lite.lang.backend.apis.api import (
    Api,
    ApiReader,
    ApiRequest,
    JsonTool,
    PartialAnswer,
    ProviderItems,
    Tools,
)
from sglang_lite.lang.backend.remote.connection import ApiConnection
from sglang_lite.lang.backend.remote.errors import ErrorTranslator, shorten_message
from sglang_lite.lang.backend.token_counts import (
    NOT_CREDIBLE,
    SentRequests,
    TiktokenEncoding,
    TokenUsage,
    add_unreported_usage,
    count_text_tokens,
    estimate_tokens,
    is_credible,
    possible_unreported_usage,
    sent_requests,
    unreported_usages,
)
from sglang_lite.lang.results import missing_data_warnings, with_warnings
from sglang_lite.protocol import (
    BackendError,
    Delta,
    Generation,
    SglError,
    TruncatedError,
    Unset,
    Usage,
    ValueValidationError,
)
from sglang_lite.text.tool_use import answer_as_json, call_as_json, calls_as_json

_MAX_PAUSES = 16  # calls for one answer if the model keeps pausing and has to be asked to continue


@dataclass(frozen=True, slots=True)
class ApiClient:
    """Client of one backend's API.

    Attributes:
        connection: client of the SDK and rate limit.
        errors: translator of the SDK's errors; has the backend's name, provider and model.
        tokens: total usage of the backend.
        provider_items: provider items of earlier turns, which the API expects back.
    """

    connection: ApiConnection
    errors: ErrorTranslator
    tokens: TokenUsage
    provider_items: ProviderItems

    async def request_answer(
        self,
        api: Api,
        request: ApiRequest,
        tokenizer: TiktokenEncoding | None,
        *,
        constrained: bool,
        stream: bool,
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Sends a request. Yields deltas if `stream`, then the finished samples.

        Args:
            tokenizer: tokenizer of the model, to count what the provider does not report; None if
                unknown.
            constrained: whether the answer has a constraint, so that an answer that was cut short
                is an error.
            stream: whether to yield deltas.

        Raises:
            BackendError: the call failed, or the answer is incomplete or can't be read.
            TruncatedError: a constrained answer was cut short.
            ValueValidationError: the answer has several tool calls where one is allowed.
        """
        reader = api.reader()
        account = CallAccount(request, reader, tokenizer)
        try:
            with self.errors.translate_errors():
                async with aclosing(
                    self._read_answer(api, request, reader, account, stream=stream)
                ) as deltas:
                    async for delta in deltas:
                        yield delta
            account.end_answered_call()
            for each in self._finish_samples(reader, request, constrained=constrained):
                yield each
        except asyncio.CancelledError:
            account.end_failed_call(None)
            raise
        except SglError as error:
            account.end_failed_call(error)
            if error.origin is None:
                origin = self.errors.origin
                error.origin = Origin(origin.provider, origin.model, reader.meta.get("id"))
            error.usage = reader.usage
            raise

    async def _read_answer(
        self,
        api: Api,
        request: ApiRequest,
        reader: ApiReader,
        account: CallAccount,
        *,
        stream: bool,
    ) -> AsyncGenerator[Delta, None]:
        """Makes the call and reads its answer. If the model pauses, makes further calls. Yields the
        deltas of a stream.
        """
        arguments = api.arguments(request)
        waited = await self.connection.limit.wait(_estimate_call_tokens(request))
        began = time.perf_counter()
        first = 0.0
        for _ in range(_MAX_PAUSES):
            create = api.create(self.connection.client())
            if stream or api.always_streams:
                async with _open_stream(
                    await account.await_counting_requests(create(**arguments, **api.streamed))
                ) as events:
                    async for event in events:
                        with self.errors.report_unreadable_answer():
                            deltas = _validate_texts(reader.read_event(event))
                        for delta in deltas:
                            first = first or time.perf_counter() - began
                            if stream and (delta.text or delta.reasoning):
                                yield delta
            else:
                response = await account.await_counting_requests(create(**arguments))
                if isinstance(response, str):  # SDKs return a body that is not JSON as a string
                    raise self.errors.unreadable_response_error(
                        f"the answer is not JSON, but {shorten_message(response)[:200] or 'empty'}"
                    )
                with self.errors.report_unreadable_answer():
                    reader.read_whole_answer(response)
            account.answered += 1
            if not reader.paused:
                break
            arguments = api.resumed(arguments, reader)
        reader.meta |= {
            "provider": self.errors.origin.provider,
            "reasoning_tokens": reader.usage.reasoning_tokens,
        }
        reader.meta |= {"waited_s": waited} if waited else {}
        times = {"first_token_s": first, "total_s": time.perf_counter() - began}
        reader.usage = msgspec.structs.replace(reader.usage, **times)

    def _finish_samples(
        self, reader: ApiReader, request: ApiRequest, *, constrained: bool
    ) -> Iterator[Generation]:
        """Yields the finished samples of an answer and adds its usage to the totals."""
        self.tokens.add_usage(reader.usage)
        if reader.failure:
            raise self.errors.answer_failure_error(reader.failure)
        if reader.paused:
            raise self.errors.unreadable_response_error(f"the model paused {_MAX_PAUSES} times")
        count = request.params.samples
        if len(reader.samples) != count:
            raise self.errors.unreadable_response_error(
                f"{len(reader.samples)} samples arrived instead of {count}"
            )
        for index, sample in sorted(reader.samples.items()):
            if sample.finish_reason is None:
                raise self.errors.unreadable_response_error(
                    "the stream ended before the answer was complete"
                )
            # Providers report one usage for all samples together; the first sample carries it.
            usage = Usage() if index else reader.usage
            text = self._sample_text(sample, request, usage, constrained=constrained)
            if sample.provider_items and count == 1 and not request.prompt.partial:
                self.provider_items.store_turn(request.prompt.messages, text, sample.provider_items)
            answer = Generation(
                text,
                finish_reason="length" if sample.truncated else "stop",
                matched=sample.matched,
                usage=usage,
                index=index,
                output_logprobs=sample.logprobs,
                reasoning=sample.reasoning,
            )
            missing = missing_data_warnings(
                answer, request.params, reader.usage, end_assumed=sample.end_assumed
            )
            yield msgspec.structs.replace(answer, meta=with_warnings(reader.meta, *missing))

    def _sample_text(
        self, sample: PartialAnswer, request: ApiRequest, usage: Usage, *, constrained: bool
    ) -> str:
        """Returns the text of a sample. Tool calls become JSON text: the arguments, or an object
        that names the tool.

        Raises:
            RefusalError: the model refused to answer.
            TruncatedError: a constrained answer was cut short.
            ValueValidationError: the answer has several tool calls where one is allowed.
            BackendError: the answer is empty.
        """
        name = self.errors.name
        if sample.refusal:
            raise self.errors.refusal_error(sample.refusal)
        if sample.truncated and constrained:
            thoughts = (
                ", which reasoning may have used up" if not sample.text and not sample.calls else ""
            )
            problem = f"{name} was cut short after {usage.completion_tokens} tokens{thoughts}."
            raise TruncatedError(problem, text=sample.text, hint="Raise max_tokens.")
        if isinstance(request.shape, Tools | JsonTool) and sample.calls:
            return self._calls_as_json(sample, request.shape)
        if not sample.text and (sample.truncated or isinstance(request.params.stop, Unset)):
            spent = (
                f" after {usage.completion_tokens} tokens, which reasoning may have used up"
                if sample.truncated
                else ""
            )
            raise BackendError(
                f"{name} returned no text{spent}.", hint="Raise max_tokens, or change the prompt."
            )
        return answer_as_json(sample.text) if isinstance(request.shape, Tools) else sample.text

    def _calls_as_json(self, sample: PartialAnswer, shape: Tools | JsonTool) -> str:
        """Returns the JSON text of a sample's tool calls, in their order."""
        calls = [call for _, call in sorted(sample.calls.items())]
        if isinstance(shape, Tools) and shape.parallel:
            return calls_as_json([(call.name, call.arguments) for call in calls])
        if len(calls) > 1:
            names = ", ".join(call.name for call in calls)
            problem = f"{self.errors.name} called {len(calls)} tools at once ({names}), but this node accepts one call."
            hint = "Ask for one call in the prompt, set parallel_tool_calls=True, or set retries."
            raise ValueValidationError(problem, text=sample.text, hint=hint)
        return (
            calls[0].arguments
            if isinstance(shape, JsonTool)
            else call_as_json(calls[0].name, calls[0].arguments)
        )


def _validate_texts(deltas: Sequence[Delta]) -> Sequence[Delta]:
    """Returns deltas if all their contents are text. Raises TypeError otherwise."""
    for delta in deltas:
        for content in (delta.text, delta.reasoning):
            if not isinstance(content, str):
                raise TypeError(f"{content!r:.80} is not a text")
    return deltas


@asynccontextmanager
async def _open_stream(stream: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    """Opens an SDK's stream. On exit, closes the stream and all generators that it reads from.

    An SDK closes only the response. It would leave the chain of generators to Python's garbage
    collector, which closes them in any order and from any thread, even one that the loop's thread
    is closing at the same time.
    """
    async with AsyncExitStack() as closing:
        events = await closing.enter_async_context(stream)
        try:
            yield events
        except Exception as error:
            # a failed generator's frame refers to those it reads from
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            await closing.aclose()
            with suppress(Exception):
                # the response is closed: reading on ends each generator immediately
                async with asyncio.timeout(0):
                    async for _ in events:
                        pass


def _estimate_call_tokens(request: ApiRequest) -> float:
    """Estimates the tokens of a call: a quarter of the prompt's characters, plus `max_tokens` if
    set.
    """
    limit = request.params.max_tokens
    chars = sum(len(span.text) for span in request.prompt.spans)
    return chars / 4 + (0 if isinstance(limit, Unset) else limit)


_T = TypeVar("_T")


class CallAccount:
    """Counts the requests of one call for the run's budget, including the SDK's retries and
    requests made after the model pauses. Has no effect outside a run with a budget.

    Args:
        request: request of the call.
        reader: reader of the answer.
        tokenizer: tokenizer of the model, or None if unknown.

    Attributes:
        answered: number of requests whose answer was completely read.
    """

    def __init__(
        self, request: ApiRequest, reader: ApiReader, tokenizer: TiktokenEncoding | None
    ) -> None:
        self._request = request
        self._reader = reader
        self._tokenizer = tokenizer
        self._sent = SentRequests()
        self._over = False
        self.answered = 0

    async def await_counting_requests(self, sending: Awaitable[_T]) -> _T:
        """Awaits `sending` and counts the requests that it makes."""
        token = sent_requests.set(self._sent)
        try:
            return await sending
        finally:
            sent_requests.reset(token)

    def end_answered_call(self) -> None:
        """Ends the account of an answered call. Requests that the SDK had to repeat are charged at
        the maximum possible usage. So is the answer if its reported usage is too low to be
        credible.
        """
        self._over = True
        if unreported_usages.get() is None:
            return
        add_unreported_usage(self._maximum_usage(), self._sent.processed - self.answered)
        reported = self._reader.usage
        samples = self._reader.samples.values()
        whole = all(sample.finish_reason is not None for sample in samples)
        if not whole or not is_credible(
            reported, self._request.prompt, map(_join_received_text, samples), self._tokenizer
        ):
            add_unreported_usage(possible_unreported_usage(reported, self._maximum_usage()))
            self._reader.meta.setdefault("warnings", []).append(NOT_CREDIBLE)

    def end_failed_call(self, error: SglError | None) -> None:
        """Ends the account of a failed call, unless it has already ended. The usage of unanswered
        requests is unknown, so they are charged at the maximum possible usage.

        Args:
            error: error of the call, or None if it was stopped; its last request is then counted
                elsewhere.
        """
        if self._over or unreported_usages.get() is None:
            return
        unanswered = self._sent.processed - self.answered
        if not self._sent.tried:  # an SDK with its own connections sent it
            unanswered = isinstance(error, BackendError) and error.usage is None
        if error is None:
            add_unreported_usage(self._maximum_usage(), unanswered - 1)
        elif unanswered > 0:
            add_unreported_usage(
                possible_unreported_usage(self._reader.usage, self._maximum_usage())
            )
            add_unreported_usage(self._maximum_usage(), unanswered - 1)

    def _maximum_usage(self) -> Usage:
        """Returns the most that a single request may have used."""
        request = self._request
        params = self._request.params
        prompt = estimate_tokens(request.prompt, self._tokenizer)
        if request.shape is not None:
            prompt += count_text_tokens(
                json.dumps(asdict(request.shape), default=dict), self._tokenizer
            )
        seen = sum(
            count_text_tokens(_join_received_text(sample), self._tokenizer)
            for sample in self._reader.samples.values()
        )
        longest = 0 if isinstance(params.max_tokens, Unset) else params.max_tokens * params.samples
        return Usage(prompt, 0, max(longest, seen))


def _join_received_text(sample: PartialAnswer) -> str:
    """Joins all text that was received for a sample."""
    return " ".join(
        [
            sample.text,
            sample.reasoning or "",
            sample.refusal,
            *(call.arguments for call in sample.calls.values()),
        ]
    )
