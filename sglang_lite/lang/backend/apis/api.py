"""Interface to one API of a provider: builds requests and reads answers. Also contains code that
several APIs share, such as storing the items that a provider expects back in later turns.
Independent of connections and of the SDK's errors.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from sglang_lite.protocol import Delta, Message, Prompt, SamplingParams, TokenLogprob, Usage
from sglang_lite.protocol.anything import Foreign, Json
from sglang_lite.protocol.sampling import given_as_data
from sglang_lite.text.tool_use import ToolChoice


@dataclass(frozen=True, slots=True)
class Target:
    """Model that a request is sent to.

    Attributes:
        model: name of the model.
        max_tokens_field: the server's name for `max_tokens`.
        effort: amount of reasoning, in the provider's words, or None for the model's default.
        may_reason: True if the model may reason; its encrypted reasoning is then requested, to be
            sent back later.
        cache_hints: True if requests mark the prefixes that prompts share, or send a key for them,
            for the provider's cache.
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
    """Answer format: JSON under a schema, which is given as JSON text. If it is not strict, the
    schema is only a hint to the model.
    """

    schema: str
    strict: bool


@dataclass(frozen=True, slots=True)
class JsonTool:
    """Answer format: a tool call whose arguments are the answer. The model must make the call. The
    arguments follow a schema, which is given as JSON text.
    """

    schema: str

    @property
    def tool(self) -> ApiTool:
        return ApiTool(ANSWER, "Its arguments are your whole answer.", self.schema, strict=True)


@dataclass(frozen=True, slots=True)
class GrammarTool:
    """Answer format: a tool call whose input is the answer. The model must make the call. The input
    is a text that follows a grammar.
    """

    syntax: Literal["regex", "lark"]
    definition: str


