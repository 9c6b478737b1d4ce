"""Executes turns that contain several generations, on a backend that is called for one generation
at a time. One call may answer several generations (see turn_plan.py). Their values are then
extracted from the text of its answer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias

import msgspec

from sglang_lite.constraints.matching import validate
from sglang_lite.lang.backend.base import unsupported_feature_error
from sglang_lite.lang.backend.planning import AnswerSource, NodeQuestion, RunFacts
from sglang_lite.lang.backend.remote.turn_plan import (
    Generated,
    TurnContext,
    TurnPlan,
    effective_stops,
    plan_turns,
    turn_text_constraint,
)
from sglang_lite.lang.backend.rendering import with_continue_request, without_partial_turn
from sglang_lite.lang.expressions import SglGen, SglSelect
from sglang_lite.program.nodes import Expression
from sglang_lite.protocol import (
    UNSET,
    BackendError,
    Delta,
    Generation,
    Message,
    Prompt,
    SamplingParams,
    Selection,
    Unset,
    Usage,
    ValueValidationError,
    total_usage,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.sampling import NO_PARAMS, merge
from sglang_lite.text.stop import StopMatcher

# metadata of an answer that came with another generation's call
_NOT_ASKED = {"calls": 0, "cost": 0.0}
_BESIDE = 16  # maximum number of tokens of constant text next to a value


def create_turn_sources(
    expressions: Sequence[Expression], setting: TurnContext
) -> dict[int, TurnSource]:
    """Returns the AnswerSources for a statement's generations, by their indices in the statement.
    Generations that make their own calls are left out.

    Raises:
        CapabilityError: the statement needs a model that continues an open turn, and the backend's
            does not.
    """
    turns: dict[int, Turn] = {}  # by the ids of their plans
    found: dict[int, TurnSource] = {}
    for i, (planned, index) in plan_turns(expressions, setting).items():
        if planned.refusal is not None:
            raise unsupported_feature_error(setting.backend, *planned.refusal, setting.where)
        turn = turns.setdefault(id(planned), Turn(planned, setting.run))
        found[i] = TurnSource(turn, index)
    return found


class Turn:
    """Text and generations within a turn, with the answers that are already known. Owned by the
    thread that executes the branch.

    Args:
        plan: how its generations are requested.
        run: facts of the run.

    Attributes:
        plan: as given.
    """

    __slots__ = (
        "_ahead",
        "_answers",
        "_asked",
        "_drafts",
        "_indices",
        "_messages",
        "_pieces",
        "_wasted",
        "plan",
    )

    def __init__(self, plan: TurnPlan, run: RunFacts) -> None:
        self.plan = plan
        self._drafts = run.drafts
        self._pieces = tuple(
            p if isinstance(p, str) else _make_turn_hole(p, run.params) for p in plan.span.pieces
        )
        self._indices = [i for i, piece in enumerate(self._pieces) if isinstance(piece, TurnHole)]
        self._ahead = plan.ahead
        self._answers: dict[int, Generation] = {}  # by index of the generation
        self._wasted: list[Generation] = []  # calls whose answer was of no use to their generation
        self._asked: set[int] = set()  # indices of the generations that were requested
        # turns before this one, in the first prompt
        self._messages: tuple[Message, ...] | None = None

    async def turn_events(
        self, index: int, question: NodeQuestion
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Yields the events of the generation at `index`. A later attempt at it drops the answers
        that were already known and makes a new call.
        """
        found = await self._find_or_request_answer(index, question)
        if found is not None:
            yield found
        elif self.plan.asks_to_continue and question.prompt.partial.strip():
            yield self._add_wasted_usage(await self._ask_to_continue(question))
        else:
            async for event in question.request_events():
                yield self._add_wasted_usage(event) if isinstance(event, Generation) else event

    async def turn_selection(
        self, index: int, question: NodeQuestion, choices: Sequence[str]
    ) -> Selection:
        """Returns the answer of the selection at `index`."""
        found = await self._find_or_request_answer(
            index, replace(question, params=self.plan.common_params or NO_PARAMS)
        )
        if found is not None:
            return Selection((), found.usage, found.text, found.meta)
        picked = await replace(
            question, prompt=self._continuation_prompt(question)
        ).request_selection(choices)
        total = self._add_wasted_usage(Generation("", usage=picked.usage, meta=picked.meta))
        return msgspec.structs.replace(picked, usage=total.usage, meta=total.meta)

    def _continuation_prompt(self, question: NodeQuestion) -> Prompt:
        """Returns the prompt that makes the model continue the turn."""
        template: Any = question.backend.get_chat_template()
        return (
            with_continue_request(question.prompt, template)
            if self.plan.asks_to_continue
            else question.prompt
        )

    async def _find_or_request_answer(
        self, index: int, question: NodeQuestion
    ) -> Generation | None:
        """Returns the answer for the generation at `index`. It comes from an earlier call, or from
        a call made now that may also answer later generations. Returns None if the generation needs
        a call of its own.
        """
        if index in self._asked:  # a later attempt, so known answers may not fit
            self._answers = {}
            self._ahead = False
        self._asked.add(index)
        self._messages = question.prompt.messages if self._messages is None else self._messages
        if question.prompt.messages != self._messages:  # the model is shown its rejected answer
            return None
        if index not in self._answers:
            await self._request_turn_ahead(index, question)
        return self._answers.pop(index, None)

    async def _request_turn_ahead(self, index: int, question: NodeQuestion) -> None:
        """Tries to get the answers of several generations with one call: the one at `index` and
        later ones of the turn. Keeps the answers that it finds.
        """
        if self.plan.as_text:
            await self._request_turn_as_text(index, question)
        if not self._ahead:
            return
        turn_start = question.prompt.partial if self.plan.asks_to_continue else ""
        if turn_start.strip() and index == 0 and self.plan.span.begins:
            pieces = (turn_start, *self._pieces[self._indices[0] :])
            if await self._request_rest_of_turn(
                index, pieces, question, without_partial_turn(question.prompt), ""
            ):
                return
        if len(self._indices) - index > 1:
            pieces = self._pieces[self._indices[index] :]
            self._ahead = await self._request_rest_of_turn(
                index, pieces, question, self._continuation_prompt(question), turn_start
            )

    async def _request_rest_of_turn(
        self,
        index: int,
        pieces: Sequence[TurnPiece],
        question: NodeQuestion,
        prompt: Prompt,
        turn_start: str,
    ) -> bool:
        """Requests the rest of a turn in one call, which does not stop where its generations end.
        Keeps the values that are found in the answer. Returns False if the value of the generation
        at `index` is not among them.

        Args:
            turn_start: text of the turn so far, which the model may repeat at the beginning of its
                answer.
        """
        assert self._drafts is not None
        free = msgspec.structs.replace(
            question.params, stop=self.plan.stops or UNSET, max_tokens=self._drafts.tokens
        )
        response = await question.request_single_sample(prompt, free)
        tokens = tuple(entry.text or "" for entry in response.output_logprobs)
        text = strip_repetition(turn_start, response.text) if turn_start else response.text
        answer = UnstoppedAnswer(
            text, response.finish_reason == "stop", response.usage.completion_tokens, tokens
        )
        reading = parse_turn_pieces(answer, pieces)
        possible = len(self._indices) - index
        found = len(reading.values)
        saved = max(found - 1, 0)
        self._drafts.note(
            saved,
            possible - max(found, 1) + (not found),
            saved * response.usage.prompt_tokens,
            reading.unused_tokens,
        )
        if not found:
            self._wasted.append(response)
            return False
        usage = _add_thrown_away_tokens(response.usage, reading.unused_tokens)
        turn = {"by": "ahead", "found": saved, "thrown_tokens": reading.unused_tokens}
        own = msgspec.structs.replace(response, usage=usage, meta={**response.meta, "turn": turn})
        others = {"by": "found", "saved_tokens": response.usage.prompt_tokens}
        self._keep_found_values(index, self._add_wasted_usage(own), reading.values, others)
        return True

    async def _request_turn_as_text(self, index: int, question: NodeQuestion) -> None:
        """Requests the turn as one text under a grammar. Extracts the values of the generations
        from it, starting at `index`.

        Raises:
            ValueValidationError: the text can't be split into the generations.
        """
        begun = question.prompt.partial
        whole = turn_text_constraint((begun, *self.plan.span.fields[self._indices[index] :]))
        assert whole is not None  # a plan has `as_text` only if its pieces fit into one text
        limits = [
            p.max_tokens for p in self._pieces[self._indices[index] :] if isinstance(p, TurnHole)
        ]
        total = sum(each or 0 for each in limits) + _BESIDE * len(limits)
        params = msgspec.structs.replace(
            question.params, stop=UNSET, max_tokens=UNSET if None in limits else total
        )
        response = await question.request_single_sample(
            without_partial_turn(question.prompt), params, whole
        )
        remaining = self._pieces[self._indices[index] : self._indices[-1] + 1]
        pieces = [piece for piece in (begun, *remaining) if piece != ""]
        values = parse_turn_pieces(
            UnstoppedAnswer(response.text, True, response.usage.completion_tokens), pieces
        ).values
        if len(values) < len(self._indices) - index:
            error = ValueValidationError(
                "the turn's text could not be split into its generations.", text=response.text
            )
            error.usage = response.usage
            raise error
        turn = {"by": "text", "found": len(values) - 1}
        own = msgspec.structs.replace(response, meta={**response.meta, "turn": turn})
        self._keep_found_values(index, own, values, {"by": "found"})

    def _keep_found_values(
        self, index: int, own: Generation, values: Sequence[TurnValue], found: Mapping[str, Json]
    ) -> None:
        """Keeps the values found in a call's answer. The first one belongs to the generation at
        `index`.

        Args:
            own: answer of the call; the first value gets its usage and metadata.
            found: how the other values were found, for their metadata.
        """
        others = {**own.meta, **_NOT_ASKED, "turn": found}
        for i, value in enumerate(values):
            answer = msgspec.structs.replace(own, usage=Usage(), meta=others) if i else own
            reason: Literal["stop", "length"] = "length" if value.cut else "stop"
            self._answers[index + i] = msgspec.structs.replace(
                answer,
                text=value.text,
                matched=value.matched,
                finish_reason=reason,
                output_logprobs=(),
            )

    async def _ask_to_continue(self, question: NodeQuestion) -> Generation:
        """Shows the model its open turn, asks it to continue, and returns the answer.

        Raises:
            BackendError: the model only repeated the open turn.
        """
        turn_start = question.prompt.partial
        request = self._continuation_prompt(question)
        response = await question.request_single_sample(
            request, question.params, question.constraint
        )
        if question.constraint is not None:
            return msgspec.structs.replace(
                response, meta={**response.meta, "turn": {"by": "asked"}}
            )
        text = strip_repetition(turn_start, response.text)
        # a stop ended the answer within the repeated text
        if not text.strip() and response.text.strip():
            self._wasted.append(response)
            response = await question.request_single_sample(
                request, msgspec.structs.replace(question.params, stop=self.plan.stops or UNSET)
            )
            hole = TurnHole(() if isinstance(question.params.stop, Unset) else question.params.stop)
            answer = UnstoppedAnswer(
                strip_repetition(turn_start, response.text), True, response.usage.completion_tokens
            )
            values = parse_turn_pieces(answer, (hole,)).values
            if not values:
                raise BackendError(
                    f"{question.backend.get_model_name()} did not continue {turn_start[-60:]!r}: it repeated it."
                )
            text = values[0].text
            response = msgspec.structs.replace(response, matched=values[0].matched)
        return msgspec.structs.replace(
            response, text=text, meta={**response.meta, "turn": {"by": "asked"}}
        )

    def _add_wasted_usage(self, response: Generation) -> Generation:
        """Adds the usage of earlier calls to an answer's usage, if their answers could not be used."""
        wasted = self._wasted
        self._wasted = []
        if not wasted:
            return response
        usages = [
            _add_thrown_away_tokens(each.usage, each.usage.completion_tokens) for each in wasted
        ]
        thrown = sum(each.completion_tokens for each in usages)
        turn = dict(response.meta.get("turn", {"by": "own"}))
        turn["thrown_tokens"] = turn.get("thrown_tokens", 0) + thrown
        usage = total_usage([*usages, response.usage])
        return msgspec.structs.replace(response, usage=usage, meta={**response.meta, "turn": turn})


