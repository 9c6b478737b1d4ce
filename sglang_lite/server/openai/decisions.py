"""OpenAI's decisions, and scores of given texts: what a model thinks of answers that are known, without generating any.

A decision's questions are forks of one prefix: what the input says is computed once, and all choices of all questions
run together after it. Each choice is written as JSON, a text in quotation marks or `true`, and the model was told to
answer so. No JSON text or boolean is the beginning of another one, so the sum of the log-probabilities of a choice's
tokens is that of answering with this choice and nothing more, however long it is and whatever else it resembles: it is
not divided by the length. The softmax of these sums over the choices is the model's own distribution, on the condition
that it answers with one of them. Nothing is calibrated beyond that.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
from starlette.responses import Response

from sglang_lite.program.nodes import Fork, Gen, Node, Program, Select, Text
from sglang_lite.protocol import (
    CapabilityError,
    ConstraintError,
    Generation,
    ParameterError,
    Played,
    Prompt,
    SamplingParams,
    Selection,
    SglError,
    Span,
    TemplateError,
    Usage,
)
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.conversation.chat_format import Conversation
from sglang_lite.server.fields import DECISIONS_NEUTRAL, GATEWAY_NEUTRAL, Fields
from sglang_lite.server.routes import Call, Route, answer
from sglang_lite.server.service import Service
from sglang_lite.text.reasoning import format_of

MOST_QUESTIONS = 400
MOST_CHOICES = 255
_MOST_ROWS = 1024  # choices that are scored together: each is a request of the engine
_UNSCORED = (ParameterError, ConstraintError, CapabilityError)  # what is wrong with one question alone
_JSON_BYTES, _JSON_DEPTH, _JSON_VALUES = 2**18, 32, 10_000  # of a part of the input that is JSON


# ----------------------------------------------------------------------------------------------------- the request


class _Part(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    pass


class InputText(_Part, tag="input_text"):
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None  # every prefix is cached


class InputImage(_Part, tag="input_image"):
    image_url: str
    detail: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputJson(_Part, tag="input_json"):
    data: dict[str, Any] | list[dict[str, Any]]


class OutputText(_Part, tag="output_text"):
    text: str
    annotations: list[Any] | None = None  # an earlier answer's, sent back as they came
    logprobs: list[Any] | None = None


class Refusal(_Part, tag="refusal"):
    refusal: str


Parts: TypeAlias = list[InputText | InputImage | InputJson | OutputText | Refusal]


class InputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message", forbid_unknown_fields=True):
    role: Literal["user", "developer", "system", "assistant"]
    content: str | Parts
    phase: Literal["commentary", "final_answer"] | None = None


class _Item(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    call_id: str
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputCall(_Item, tag="function_call"):
    name: str
    arguments: str
    namespace: str | None = None


class InputCallOutput(_Item, tag="function_call_output"):
    output: str | list[InputText | InputImage]


class InputCustomCall(_Item, tag="custom_tool_call"):
    name: str
    input: str
    namespace: str | None = None


class InputCustomCallOutput(_Item, tag="custom_tool_call_output"):
    output: str | list[InputText | InputImage]


Item: TypeAlias = InputMessage | InputCall | InputCallOutput | InputCustomCall | InputCustomCallOutput


class _Question(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    instructions: str | list[InputText | InputImage | InputJson]
    name: str | None = None


class PredicateQuestion(_Question, tag="predicate"):
    pass


class DecisionChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    value: str | bool
    description: str | None = None


class ChoiceQuestion(_Question, tag="choice"):
    choices: list[DecisionChoice]


class DecisionLevel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    label: str
    description: str | None = None


class ScoreQuestion(_Question, tag="score"):
    levels: list[DecisionLevel]


Question: TypeAlias = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionRequest(msgspec.Struct, kw_only=True):
    """Questions about an input."""

    model: str
    input: str | list[dict[str, Any]]
    questions: list[Question]


class ScoreRequest(msgspec.Struct, kw_only=True):
    """Texts that are to be scored: our `continuations` of a `prompt`, or labels after SGLang's `query` and `items`."""

    model: str | None = None
    prompt: str | None = None
    continuations: list[str] | None = None
    query: str | list[int] | None = None
    items: str | list[str | list[int]] | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


