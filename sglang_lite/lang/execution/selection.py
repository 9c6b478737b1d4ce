"""Playing selections: scores from the backend, or its own choice, and what is chosen by them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sglang_lite.lang.backend.asked_node import scores_needed
from sglang_lite.lang.concurrency.pool import in_pool
from sglang_lite.lang.execution import blocking_hooks
from sglang_lite.lang.execution.attempts import attempts
from sglang_lite.lang.execution.budget import most_of_selection
from sglang_lite.lang.execution.generation import say_who_asks
from sglang_lite.lang.execution.operations import SelectOp
from sglang_lite.lang.expressions import only_picks
from sglang_lite.program.choosing import ChoicesDecision, decide
from sglang_lite.program.nodes import Select
from sglang_lite.program.seeds import reseeded
from sglang_lite.protocol import Selection, SglError

if TYPE_CHECKING:
    from sglang_lite.lang.execution.player import Player

_T = TypeVar("_T")


def select_immediately(branch: Player, op: SelectOp) -> bool:
    """Plays a selection whose scores are there without waiting. False: it has to wait."""
    if not branch.backend.answers_now or op.own.multi is not None or branch.log is not None or not branch.run.plain:
        return False
    if op.turn is not None:  # which is asked for as a whole
        return False
    unconditional = op.own.choices_method.requires_unconditional_logprobs
    _say_what_asks(branch, op)
    selection = branch.backend.select_now(
        branch.transcript.prompt(), _choices(branch, op.node), unconditional=unconditional
    )
    if selection is None:
        return False
    _picked(branch, op, selection, _decided(op, selection))
    return True


def _say_what_asks(branch: Player, op: SelectOp) -> None:
    """Lets the backend know which node asks, and whether it needs scores."""
    say_who_asks(branch, op)
    scores_needed.set(not only_picks(op.own))


async def aselect(branch: Player, op: SelectOp) -> None:
    """Plays a selection."""
    backend = branch.backend
    if branch.pushed is not None:
        branch.pushed.reach(op, branch.transcript.pieces)
    if backend.blocking:
        decision = await _retried(branch, op, lambda _: _by_hook(branch, op))
        _picked(branch, op, None, decision)
    elif op.own.multi is None:
        selection = await _score(branch, op, _choices(branch, op.node))
        _picked(branch, op, selection, _decided(op, selection))
    else:
        await _select_several(branch, op)


async def _by_hook(branch: Player, op: SelectOp) -> ChoicesDecision:
    prompt, choices = branch.transcript.prompt(), op.node.choices
    with branch.run.within_budget(branch.backend, partial(most_of_selection, prompt, choices)):
        decision: ChoicesDecision = await in_pool(branch.backend.pool, partial(blocking_hooks.select, branch, op))
        return decision


def _decided(op: SelectOp, selection: Selection) -> ChoicesDecision:
    return decide(selection, op.node.choices, op.own.choices_method, op.node.temperature, op.node.seed)


def _choices(branch: Player, node: Select) -> Sequence[str]:
    """Choices that may come where the branch is now."""
    walk = branch.transcript.walk
    return node.choices if walk is None else walk.possible(node.choices)


async def _retried(branch: Player, op: SelectOp, ask: Callable[[int], Awaitable[_T]]) -> _T:
    """
    Args:
        ask: makes an attempt; 0 is the first.
    """
    if branch.run.plain:
        return await ask(0)

    async def attempt(number: int) -> _T:
        try:
            return await ask(number)
        except Exception as error:  # as in `ask`
            op.refuse(error)
            raise

    return await attempts(branch, branch.run.settings.retries, attempt)


async def _score(branch: Player, op: SelectOp, texts: Sequence[str]) -> Selection:
    unconditional = op.own.choices_method.requires_unconditional_logprobs
    if branch.pushed is None:
        _say_what_asks(branch, op)
        return await _retried(branch, op, partial(_select_once, branch, op, texts, unconditional=unconditional))

    async def ask(_: int) -> Selection:
        assert branch.pushed is not None
        if branch.backend.remembers:
            prompt = branch.transcript.prompt()
            known = branch.backend.remembered_choice(prompt, texts, unconditional=unconditional)
            if known is not None:
                return known
        asked, op.asked = op.asked, None
        pushed, place = asked or (
            branch.pushed,
            branch.pushed.score(op, texts, branch.transcript.pieces, unconditional=unconditional),
        )
        answers: list[Any] = [each async for each in pushed.answers(place)]
        selection: Selection = answers[0]
        return selection

    return await _retried(branch, op, ask)


async def _select_once(
    branch: Player, op: SelectOp, texts: Sequence[str], attempt: int, *, unconditional: bool
) -> Selection:
    """Asks the backend for scores, if the budgets allow it."""
    prompt, run, backend = branch.transcript.prompt(), branch.run, branch.backend
    with run.within_budget(backend, partial(most_of_selection, prompt, texts)) as used:
        try:
            if op.turn is None:
                selection = await backend.aselect(prompt, texts, unconditional=unconditional)
            else:
                turn, place = op.turn
                selection = await turn.selection(place, backend, prompt, texts, attempt)
        except SglError as error:
            run.account.failed([error.usage])
            raise
        used.append(selection.usage)
    return selection


async def _select_several(branch: Player, op: SelectOp) -> None:
    node, multi = op.node, op.own.multi
    assert multi is not None
    left, taken, records = list(node.choices), list[str](), []
    while left:
        before = multi.separator if taken else ""
        texts = [before + choice for choice in left] + ([multi.end] if taken else [])
        selection = await _score(branch, op, texts)
        if not branch.is_at(op):  # as in _accept
            return
        seed = reseeded(node.seed, len(taken))
        records.append((selection, decide(selection, texts, op.own.choices_method, node.temperature, seed)))
        decision = records[-1][1].decision
        if decision == multi.end:
            break
        branch.transcript.choose(decision)
        op.mark = None  # that was before it
        taken.append(decision.removeprefix(before))
        left.remove(taken[-1])
    _chosen(branch, op, records, multi.separator.join(taken), taken)


def select(branch: Player, op: SelectOp) -> None:
    """`aselect` with blocking hooks, on a thread of the backend's pool."""
    _picked(branch, op, None, blocking_hooks.select(branch, op))


def _picked(branch: Player, op: SelectOp, selection: Selection | None, decision: ChoicesDecision) -> None:
    if not branch.is_at(op):  # as in _accept
        return
    branch.transcript.choose(decision.decision)
    record = selection or Selection((), picked=decision.decision), decision
    _chosen(branch, op, record, decision.decision, decision.decision)


def _chosen(branch: Player, op: SelectOp, record: Any, text: str, value: str | list[str]) -> None:
    """Gives the variable of a selection its value, and its stream the text."""
    op.variable.record = record
    op.variable.behind = branch.transcript.behind
    op.ended = branch.run.account.played(record)
    if op.log is not None:
        op.log.append(text)
        op.log.close()
    op.variable.set(value)