class TurnSource(AnswerSource):
    """Source of the answer of one generation in a turn.

    Attributes:
        turn: the turn.
        index: number of the generation in the turn, from 0.
    """

    __slots__ = ("index", "turn")

    def __init__(self, turn: Turn, index: int) -> None:
        self.turn = turn
        self.index = index

    def agenerate(self, question: NodeQuestion) -> AsyncGenerator[Delta | Generation, None]:
        return self.turn.turn_events(self.index, question)

    async def aselect(self, question: NodeQuestion, choices: Sequence[str]) -> Selection:
        return await self.turn.turn_selection(self.index, question, choices)


def _make_turn_hole(gen: Generated, outer: SamplingParams) -> TurnHole:
    if isinstance(gen, SglSelect):
        return TurnHole(fits=gen.choices.__contains__)
    max_tokens = merge(outer, gen.node.params).max_tokens
    constraint = gen.node.constraint
    return TurnHole(
        effective_stops(gen, outer),
        None if isinstance(max_tokens, Unset) else max_tokens,
        None if constraint is None and gen.value_type is None else partial(_is_valid_value, gen),
    )


def _is_valid_value(gen: SglGen, text: str) -> bool:
    """Returns True if a text is a valid value of a generation."""
    try:
        if gen.node.constraint is not None:
            validate(gen.node.constraint, text)
        if gen.value_type is not None:
            gen.value_type.parse(text)
    except ValueValidationError:
        return False
    return True


