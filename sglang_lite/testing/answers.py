"""Scripted answers, independent of the provider, and how they are rendered within the limits of a
request.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from random import Random
from typing import Any, Literal, TypeAlias

from sglang_lite.constraints.matching import validate
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.schema import parse_json
from sglang_lite.protocol import Constraint, ConstraintError, JsonSchema, ValueValidationError
from sglang_lite.text.stop import StopMatcher

_TOKEN = re.compile(r"\s*\S+|\s+")

Finish: TypeAlias = Literal["stop", "length", "filter", "pause"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a tool. `input` is text for a custom tool of OpenAI's, otherwise an object."""

    name: str
    input: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Say:
    """Answer of the model. Plain text stands for `Say(text)`; other JSON data is converted to text.

    Attributes:
        text: text of the answer. It is cut at the request's stop strings and token limit (words
            count as tokens). If the request has a schema or grammar, the text is converted to the
            required form: `Paris` answers a schema with one text property. None stands for "ok", or
            a random text that the constraint allows.
        thinking: reasoning before the text, if the API returns it; its tokens are counted in any
            case.
        refusal: refusal of the model, instead of text.
        calls: calls of tools. If the request forces a tool and `calls` is empty, the text becomes
            the tool's input.
        finish: finish reason, unless "stop": "length", "filter" (content filter), or "pause"
            (Anthropic's `pause_turn`).
        cached, written: number of prompt tokens that are read from the provider's cache, or written
            to it.
        exactly: True to send the text unchanged, whatever the request requires.
        headers: headers of the answer.
    """

    text: str | None = None
    _: KW_ONLY
    thinking: str = ""
    refusal: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: Finish = "stop"
    cached: int = 0
    written: int = 0
    exactly: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fail:
    """Error of the provider.

    Attributes:
        status: HTTP status.
        message: text of the error.
        kind: the provider's name for the error's type; "" for the type that belongs to the status.
        code, parameter: further fields of OpenAI's errors.
        headers: headers of the response.
        after: for a stream, number of events before the error, which then has no HTTP status; None
            for an error instead of a response.
        answer: answer that begins before the error, if `after` is set.
    """

    status: int
    message: str = "The server had an error while processing your request."
    kind: str = ""
    code: str | None = None
    parameter: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    after: int | None = None
    answer: Answer = "The beginning of an answer that never ends."


@dataclass(frozen=True, slots=True)
class Cut:
    """Answer that breaks off.

    Attributes:
        after: number of events before the break; an answer in one piece breaks off in its middle.
        how: "drop" closes the connection, "hold" sends nothing more, "garbage" sends invalid JSON.
        answer: answer that breaks off.
    """

    after: int = 1
    how: Literal["drop", "hold", "garbage"] = "drop"
    answer: Answer = "The beginning of an answer that never ends."


@dataclass(frozen=True, slots=True)
class Slow:
    """Answer with a delay of `seconds` before each event of a stream, or before an answer in one
    piece.
    """

    seconds: float
    answer: Answer = None


@dataclass(frozen=True, slots=True)
class Buffered:
    """Stream whose events all arrive together, as if through a buffering proxy."""

    answer: Answer = None


@dataclass(frozen=True, slots=True)
class Html:
    """HTML page instead of an answer, as returned by proxies and wrong addresses."""

    status: int = 200
    text: str = "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"


Answer: TypeAlias = "str | Mapping[str, Any] | Say | Fail | Cut | Slow | Buffered | Html | Any"


def rate_limit(
    retry_after: float | None = None, message: str = "Rate limit reached. Try again later."
) -> Fail:
    """Makes an error with HTTP status 429. `retry_after` is the value of the `retry-after` header
    in seconds; None omits the header.
    """
    headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}
    return Fail(429, message, code="rate_limit_exceeded", headers=headers)


def overload(after: int | None = None) -> Fail:
    """Makes the error of an overloaded provider: HTTP status 529, or an error within a stream after
    `after` events.
    """
    return Fail(529, "Overloaded", kind="overloaded_error", after=after)


