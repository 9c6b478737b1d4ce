"""Executes selections. Gets the scores of the choices from the backend and decides by them, or
accepts the backend's own decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from sglang_lite.lang.backend.base import set_selection_adapter
from sglang_lite.lang.backend.planning import NodeQuestion, scores_needed
from sglang_lite.lang.execution.answer_log import digest_question, log_answer
from sglang_lite.lang.execution.base_player import BasePlayer
from sglang_lite.lang.execution.budget import max_selection_usage
from sglang_lite.lang.execution.operations import SelectOp, asked
from sglang_lite.lang.execution.retries import run_attempts
from sglang_lite.lang.expressions import MULTI_END, MULTI_SEPARATOR, can_skip_scores
from sglang_lite.program.choosing import decide_choice
from sglang_lite.program.nodes import Select
from sglang_lite.program.seeds import seed_for_attempt
from sglang_lite.protocol import Selection, SglError, Unset


def select_immediately(player: BasePlayer, op: SelectOp) -> bool:
    """Executes a selection if the backend can score it without waiting. Returns False if it has to
    wait.
    """
    backend = player.backend
    if op.expression.multi or not player.may_answer_now(op):
        return False
    unconditional = op.expression.choices_method.requires_unconditional_logprobs
    scores_needed.set(not can_skip_scores(op.expression))
    set_selection_adapter(op.node.lora_path)
    token = asked.set((player, op))
    try:
        prompt = player.transcript.prompt()
        choices = _allowed_choices(player, op.node)
        selection = backend.select_now(prompt, choices, unconditional=unconditional)
    finally:
        asked.reset(token)
    if selection is None:
        return False
    finish_selection(player, op, selection)
    return True


def finish_selection(player: BasePlayer, op: SelectOp, selection: Selection) -> None:
    """Finishes a selection whose answer has arrived."""
    _accept_pick(
        player,
        op,
        _decide_by_scores(player, op, selection, _allowed_choices(player, op.node), op.node.seed),
    )


async def play_selection(player: BasePlayer, op: SelectOp) -> None:
    """Executes a selection of one choice, or of several choices for `select(multi=True)`."""
    if player.pushed is not None:
        player.pushed.record_pieces_at_start(op, player.transcript.pieces)
    if op.expression.multi:
        await _select_several(player, op)
    else:
        _accept_pick(
            player,
            op,
            await _reuse_or_score(player, op, _allowed_choices(player, op.node), op.node.seed),
        )


def _decide_by_scores(
    player: BasePlayer,
    op: SelectOp,
    selection: Selection,
    choices: Sequence[str],
    seed: int | Unset,
) -> Selection:
    """Decides a selection by its scores, and adds the metadata of the deciding method."""
    if not player.backend.capabilities.reads_prompts:  # the backend has already decided
        return selection
    decision = decide_choice(
        selection, choices, op.expression.choices_method, op.node.temperature, seed
    )
    meta = {**selection.meta, **(decision.meta_info or {})}
    return msgspec.structs.replace(selection, picked=decision.decision, meta=meta)


def _allowed_choices(player: BasePlayer, node: Select) -> Sequence[str]:
    """Returns the choices that the open grammar allows here. Without an open grammar, returns all
    choices.
    """
    walk = player.transcript.matcher
    return node.choices if walk is None else walk.filter(node.choices)


async def _reuse_or_score(
    player: BasePlayer, op: SelectOp, texts: Sequence[str], seed: int | Unset
) -> Selection:
    """Returns a selection with its decision. If possible, the selection is kept from an earlier
    run. Otherwise, the choices are scored.
    """
    if player.run.kept is not None:
        kept = player.run.kept.next_selection(op, texts, player.transcript)
        if kept is not None:
            return kept
    return _decide_by_scores(player, op, await _score_with_retries(player, op, texts), texts, seed)


async def _score_with_retries(player: BasePlayer, op: SelectOp, texts: Sequence[str]) -> Selection:
    def record_error(error: Exception) -> bool:
        """Records the error of an attempt. Returns False, because another attempt may succeed."""
        op.record_failure(error)
        return False

    ask = _score_by_backend if op.pushed_node is None else _score_by_program
    return await run_attempts(
        player.run, player.run.settings.retries, partial(ask, player, op, texts), record_error
    )


async def _score_by_program(
    player: BasePlayer, op: SelectOp, texts: Sequence[str], attempt: int
) -> Selection:
    """Returns the scores that the pushed-down program computes."""
    assert op.pushed_node is not None
    pushed, place = op.pushed_node
    if op.node.judged:  # else it was asked for when it was pushed down
        unconditional = op.expression.choices_method.requires_unconditional_logprobs
        node = msgspec.structs.replace(
            op.node, choices=tuple(texts), method=None, unconditional=unconditional
        )
        pushed.request_another_answer(op, node, player.transcript.pieces)
    answers: list[Any] = [each async for each in pushed.events.iterate_events((place, op.attempt))]
    selection: Selection = answers[0]
    return selection


async def _score_by_backend(
    player: BasePlayer, op: SelectOp, texts: Sequence[str], attempt: int
) -> Selection:
    """Asks the backend for scores within the budgets."""
    asked.set((player, op))
    scores_needed.set(not can_skip_scores(op.expression))
    set_selection_adapter(op.node.lora_path)
    unconditional = op.expression.choices_method.requires_unconditional_logprobs
    prompt = player.transcript.prompt()
    run = player.run
    backend = player.backend
    with run.reserve_in_budgets(
        backend, partial(max_selection_usage, backend, prompt, texts)
    ) as account:
        try:
            if op.expression.source is None:
                selection = await backend.aselect(prompt, texts, unconditional=unconditional)
            else:
                selection = await op.expression.source.aselect(NodeQuestion(backend, prompt), texts)
        except SglError as error:
            run.account.record_failures([error.usage])
            raise
        if account is None:
            return selection
        (selection,) = account.record_answers([selection], prompt, ())
    return selection


async def _select_several(player: BasePlayer, op: SelectOp) -> None:
    question = digest_question(player, op)
    remaining = list(op.node.choices)
    chosen = list[str]()
    selections = list[Selection]()
    while remaining:
        before = MULTI_SEPARATOR if chosen else ""
        texts = [before + choice for choice in remaining] + ([MULTI_END] if chosen else [])
        selection = await _reuse_or_score(
            player, op, texts, seed_for_attempt(op.node.seed, len(chosen))
        )
        if not player.is_current(op):  # the branch was stopped meanwhile
            return
        selections.append(selection)
        assert selection.picked is not None
        if selection.picked == MULTI_END:
            break
        player.transcript.append_choice(selection.picked)
        chosen.append(selection.picked.removeprefix(before))
        remaining.remove(chosen[-1])
    log_answer(player, op, question, selections)
    _set_chosen_value(player, op, selections, MULTI_SEPARATOR.join(chosen), chosen)


def _accept_pick(player: BasePlayer, op: SelectOp, selection: Selection) -> None:
    if not player.is_current(op):  # the branch was stopped meanwhile
        return
    assert selection.picked is not None
    if player.run.is_logged:
        log_answer(player, op, digest_question(player, op), [selection])
    player.transcript.append_choice(selection.picked)
    _set_chosen_value(player, op, selection, selection.picked, selection.picked)


def _set_chosen_value(
    player: BasePlayer,
    op: SelectOp,
    record: Selection | list[Selection],
    text: str,
    value: str | list[str],
) -> None:
    """Sets the variable of a selection."""
    op.variable.record = record
    op.variable.end_position = player.transcript.end_position
    op.ended = player.run.account.record_result(record)
    if op.variable.log is not None:
        op.variable.log.append(text)
    op.variable.set(value)