DECISIONS: Fields[DecisionRequest] = Fields(DecisionRequest, DECISIONS_NEUTRAL, {})
SCORE: Fields[ScoreRequest] = Fields(ScoreRequest, GATEWAY_NEUTRAL, {})


# --------------------------------------------------------------------------------------------------- what is asked

_TASK = "Answer a question about this in JSON, with exactly one of its choices."


@dataclass(frozen=True, slots=True)
class _Options:
    """A question, ready to be asked.

    Attributes:
        text: of the question.
        values: of the choices; of levels their labels.
        written: the choices as JSON.
    """

    text: str
    values: Sequence[str | bool]
    written: tuple[str, ...]


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The input as messages that templates take.

    Raises:
        ParameterError: an item is none, or the output of no call.
        CapabilityError: there is an image in it.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise ParameterError("input", "is empty.")
    messages: list[dict[str, Any]] = []
    calls: set[tuple[type, str]] = set()
    for i, data in enumerate(given):
        where = f"input[{i}]"
        item = _item(data, where)
        if isinstance(item, InputMessage):
            messages.append({"role": item.role, "content": _text(item.content, f"{where}.content")})
        elif isinstance(item, InputCall | InputCustomCall):
            calls.add((type(item), item.call_id))
            called = {"type": "function", "id": item.call_id, "function": _function(item, where)}
            if messages and messages[-1].get("tool_calls"):
                messages[-1]["tool_calls"].append(called)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [called]})
        else:
            kind = InputCall if isinstance(item, InputCallOutput) else InputCustomCall
            if (kind, item.call_id) not in calls:
                raise ParameterError(f"{where}.call_id", f"{item.call_id!r:.80} is no call before it.")
            messages.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, f"{where}.output")}
            )
    return messages


def _item(data: dict[str, Any], where: str) -> Item:
    try:
        item: Item = msgspec.convert({"type": "message", **data} if "role" in data else data, Item)
    except msgspec.ValidationError as error:
        told, _, path = str(error).partition(" - at `$")
        raise ParameterError(where + path.rstrip("`"), f"{told[:1].lower()}{told[1:]}.") from None
    return item


