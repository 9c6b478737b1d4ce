"""Interface to one API of a provider: its requests and its answers. Independent of connections and of the SDK's
errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sglang_lite.protocol import Delta, Prompt, SamplingParams, TokenLogprob, Usage
from sglang_lite.protocol.anything import Foreign


@dataclass(frozen=True, slots=True)
class Target:
    """Model that a request is for.

    Attributes:
        model: name of the model.
        max_tokens_field: name of `max_tokens` on the server.
        effort: amount of reasoning, in the provider's words, or None for the model's default.
        may_reason: True if the model may reason, so that its encrypted reasoning is requested, to be sent back later.
        cache_hints: True if requests mark the prefixes that prompts share, or have a key for them, for the provider's
            cache.
        settings: settings that are sent with every request.
    """

    model: str
    max_tokens_field: str = "max_tokens"
    effort: str | None = None
    may_reason: bool = False
    cache_hints: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """JSON that follows a schema. If it is not strict, the schema is only a hint."""

    schema: dict[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class JsonTool:
    """Tool that the model must call. Its arguments, which follow a schema, are the answer."""

    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GrammarTool:
    """Tool that the model must call. Its input, a text of a grammar, is the answer."""

    syntax: Literal["regex", "lark"]
    definition: str


@dataclass(frozen=True, slots=True)
class OwnField:
    """Request fields that only one dialect of the API has."""

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ApiTool:
    """Function that the model may call.

    Attributes:
        schema: schema of the arguments, an object. If the tool is not strict, the schema is only a hint.
    """

    name: str
    description: str
    schema: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools for the model to call.

    Attributes:
        required: True if the model must call a tool, False if it may answer instead.
        parallel: True if the model may call several tools at once.
    """

    tools: tuple[ApiTool, ...]
    required: bool
    parallel: bool = False


# Form in which an answer is requested; None for free text.
Shape: TypeAlias = JsonFormat | JsonTool | GrammarTool | OwnField | Tools | None


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """Request of one call, independent of the API.

    Attributes:
        provider_items: items that the API expects back from earlier turns, by index in the prompt's messages.
    """

    target: Target
    prompt: Prompt
    params: SamplingParams
    shape: Shape = None
    provider_items: Mapping[int, Sequence[Any]] = field(default_factory=dict)


@dataclass(slots=True)
class PartialCall:
    """Tool call received so far. `arguments` is JSON text, or other text if the model wrote that."""

    name: str = ""
    arguments: str = ""
    id: str = ""


@dataclass(slots=True)
class PartialAnswer:
    """Answer received so far, for one sample.

    Attributes:
        reasoning: reasoning that the API shows, or None if it shows none.
        calls: tool calls, by index.
        provider_items: items that the API expects back with this turn.
        refusal: reason for a refusal; empty if the model did not refuse.
        finish_reason: finish reason in the API's word, or None if the sample has not ended.
        truncated: True if the sample ended at a limit on tokens.
        matched: stop string that ended the sample, if the API reports it.
        end_assumed: True if the API sent no finish reason with a whole answer, which is taken as complete.
    """

    text: str = ""
    reasoning: str | None = None
    calls: dict[int, PartialCall] = field(default_factory=dict)
    provider_items: list[Any] = field(default_factory=list)
    refusal: str = ""
    finish_reason: str | None = None
    truncated: bool = False
    matched: str | None = None
    end_assumed: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()


class ApiReader(ABC):
    """Reader of one answer, whole or in events.

    Attributes:
        samples: samples, by index.
        usage: usage of all samples together, without times.
        meta: other data that the API reports.
        failure: reason that the API reports for a failed answer; empty if it reports none.
        paused: True if the model has paused, and must be called again with its output so far.
    """

    def __init__(self) -> None:
        self.samples: dict[int, PartialAnswer] = {}
        self.usage = Usage()
        self.meta: dict[str, Any] = {}
        self.failure = ""
        self.paused = False

    def whole(self, response: Foreign) -> None:
        """Reads an answer that arrived in one piece. The default reads it as an event."""
        self.event(response)

    @abstractmethod
    def event(self, event: Foreign) -> Sequence[Delta]:
        """Reads an event of a stream, and returns its new text."""


@dataclass(frozen=True, slots=True)
class Api:
    """One API of a provider.

    Attributes:
        arguments: builds the arguments of the SDK's call for a request; a pure function.
        create: returns the method of a client that makes the call.
        streamed: additional arguments of a call that streams.
        reader: makes a reader of one answer.
        always_streams: True if every call streams.
        resumed: builds the arguments of a further call after the model has paused, from the last arguments and the
            reader.
    """

    arguments: Callable[[ApiRequest], dict[str, Any]]
    create: Callable[[Any], Callable[..., Awaitable[Any]]]
    streamed: Mapping[str, Any]
    reader: Callable[[], ApiReader]
    always_streams: bool = False
    resumed: Callable[[dict[str, Any], Any], dict[str, Any]] = lambda arguments, _: arguments