def _add_thrown_away_tokens(usage: Usage, tokens: int) -> Usage:
    """Returns a usage in which `tokens` more tokens count as thrown away."""
    return msgspec.structs.replace(usage, thrown_away_tokens=usage.thrown_away_tokens + tokens)


# To read several generations out of one answer, the program's constants and stops are matched
# against its text. Visible characters must be equal. Layout may differ, because models and APIs
# change it:
# - blanks: more or fewer blanks and blank lines before a constant with visible characters, and
# within it between words and before punctuation. A constant of only blanks is matched exactly.
# - lines: a constant that begins a line may have a list marker before it and be some lines further
# down. Lines without a place in the program are dropped; a stop and the next constant would have
# prevented them.

_BLANKS = r"[^\S\n]*"  # blanks other than line ends
_MARK = rf"(?:(?:[-*+•]|[0-9]{{1,2}}[.)]){_BLANKS})?"  # list marker
_SKIPPED = 2  # maximum number of non-blank lines before a line that begins with a constant


@dataclass(frozen=True, slots=True)
class TurnHole:
    """Generation in a turn, with the details that are needed to find its value in an answer.

    Attributes:
        stops: strings that end the value.
        max_tokens: maximum number of tokens of the value, or None for no limit.
        fits: returns True if a text satisfies the constraint, which ends the value before the next
            constant; None if it has no constraint.
    """

    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    fits: Callable[[str], bool] | None = None


