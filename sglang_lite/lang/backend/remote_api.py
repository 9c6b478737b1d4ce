"""One API of a provider: how it is asked and how its answers are read. Knows no connection and no error of an SDK."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from sglang_lite.protocol import Delta, Prompt, SamplingParams, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a request is for.

    Attributes:
        model: its name.
        limit: its server's name of `max_tokens`.
    """

    model: str
    limit: str = "max_tokens"


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


Shape: TypeAlias = JsonFormat | JsonTool | GrammarTool | OwnField | None  # how an answer is asked for; None: free text


@dataclass(frozen=True, slots=True)
class Question:
    """Question of one call."""

    target: Target
    prompt: Prompt
    params: SamplingParams
    shape: Shape = None


@dataclass(slots=True)
class PartialAnswer:
    """Answer of an API so far, for one sample.

    Attributes:
        refusal: why there is no answer, if there is none.
        reason: the API's word for how the sample ended, None while it has not.
        cut: it ended because a limit on tokens was reached.
        matched: the stop string that ended it, where the API tells.
    """

    text: str = ""
    refusal: str = ""
    reason: str | None = None
    cut: bool = False
    matched: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class Reader(Protocol):
    """Reader of one answer, whole or in events.

    Attributes:
        samples: by their indices.
        usage: of all samples together; without times.
        meta: anything else that the API tells.
        failure: the API's word for why there is no answer, if it says so in one; else empty.
    """

    samples: dict[int, PartialAnswer]
    usage: Usage
    meta: dict[str, Any]
    failure: str

    def whole(self, said: Any) -> None:
        """Reads an answer in one piece."""

    def event(self, said: Any) -> Sequence[Delta]:
        """Reads an event of a stream: what is new in it."""


@dataclass(frozen=True, slots=True)
class Api:
    """An API.

    Attributes:
        request: arguments of the SDK's call that asks a question. A pure function.
        create: the call, of a client.
        streamed: further arguments of a call that streams.
        reader: makes a reader of one answer.
    """

    request: Callable[[Question], dict[str, Any]]
    create: Callable[[Any], Callable[..., Awaitable[Any]]]
    streamed: Mapping[str, Any]
    reader: Callable[[], Reader]
