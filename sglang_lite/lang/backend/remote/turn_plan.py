"""Plans turns that contain several generations, on a backend that is called for one generation at a
time. A plan decides which answers a single call can bring. Both the execution of a turn and
`explain` use plans.

A turn is planned from what one statement adds to it: `s += assistant("Name:" + gen("name") + "Job:"
+ gen("job"))`. So the plan depends only on the program, never on timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.backend.capabilities import Demands
from sglang_lite.lang.backend.planning import RunFacts
from sglang_lite.lang.expressions import SglGen, SglSelect, can_skip_scores
from sglang_lite.program.nodes import Expression, ScopeBegin, ScopeEnd, Text, TurnBegin, TurnEnd
from sglang_lite.protocol import (
    UNSET,
    CapabilityError,
    Choices,
    Constraint,
    InOrder,
    Location,
    OneOf,
    SamplingParams,
    Unset,
)
from sglang_lite.protocol.sampling import merge

# parameters that may differ among the generations of one call
_OWN = ("stop", "max_tokens", "seed")
_ALONE = (
    "n", "min_tokens", "stop_token_ids", "stop_regex", "include_stop", "ignore_eos", "return_logprob",
    "logprob_start_len", "top_logprobs_num", "token_ids_logprob",
)  # fmt: skip

Generated: TypeAlias = SglGen | SglSelect


@dataclass(slots=True)
class TurnSpan:
    """Adjacent text, generations and selections of a statement, within one turn.

    Attributes:
        begins: True if the span begins the turn.
        pieces: texts, generations and selections, in order.
        indices: indices of its generations and selections in the statement.
    """

    begins: bool
    pieces: list[str | Generated] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)

    @property
    def generated(self) -> list[Generated]:
        """Generations and selections of the span."""
        return [piece for piece in self.pieces if not isinstance(piece, str)]

    @property
    def fields(self) -> list[str | Constraint | None]:
        """Parts of the span as one text under a grammar: constant texts as they are, and
        generations as their constraints.
        """
        return [
            piece if isinstance(piece, str) else _constraint_of_piece(piece)
            for piece in self.pieces
        ]

    @property
    def continuations(self) -> list[tuple[Generated, str]]:
        """Generations with visible text or another generation before them in the turn, each with
        the preceding text. For them, the model has to continue an open turn.
        """
        found = list[tuple[Generated, str]]()
        before = ""
        first = True
        for piece in self.pieces:
            if isinstance(piece, str):
                before += piece
                continue
            if before.strip() or not first:
                found.append((piece, before))
            first = False
        return found


@dataclass(frozen=True, slots=True)
class TurnContext:
    """Circumstances in which a statement's turns are planned.

    Attributes:
        backend: backend that is called.
        role: role of the turn open before the statement, or None.
        run: facts of the run.
        where: line of the statement.
    """

    backend: Backend
    role: str | None
    run: RunFacts
    where: Location | None


@dataclass(frozen=True, slots=True, eq=False)
class TurnPlan:
    """Plan for a span whose generations can't simply make one call each. For example, one call may
    bring several answers.

    Attributes:
        stops: stop strings of the chat template, which end any generation in a turn.
        common_params: sampling parameters common to all generations; None if they differ, so that
            no call can bring several.
        as_text: True if one call generates the whole text, under a grammar.
        asks_to_continue: True if the model is shown the open turn and asked to continue.
        ahead: True if a call may bring later generations in addition to its own.
        refusal: the refused generation, what can't be done, and what to do instead; None if the
            backend can do it.
    """

    span: TurnSpan
    stops: tuple[str, ...] = ()
    common_params: SamplingParams | None = None
    as_text: bool = False
    asks_to_continue: bool = False
    ahead: bool = False
    refusal: tuple[Generated, str, str] | None = None


def plan_turns(
    expressions: Sequence[Expression], setting: TurnContext
) -> dict[int, tuple[TurnPlan, int]]:
    """Plans a statement's turns. Returns a dict from the index of a generation in the statement to
    its plan and its index in the turn. Generations that make their own calls are left out.
    """
    if setting.backend.capabilities.turns is None:
        return {}
    plans: dict[int, tuple[TurnPlan, int]] = {}
    for role, span in _split_into_spans(expressions, setting.role):
        if role == "assistant" or setting.backend.capabilities.continues:
            template = None if role is None else setting.backend.get_chat_template()
            found = _plan_span(span, setting, () if template is None else tuple(template.stop_str))
            if found is not None:
                plans |= {index: (found, i) for i, index in enumerate(span.indices)}
    return plans


def effective_stops(generation: Generated, outer: SamplingParams) -> tuple[str, ...]:
    """Returns the stop strings of a generation; a selection has none."""
    if isinstance(generation, SglSelect):
        return ()
    stops = merge(outer, generation.node.params).stop
    return () if isinstance(stops, Unset) else stops


def _split_into_spans(
    expressions: Sequence[Expression], role: str | None
) -> Iterator[tuple[str | None, TurnSpan]]:
    """Splits a statement into spans. Yields those that contain a generation, each with the role of
    its turn.
    """
    span = TurnSpan(begins=False)
    for index, each in enumerate(expressions):
        match each:
            case Text():
                span.pieces.append(each.text)
            case SglGen() | SglSelect() if isinstance(each, SglGen) or can_skip_scores(each):
                span.pieces.append(each)
                span.indices.append(index)
            case ScopeBegin() | ScopeEnd():
                pass
            case _:
                if span.indices:
                    yield role, span
                role = (
                    each.role
                    if isinstance(each, TurnBegin)
                    else None
                    if isinstance(each, TurnEnd)
                    else role
                )
                span = TurnSpan(begins=isinstance(each, TurnBegin))
    if span.indices:
        yield role, span


def _plan_span(span: TurnSpan, setting: TurnContext, stops: tuple[str, ...]) -> TurnPlan | None:
    rules = setting.backend.capabilities.turns
    assert rules is not None
    common = _common_params(span.generated, setting.run.params)
    continuations = span.continuations
    constrained = any(_constraint_of_piece(generated) is not None for generated, _ in continuations)
    begun = rules.begun_constrained if constrained else rules.begun_turns
    shares = common is not None and bool(continuations)
    if (
        begun != "continued"
        and rules.enforces_grammars
        and shares
        and _fits_one_text(span, setting)
    ):
        return TurnPlan(span, stops, common, as_text=True)
    ahead = setting.run.drafting and shares
    if begun == "continued":
        return (
            TurnPlan(span, stops, common, ahead=True) if ahead and len(span.generated) > 1 else None
        )
    if begun == "asked" or setting.run.drafts is not None:
        return TurnPlan(span, stops, common, asks_to_continue=True, ahead=ahead)
    if continuations:
        generation, before = next(
            (each for each in continuations if each[1].strip()), continuations[-1]
        )
        feature = (
            f"a generation after text that is already in the assistant's turn: {before[-60:]!r}"
        )
        return TurnPlan(span, refusal=(generation, feature, _INSTEAD))
    return None


_INSTEAD = (
    "Begin a new turn for each generation, set @function(num_api_spec_tokens=…), or make the backend with "
    'policy="emulate".'
)


def _common_params(
    generations: Sequence[Generated], outer: SamplingParams
) -> SamplingParams | None:
    """Returns the sampling parameters common to all generations, except for `_OWN`. Returns None if
    no single call can bring all of them, for example because their temperatures differ.
    """
    common = None
    for generated in generations:
        if isinstance(generated, SglSelect):
            continue
        options = generated.options
        params = merge(outer, generated.node.params)
        if (
            generated.tools is not None
            or options.code is not None
            or options.backend is not None
            or options.reasoning is not None
        ):
            return None
        if params.max_tokens == 0 or any(
            getattr(params, name) not in (UNSET, False) for name in _ALONE
        ):
            return None
        own = _without_individual_params(params)
        common = common or own
        if own != common:
            return None
    return common or _without_individual_params(outer)


def _without_individual_params(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, **dict.fromkeys(_OWN, UNSET))


def _constraint_of_piece(generated: Generated) -> Constraint | None:
    return (
        Choices(generated.choices)
        if isinstance(generated, SglSelect)
        else generated.node.constraint
    )


def _fits_one_text(span: TurnSpan, setting: TurnContext) -> bool:
    """Returns True if the backend can generate the whole span as one text under a grammar."""
    whole = turn_text_constraint(span.fields)
    if whole is None:
        return False
    try:
        params = msgspec.structs.replace(setting.run.params, stop=UNSET)
        setting.backend.check(span.generated[0], Demands("gen", params, whole), setting.where)
    except CapabilityError:
        return False
    return True


def turn_text_constraint(pieces: Sequence[str | Constraint | None]) -> Constraint | None:
    """Returns the constraint on a turn's text up to its last generation. Constant text stays as it
    is, and each generation contributes its constraint. Returns None if a generation has no
    constraint. Also returns None if only whitespace separates two generations, because the end of
    the first is then unknown.
    """
    found = list[Constraint]()
    behind = False  # True after a generation, until text other than blanks follows
    last = max(i for i, piece in enumerate(pieces) if not isinstance(piece, str))
    for piece in pieces[: last + 1]:
        if isinstance(piece, str):
            found += [Choices((piece,))] if piece else []
            behind = behind and not piece.strip()
        elif piece is None or behind:
            return None
        else:
            found.append(piece)
            behind = True
    return OneOf((InOrder(tuple(found)),))  # every API with grammars supports OneOf
