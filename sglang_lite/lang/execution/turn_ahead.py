"""Several generations in one turn, on a backend that is asked generation by generation: what one call brings of them.

What is known of a turn is what one statement adds to it: `s += assistant("Name:" + gen("name") + "Job:" + gen("job"))`.
So it depends on the program alone, never on timing; and it belongs to the branch that the statement adds to.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec

from sglang_lite.constraints.matching import validate
from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.backend.turn_object import Field, turn_object
from sglang_lite.lang.backend.turns import asked_to_go_on, from_start, unrepeated
from sglang_lite.lang.execution.turn_match import Answer, Hole, Part, read
from sglang_lite.lang.expressions import GenOptions, SglGen, SglSelect
from sglang_lite.program.choosing import token_length_normalized
from sglang_lite.program.nodes import Expression, ScopeBegin, ScopeEnd, Text, TurnBegin, TurnEnd
from sglang_lite.protocol import (
    UNSET,
    BackendError,
    CapabilityError,
    Choices,
    Constraint,
    Delta,
    Generation,
    Location,
    Prompt,
    SamplingParams,
    Selection,
    Unset,
    Usage,
    ValueValidationError,
    total_usage,
)

_LEAST_SEEN, _LEAST_RATE = 32, 0.5  # speculation ends where fewer were found, of so many or more
_BESIDE = 16  # tokens of a property of an object, besides its value
_OWN = ("stop", "max_tokens", "seed")  # parameters that generations of one call may each have
_ALONE = (
    "n", "min_tokens", "stop_token_ids", "stop_regex", "include_stop", "ignore_eos", "return_logprob",
    "logprob_start_len", "top_logprobs_num", "token_ids_logprob",
)  # fmt: skip


class ApiSpeculation:
    """Speculation of a program on the calls of an API, and what it has brought in all runs of that program so far.

    Args:
        tokens: the most that a call generates ahead; None: no call does.

    Attributes:
        found: generations whose text an earlier call had brought.
        missed: those that it could have brought, and which needed a call.
        saved_tokens: of prompts that were not sent again.
        thrown_tokens: that were generated and not used.
    """

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens
        self.found = self.missed = self.saved_tokens = self.thrown_tokens = 0
        self._lock = threading.Lock()

    @property
    def on(self) -> bool:
        """True if the next run will speculate: not after 32 generations of which less than half were found."""
        seen = self.found + self.missed
        return self.tokens is not None and (seen < _LEAST_SEEN or self.found >= seen * _LEAST_RATE)

    def note(self, found: int, missed: int, saved: int, thrown: int) -> None:
        """Counts what a call has brought."""
        with self._lock:
            self.found += found
            self.missed += missed
            self.saved_tokens += saved
            self.thrown_tokens += thrown

    def __repr__(self) -> str:
        return (
            f"ApiSpeculation(tokens={self.tokens}, found={self.found}, missed={self.missed}, "
            f"saved_tokens={self.saved_tokens}, thrown_tokens={self.thrown_tokens})"
        )


# ------------------------------------------------------------------------------------------------- planning


_Asked: TypeAlias = SglGen | SglSelect


@dataclass(slots=True)
class _Span:
    """Text, generations and selections that follow on each other in a statement, within one turn.

    Attributes:
        begins: it begins the turn.
        places: of its generations and selections in the statement.
    """

    begins: bool
    parts: list[str | _Asked] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def asked(self) -> list[_Asked]:
        """Its generations and selections."""
        return [part for part in self.parts if not isinstance(part, str)]

    @property
    def begun(self) -> bool:
        """True if a generation stands behind anything in it that is seen."""
        return len(self.asked) > 1 or bool(self.first_behind[1].strip())

    @property
    def first_behind(self) -> tuple[_Asked, str]:
        """The first generation with text before it, or the last one, and that text."""
        before = ""
        for part in self.parts:
            if isinstance(part, str):
                before += part
            elif before.strip():
                return part, before
        return self.asked[-1], before


def _spans(parts: Sequence[Expression], role: str | None) -> Iterator[tuple[str | None, _Span]]:
    """Spans of a statement that have a generation, with the roles of their turns."""
    span = _Span(begins=False)
    for place, part in enumerate(parts):
        match part:
            case Text():
                span.parts.append(part.text)
            case SglGen() | SglSelect() if _is_plain(part):
                span.parts.append(part)
                span.places.append(place)
            case ScopeBegin() | ScopeEnd():
                pass
            case _:
                if span.places:
                    yield role, span
                role = part.role if isinstance(part, TurnBegin) else None if isinstance(part, TurnEnd) else role
                span = _Span(begins=isinstance(part, TurnBegin))
    if span.places:
        yield role, span


def _is_plain(part: _Asked) -> bool:
    """Tells whether a selection only picks, so that no scores are needed."""
    if isinstance(part, SglGen):
        return True
    return part.multi is None and part.temperature == 0 and part.choices_method is token_length_normalized


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of a statement: what its turns are planned for.

    Attributes:
        role: of the turn that is open before it.
        params: of the run.
        speculation: None: the program does not speculate.
        ahead: it does in this run.
        where: it stands.
    """

    backend: BaseBackend
    role: str | None
    params: SamplingParams
    speculation: ApiSpeculation | None
    ahead: bool
    where: Location | None