@dataclass(frozen=True, slots=True)
class OwnField:
    """Answer format of one server's dialect of the API, such as `structured_outputs`. It is
    requested with fields of its own.
    """

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ApiTool:
    """Function that the model may call.

    Attributes:
        schema: schema of the arguments, an object, as JSON text. If the tool is not strict, the
            schema is only a hint.
    """

    name: str
    description: str
    schema: str
    strict: bool


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools for the model to call.

    Attributes:
        choice: "auto" if the model may call a tool, "required" if it must, "none" if it may not.
        parallel: True if one answer may contain several calls.
    """

    tools: tuple[ApiTool, ...]
    choice: ToolChoice
    parallel: bool = False


# Form in which an answer is requested; None for free text.
Shape: TypeAlias = JsonFormat | JsonTool | GrammarTool | OwnField | Tools | None


ANSWER = "answer"  # name of the JSON format, or of the tool whose arguments are the answer


def split_parameters(
    params: SamplingParams, names: Mapping[str, str]
) -> tuple[dict[str, Json], dict[str, Json]]:
    """Splits the parameters that were set into two dicts: those that the API has, under the API's
    names, and all others.

    Args:
        names: the API's names for parameters; "" for one that is not sent.
    """
    own = dict[str, Any]()
    others = dict[str, Any]()
    for name, value in given_as_data(params).items():
        if name not in names:
            others[name] = value
        elif names[name]:
            own[names[name]] = value
    return own, others


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """Request of one call, independent of the API.

    Attributes:
        provider_items: items that the API expects back from earlier turns, by index in the prompt's
            messages.
    """

    target: Target
    prompt: Prompt
    params: SamplingParams
    shape: Shape = None
    provider_items: Mapping[int, Sequence[Any]] = field(default_factory=dict)


@dataclass(slots=True)
class PartialCall:
    """Tool call received so far. `arguments` should be JSON, but contains whatever the model wrote."""

    name: str = ""
    arguments: str = ""
    id: str = ""


@dataclass(slots=True)
class PartialAnswer:
    """The part of an answer received so far, for one sample.

    Attributes:
        reasoning: reasoning that the API shows, or None if it shows none.
        calls: tool calls, by index.
        provider_items: items that the API expects back with this turn.
        refusal: reason for a refusal; empty if the model did not refuse.
        finish_reason: finish reason in the API's terms, or None if the sample has not ended.
        truncated: True if the sample ended at a token limit.
        matched: stop string that ended the sample, if the API reports it.
        end_assumed: True if the API sent no finish reason with a whole answer, which then counts as
            complete.
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
    """Reads one answer, whole or in events.

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

    def read_whole_answer(self, response: Foreign) -> None:
        """Reads an answer that arrived in one piece. By default, passes it to `read_event`."""
        self.read_event(response)

    @abstractmethod
    def read_event(self, event: Foreign) -> Sequence[Delta]:
        """Reads an event of a stream and returns its new text."""


@dataclass(frozen=True, slots=True)
class Api:
    """One API of a provider.

    Attributes:
        arguments: builds the arguments of the SDK's call for a request; a pure function.
        create: returns the client's method that makes the call.
        streamed: additional arguments of a call that streams.
        reader: creates a reader for one answer.
        always_streams: True if every call streams.
        resumed: builds the arguments of another call after the model has paused, from the last
            arguments and the reader.
    """

    arguments: Callable[[ApiRequest], dict[str, Any]]
    create: Callable[[Any], Callable[..., Awaitable[Any]]]
    streamed: Mapping[str, Any]
    reader: Callable[[], ApiReader]
    always_streams: bool = False
    resumed: Callable[[dict[str, Any], Any], dict[str, Any]] = lambda arguments, _: arguments


# characters: about 1,024 tokens, the shortest prefix that any provider caches
MIN_PREFIX_CHARS = 4 * 1024
_MAX_MARKS = 4  # maximum number of marks that Anthropic accepts
_MARK = {"type": "ephemeral"}


def cacheable_prefixes(prompt: Prompt) -> tuple[int, ...]:
    """Returns which prefixes of a prompt are worth caching, each as a number of messages. There are
    at most four, in ascending order.
    """
    lengths = list(accumulate((len(message.text) for message in prompt.messages), initial=0))
    long = [
        count
        for count in prompt.shared
        if count < len(lengths) and lengths[count] >= MIN_PREFIX_CHARS
    ]
    return tuple(sorted(long[:_MAX_MARKS]))


def cache_key(prompt: Prompt) -> str | None:
    """Returns the same key for all prompts that have the same shortest shared prefix. Returns None
    if the prompt is too short or shares no prefix.
    """
    if (
        not prompt.shared
        or sum(len(message.text) for message in prompt.messages) < MIN_PREFIX_CHARS
    ):
        return None
    begin = prompt.messages[: min(prompt.shared)]
    turns = repr([(message.role, message.content) for message in begin])
    return hashlib.sha256(turns.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def with_cache_control(request: Mapping[str, Json], prompt: Prompt) -> dict[str, Json]:
    """Adds `cache_control` to a request of Anthropic's Messages API. The marks are at the ends of
    the prefixes that the prompt shares with others.

    Args:
        request: request whose `system` has the prompt's system turns, and whose `messages` have one
            message for each other turn.
    """
    marked = dict(request)
    messages = list(request["messages"])
    system = (
        sum(1 for message in prompt.messages if message.role == "system")
        if "system" in request
        else 0
    )
    for count in cacheable_prefixes(prompt):
        if count > system:
            at = count - system - 1
            messages[at] = {**messages[at], "content": _mark_last_block(messages[at]["content"])}
        elif count == system:
            marked["system"] = _mark_last_block(request["system"])
    return marked | {"messages": messages}


def _mark_last_block(content: Any) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return [*blocks[:-1], {**blocks[-1], "cache_control": _MARK}]


_MAX_TURNS = 4096  # stored turns


class ProviderItems:
    """Stores what a provider expects back with the latest turns: encrypted reasoning, signed
    thoughts, ids of tool calls. An entry's key is the conversation up to and including its turn, so
    forks, rollbacks and threads need no special handling. A turn without an entry is sent as text.

    Used only on the event loop that makes the calls. So it needs no lock, which a forked process
    could inherit in the locked state.
    """

    def __init__(self) -> None:
        self._items: OrderedDict[tuple[Message, ...], Sequence[Any]] = OrderedDict()

    def store_turn(self, before: Sequence[Message], text: str, items: Sequence[Json]) -> None:
        """Stores the items of an answer under the conversation that ends with it. The answer must
        be a whole turn.
        """
        turn = Message("assistant", (text.lstrip(),))
        self._items[(*before, turn)] = items
        if len(self._items) > _MAX_TURNS:
            self._items.popitem(last=False)

    def items_by_message(self, messages: Sequence[Message]) -> Mapping[int, Sequence[Json]]:
        """Returns the stored items of a conversation's turns, by message index."""
        found = {}
        for i, message in enumerate(messages if self._items else ()):
            if message.role == "assistant":
                items = self._items.get(tuple(messages[: i + 1]))
                if items is not None:
                    found[i] = items
        return found


def iterate_turns(
    messages: Sequence[Message],
    items: Mapping[int, Sequence[Json]],
    calls_of: Callable[[Sequence[Json]], list[Json]],
) -> Iterator[tuple[Message, Sequence[Json] | None, list[Json]]]:
    """Yields each turn with the items to send in its place, or None to send its text. Also yields
    the list of tool calls whose results the turn contains, which is usually empty.

    Args:
        items: stored items, by index of the message.
        calls_of: function that extracts the tool calls from the items of a turn.
    """
    calls: list[Json] = []
    for index, message in enumerate(messages):
        stored = items.get(index)
        yield message, stored, calls if message.role == "user" else []
        calls = [] if stored is None else calls_of(stored)
