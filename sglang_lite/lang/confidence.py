"""Confidence of a model in a generated value and in each of its parts.

Most values are rated by the scores of their sampled tokens. Choices, such as enums and booleans,
are scored again, the way `select` scores them. Their sampled tokens are only one of several
spellings, and the last token may also contain text after the choice. If one choice is the beginning
of another, the probability of the longer one does not count for the shorter one.

The confidence in a value that was drawn exactly is its probability in the distribution from which
it was drawn. The parts of such a value have no confidence.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from sglang_lite.constraints.byte_matcher import ByteMatcher
from sglang_lite.constraints.json_schema.allowed_values import AllowedValues
from sglang_lite.constraints.json_schema.json_spans import PlacedValue, locate_values
from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.exact import MAX_GAP_OF_ALL_TEXTS
from sglang_lite.notebook.markup import (
    element,
    notebook_html,
    share_meter,
    shorten_text,
    table_of_rows,
)
from sglang_lite.protocol import (
    UNSET,
    Choices,
    Constraint,
    Generation,
    JsonSchema,
    ProgramError,
    Prompt,
    Selection,
    Span,
    TokenScores,
    Unset,
)
from sglang_lite.protocol.anything import Json

_TAIL: Final = re.compile(r"[ \t\r\n]*[,\]}]")  # ends a value inside an array or object


@dataclass(frozen=True, slots=True, repr=False)
class Confidence:
    """Confidence of a model in a value that it generated, and in the value's parts.

    Attributes:
        text: text of the value.
        logprob: log of the probability of this value under the constraint, given the text before.
            For a choice (enum, Literal, boolean, null), it is the log of its share in `probs`; for
            any other value, the sum over its tokens, including the end of a number. If the value
            was drawn exactly, it is the log of its probability, or of a lower bound if not all
            texts are known.
        mass: log of the probability that the model itself gave to the tokens that the constraint
            allowed, summed over the value's tokens; 0 if the model would have written nothing else.
            If the value was drawn exactly, it is `ExactShares.log_mass`.
        probs: probability of each choice, by its value, or by its text if the constraint is a list
            of texts or allows objects and arrays; None for other values. If the value was drawn
            exactly, the probabilities of all texts if they are known (a `gap` of at most 0.002).
        parts: members by name, or items by index.
    """

    text: str
    logprob: float
    mass: float
    probs: Mapping[Json, float] | None = None
    parts: Mapping[str | int, Confidence] = field(default_factory=dict)

    def __getitem__(self, part: str | int) -> Confidence:
        """Returns the confidence in a member of an object, by its name, or in an item of an array,
        by its index.
        """
        return self.parts[part]

    def __repr__(self) -> str:
        parts = (
            f", parts: {shorten_text(', '.join(map(str, self.parts)), 100)}" if self.parts else ""
        )
        return f"Confidence({shorten_text(repr(self.text), 100)}, prob={self.prob:.4f}, mass={self.mass:.4f}{parts})"

    def _repr_html_(self) -> str:
        rows = table_of_rows(
            ("part", "value", "probability", "choices"), _iterate_table_rows(self, "")
        )
        return notebook_html(element("b", "Confidence"), rows)

    @property
    def prob(self) -> float:
        """Probability of this value under the constraint, between 0 and 1."""
        return math.exp(self.logprob)


def _iterate_table_rows(confidence: Confidence, path: str) -> Iterator[tuple[object, ...]]:
    """Yields a table row for a value and for each of its parts. A row has a path, a text, a
    probability and the choices.
    """
    likeliest = sorted((confidence.probs or {}).items(), key=lambda each: -each[1])
    choices = ", ".join(f"{shorten_text(str(choice))} {share:.1%}" for choice, share in likeliest)
    yield path or "(all)", confidence.text, share_meter(confidence.prob), choices
    for name, part in confidence.parts.items():
        yield from _iterate_table_rows(part, f"{path}.{name}" if path else str(name))


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """Question that was answered by a generation: its backend, prompt, constraint and adapter."""

    backend: Backend
    prompt: Prompt
    constraint: Constraint | None
    adapter: tuple[str, ...] | Unset = UNSET


@dataclass(frozen=True, slots=True)
class _Choice:
    """Value in an answer that was chosen from a list of options, such as an enum or a boolean.

    Attributes:
        start: index of its first character.
        texts: text of each possible choice, by the key used in `Confidence.probs`.
        tail: text that ends the choice.
    """

    start: int
    texts: Mapping[Json, str]
    tail: str


# Function that scores texts as continuations of a prompt, on a question's backend.
Scorer: TypeAlias = Callable[[Backend, Prompt, Sequence[str]], Awaitable[Selection]]


def measure_confidence(
    question: AnsweredQuestion, answer: Generation, score: Scorer
) -> Awaitable[Confidence]:
    """Returns a coroutine that scores the choices of an answer concurrently and computes the
    confidence in its value.

    Args:
        question: the question that was answered.
        answer: the answer.
        score: function that scores choices.

    Raises:
        ProgramError: the answer is free text, was cut, or has no scores of its tokens.
    """
    if "exact" in answer.meta:
        return _read_exact_confidence(answer, question.constraint)
    scores = _require_scores(answer, question.constraint)
    value = _locate_value(answer, question.constraint)
    choices = list(_find_choices(question.constraint, answer.text, value))

    async def score_choices() -> Confidence:
        prompts = [_extend_prompt(choice, question.prompt, answer, scores) for choice in choices]
        texts = [[text + choice.tail for text in choice.texts.values()] for choice in choices]
        selections = await asyncio.gather(
            *(score(question.backend, *each) for each in zip(prompts, texts))
        )
        found = {choice.start: (choice, each) for choice, each in zip(choices, selections)}
        return _Reader(answer.text, scores, found).confidence_of(value)

    return score_choices()


async def _read_exact_confidence(answer: Generation, constraint: Constraint | None) -> Confidence:
    """Returns the confidence in a value that was drawn exactly."""
    figures = answer.meta["exact"]
    share = figures["probs"][answer.text]
    probs: dict[Json, float] | None = None
    if figures["gap"] <= MAX_GAP_OF_ALL_TEXTS:
        keys = _keys_of_texts(list(figures["probs"]), constraint)
        probs = dict(zip(keys, figures["probs"].values(), strict=True))
    else:  # the missing probability may belong to other texts
        share *= 1 - figures["gap"]
    logprob = math.log(share) if share else -math.inf
    return Confidence(answer.text, logprob, figures["log_mass"], probs)


def _keys_of_texts(texts: Sequence[str], constraint: Constraint | None) -> Sequence[Json]:
    """Returns the values of the texts if all are different JSON scalars, else the texts."""
    if not isinstance(constraint, JsonSchema):
        return texts
    values = [msgspec.json.decode(text) for text in texts]
    if any(isinstance(value, dict | list) for value in values) or len(set(values)) < len(values):
        return texts
    return values


def _require_scores(answer: Generation, constraint: Constraint | None) -> TokenScores:
    if constraint is None:
        raise ProgramError(
            "free text has no value to be sure of.",
            hint="Give gen a type or a constraint. For log-probabilities of tokens use gen(return_logprob=True).",
        )
    scores = answer.scores
    if scores is None:
        raise ProgramError(
            "the backend has not scored its tokens.", hint="Use a local engine, or its server."
        )
    if None in scores.logprobs:
        raise ProgramError(
            "the first of its tokens have no scores, as its stream was continued after an interruption.",
            hint="Generate it again: state.rerun(…).",
        )
    return scores


def _locate_value(answer: Generation, constraint: Constraint | None) -> PlacedValue:
    """Returns the value of an answer, with the positions of its parts in the text. Text other than
    JSON is a single value without parts.
    """
    text = answer.text
    if not isinstance(constraint, JsonSchema):
        return PlacedValue(text, 0, len(text))
    try:
        return locate_values(text)
    except (ValueError, RecursionError) as error:
        why = (
            "max_tokens has cut its text"
            if answer.finish_reason == "length"
            else f"its text is no JSON: {error}"
        )
        raise ProgramError(f"{why}.", hint="Raise max_tokens.") from error


def _find_choices(
    constraint: Constraint | None, text: str, value: PlacedValue
) -> Iterator[_Choice]:
    """Yields the choices in an answer, in the order of its text."""
    if isinstance(constraint, Choices):
        yield _Choice(0, {each: each for each in constraint.options}, "")
    elif isinstance(constraint, JsonSchema):
        matcher = ByteMatcher(constraint)
        for each, options in _enumerated_scalars(value, AllowedValues.for_schema(constraint)):
            texts = [scalar_as_json(option) for option in options]
            own = text[each.start : each.end]
            matcher.push(text[len(matcher.text) : each.start])
            possible = matcher.filter(texts)  # the text before may have ruled some out
            if own in possible:
                several = len(set(options)) < len(options)  # 1 and True are equal
                keys = {t: t if several else option for t, option in zip(texts, options)}
                tail = _TAIL.match(text, each.end)
                yield _Choice(
                    each.start, {keys[t]: t for t in possible}, tail.group() if tail else ""
                )


def scalar_as_json(value: Json) -> str:
    """Returns the JSON text of a scalar, in the spelling that constraints use."""
    return msgspec.json.encode(value).decode()


def _enumerated_scalars(
    value: PlacedValue, allowed: AllowedValues
) -> Iterator[tuple[PlacedValue, Sequence[Json]]]:
    """Yields those scalars of a value that are restricted to a list of options, each with its
    options.
    """
    if value.parts is None:
        if options := allowed.options:
            yield value, options
        return
    for name, part in value.parts.items():
        yield from _enumerated_scalars(
            part, allowed.member(name) if isinstance(name, str) else allowed.narrow_to_item(name)
        )


def _extend_prompt(
    choice: _Choice, prompt: Prompt, answer: Generation, scores: TokenScores
) -> Prompt:
    """Returns the prompt for scoring a choice: the original prompt, and the text of the answer
    before the choice.
    """
    before = answer.text[: choice.start]
    if before:
        # blanks before a choice are part of its first token, like in `select`
        own = len(before.rstrip())
        count = sum(end <= own for end in scores.ends)
        kept = scores.ends[count - 1] if count else 0
        written = [Span(before[:kept], answer.token_ids[:count])] if count else []
        written += [Span(before[kept:], special=False)] if kept < len(before) else []
        prompt = msgspec.structs.replace(
            prompt, spans=(*prompt.spans, *written), partial=prompt.partial + before
        )
    return prompt


class _Reader:
    """Computes confidences from scores.

    Args:
        text: text of the answer.
        scores: scores of its tokens.
        choices: choices in the text with their scores, by the index of their first character.
    """

    def __init__(
        self, text: str, scores: TokenScores, choices: Mapping[int, tuple[_Choice, Selection]]
    ) -> None:
        self._text = text
        self._choices = choices
        # start, end, log-probability and mass of each token
        self._tokens: list[tuple[int, int, float, float]] = []
        start = 0
        for logprob, allowed, end in zip(scores.logprobs, scores.allowed, scores.ends):
            assert logprob is not None
            assert allowed is not None
            # A token without text of its own (the rest of a character, or an end) counts for the
            # character before.
            self._tokens.append(
                (min(start, end - 1), end, min(logprob - allowed, 0.0), min(allowed, 0.0))
            )
            start = end

    def confidence_of(self, value: PlacedValue) -> Confidence:
        text = self._text[value.start : value.end]
        is_number = isinstance(value.value, int | float) and not isinstance(value.value, bool)
        end = value.end + is_number  # a number ends only with the character after it
        own = [
            (logprob, mass)
            for first, behind, logprob, mass in self._tokens
            if first < end and behind > value.start
        ]
        logprob = math.fsum(each for each, _ in own)
        mass = math.fsum(each for _, each in own)
        if value.parts is None and value.start in self._choices:
            choice, selection = self._choices[value.start]
            shares = dict(zip(choice.texts, _choice_probabilities(selection), strict=True))
            key = next(key for key, each in choice.texts.items() if each == text)
            return Confidence(
                text, math.log(shares[key]) if shares[key] else -math.inf, mass, shares
            )
        parts = {name: self.confidence_of(part) for name, part in (value.parts or {}).items()}
        return Confidence(text, logprob, mass, parts=parts)


def _choice_probabilities(selection: Selection) -> list[float]:
    """Returns the probability that each choice is generated and ends there. This is the probability
    of its tokens, minus the probability of longer choices that continue them. The results are
    scaled to add up to 1.
    """
    weights = selection.probs
    tokens = {score.text: score.token_ids for score in selection.scores}
    ended = dict(weights)
    for text, ids in tokens.items():
        beginnings = [
            each
            for each, first in tokens.items()
            if len(first) < len(ids) and ids[: len(first)] == first
        ]
        if beginnings:  # the longest one's weight is already subtracted from the shorter ones
            ended[max(beginnings, key=lambda each: len(tokens[each]))] -= weights[text]
    left = [max(each, 0.0) for each in ended.values()]
    return [each / math.fsum(left) for each in left]
