"""OpenAI's decisions: probabilities of given answers, without generating any.

The questions of a decision are forks of one prefix: the input is computed once, and all choices of
all questions are scored together after it. Each choice is written as JSON (a quoted text, or
`true`), and the model is told to answer in this form. No JSON text or boolean is a prefix of
another one. So the sum of the log-probabilities of a choice's tokens is the log-probability of
answering with this choice and nothing more, whatever its length and its similarity to other
choices; it isn't divided by the length. A quotation mark that all choices begin with would add the
same value to each sum, and is left out. The softmax of these sums over the choices is the model's
own distribution, on the condition that it answers with one of them. There is no further
calibration.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from sglang_lite.process.random_ids import random_id
from sglang_lite.program.nodes import Fork, Node, Program, Select, Text
from sglang_lite.protocol import (
    UNSET,
    CapabilityError,
    ConstraintError,
    ParameterError,
    Played,
    Prompt,
    SamplingParams,
    Selection,
    SglError,
    Span,
    TemplateError,
    Unset,
    Usage,
)
from sglang_lite.runtime.core.submission import GenerateRequest, ProgramRequest
from sglang_lite.server.endpoint import HttpRequest, Route, json_response, read_body
from sglang_lite.server.openai.decisions_request import (
    DECISIONS,
    ChoiceQuestion,
    DecisionRequest,
    Options,
    PredicateQuestion,
    Question,
    build_question_options,
    parse_decision_messages,
)
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.service import Service
from sglang_lite.server.sglang.labels import label_scores
from sglang_lite.text.chat_format import Conversation
from sglang_lite.text.reasoning import reasoning_format

MAX_QUESTIONS = 400
MAX_ROWS = 1024  # choices that are scored together, each as one request of the engine
# errors that concern only one question
_UNSCORED = (ParameterError, ConstraintError, CapabilityError)
_TASK = "Answer a question about this in JSON, with exactly one of its choices."


@dataclass(frozen=True, slots=True)
class _QuestionTemplate:
    """Prompt around each question: token ids before it, and text after it."""

    text: str
    ids: tuple[int, ...]
    after: tuple[Text, ...]

    @property
    def prompt(self) -> Prompt:
        return Prompt((Span(self.text, self.ids),))

    def build_branch(
        self, options: Options, lora_path: tuple[str, ...] | Unset
    ) -> tuple[Node, ...]:
        """Returns the nodes of a question's branch. `lora_path` names the adapter that scores the
        choices.
        """
        # The shared quotation mark is computed once, with the question.
        quote = '"' if all(each.startswith('"') for each in options.choices_json) else ""
        texts = tuple(each[len(quote) :] for each in options.choices_json)
        choice = Select(None, texts, method=None, special=False, lora_path=lora_path)
        return (Text(options.text, special=False), *self.after, Text(quote, special=False), choice)


def _question_template(
    reader: RequestReader, messages: Sequence[Mapping[str, Any]]
) -> _QuestionTemplate:
    """Renders the input with a gap for the questions, and tokenises the text before the gap.

    Raises:
        ParameterError: the input is too long.
        TemplateError: the chat template changes the last message.
    """
    marker = random_id()
    task = f"{_TASK}\n\n{marker}"
    if messages[-1]["role"] == "user":  # some templates require alternating roles
        messages = [
            *messages[:-1],
            {**messages[-1], "content": f"{messages[-1]['content']}\n\n{task}"},
        ]
    else:
        messages = [*messages, {"role": "user", "content": task}]
    variables = {"": {"enable_thinking": False}}  # no field of the request sets this
    rendered = reader.chat_format.render(Conversation(messages=messages, variables=variables))
    before: list[Span] = []
    after: list[Text] = []
    for span in rendered.prompt.spans:
        head, placeholder, tail = span.text.partition(marker)
        if after:
            after.append(Text(span.text, special=span.special))
        else:
            before.append(Span(head, special=span.special))
            if placeholder:
                after.append(Text(tail, special=span.special))
    if not after:
        raise TemplateError(
            "the chat template changes the last message, so no question can be asked after it."
        )
    if rendered.reasoning is not None:
        markers = reasoning_format(rendered.reasoning)
        # the template has begun the reasoning
        if rendered.prompt.text.rstrip().endswith(markers.start):
            after.append(Text(f"\n{markers.end}\n\n"))
    ids = reader.tokenizer.encode_spans(before, first=True)
    if len(ids) >= reader.longest:
        raise ParameterError(
            "input",
            f"has {len(ids):,} tokens, but {reader.model_name} takes fewer than {reader.longest:,}. Shorten it.",
        )
    return _QuestionTemplate("".join(span.text for span in before), tuple(ids), tuple(after))


async def decide(service: Service, call: HttpRequest) -> Response:
    """Answers the questions of a request."""
    body, questions, template = await read_body(service, call, _read_decision_request)
    adapter = service.find_requested_adapter(body.model)
    # The input goes first, by itself: it is computed only once, and the number of its cached tokens
    # is known.
    alone = SamplingParams(max_tokens=0, lora_path=UNSET if adapter is None else (adapter,))
    (input_only,) = await service.async_engine.results(GenerateRequest(template.ids, alone))
    found: dict[int, Selection] = {}
    for wave in _group_questions(questions):
        found.update(await _score_questions(service, template, wave, alone.lora_path))
    answers = [
        _build_decision(question, questions[i], found.get(i))
        for i, question in enumerate(body.questions)
    ]
    usage = _decision_token_counts(input_only.usage, found.values())
    return json_response(
        {"model": service.resolve_answering_model(body.model), "answers": answers, "usage": usage}
    )


def _read_decision_request(
    reader: RequestReader, call: HttpRequest
) -> tuple[DecisionRequest, list[Options | None], _QuestionTemplate]:
    """Returns the request without its input, the options of each question, and the prompt template
    that surrounds a question.
    """
    body = call.read_fields(DECISIONS)
    if not 1 <= len(body.questions) <= MAX_QUESTIONS:
        raise ParameterError(
            "questions", f"has {len(body.questions):,} questions. Give 1 to {MAX_QUESTIONS}."
        )
    questions = [
        build_question_options(question, f"questions[{i}]")
        for i, question in enumerate(body.questions)
    ]
    template = _question_template(reader, parse_decision_messages(body.input))
    body.input = ""
    return body, questions, template


def _group_questions(questions: Sequence[Options | None]) -> Iterator[dict[int, Options]]:
    """Yields groups of questions that are scored together, each as a mapping from index to
    question.
    """
    wave: dict[int, Options] = {}
    rows = 0
    for i, options in enumerate(questions):
        if options is None:
            continue
        if wave and rows + len(options.values) > MAX_ROWS:
            yield wave
            wave = {}
            rows = 0
        wave[i] = options
        rows += len(options.values)
    if wave:
        yield wave


async def _score_questions(
    service: Service,
    template: _QuestionTemplate,
    wave: Mapping[int, Options],
    lora_path: tuple[str, ...] | Unset,
) -> dict[int, Selection]:
    """Returns the scores of a group's questions by index. Questions that can't be scored are
    missing.

    Raises:
        SglError: the engine is closed, or has no room.
    """
    indices = list(wave)
    program = Program((Fork(tuple(template.build_branch(wave[i], lora_path) for i in indices)),))
    found: dict[int, Selection] = {}
    async with contextlib.aclosing(
        service.async_engine.play(ProgramRequest(template.prompt, program))
    ) as events:
        async for batch in events:
            for event in batch:
                if isinstance(event, SglError):
                    raise event
                if not isinstance(event, Played):
                    continue
                if isinstance(event.event, Selection):
                    found[indices[event.path[1]]] = event.event
                elif isinstance(event.event, SglError) and not isinstance(event.event, _UNSCORED):
                    raise event.event
    return found


def _build_decision(
    question: Question, options: Options | None, selection: Selection | None
) -> dict[str, Any]:
    """Returns the answer to a question, or a refusal if nothing could be scored."""
    head = {"type": question.__struct_config__.tag, "name": question.name}
    logprobs = [] if selection is None else [sum(score.logprobs) for score in selection.scores]
    if options is None or not any(map(math.isfinite, logprobs)):
        return {**head, "type": "refusal"}
    shares = label_scores(logprobs, apply_softmax=True)
    if isinstance(question, PredicateQuestion):
        return {**head, "probability": shares[0]}
    confidence = _confidence(shares)
    if isinstance(question, ChoiceQuestion):
        best = max(range(len(shares)), key=shares.__getitem__)
        probabilities = [
            {"value": value, "probability": p} for value, p in zip(options.values, shares)
        ]
        return {
            **head,
            "choice": options.values[best],
            "confidence": confidence,
            "probabilities": probabilities,
        }
    return {
        **head,
        "score": sum(i * p for i, p in enumerate(shares)),
        "confidence": confidence,
        "probabilities": [
            {"value": i, "label": label, "probability": p}
            for i, (label, p) in enumerate(zip(options.values, shares))
        ],
    }


def _confidence(shares: Sequence[float]) -> float:
    """Returns the probability of the most likely choice, rescaled from 0 (all choices are equally
    likely) to 1 (certainty).
    """
    even = 1 / len(shares)
    return min(max((max(shares) - even) / (1 - even), 0.0), 1.0)


def _decision_token_counts(input_usage: Usage, selections: Iterable[Selection]) -> dict[str, Any]:
    """Returns the token counts of a decision. Each token of the input, of a question and of a
    choice counts once, although all choices are scored after the same prefix.
    """
    total = input_usage.prompt_tokens
    for selection in selections:
        choices = sum(len(score.token_ids) for score in selection.scores)
        question = (selection.usage.prompt_tokens - choices) // len(
            selection.scores
        ) - input_usage.prompt_tokens
        total += question + choices
    cached = input_usage.cached_tokens
    return {
        "input_tokens": total,
        "input_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": input_usage.prompt_tokens - cached,
        },
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": total,
    }


ROUTES = (
    Route(
        "/v1/decisions",
        decide,
        "Answer questions with probabilities",
        protocol="openai",
        fields=DECISIONS,
        counts_as_open=True,
    ),
)
