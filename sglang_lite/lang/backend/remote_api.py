"""One API of a provider: how it is asked and how its answers are read. Knows no connection and no error of an SDK."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sglang_lite.protocol import Delta, Prompt, SamplingParams, TokenLogprob, Usage
from sglang_lite.protocol.anything import Foreign


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a request is for.

    Attributes:
        model: its name.
        limit: its server's name of `max_tokens`.
        effort: how much it is to reason, in its provider's words; None: as much as it does by itself.
        reasons: it may reason, so that what it thinks is asked for, to be given back.
        cached: its provider is told where prompts begin alike, by marks or by a key.
        extra: settings that go with every request.
    """

    model: str
    limit: str = "max_tokens"
    effort: str | None = None
    reasons: bool = False
    cached: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """JSON of a schema; one that is not strict is a hint."""

    schema: dict[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class JsonTool:
    """A tool that the model must call with arguments of a schema; they are the answer."""

    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GrammarTool:
    """A tool that the model must call with a text of a grammar; its input is the answer."""

    syntax: Literal["regex", "lark"]
    definition: str


@dataclass(frozen=True, slots=True)
class OwnField:
    """Fields that only one dialect has."""

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        schema: of its arguments, an object; one that is not strict is a hint.
    """

    name: str
    description: str
    schema: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools of which the model calls one.

    Attributes:
        required: it must, else it may answer instead.
        parallel: it may call several at once.
    """

    tools: tuple[Tool, ...]
    required: bool
    parallel: bool = False


# How an answer is asked for; None: free text.
Shape: TypeAlias = JsonFormat | JsonTool | GrammarTool | OwnField | Tools | None


@dataclass(frozen=True, slots=True)
class Question:
    """Question of one call.

    Attributes:
        items: what the API has given of earlier turns and wants to be given back, by their places in the messages.
    """

    target: Target
    prompt: Prompt
    params: SamplingParams
    shape: Shape = None
    items: Mapping[int, Sequence[Any]] = field(default_factory=dict)


@dataclass(slots=True)
class PartialCall:
    """A call of a tool so far. `arguments` is JSON text, or what the model wrote instead."""

    name: str = ""
    arguments: str = ""
    id: str = ""


@dataclass(slots=True)
class PartialAnswer:
    """Answer of an API so far, for one sample.

    Attributes:
        thoughts: reasoning that the API shows; None: it shows none.
        calls: of tools, by their places.
        items: what the API wants to be given back with this turn.
        refusal: why there is no answer, if there is none.
        reason: the API's word for how the sample ended, None while it has not.
        cut: it ended because a limit on tokens was reached.
        matched: the stop string that ended it, where the API tells.
    """

    text: str = ""
    thoughts: str | None = None
    calls: dict[int, PartialCall] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)
    refusal: str = ""
    reason: str | None = None
    cut: bool = False
    matched: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class Reader(ABC):
    """Reader of one answer, whole or in events.

    Attributes:
        samples: by their indices.
        usage: of all samples together; without times.
        meta: anything else that the API tells.
        failure: the API's word for why there is no answer, if it says so in one; else empty.
        paused: the model wants to be asked again, with what it has said, to continue.
    """

    def __init__(self) -> None:
        self.samples: dict[int, PartialAnswer] = {}
        self.usage = Usage()
        self.meta: dict[str, Any] = {}
        self.failure = ""
        self.paused = False

    def whole(self, said: Foreign) -> None:
        """Reads an answer in one piece: as an event, unless a subclass knows more."""
        self.event(said)

    @abstractmethod
    def event(self, said: Foreign) -> Sequence[Delta]:
        """Reads an event of a stream: what is new in it."""


@dataclass(frozen=True, slots=True)
class Api:
    """An API.

    Attributes:
        request: arguments of the SDK's call that asks a question. A pure function.
        create: the call, of a client.
        streamed: further arguments of a call that streams.
        reader: makes a reader of one answer.
        always_streams: an answer is never asked for in one piece.
        resumed: the arguments of a further call, where the model has paused.
    """

    request: Callable[[Question], dict[str, Any]]
    create: Callable[[Any], Callable[..., Awaitable[Any]]]
    streamed: Mapping[str, Any]
    reader: Callable[[], Reader]
    always_streams: bool = False
    resumed: Callable[[dict[str, Any], Any], dict[str, Any]] = lambda request, _: request