TurnPiece: TypeAlias = str | TurnHole


@dataclass(frozen=True, slots=True)
class UnstoppedAnswer:
    """Answer that may go on after the end of its first generation, because the call had no stop
    there.

    Attributes:
        text: whole text of the answer.
        ended: True if the model ended the answer, False if a limit cut it.
        count: number of its tokens.
        tokens: texts of its tokens, if known.
    """

    text: str
    ended: bool
    count: int
    tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnValue:
    """Text of one generation, found in an answer.

    Attributes:
        matched: stop string that ended the value, or None.
        cut: True if the limit on its tokens ended the value.
    """

    text: str
    matched: str | None = None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """Values found in an answer.

    Attributes:
        values: values of the first holes, up to the first one that was not found.
        unused_tokens: number of the answer's tokens outside all values and constants, estimated
            from their share of the characters.
    """

    values: tuple[TurnValue, ...]
    unused_tokens: int


def parse_turn_pieces(answer: UnstoppedAnswer, pieces: Sequence[TurnPiece]) -> Reading:
    """Reads the pieces of a turn, from the first on, out of an answer.

    The first constant may also be some lines further down. A generation ends at its first stop
    string, or with the answer if the model ended it. Whitespace is not a value.
    """
    text = answer.text
    values = list[TurnValue]()
    start_of_turn = at = 0
    for index, piece in enumerate(pieces):
        if isinstance(piece, TurnHole):
            ends = itertools.takewhile(lambda p: isinstance(p, str), pieces[index + 1 :])
            found = _find_value(piece, "".join(map(str, ends)), answer, at)
            if found is None:
                break
            value, at = found
            values.append(value)
            if value.cut:
                break
        else:
            if index:
                span = _find_constant_after(piece, text, at, values)
            else:
                span = _find_line_starting_with(piece, text, 0) if piece.strip() else (0, 0)
            if span is None:
                break
            start, at = span
            start_of_turn = start_of_turn if index else start
    return Reading(tuple(values), _count_unused_tokens(answer, at - start_of_turn if values else 0))


def _find_constant_after(
    constant: str, text: str, at: int, values: Sequence[TurnValue]
) -> tuple[int, int] | None:
    """Finds a constant text after a value or another constant, and returns its start and end. The
    constant may include the stop string that ended the value, or follow it. Returns None if it is
    not found.
    """
    pattern = _constant_pattern(constant)
    stop = values[-1].matched if values else None
    for start in (at, at + len(stop or "")):
        match = pattern.match(text, start)
        if match is not None:
            return match.span()
    words = constant.lstrip()
    return (
        _find_line_starting_with(words, text, at)
        if words and "\n" in constant[: -len(words)]
        else None
    )