def _function(item: InputCall | InputCustomCall, where: str) -> dict[str, Any]:
    if isinstance(item, InputCustomCall):
        return {"name": item.name, "arguments": {"input": item.input}}
    try:
        arguments = msgspec.json.decode(item.arguments or "{}")
    except msgspec.DecodeError as error:
        raise ParameterError(f"{where}.arguments", f"is no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ParameterError(f"{where}.arguments", "is no JSON object.")
    return {"name": item.name, "arguments": arguments}


def _text(content: str | Sequence[_Part], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, InputText | OutputText):
            texts.append(part.text)
        elif isinstance(part, Refusal):
            texts.append(part.refusal)
        elif isinstance(part, InputJson):
            texts.append(_json(part, f"{where}[{i}].data"))
        else:
            kind = part.__struct_config__.tag
            raise CapabilityError(f"the model reads text, and takes no {kind}.", parameter=f"{where}[{i}]")
    return "\n".join(texts)


def _json(part: InputJson, where: str) -> str:
    written = msgspec.json.encode(part.data)
    if len(written) > _JSON_BYTES:
        raise ParameterError(where, f"{len(written):,} bytes of JSON are more than {_JSON_BYTES:,}.")
    depths = list(_depths(part.data, 1))
    if max(depths) > _JSON_DEPTH:
        raise ParameterError(where, f"is nested deeper than {_JSON_DEPTH}.")
    if len(depths) > _JSON_VALUES:
        raise ParameterError(where, f"{len(depths):,} values are more than {_JSON_VALUES:,}.")
    return written.decode()


def _depths(value: Any, depth: int) -> Iterator[int]:  # of plain data
    """The depth of each value: how many containers it is in, itself included."""
    yield depth if isinstance(value, dict | list) else depth - 1
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _depths(each, depth + 1)


def _options(question: Question, where: str) -> _Options | None:
    """A question as it is asked; None: the model can't see all of it.

    Raises:
        ParameterError: it has too few or too many choices, or one of them twice.
    """
    values, described = _values(question, where)
    written = tuple(msgspec.json.encode(value).decode() for value in values)
    try:
        asked = _text(question.instructions, f"{where}.instructions")
    except CapabilityError:
        return None
    if any(described):
        listed = "".join(f"\n{each}: {told}" if told else f"\n{each}" for each, told in zip(written, described))
    else:
        listed = f" {', '.join(written)}"
    head = "Levels, lowest first:" if isinstance(question, ScoreQuestion) else "Choices:"
    return _Options(f"{asked}\n{head}{listed}", values, written)


def _values(question: Question, where: str) -> tuple[Sequence[str | bool], Sequence[str | None]]:
    """The values of a question's choices, and what is said of them."""
    if isinstance(question, PredicateQuestion):
        return (True, False), (None, None)
    if isinstance(question, ChoiceQuestion):
        found: list[tuple[str | bool, str | None]] = [(each.value, each.description) for each in question.choices]
        name = "choices"
    else:
        found = [(each.label, each.description) for each in question.levels]
        name = "levels"
    if not 2 <= len(found) <= MOST_CHOICES:
        raise ParameterError(f"{where}.{name}", f"{len(found)} are not between 2 and {MOST_CHOICES}.")
    if len({(type(value), value) for value, _ in found}) < len(found):
        raise ParameterError(f"{where}.{name}", "one of them is there twice.")
    return [value for value, _ in found], [told for _, told in found]


@dataclass(frozen=True, slots=True)
class _Frame:
    """What stands around each question: final tokens before it, text after it."""

    text: str
    ids: tuple[int, ...]
    after: tuple[Text, ...]

    @property
    def prompt(self) -> Prompt:
        return Prompt((Span(self.text, self.ids),))

    def branch(self, asked: _Options) -> tuple[Node, ...]:
        """The nodes of a question."""
        # A generation of no token: the question is computed once, before its choices need it.
        read = Gen(None, SamplingParams(max_tokens=0), held=True)
        choice = Select(None, asked.written, method=None, special=False)
        return (Text(asked.text, special=False), *self.after, read, choice)


def _frame(service: Service, messages: Sequence[Mapping[str, Any]]) -> _Frame:
    """
    Raises:
        ParameterError: the input is too long.
    """
    place = uuid.uuid4().hex
    asked = f"{_TASK}\n\n{place}"
    if messages[-1]["role"] == "user":  # some templates take turns only
        messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\n{asked}"}]
    else:
        messages = [*messages, {"role": "user", "content": asked}]
    prepared = service.chat_format.prepare(Conversation(messages=messages, variables={"enable_thinking": False}))
    before: list[Span] = []
    after: list[Text] = []
    for span in prepared.prompt.spans:
        head, found, tail = span.text.partition(place)
        if after:
            after.append(Text(span.text, special=span.special))
        else:
            before.append(Span(head, special=span.special))
            if found:
                after.append(Text(tail, special=span.special))
    if not after:
        raise TemplateError("the chat template changes the last message: nothing can be asked after it.")
    if prepared.reasoning is not None:
        known = format_of(prepared.reasoning)
        if prepared.prompt.text.rstrip().endswith(known.start):  # the template has begun it
            after.append(Text(f"\n{known.end}\n\n"))
    ids = service.engine.tokenizer.encode_spans(before, first=True)
    longest = service.engine.core.capacity.longest
    if len(ids) >= longest:
        raise ParameterError("input", f"{len(ids):,} tokens long; {service.model_name} takes {longest:,}.")
    return _Frame("".join(span.text for span in before), tuple(ids), tuple(after))


# ---------------------------------------------------------------------------------------------------- the answers


async def decide(service: Service, call: Call) -> Response:
    """Answers questions."""
    body = call.read(DECISIONS)
    service.check_model(body.model)
    if not 1 <= len(body.questions) <= MOST_QUESTIONS:
        raise ParameterError("questions", f"{len(body.questions)} are not between 1 and {MOST_QUESTIONS}.")
    asked = [_options(question, f"questions[{i}]") for i, question in enumerate(body.questions)]
    messages = _messages(body.input)
    frame = await asyncio.to_thread(_frame, service, messages)
    # The input alone, first: so it is computed once, and what it found in the cache is known.
    alone = SamplingParams(max_tokens=0)
    (read,) = await service.running.results(GenerateRequest(frame.ids, alone))
    found: dict[int, Selection] = {}
    for wave in _waves(asked):
        found.update(await _selections(service, frame, wave))
    answers = [_answer(question, asked[i], found.get(i)) for i, question in enumerate(body.questions)]
    return answer({"model": service.model_name, "answers": answers, "usage": _usage(read.usage, found.values())})


def _waves(asked: Sequence[_Options | None]) -> Iterator[dict[int, _Options]]:
    """Questions that are asked together, with their places."""
    wave: dict[int, _Options] = {}
    rows = 0
    for i, options in enumerate(asked):
        if options is None:
            continue
        if wave and rows + len(options.values) > _MOST_ROWS:
            yield wave
            wave, rows = {}, 0
        wave[i] = options
        rows += len(options.values)
    if wave:
        yield wave


async def _selections(service: Service, frame: _Frame, wave: Mapping[int, _Options]) -> dict[int, Selection]:
    """The scores of questions by their places, but for those that can't be scored.

    Raises:
        SglError: the engine has ended, or has no room.
    """
    places = list(wave)
    program = Program((Fork(tuple(frame.branch(wave[i]) for i in places)),))
    found: dict[int, Selection] = {}
    async with contextlib.aclosing(service.running.play(frame.prompt, program)) as events:
        async for taken in events:
            for event in taken:
                if isinstance(event, SglError):
                    raise event
                if not isinstance(event, Played):
                    continue
                if isinstance(event.event, Selection):
                    found[places[event.path[1]]] = event.event
                elif isinstance(event.event, SglError) and not isinstance(event.event, _UNSCORED):
                    raise event.event
    return found


def _answer(question: Question, asked: _Options | None, selection: Selection | None) -> dict[str, Any]:
    """The answer to a question; a refusal where nothing could be scored."""
    head = {"type": question.__struct_config__.tag, "name": question.name}
    shares = None if selection is None else _softmax([sum(score.logprobs) for score in selection.scores])
    if asked is None or shares is None:
        return {**head, "type": "refusal"}
    if isinstance(question, PredicateQuestion):
        return {**head, "probability": shares[0]}
    confidence = _confidence(shares)
    if isinstance(question, ChoiceQuestion):
        best = max(range(len(shares)), key=shares.__getitem__)
        probabilities = [{"value": value, "probability": p} for value, p in zip(asked.values, shares)]
        return {**head, "choice": asked.values[best], "confidence": confidence, "probabilities": probabilities}
    return {
        **head,
        "score": sum(i * p for i, p in enumerate(shares)),
        "confidence": confidence,
        "probabilities": [
            {"value": i, "label": label, "probability": p} for i, (label, p) in enumerate(zip(asked.values, shares))
        ],
    }


def _softmax(logprobs: Sequence[float]) -> list[float] | None:
    """Shares of log-probabilities; None where there are none."""
    top = max(logprobs)
    if not math.isfinite(top):
        return None
    weights = [math.exp(each - top) for each in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


def _confidence(shares: Sequence[float]) -> float:
    """How far the likeliest choice is above all being alike (0), up to certainty (1)."""
    even = 1 / len(shares)
    return min(max((max(shares) - even) / (1 - even), 0.0), 1.0)


def _usage(read: Usage, found: Iterable[Selection]) -> dict[str, Any]:
    """Token counts: each token of the input, of a question and of a choice once."""
    total = read.prompt_tokens
    for selection in found:
        choices = sum(len(score.token_ids) for score in selection.scores)
        question = (selection.usage.prompt_tokens - choices) // len(selection.scores) - read.prompt_tokens
        total += question + choices
    cached = read.cached_tokens
    return {
        "input_tokens": total,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": read.prompt_tokens - cached},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": total,
    }


# --------------------------------------------------------------------------------------------------------- scores


async def score(service: Service, call: Call) -> Response:
    """Scores texts."""
    body = call.read(SCORE)
    service.check_model(body.model)
    ours = {"prompt": body.prompt, "continuations": body.continuations}
    theirs = {
        "query": body.query, "items": body.items, "label_token_ids": body.label_token_ids,
        "apply_softmax": body.apply_softmax, "item_first": body.item_first,
    }  # fmt: skip
    if any(value is not None for value in ours.values()):
        for name, value in theirs.items():
            if value is not None:
                raise ParameterError(name, "and continuations are both given.", hint="Give prompt and continuations.")
        return await _continuations(service, body)
    for name in ("query", "items", "label_token_ids"):
        if theirs[name] is None:
            raise ParameterError(name, "is missing.", hint="Or give prompt and continuations.")
    return await _labels(service, body)


async def _continuations(service: Service, body: ScoreRequest) -> Response:
    texts = body.continuations
    if not texts or not all(texts) or len(texts) > _MOST_ROWS:
        raise ParameterError("continuations", f"1 to {_MOST_ROWS:,} are needed, and none empty.")
    selection = await service.running.select(body.prompt or "", texts)
    scores = [
        {
            "index": i,
            "text": each.text,
            "logprob": sum(each.logprobs),
            "token_ids": each.token_ids,
            "token_logprobs": each.logprobs,
        }
        for i, each in enumerate(selection.scores)
    ]
    usage = selection.usage
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": 0, "total_tokens": usage.prompt_tokens,
              "prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}  # fmt: skip
    return answer({"object": "score", "model": service.model_name, "scores": scores, "usage": counts})


async def _labels(service: Service, body: ScoreRequest) -> Response:
    """How likely each label is as the next token, after the query with each item."""
    assert body.query is not None
    labels = body.label_token_ids
    size = service.engine.vocab_size
    if not labels:
        raise ParameterError("label_token_ids", "is empty.")
    for label in labels:
        if not 0 <= label < size:
            raise ParameterError("label_token_ids", f"{label} is no token id (0 to {size - 1:,}).")
    items = [body.items] if isinstance(body.items, str) else body.items or []
    if not 1 <= len(items) <= _MOST_ROWS:
        raise ParameterError("items", f"1 to {_MOST_ROWS:,} are needed.")
    params = SamplingParams(
        max_tokens=1, temperature=1.0, top_p=1.0, seed=0, ignore_eos=True, return_logprob=True,
        token_ids_logprob=tuple(labels),
    )  # fmt: skip
    prompts = [_prompt(body.query, item, first=bool(body.item_first)) for item in items]
    found = await asyncio.gather(*(service.running.results(GenerateRequest(prompt, params)) for prompt in prompts))
    scores = [_label_scores(generations[0], labels, softmax=bool(body.apply_softmax)) for generations in found]
    usages = [generations[0].usage for generations in found]
    prompt = sum(usage.prompt_tokens for usage in usages)
    counts = {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt,
              "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)}}  # fmt: skip
    return answer({"object": "scoring", "model": service.model_name, "scores": scores, "usage": counts})


def _prompt(query: str | list[int], item: str | list[int], *, first: bool) -> str | list[int]:
    parts = (item, query) if first else (query, item)
    if isinstance(parts[0], str) and isinstance(parts[1], str):
        return parts[0] + parts[1]
    if isinstance(parts[0], list) and isinstance(parts[1], list):
        return parts[0] + parts[1]
    raise ParameterError("items", "are texts where query is a text, and lists of ids where it is one.")


def _label_scores(generation: Generation, labels: Sequence[int], *, softmax: bool) -> list[float]:
    known = {id: logprob for logprob, id, _ in generation.output_logprobs[0].ids}
    logprobs = [known[label] for label in labels]
    if softmax and (shares := _softmax(logprobs)) is not None:
        return shares
    return [math.exp(each) for each in logprobs]


ROUTES = (
    Route(
        "/v1/decisions", decide, "Answer questions with probabilities", protocol="openai", fields=DECISIONS, works=True
    ),
    Route("/v1/score", score, "Score texts", protocol="openai", fields=SCORE, works=True),
)
