"""Reader of an answer's samples: splits text into reasoning, content, and tool calls with ids,
while it arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import Delta, Generation, TokenLogprob
from sglang_lite.protocol.anything import Json
from sglang_lite.server.conversation.tools import parse_custom_input
from sglang_lite.text.chat_format import AnswerReader, RenderedConversation
from sglang_lite.text.tool_calls import CallPiece, Pieces


@dataclass(slots=True)
class PartialToolCall:
    """Tool call as received so far.

    Attributes:
        index: index among the calls of its sample.
        custom: True if the tool is a custom one; `arguments` is then its input.
        id: id that the result of the call refers to.
    """

    index: int
    name: str
    custom: bool
    id: str
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Update of a call: its beginning, or further arguments."""

    call: PartialToolCall
    arguments: str
    begins: bool = False


DeltaPiece: TypeAlias = (
    tuple[Literal["reasoning"], str]
    | tuple[Literal["content"], str]
    | tuple[Literal["call"], CallDelta]
)


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """New text, reasoning and calls of a sample."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __add__(self, other: SampleDelta) -> SampleDelta:
        return SampleDelta(
            self.reasoning + other.reasoning, self.content + other.content, self.calls + other.calls
        )

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    @property
    def ordered_pieces(self) -> Iterator[DeltaPiece]:
        """Pieces in the order of the text: reasoning, content, calls. Further arguments of an
        earlier call come before the content.
        """
        if self.reasoning:
            yield "reasoning", self.reasoning
        begun = next((at for at, part in enumerate(self.calls) if part.begins), len(self.calls))
        for part in self.calls[:begun]:
            yield "call", part
        if self.content:
            yield "content", self.content
        for part in self.calls[begun:]:
            yield "call", part


def reported_logprobs(generation: Generation) -> tuple[TokenLogprob, ...]:
    """Returns the log-probabilities of a generation's tokens, or () if it has no tokens. In that
    case the engine reports log-probabilities for the next token, which OpenAI's protocols leave
    out.
    """
    return generation.output_logprobs if generation.token_ids else ()


@dataclass(slots=True)
class SampleReader:
    """Reads one sample from its events.

    Args:
        rendered: conversation that the sample continues.
        separate: whether to split reasoning off; otherwise reasoning counts as content, with its
            marks.
        stream_reasoning: whether to return reasoning as it arrives; otherwise only once it has
            ended.
        prefix: prefix of the ids of calls.

    Attributes:
        calls: calls that have begun.
        reasoning: reasoning so far.
        logprobs: number of log-probabilities in the deltas so far.
        length: number of characters in the deltas so far.
    """

    rendered: RenderedConversation
    separate: bool = True
    stream_reasoning: bool = True
    prefix: str = "call_"
    calls: list[PartialToolCall] = field(default_factory=list, init=False)
    reasoning: str = field(default="", init=False)
    logprobs: int = field(default=0, init=False)
    _reasoning: str = field(default="", init=False)  # reasoning that is returned once it has ended
    # custom tools' incomplete inputs
    _inputs: dict[int, str] = field(default_factory=dict, init=False)
    length: int = field(default=0, init=False)
    _reader: AnswerReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = self.rendered.new_answer_reader(separate=self.separate)

    def read_event(self, each: Delta | Generation) -> SampleDelta:
        """Returns what an event adds to the sample."""
        if isinstance(each, Delta):
            self.length += len(each.text)
            self.logprobs += len(each.logprobs)
            return self._split_into_deltas(self._reader.push(each.text), ended=False)
        first = self._split_into_deltas(self._reader.push(each.text[self.length :]), ended=False)
        return first + self._split_into_deltas(self._reader.flush(), ended=True)

    def openai_finish_reason(
        self, generation: Generation
    ) -> Literal["stop", "length", "abort", "tool_calls"]:
        """Returns the sample's finish reason as OpenAI's protocols report it."""
        if generation.finish_reason == "stop" and self.calls and not self.has_open_call:
            return "tool_calls"
        return generation.finish_reason

    @property
    def has_open_call(self) -> bool:
        """True while a call has begun and has not ended."""
        return self._reader.open

    def own_fields(self, generation: Generation) -> dict[str, Json]:
        """Like the module's `own_fields`, but marks the whole answer as truncated if a limit cut
        off a tool call and no truncated value is listed. The engine can't report this for a call
        written without the format's markers.
        """
        found = own_fields(generation)
        if "shortened" not in found and self.has_open_call and generation.finish_reason == "length":
            found["shortened"] = [""]
        return found

    @property
    def ended(self) -> int:
        """Number of calls that have ended. They come first in `calls`."""
        return self._reader.ended

    def _split_into_deltas(self, pieces: Pieces, *, ended: bool) -> SampleDelta:
        self.reasoning += pieces.reasoning
        self._reasoning += pieces.reasoning
        content = pieces.content
        reasoning = ""
        if self._reasoning and (self.stream_reasoning or ended or content or pieces.calls):
            reasoning = self._reasoning
            self._reasoning = ""
        calls: list[CallDelta] = []
        if self.rendered.input_of is not None:
            calls += self._input_deltas(self.rendered.input_of, content)
            content = ""
        for piece in pieces.calls:
            calls += self._read_call_piece(piece)
        if ended or not self._reader.open:
            calls += self._flush_inputs()
        return SampleDelta(reasoning, content, tuple(calls))

    def _begin_call(self, name: str, *, custom: bool) -> CallDelta:
        call = PartialToolCall(len(self.calls), name, custom, f"{self.prefix}{random_id()[:24]}")
        self.calls.append(call)
        return CallDelta(call, "", begins=True)

    def _extend_call(self, call: PartialToolCall, arguments: str) -> CallDelta:
        call.arguments += arguments
        return CallDelta(call, arguments)

    def _input_deltas(self, name: str, text: str) -> list[CallDelta]:
        """Returns the deltas for text that is the input of a custom tool."""
        begun = [] if self.calls else [self._begin_call(name, custom=True)]
        return [*begun, *([self._extend_call(self.calls[0], text)] if text else [])]

    def _read_call_piece(self, piece: CallPiece) -> list[CallDelta]:
        found = []
        if piece.name:
            found = self._flush_inputs()
            found.append(
                self._begin_call(piece.name, custom=piece.name in self.rendered.custom_tools)
            )
        call = self.calls[piece.index]
        if call.custom:
            self._inputs[call.index] = self._inputs.get(call.index, "") + piece.arguments
        elif piece.arguments:
            found.append(self._extend_call(call, piece.arguments))
        return found

    def _flush_inputs(self) -> list[CallDelta]:
        """Returns the complete inputs of custom tools whose calls have ended, and clears them."""
        found = self._inputs
        self._inputs = {}
        return [
            self._extend_call(self.calls[index], parse_custom_input(arguments))
            for index, arguments in found.items()
        ]


def encode_openai_logprobs(
    token_bytes: Sequence[bytes], entries: Sequence[TokenLogprob], *, as_ids: bool = False
) -> list[dict[str, Json]]:
    """Converts log-probabilities of tokens to the form of OpenAI's protocols. With `as_ids`, tokens
    are written as "token_id:" and their id, as vLLM does.
    """

    def entry(logprob: float | None, token_id: int, text: str | None) -> dict[str, Any]:
        spelled = list(token_bytes[token_id]) if token_id < len(token_bytes) else []
        token = f"token_id:{token_id}" if as_ids else text or ""
        return {"token": token, "logprob": logprob, "bytes": spelled}

    return [
        {
            **entry(each.logprob, each.token_id, each.text),
            "top_logprobs": [entry(*top) for top in each.top],
        }
        for each in entries
    ]


def own_fields(generation: Generation) -> dict[str, Json]:
    """Returns the fields of an answer that only this package's server has: `shortened`, JSON Pointers
    to the values that a limit has cut off, if there are any; `exact`, the probabilities that an
    exact answer was drawn from; and `weighted`, the weight of a weighted one.
    """
    found = dict[str, Json]()
    if generation.shortened:
        found["shortened"] = [*generation.shortened]
    found |= {
        name: generation.meta[name] for name in ("exact", "weighted") if name in generation.meta
    }
    return found