def plan(parts: Sequence[Expression], setting: Setting) -> dict[int, tuple[Turn, int]]:
    """Turns in a statement, by the places of their generations: those that are not asked for as if each were alone.

    Raises:
        CapabilityError: a model that can't continue a begun turn would have to.
    """
    rules = setting.backend.turn_rules
    if rules is None:
        return {}
    turns: dict[int, tuple[Turn, int]] = {}
    for role, span in _spans(parts, setting.role):
        if role == "assistant" or setting.backend.capabilities.continues:
            template = None if role is None else setting.backend.get_chat_template()
            turn = _turn(span, setting, () if template is None else tuple(template.stop_str))
            if turn is not None:
                turns |= {place: (turn, i) for i, place in enumerate(span.places)}
    return turns


def _turn(span: _Span, setting: Setting, stops: tuple[str, ...]) -> Turn | None:
    """
    Args:
        stops: of the chat template, which end any generation in a turn.
    """
    rules = setting.backend.turn_rules
    assert rules is not None
    drawn = _drawn_alike(span.asked, setting.params)
    needed = len(span.asked) > 1 or not rules.constrained  # one alone is continued where that can be
    if span.begun and drawn is not None and rules.objects and needed:
        fields = _fields(span, setting, free=rules.begun == "asked")
        if fields:
            return Turn(span, setting, stops, drawn, fields=fields)
    ahead = setting.ahead and drawn is not None and span.begun
    if rules.begun == "continued":
        several = len(span.asked) > 1
        return Turn(span, setting, stops, drawn, ahead=True) if ahead and several else None
    if rules.begun == "asked" or setting.speculation is not None:
        return Turn(span, setting, stops, drawn, asked=True, ahead=ahead)
    if span.begun:
        asked, before = span.first_behind
        raise setting.backend.refusal(
            asked, f"a generation behind what stands in the assistant's turn already: {before[-60:]!r}",
            "Begin a new turn for each, set @function(num_api_spec_tokens=…), give every generation a constraint, or "
            'make the backend with policy="emulate".', setting.where,
        )  # fmt: skip
    return None


def _drawn_alike(asked: Sequence[_Asked], outer: SamplingParams) -> SamplingParams | None:
    """Sampling parameters of all generations, beside what each may have of its own. None: one call can't bring all of
    them, as they are drawn in different ways, or something else is asked of their tokens."""
    alike = None
    for part in asked:
        if isinstance(part, SglSelect):
            continue
        options = part.options or GenOptions()
        params = merged(outer, part.node.params)
        if part.tools is not None or options.backend is not None or options.reasoning is not None:
            return None
        if params.max_tokens == 0 or any(getattr(params, name) not in (UNSET, False) for name in _ALONE):
            return None
        drawn = _without_own(params)
        alike = alike or drawn
        if drawn != alike:
            return None
    return alike or _without_own(outer)


