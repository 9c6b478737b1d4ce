"""Several generations in one turn, on a backend that is asked generation by generation: answers that one call has
brought for other generations than its own. Belongs to the branch that the statement is added to (see turn_plan.py)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from sglang_lite.constraints.matching import validate
from sglang_lite.lang.backend.base_backend import BaseBackend, only_answer
from sglang_lite.lang.backend.turn_object import turn_object
from sglang_lite.lang.backend.turn_text import turn_text
from sglang_lite.lang.backend.turns import from_start, unrepeated, with_continue_request
from sglang_lite.lang.execution.run import merge
from sglang_lite.lang.execution.turn_match import Hole, OverrunAnswer, Part, read
from sglang_lite.lang.execution.turn_plan import Generated, Setting, TurnPlan, plan, stops_of
from sglang_lite.lang.expressions import SglGen, SglSelect
from sglang_lite.program.nodes import Expression
from sglang_lite.protocol import (
    UNSET,
    BackendError,
    Constraint,
    Delta,
    Generation,
    Prompt,
    SamplingParams,
    Selection,
    Unset,
    Usage,
    ValueValidationError,
    total_usage,
)

_NOT_ASKED = {"calls": 0, "cost": 0.0}  # metadata of an answer that another generation's call has brought
_BESIDE = 16  # tokens of a JSON property, besides its value


def turns_of(parts: Sequence[Expression], setting: Setting) -> dict[int, tuple[Turn, int]]:
    """Turns of a statement, by the indices of their generations in the statement, each with the generation's index in
    its turn. Generations that are asked for alone are left out.

    Raises:
        CapabilityError: the statement needs a model that continues a begun turn, and the backend's does not.
    """
    turns: dict[int, Turn] = {}  # by the ids of their plans
    found: dict[int, tuple[Turn, int]] = {}
    for i, (planned, place) in plan(parts, setting).items():
        if planned.refusal is not None:
            raise setting.backend.refusal(*planned.refusal, setting.where)
        turn = turns.setdefault(id(planned), Turn(planned, setting))
        found[i] = turn, place
    return found


class Turn:
    """Span of text and generations within a turn, with the answers that are known ahead. Owned by the thread that plays
    the branch.

    Args:
        planned: way in which its generations are asked for.
    """

    __slots__ = ("_ahead", "_found", "_parts", "_places", "_plan", "_speculation", "_spent")

    def __init__(self, planned: TurnPlan, setting: Setting) -> None:
        span = planned.span
        self._plan, self._speculation = planned, setting.speculation
        self._parts = tuple(p if isinstance(p, str) else _hole(p, setting.params) for p in span.parts)
        self._places = [i for i, part in enumerate(self._parts) if isinstance(part, Hole)]
        self._ahead = planned.ahead
        self._found: dict[int, Generation] = {}  # by index of the generation
        self._spent: list[Generation] = []  # calls that brought nothing for their generation

    async def answers(
        self, place: int, backend: BaseBackend, prompt: Prompt, params: SamplingParams, constraint: Constraint | None,
        attempt: int, *, stream: bool,
    ) -> AsyncGenerator[Delta | Generation, None]:  # fmt: skip
        """Yields the events of the generation at index `place`, as `BaseBackend.agenerate` does.

        Args:
            attempt: number of the attempt, from 0. A later attempt makes its own call, and answers known ahead are
                dropped.
        """
        known = backend.saved_answers(prompt, params, constraint)
        if known is not None:
            for each in known:
                yield each
            return
        found = await self._known(place, backend, prompt, params, attempt)
        if found is not None:
            yield found
        elif self._plan.asked and prompt.partial.strip():
            yield self._with_spent(await self._go_on(backend, prompt, params, constraint))
        else:
            async for event in backend.agenerate(prompt, params, constraint, stream=stream):
                yield self._with_spent(event) if isinstance(event, Generation) else event

    async def selection(
        self, place: int, backend: BaseBackend, prompt: Prompt, choices: Sequence[str], attempt: int
    ) -> Selection:
        """Answer of the selection at index `place`, as `BaseBackend.aselect` returns it."""
        found = await self._known(place, backend, prompt, self._plan.drawn or SamplingParams(), attempt)
        if found is not None:
            return Selection((), found.usage, found.text, found.meta)
        shown = with_continue_request(prompt, _template(backend)) if self._plan.asked else prompt
        picked = await backend.aselect(shown, choices, unconditional=False)
        said = self._with_spent(Generation("", usage=picked.usage, meta=picked.meta))
        return msgspec.structs.replace(picked, usage=said.usage, meta=said.meta)

    def forget(self) -> None:
        """Drops the answers known ahead, as an earlier generation of the turn is asked for again."""
        self._found, self._ahead = {}, False

    async def _known(
        self, place: int, backend: BaseBackend, prompt: Prompt, params: SamplingParams, attempt: int
    ) -> Generation | None:
        """Answer for the generation at index `place`, from an earlier call or from a shared call made now; None if it
        needs a call of its own."""
        if attempt:
            self.forget()
        if place not in self._found:
            await self._look_ahead(place, backend, prompt, params)
        return self._found.pop(place, None)

    async def _look_ahead(self, place: int, backend: BaseBackend, prompt: Prompt, params: SamplingParams) -> None:
        """Makes a call that may bring this generation and later ones of the turn."""
        if self._plan.by == "object":
            await self._ask_object(place, backend, prompt, params)
        elif self._plan.by == "text":
            await self._ask_text(place, backend, prompt, params)
        if not self._ahead:
            return
        begun = prompt.partial if self._plan.asked else ""
        if begun.strip() and place == 0 and self._plan.span.begins:
            parts = (begun, *self._parts[self._places[0] :])
            if await self._ask_ahead(place, parts, backend, from_start(prompt), params, ""):
                return
        if len(self._places) - place > 1:
            shown = with_continue_request(prompt, _template(backend)) if self._plan.asked else prompt
            parts = self._parts[self._places[place] :]
            self._ahead = await self._ask_ahead(place, parts, backend, shown, params, begun)

    async def _ask_ahead(
        self, place: int, parts: Sequence[Part], backend: BaseBackend, prompt: Prompt, params: SamplingParams,
        begun: str,
    ) -> bool:  # fmt: skip
        """Asks for the rest of a turn, without the stops of its generations, and keeps the values found in the answer.
        Returns False if the answer does not contain the generation at `place`.

        Args:
            begun: text of the turn so far, which the model may repeat at the beginning of its answer.
        """
        assert self._speculation is not None
        free = msgspec.structs.replace(params, stop=self._plan.stops or UNSET, max_tokens=self._speculation.tokens)
        said = await only_answer(backend.agenerate(prompt, free, None, stream=False))
        tokens = tuple(entry.text or "" for entry in said.output_logprobs)
        text = unrepeated(begun, said.text) if begun else said.text
        answer = OverrunAnswer(text, said.finish_reason == "stop", said.usage.completion_tokens, tokens)
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
                meta={**said.meta, **(_NOT_ASKED if i else {}), "turn": turn},
            )  # fmt: skip
            self._found[place + i] = own if i else self._with_spent(own)
        if not found:
            self._spent.append(said)
        return found > 0

    async def _ask_object(self, place: int, backend: BaseBackend, prompt: Prompt, params: SamplingParams) -> None:
        """Asks for the generations from `place` on as one JSON object."""
        whole = turn_object((prompt.partial, *self._plan.fields[self._places[place] :]))
        assert whole is not None  # plans by object are only made of parts that fit into one
        said = await self._whole(place, backend, prompt, params, whole.constraint)
        self._keep_whole(place, said, whole.parse_texts(said.text))

    async def _ask_text(self, place: int, backend: BaseBackend, prompt: Prompt, params: SamplingParams) -> None:
        """Asks for the turn as one text under a grammar, and finds the generations from `place` on in it.

        Raises:
            ValueValidationError: the text can't be split into the generations.
        """
        whole = turn_text((prompt.partial, *self._plan.fields[self._places[place] :]))
        assert whole is not None  # plans by text are only made of parts that fit into one
        said = await self._whole(place, backend, prompt, params, whole)
        asked = self._parts[self._places[place] : self._places[-1] + 1]
        parts = [part for part in (prompt.partial, *asked) if part != ""]
        values = read(OverrunAnswer(said.text, True, said.usage.completion_tokens), parts).values
        if len(values) < len(self._places) - place:
            error = ValueValidationError("the turn's text could not be split into its generations.", text=said.text)
            error.usage = said.usage
            raise error
        self._keep_whole(place, said, [value.text for value in values])

    async def _whole(
        self, place: int, backend: BaseBackend, prompt: Prompt, params: SamplingParams, constraint: Constraint
    ) -> Generation:
        """Answer of a call that brings all generations from `place` on."""
        limits = [p.max_tokens for p in self._parts[self._places[place] :] if isinstance(p, Hole)]
        most = sum(each or 0 for each in limits) + _BESIDE * len(limits)
        params = msgspec.structs.replace(params, stop=UNSET, max_tokens=UNSET if None in limits else most)
        return await only_answer(backend.agenerate(from_start(prompt), params, constraint, stream=False))

    def _keep_whole(self, place: int, said: Generation, texts: Sequence[str]) -> None:
        """Keeps the texts of all generations from `place` on. The first one carries the call's usage."""
        for i, text in enumerate(texts):
            turn = {"by": "found"} if i else {"by": self._plan.by, "found": len(texts) - 1}
            usage = Usage() if i else said.usage
            meta = {**said.meta, **(_NOT_ASKED if i else {}), "turn": turn}
            self._found[place + i] = msgspec.structs.replace(said, text=text, usage=usage, meta=meta)

    async def _go_on(
        self, backend: BaseBackend, prompt: Prompt, params: SamplingParams, constraint: Constraint | None
    ) -> Generation:
        """Answer of a call that shows the model the begun turn and asks it to continue.

        Raises:
            BackendError: the model only repeated the begun turn.
        """
        begun = prompt.partial
        shown = with_continue_request(prompt, _template(backend))
        said = await only_answer(backend.agenerate(shown, params, constraint, stream=False))
        if constraint is not None:
            return msgspec.structs.replace(said, meta={**said.meta, "turn": {"by": "asked"}})
        text = unrepeated(begun, said.text)
        if not text.strip() and said.text.strip():  # a stop ended the answer within the repeated text
            self._spent.append(said)
            free = msgspec.structs.replace(params, stop=self._plan.stops or UNSET)
            said = await only_answer(backend.agenerate(shown, free, None, stream=False))
            hole = Hole(() if isinstance(params.stop, Unset) else params.stop)
            answer = OverrunAnswer(unrepeated(begun, said.text), True, said.usage.completion_tokens)
            values = read(answer, (hole,)).values
            if not values:
                raise BackendError(f"{backend.get_model_name()} did not continue {begun[-60:]!r}: it repeated it.")
            text, said = values[0].text, msgspec.structs.replace(said, matched=values[0].matched)
        return msgspec.structs.replace(said, text=text, meta={**said.meta, "turn": {"by": "asked"}})

    def _with_spent(self, said: Generation) -> Generation:
        """Answer whose usage includes that of earlier calls that brought nothing."""
        spent, self._spent = self._spent, []
        if not spent:
            return said
        usages = [_with_thrown(each.usage, each.usage.completion_tokens) for each in spent]
        thrown = sum(each.completion_tokens for each in usages)
        turn = dict(said.meta.get("turn", {"by": "own"}))
        turn["thrown_tokens"] = turn.get("thrown_tokens", 0) + thrown
        usage = total_usage([*usages, said.usage])
        return msgspec.structs.replace(said, usage=usage, meta={**said.meta, "turn": turn})


def _hole(gen: Generated, outer: SamplingParams) -> Hole:
    if isinstance(gen, SglSelect):
        return Hole(fits=gen.choices.__contains__)
    most, constraint = merge(outer, gen.node.params).max_tokens, gen.node.constraint
    return Hole(
        stops_of(gen, outer),
        None if isinstance(most, Unset) else most,
        None if constraint is None and gen.value_type is None else partial(_fits, gen),
    )


def _fits(gen: SglGen, text: str) -> bool:
    """Returns True if a text is a valid value of a generation."""
    try:
        if gen.node.constraint is not None:
            validate(gen.node.constraint, text)
        if gen.value_type is not None:
            gen.value_type.parse(text)
    except ValueValidationError:
        return False
    return True


def _with_thrown(usage: Usage, tokens: int) -> Usage:
    """Usage with `tokens` more tokens that were generated in vain."""
    return msgspec.structs.replace(usage, thrown_away_tokens=usage.thrown_away_tokens + tokens)


def _template(backend: BaseBackend) -> Any:
    return backend.get_chat_template()