def _find_line_starting_with(constant: str, text: str, at: int) -> tuple[int, int] | None:
    """Finds a line that begins with a constant, and returns the constant's start and end. At most
    `_SKIPPED` non-blank lines are skipped. Returns None if no line is found.
    """
    match = _line_pattern(constant).search(text, at)
    if match is None:
        return None
    between = text[at : match.start()].split("\n")
    return match.span() if sum(map(bool, map(str.strip, between))) <= _SKIPPED else None


@lru_cache(maxsize=1024)
def _constant_pattern(constant: str) -> re.Pattern[str]:
    return re.compile(
        r"\s*" + _words_pattern(constant) if constant.strip() else re.escape(constant)
    )


@lru_cache(maxsize=1024)
def _line_pattern(constant: str) -> re.Pattern[str]:
    return re.compile(rf"^{_BLANKS}{_MARK}{_words_pattern(constant)}", re.MULTILINE)


def _words_pattern(constant: str) -> str:
    """Returns a regex that finds a constant text with any spacing between its words. Whitespace
    before the first word is ignored. The number of line ends after the last word must match,
    because the next line may be an empty value.
    """
    behind = constant[len(constant.rstrip()) :]
    ends = (_BLANKS + r"\n") * behind.count("\n") + _BLANKS * bool(behind)
    words = [re.findall(r"\w+|[^\w\s]+", word) for word in constant.split()]
    return r"\s+".join(_BLANKS.join(map(re.escape, word)) for word in words) + ends


def _find_value(
    hole: TurnHole, behind: str, answer: UnstoppedAnswer, at: int
) -> tuple[TurnValue, int] | None:
    """Finds the value that begins at `at`, and where it ends. Returns None if there is no value or
    the end is unknown.

    Args:
        behind: constant after the value.
    """
    if hole.fits is not None:
        return _find_constrained_value(hole, hole.fits, behind, answer.text, at)
    stops = StopMatcher(hole.stops)
    text = stops.push(answer.text[at:])
    text += stops.flush() if stops.matched is None else ""
    length = _length_within_limit(hole, answer, at, at + len(text))
    if length is None or not text[:length].strip():
        return None
    if length < len(text):
        return TurnValue(text[:length], cut=True), at + length
    if stops.matched is None and not answer.ended:
        return None
    return TurnValue(text, stops.matched), at + len(text)


def _find_constrained_value(
    hole: TurnHole, fits: Callable[[str], bool], behind: str, text: str, at: int
) -> tuple[TurnValue, int] | None:
    """Finds the shortest text before the constant `behind` that satisfies the constraint.
    Whitespace around the text is stripped if necessary.
    """
    ends = (
        [match.start() for match in _constant_pattern(behind).finditer(text, at)]
        if behind.strip()
        else []
    )
    for end in [*ends, len(text)]:
        for value in dict.fromkeys((text[at:end], text[at:end].strip())):
            # a token has a byte
            short = hole.max_tokens is None or len(value.encode()) <= hole.max_tokens
            if short and value.strip() and fits(value):
                return TurnValue(value), end
    return None


def _length_within_limit(
    hole: TurnHole, answer: UnstoppedAnswer, start: int, end: int
) -> int | None:
    """Returns how many characters of a text fit within its generation's token limit. Returns None
    if this is unknown.
    """
    length = end - start
    limit = hole.max_tokens
    # a token has a byte
    if limit is None or answer.count <= limit or len(answer.text[start:end].encode()) <= limit:
        return length
    if "".join(answer.tokens) != answer.text:
        return None
    # Ends of the tokens in the text.
    ends = [each for each in itertools.accumulate(map(len, answer.tokens)) if each > start]
    return length if len(ends) < limit else min(length, ends[limit - 1] - start)


def _count_unused_tokens(answer: UnstoppedAnswer, used: int) -> int:
    """Estimates the number of an answer's tokens outside the `used` characters."""
    length = len(answer.text)
    return round(answer.count * (length - used) / length) if length else answer.count


def strip_repetition(begun: str, text: str) -> str:
    """Removes lines from the beginning of the model's new text if they repeat the open turn."""
    lines = begun.strip().split("\n")
    start = len(text) - len(text.lstrip())
    for first in range(len(lines)):
        repeated = "\n".join(lines[first:]).strip()
        if repeated and text.startswith(repeated, start):
            rest = text[start + len(repeated) :]
            if not (
                repeated[-1].isalnum() and rest[:1].isalnum()
            ):  # if not, the lines were the beginning of another word
                return rest
    return text