def _without_own(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, **dict.fromkeys(_OWN, UNSET))


def merged(outer: SamplingParams, inner: SamplingParams) -> SamplingParams:
    """`outer`, with everything that `inner` sets."""
    own = {name: value for name in inner.__struct_fields__ if (value := getattr(inner, name)) is not UNSET}
    return msgspec.structs.replace(outer, **own)


def _fields(span: _Span, setting: Setting, *, free: bool) -> tuple[str | Field, ...]:
    """The parts of an object that brings all of a span; none where the backend takes no such object.

    Args:
        free: also generations without a constraint, as strings.
    """
    parts: list[str | Field] = []
    for part in span.parts:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, SglSelect):
            parts.append(Field(part.node.name, Choices(part.choices)))
        elif part.node.constraint is not None:
            parts.append(Field(part.node.name, part.node.constraint))
        elif free:
            parts.append(Field(part.node.name, None, _hole(part, setting.params).stops))
        else:
            return ()
    whole = turn_object(parts)
    if whole is None:
        return ()
    try:
        params = msgspec.structs.replace(setting.params, stop=UNSET)
        setting.backend.check(span.asked[0], params, whole.constraint, setting.where)
    except CapabilityError:
        return ()
    return tuple(parts)


# -------------------------------------------------------------------------------------------------- asking


