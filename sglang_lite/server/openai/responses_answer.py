"""Answers of OpenAI's Responses API as they arrive: output items, and the numbered events that
describe them.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_lite.protocol import Delta, Generation, TokenLogprob
from sglang_lite.protocol.anything import Json
from sglang_lite.server.conversation.sample_reader import (
    CallDelta,
    SampleDelta,
    SampleReader,
    encode_openai_logprobs,
    reported_logprobs,
)
from sglang_lite.server.openai.responses_items import new_id

Event = dict[str, Any]
_DONE = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
}


def _new_content_part(kind: str) -> dict[str, Any]:
    """Creates an empty content part for output text or reasoning."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


class TextLogprobs:
    """Log-probabilities of an answer's content, selected from the log-probabilities of its whole
    text.

    Args:
        token_bytes: bytes of each token of the vocabulary.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._told = 0  # index of the character after the last part
        self._begins = 0  # index of the character at which the next token begins
        # log-probabilities, each with the index at which its token begins
        self._entries: deque[tuple[int, TokenLogprob]] = deque()

    def append_text_and_tokens(self, text: str, entries: Sequence[TokenLogprob]) -> None:
        """Appends further text and its tokens."""
        self._text += text
        for entry in entries:
            self._entries.append((self._begins, entry))
            known = entry.token_id < len(self._token_bytes)
            self._begins += (
                len(self._decoder.decode(self._token_bytes[entry.token_id])) if known else 0
            )

    def take_logprobs_of_part(self, part: str, *, last: bool) -> list[dict[str, Json]]:
        """Returns the log-probabilities of the next part of the text.

        Args:
            part: text of the part.
            last: whether this is the last part of the text so far.
        """
        find = self._text.rfind if last else self._text.find
        start = max(find(part, self._told), self._told)
        self._told = start + len(part)
        found = []
        while self._entries and self._entries[0][0] < self._told:
            begins, entry = self._entries.popleft()
            if begins >= start:
                found.append(entry)
        return encode_openai_logprobs(self._token_bytes, found)


@dataclass(slots=True)
class ResponseAnswer:
    """Answer as received so far.

    Args:
        sample: reader of the answer's sample.
        logprobs: log-probabilities of its text, if requested, or None.

    Attributes:
        items: output items.
    """

    sample: SampleReader
    logprobs: TextLogprobs | None
    items: list[dict[str, Any]] = field(default_factory=list, init=False)
    _number: int = field(default=0, init=False)
    _open: bool = field(default=False, init=False)  # the last item is incomplete

    def new_event(self, kind: str, **content: Json) -> Event:
        """Creates an event with the next sequence number."""
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **content}

    def encode_response_events(self, each: Delta | Generation) -> Iterator[Event]:
        """Yields the stream's events for an event of the engine."""
        if self.logprobs is not None:
            before = self.sample.length
            known = self.sample.logprobs
            if isinstance(each, Delta):
                self.logprobs.append_text_and_tokens(each.text, each.logprobs)
            else:
                self.logprobs.append_text_and_tokens(
                    each.text[before:], reported_logprobs(each)[known:]
                )
        yield from self._encode_output_delta(self.sample.read_event(each))
        if isinstance(each, Generation):
            if not self.items:
                yield from self._open_item("message")
            yield from self.close_item(
                "incomplete" if each.finish_reason == "length" else "completed"
            )

    def close_item(self, status: str) -> Iterator[Event]:
        """Yields the events that complete the last item."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        name = _DONE[item["type"]]
        if item["type"] in ("message", "reasoning"):
            part = item["content"][0]
            told = {} if item["type"] == "reasoning" else {"logprobs": part["logprobs"]}
            yield self._part_event(f"{name}.done", content_index=0, text=part["text"], **told)
            yield self._part_event("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "function_call":
            yield self._part_event(f"{name}.done", name=item["name"], arguments=item["arguments"])
        else:
            yield self._part_event(f"{name}.done", input=item["input"])
        yield self._item_event("response.output_item.done", item)

    def _encode_output_delta(self, new: SampleDelta) -> Iterator[Event]:
        calls_follow = any(part.begins for part in new.calls)
        for kind, part in new.ordered_pieces:
            if isinstance(part, CallDelta):
                yield from self._encode_call_events(part)
            elif kind == "content":
                yield from self._text("message", part, last=not calls_follow)
            else:
                yield from self._text("reasoning", part, last=not new.content and not calls_follow)

    def _text(self, kind: str, text: str, *, last: bool) -> Iterator[Event]:
        if not self._open or self.items[-1]["type"] != kind:
            yield from self._open_item(kind)
        part = self.items[-1]["content"][0]
        part["text"] += text
        found = (
            [] if self.logprobs is None else self.logprobs.take_logprobs_of_part(text, last=last)
        )
        told = {}
        if kind == "message":
            part["logprobs"] += found
            told["logprobs"] = found
        yield self._part_event(f"{_DONE[kind]}.delta", content_index=0, delta=text, **told)

    def _encode_call_events(self, part: CallDelta) -> Iterator[Event]:
        call = part.call
        kind, name = (
            ("custom_tool_call", "input") if call.custom else ("function_call", "arguments")
        )
        if part.begins:
            yield from self._open_item(kind, call_id=call.id, name=call.name, **{name: ""})
        if part.arguments:
            self.items[-1][name] += part.arguments
            yield self._part_event(f"{_DONE[kind]}.delta", delta=part.arguments)

    def _open_item(self, kind: str, **content: Any) -> Iterator[Event]:
        yield from self.close_item("completed")
        item: dict[str, Any] = {
            "type": kind,
            "id": new_id(kind),
            "status": "in_progress",
            **_EMPTY.get(kind, {}),
            **content,
        }
        self.items.append(item)
        self._open = True
        yield self._item_event("response.output_item.added", dict(item))
        if "content" in item:
            item["content"] = [_new_content_part(kind)]
            yield self._part_event(
                "response.content_part.added", content_index=0, part=_new_content_part(kind)
            )

    def _part_event(self, kind: str, **content: Any) -> Event:
        return self.new_event(
            kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **content
        )

    def _item_event(self, kind: str, item: dict[str, Any]) -> Event:
        return self.new_event(kind, output_index=len(self.items) - 1, item=item)
