"""Answers to script, whatever the provider; and an answer as it goes out, within what the request asks for."""

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
    """A call of a tool. `input` is a text for a custom tool of OpenAI's, else an object."""

    name: str
    input: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Say:
    """An answer of the model. A plain text stands for `Say(text)`; anything JSON is its text.

    Attributes:
        text: of the answer. It is cut at the request's stop strings and after its limit of tokens (words, here). Where
            the request has a schema or a grammar, it is put into the form that is asked for: `Paris` answers a schema
            of one text property. None: a text that the constraint allows.
        thinking: reasoning before it, as far as the API shows it; its tokens are counted in any case.
        refusal: the model declines instead.
        calls: of tools. Where the request demands a tool and there are none, the text is its input.
        finish: how it ends, where that is not by itself: "length", "filter" (a content filter), "pause" (Anthropic's
            `pause_turn`).
        cached, written: tokens of the prompt that are read from the provider's cache, or written to it.
        exactly: the text goes out as it is, whatever the request asks for.
        headers: of the answer.
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
    """An error of the provider, in its words.

    Attributes:
        kind: the provider's name of it; "": the one that goes with the status.
        code, parameter: as OpenAI tells them.
        after: of a stream: so many events come before it (a stream that has begun has no status any more).
        answer: that was begun then.
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
    """An answer that breaks off.

    Attributes:
        after: so many events of a stream; an answer in one piece breaks off in its middle.
        how: the connection is closed ("drop"), nothing comes any more ("hold"), or what comes next is no JSON
            ("garbage").
    """

    after: int = 1
    how: Literal["drop", "hold", "garbage"] = "drop"
    answer: Answer = "The beginning of an answer that never ends."


@dataclass(frozen=True, slots=True)
class Slow:
    """An answer that takes its time: so many seconds before each event of a stream, or before the whole."""

    seconds: float
    answer: Answer = None


@dataclass(frozen=True, slots=True)
class Buffered:
    """A stream that comes all at once, as through a proxy that buffers."""

    answer: Answer = None


@dataclass(frozen=True, slots=True)
class Html:
    """A page where an answer should be, as proxies and wrong addresses give."""

    status: int = 200
    text: str = "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"


Answer: TypeAlias = "str | Mapping[str, Any] | Say | Fail | Cut | Slow | Buffered | Html | Any"


def rate_limit(retry_after: float | None = None, message: str = "Rate limit reached. Try again later.") -> Fail:
    """HTTP 429. `retry_after`: seconds that the provider says to wait; None: it says nothing."""
    headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}
    return Fail(429, message, code="rate_limit_exceeded", headers=headers)


def overload(after: int | None = None) -> Fail:
    """The provider has too much to do: 503 or 529, or in the middle of a stream, after so many events."""
    return Fail(529, "Overloaded", kind="overloaded_error", after=after)


# ------------------------------------------------------------------------------------------------ as it goes out


@dataclass(frozen=True, slots=True)
class Wanted:
    """Contents of a request, whatever its API.

    Attributes:
        prompt: all of its text.
        stream: in events.
        n: samples.
        limit: tokens of each.
        stops: stop strings.
        constraint: of the answer, or of the input of the tool that is demanded.
        tool: that has to be called.
        custom: it is one with a text as input.
        logprobs: how many alternatives of each token; None: no log-probabilities.
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
class ServedAnswer:
    """An answer as it goes out.

    Attributes:
        pieces: of the text, as a stream has them.
        stop: the stop string that ended it.
        prompt_tokens, completion_tokens, reasoning_tokens: words of all of it.
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
        return words(self.text)

    @property
    def completion_tokens(self) -> int:
        inputs = [call.input if isinstance(call.input, str) else json.dumps(call.input) for call in self.calls]
        return self.reasoning_tokens + sum(map(count, (self.text, self.say.refusal, *inputs)))


def words(text: str) -> list[str]:
    """A text in pieces: what counts as its tokens here."""
    return _TOKEN.findall(text)


def count(text: str) -> int:
    return len(words(text))


def as_say(answer: Answer) -> Say:
    """A scripted answer, as what the model says."""
    if isinstance(answer, Say):
        return answer
    return Say(text=answer if answer is None or isinstance(answer, str) else json.dumps(answer))


def served(say: Say, wanted: Wanted, random: Random) -> ServedAnswer:
    """An answer within what a request asks for.

    Raises:
        ValueValidationError: the text that was scripted can't be an answer to this request.
    """
    text = "" if say.refusal or say.calls else _fitted(say, wanted, random)
    stop, finish = None, say.finish
    if wanted.constraint is None and not say.exactly:
        matcher = StopMatcher(wanted.stops)
        text = matcher.push(text) + (matcher.flush() if matcher.matched is None else "")
        stop = matcher.matched if isinstance(matcher.matched, str) else None
    thoughts = count(say.thinking)
    left = None if wanted.limit is None else max(wanted.limit - thoughts, 0)
    if left is not None and count(text) > left and not say.exactly:
        text, stop, finish = "".join(words(text)[:left]), None, "length"
    calls = say.calls
    if wanted.tool is not None and not calls and not say.refusal and finish == "stop":
        calls, text = (ToolCall(wanted.tool, text if wanted.custom else json.loads(text)),), ""
    return ServedAnswer(text, say, calls, finish, stop, count(wanted.prompt), thoughts)


def _fitted(say: Say, wanted: Wanted, random: Random) -> str:
    """The text in the form that is asked for."""
    text, constraint = say.text, wanted.constraint
    if constraint is None or say.exactly:
        return "ok" if text is None else text
    if text is None:
        return sample(constraint, random)
    if wanted.limit is not None and count(text) > wanted.limit:  # it will be cut
        return text
    for form in (text, *_wrapped(text, constraint)):
        try:
            if isinstance(constraint, JsonSchema):
                parse_json(constraint, form)
            else:
                validate(constraint, form)
        except (ValueValidationError, ConstraintError):
            continue
        return form
    raise ValueValidationError(
        f"the scripted answer {text!r:.100} is none that {constraint!r:.200} allows.", text=text,
        hint="Say(…, exactly=True) sends it as it is.",
    )  # fmt: skip


def _wrapped(text: str, constraint: Constraint) -> list[str]:
    """The text as the only property of an object, where the schema is of one."""
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