class Turn:
    """A turn's span of text and generations, with what is known of it ahead. It belongs to whoever plays the branch.

    Args:
        drawn: sampling parameters of all of it; None: each has its own, and no call brings several.
        fields: parts of one object that brings all of it.
        asked: the model is shown a begun turn, and asked to go on.
        ahead: a call may bring more than the generation that it is for.
    """

    __slots__ = (
        "_ahead",
        "_asked",
        "_begins",
        "_drawn",
        "_fields",
        "_found",
        "_parts",
        "_places",
        "_speculation",
        "_spent",
        "_stops",
    )  # fmt: skip

    def __init__(
        self, span: _Span, setting: Setting, stops: tuple[str, ...], drawn: SamplingParams | None, *,
        fields: tuple[str | Field, ...] = (), asked: bool = False, ahead: bool = False,
    ) -> None:  # fmt: skip
        self._parts = tuple(p if isinstance(p, str) else _hole(p, setting.params) for p in span.parts)
        self._places = [i for i, part in enumerate(self._parts) if isinstance(part, Hole)]
        self._drawn = drawn
        self._begins, self._stops, self._speculation = span.begins, stops, setting.speculation
        self._fields, self._asked, self._ahead = fields, asked, ahead and not fields
        self._found: dict[int, Generation] = {}  # by place
        self._spent: list[Generation] = []  # calls that have brought nothing for the generation that they were for

    async def answers(
        self, place: int, backend: BaseBackend, prompt: Prompt, params: SamplingParams, constraint: Constraint | None,
        attempt: int, *, stream: bool,
    ) -> AsyncGenerator[Delta | Generation, None]:  # fmt: skip
        """Answers of the generation at a place, as `BaseBackend.agenerate` gives them.

        Args:
            attempt: 0 for the first. Later ones have calls of their own, and what was known behind it counts no more.
        """
        known = backend.remembered(prompt, params, constraint)
        if known is not None:
            for each in known:
                yield each
            return
        found = await self._known(place, backend, prompt, params, attempt)
        if found is not None:
            yield found
        elif self._asked and prompt.partial.strip():
            yield self._with_spent(await self._go_on(backend, prompt, params, constraint))
        else:
            async for event in backend.agenerate(prompt, params, constraint, stream=stream):
                yield self._with_spent(event) if isinstance(event, Generation) else event

    async def selection(
        self, place: int, backend: BaseBackend, prompt: Prompt, choices: Sequence[str], attempt: int
    ) -> Selection:
        """Answer of the selection at a place, as `BaseBackend.aselect` gives it."""
        found = await self._known(place, backend, prompt, self._drawn or SamplingParams(), attempt)
        if found is None:
            shown = asked_to_go_on(prompt, _template(backend)) if self._asked else prompt
            picked = await backend.aselect(shown, choices, unconditional=False)
            found = self._with_spent(Generation(picked.picked or "", usage=picked.usage, meta=picked.meta))
        return Selection((), found.usage, found.text, found.meta)

    async def _known(
        self, place: int, backend: BaseBackend, prompt: Prompt, params: SamplingParams, attempt: int
    ) -> Generation | None:
        """The answer at a place that a call has brought, or one that is made now; None: it needs its own."""
        if attempt:
            self._found, self._ahead = {}, False
        if place not in self._found:
            await self._look_ahead(place, backend, prompt, params)
        return self._found.pop(place, None)

    async def _look_ahead(self, place: int, backend: BaseBackend, prompt: Prompt, params: SamplingParams) -> None:
        """Makes a call that may bring this generation, and others behind it."""
        if self._fields:
            await self._ask_object(place, backend, prompt, params)
        if not self._ahead:
            return
        begun = prompt.partial if self._asked else ""
        if begun.strip() and place == 0 and self._begins:
            parts = (begun, *self._parts[self._places[0] :])
            if await self._ask_ahead(place, parts, backend, from_start(prompt), params, ""):
                return
        if len(self._places) - place > 1:
            shown = asked_to_go_on(prompt, _template(backend)) if self._asked else prompt
            parts = self._parts[self._places[place] :]
            self._ahead = await self._ask_ahead(place, parts, backend, shown, params, begun)

    async def _ask_ahead(
        self, place: int, parts: Sequence[Part], backend: BaseBackend, prompt: Prompt, params: SamplingParams,
        begun: str,
    ) -> bool:  # fmt: skip
        """Asks for a turn from a place on, and keeps the texts that are found in the answer. False: not that of the
        place.

        Args:
            begun: text that the model may say again, before what is asked for.
        """
        assert self._speculation is not None
        free = msgspec.structs.replace(params, stop=self._stops or UNSET, max_tokens=self._speculation.tokens)
        said = await _answer(backend, prompt, free, None)
        tokens = tuple(entry.text or "" for entry in said.output_logprobs)
        text = unrepeated(begun, said.text) if begun else said.text
        answer = Answer(text, said.finish_reason == "stop", said.usage.completion_tokens, tokens)
        reading = read(answer, parts)
        possible, found = len(self._places) - place, len(reading.values)
        saved = max(found - 1, 0)
        self._speculation.note(
            saved, possible - max(found, 1) + (not found), saved * said.usage.prompt_tokens, reading.thrown
        )
        for i, value in enumerate(reading.values):
            turn = {"by": "found", "saved_tokens": said.usage.prompt_tokens}
            if i == 0:
                turn = {"by": "ahead", "found": saved, "thrown_tokens": reading.thrown}
            usage = Usage() if i else _with_thrown(said.usage, reading.thrown)
            reason: Literal["stop", "length"] = "length" if value.cut else "stop"
            own = msgspec.structs.replace(
                said, text=value.text, matched=value.matched, finish_reason=reason, output_logprobs=(), usage=usage,
                meta={**said.meta, "turn": turn},
            )  # fmt: skip
            self._found[place + i] = own if i else self._with_spent(own)
        if not found:
            self._spent.append(said)
        return found > 0

    async def _ask_object(self, place: int, backend: BaseBackend, prompt: Prompt, params: SamplingParams) -> None:
        """Asks for the generations from a place on as one object."""
        whole = turn_object((prompt.partial, *self._fields[self._places[place] :]))
        assert whole is not None  # as all of them have one
        limits = [p.max_tokens for p in self._parts[self._places[place] :] if isinstance(p, Hole)]
        most = sum(each or 0 for each in limits) + _BESIDE * len(limits)
        params = msgspec.structs.replace(params, stop=UNSET, max_tokens=UNSET if None in limits else most)
        said = await _answer(backend, from_start(prompt), params, whole.constraint)
        for i, text in enumerate(whole.texts(said.text)):
            turn = {"by": "found"} if i else {"by": "object", "found": len(limits) - 1}
            usage = Usage() if i else said.usage
            meta = {**said.meta, "turn": turn}
            self._found[place + i] = msgspec.structs.replace(said, text=text, usage=usage, meta=meta)

    async def _go_on(
        self, backend: BaseBackend, prompt: Prompt, params: SamplingParams, constraint: Constraint | None
    ) -> Generation:
        """Has the model go on with the begun turn."""
        begun = prompt.partial
        shown = asked_to_go_on(prompt, _template(backend))
        said = await _answer(backend, shown, params, constraint)
        if constraint is not None:
            return msgspec.structs.replace(said, meta={**said.meta, "turn": {"by": "asked"}})
        text = unrepeated(begun, said.text)
        if not text.strip() and said.text.strip():  # a stop has ended it in what it said again
            self._spent.append(said)
            free = msgspec.structs.replace(params, stop=self._stops or UNSET)
            said = await _answer(backend, shown, free, None)
            hole = Hole(() if isinstance(params.stop, Unset) else params.stop)
            answer = Answer(unrepeated(begun, said.text), True, said.usage.completion_tokens)
            values = read(answer, (hole,)).values
            if not values:
                raise BackendError(f"{backend.get_model_name()} did not go on with {begun[-60:]!r}: it said it again.")
            text, said = values[0].text, msgspec.structs.replace(said, matched=values[0].matched)
        return msgspec.structs.replace(said, text=text, meta={**said.meta, "turn": {"by": "asked"}})

    def _with_spent(self, said: Generation) -> Generation:
        """An answer with the usage of the calls before it that have brought nothing."""
        spent, self._spent = self._spent, []
        if not spent:
            return said
        usages = [_with_thrown(each.usage, each.usage.completion_tokens) for each in spent]
        thrown = sum(each.completion_tokens for each in usages)
        turn = dict(said.meta.get("turn", {"by": "own"}))
        turn["thrown_tokens"] = turn.get("thrown_tokens", 0) + thrown
        usage = total_usage([*usages, said.usage])
        return msgspec.structs.replace(said, usage=usage, meta={**said.meta, "turn": turn})