# -------------------------------------------------------------------------- rendering for a request


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Contents of a request, independent of the API.

    Attributes:
        model: name of the model.
        prompt: all text of the request.
        stream: True if the answer should be streamed.
        n: number of samples.
        limit: maximum number of tokens per sample.
        stops: stop strings.
        constraint: constraint of the answer, or of the forced tool's input.
        tool: name of the tool that must be called, or None.
        custom: True if the input of that tool is text.
        logprobs: number of alternatives for each token; None for no log-probabilities.
    """

    model: str
    prompt: str
    stream: bool = False
    n: int = 1
    limit: int | None = None
    stops: tuple[str, ...] = ()
    constraint: Constraint | None = None
    tool: str | None = None
    custom: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class RenderedAnswer:
    """Scripted answer, ready to send.

    Attributes:
        text: text after cuts and conversion.
        say: scripted answer.
        calls: calls of tools.
        finish: finish reason.
        pieces: parts of the text, as a stream sends them.
        stop: stop string that ended the text, or None.
        prompt_tokens, completion_tokens, reasoning_tokens: token counts (in words); completion
            includes reasoning.
    """

    text: str
    say: Say
    calls: tuple[ToolCall, ...]
    finish: Finish
    stop: str | None
    prompt_tokens: int
    reasoning_tokens: int

    @property
    def pieces(self) -> list[str]:
        return split_words(self.text)

    @property
    def completion_tokens(self) -> int:
        inputs = [
            call.input if isinstance(call.input, str) else json.dumps(call.input)
            for call in self.calls
        ]
        return self.reasoning_tokens + sum(map(count_words, (self.text, self.say.refusal, *inputs)))


def split_words(text: str) -> list[str]:
    """Splits a text into pieces, which count as tokens here."""
    return _TOKEN.findall(text)


def count_words(text: str) -> int:
    return len(split_words(text))


def convert_to_say(answer: Answer) -> Say:
    """Converts a scripted answer to a `Say`."""
    if isinstance(answer, Say):
        return answer
    return Say(text=answer if answer is None or isinstance(answer, str) else json.dumps(answer))


def render_answer(say: Say, request: RequestSummary, random: Random) -> RenderedAnswer:
    """Renders the answer to a request, within its limits and constraint.

    Raises:
        ValueValidationError: the scripted text can't be an answer to this request.
    """
    text = "" if say.refusal or say.calls else _fit_constraint(say, request, random)
    stop = None
    finish = say.finish
    if request.constraint is None and not say.exactly:
        matcher = StopMatcher(request.stops)
        text = matcher.push(text) + (matcher.flush() if matcher.matched is None else "")
        stop = matcher.matched if isinstance(matcher.matched, str) else None
    thoughts = count_words(say.thinking)
    remaining = None if request.limit is None else max(request.limit - thoughts, 0)
    if remaining is not None and count_words(text) > remaining and not say.exactly:
        text = "".join(split_words(text)[:remaining])
        stop = None
        finish = "length"
    calls = say.calls
    if request.tool is not None and not calls and not say.refusal and finish == "stop":
        calls = (ToolCall(request.tool, text if request.custom else json.loads(text)),)
        text = ""
    return RenderedAnswer(text, say, calls, finish, stop, count_words(request.prompt), thoughts)


def _fit_constraint(say: Say, request: RequestSummary, random: Random) -> str:
    """Converts an answer's text to the form that the request requires."""
    text = say.text
    constraint = request.constraint
    if constraint is None or say.exactly:
        return "ok" if text is None else text
    if text is None:
        return sample(constraint, random)
    if request.limit is not None and count_words(text) > request.limit:  # the text will be cut
        return text
    for form in (text, *_json_candidates(text, constraint)):
        try:
            if isinstance(constraint, JsonSchema):
                parse_json(constraint, form)
            else:
                validate(constraint, form)
        except (ValueValidationError, ConstraintError):
            continue
        return form
    raise ValueValidationError(
        f"the scripted answer {text!r:.100} is none that {constraint!r:.200} allows.",
        text=text,
        hint="Say(…, exactly=True) sends it as it is.",
    )


def _json_candidates(text: str, constraint: Constraint) -> list[str]:
    """Returns ways to write a plain text as JSON for a request: as a JSON string and, if the schema
    has exactly one property, as an object with this property.
    """
    if not isinstance(constraint, JsonSchema):
        return []
    schema = json.loads(constraint.schema)
    names = list(schema.get("properties", ())) if isinstance(schema, dict) else []
    if len(names) != 1:
        return [json.dumps(text)]
    found = [json.dumps({names[0]: text}), json.dumps(text)]
    with contextlib.suppress(ValueError):
        found.insert(0, json.dumps({names[0]: json.loads(text)}))
    return found