def _hole(gen: _Asked, outer: SamplingParams) -> Hole:
    if isinstance(gen, SglSelect):
        return Hole(fits=gen.choices.__contains__)
    params = merged(outer, gen.node.params)
    constraint = gen.node.constraint
    return Hole(
        () if isinstance(params.stop, Unset) else params.stop,
        None if isinstance(params.max_tokens, Unset) else params.max_tokens,
        None if constraint is None and gen.value_type is None else partial(_fits, gen),
    )


def _fits(gen: SglGen, text: str) -> bool:
    """Tells whether a text is a value of a generation."""
    try:
        if gen.node.constraint is not None:
            validate(gen.node.constraint, text)
        if gen.value_type is not None:
            gen.value_type.parse(text)
    except ValueValidationError:
        return False
    return True


async def _answer(
    backend: BaseBackend, prompt: Prompt, params: SamplingParams, constraint: Constraint | None
) -> Generation:
    events: AsyncGenerator[Any, None] = backend.agenerate(prompt, params, constraint, stream=False)
    (said,) = [event async for event in events if isinstance(event, Generation)]
    return said


def _with_thrown(usage: Usage, tokens: int) -> Usage:
    """A usage of which so many tokens were generated in vain."""
    return msgspec.structs.replace(usage, thrown_away_tokens=usage.thrown_away_tokens + tokens)


def _template(backend: BaseBackend) -> Any:
    return backend.get_chat_template()
