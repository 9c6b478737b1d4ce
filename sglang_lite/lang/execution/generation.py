"""Executes generations: gets the answer, parses its value, appends its text to the branch, and
writes it to the streams.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec

from sglang_lite.constraints.json_schema.allowed_values import list_quotes
from sglang_lite.constraints.json_schema.quotes import KEYWORD
from sglang_lite.constraints.matching import validate
from sglang_lite.lang.backend.base import Backend, name_of
from sglang_lite.lang.backend.planning import NodeQuestion
from sglang_lite.lang.backend.rendering import rerender_with_template
from sglang_lite.lang.concurrency.variables import TextLog
from sglang_lite.lang.confidence import AnsweredQuestion
from sglang_lite.lang.execution.answer_log import digest_question, log_answer
from sglang_lite.lang.execution.base_player import BasePlayer
from sglang_lite.lang.execution.budget import max_generation_usage
from sglang_lite.lang.execution.operations import GenOp, asked
from sglang_lite.lang.execution.program_log import CALLS
from sglang_lite.lang.execution.retries import (
    check_value,
    next_prompt_shows_answer,
    repair_prompt,
    run_attempts,
    time_limit,
)
from sglang_lite.lang.execution.run_code import run_code
from sglang_lite.lang.execution.transcript import Reasoned
from sglang_lite.lang.execution.truncation import (
    is_constrained_answer_truncated,
    truncation_error,
    truncation_policy,
    truncation_warning,
)
from sglang_lite.lang.expressions import NO_OPTIONS, GenOptions
from sglang_lite.lang.results import DeltaWithMeta, delta_meta, merge_meta, with_warnings
from sglang_lite.program.seeds import seed_for_attempt
from sglang_lite.protocol import (
    UNSET,
    Constraint,
    Continuation,
    Delta,
    Generation,
    JsonSchema,
    ParameterError,
    ProgramError,
    Prompt,
    RequestTimeoutError,
    SamplingParams,
    SglError,
    Span,
    Unset,
    ValueValidationError,
    total_usage,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.text.reasoning import ReasoningParser

_log = logging.getLogger("sglang_lite")
_UNREAD = Prompt((Span(""),))  # for backends that look at the branch itself
_index = attrgetter("index")
_text = attrgetter("text")
_OF_LOGPROBS = ("top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs")
_of_logprobs = attrgetter(*_OF_LOGPROBS)
_NO_LOGPROBS = (UNSET, UNSET, UNSET)
_STOPS = ("stop", "stop_token_ids", "stop_regex")


def generate_immediately(player: BasePlayer, op: GenOp) -> bool:
    """Executes a generation if the backend can answer without waiting. Returns False if it has to
    wait.
    """
    backend = player.backend
    options = op.expression.options
    if not player.may_answer_now(op) or (options is not NO_OPTIONS and _changes_result(options)):
        return False
    reads = backend.capabilities.reads_prompts
    prompt = _build_prompt(player, op) if reads else _UNREAD
    token = asked.set((player, op))
    try:
        generations = backend.answer_now(prompt, op.node.params, _effective_constraint(player, op))
    finally:
        asked.reset(token)
    if generations is None:
        return False
    finish_generation(player, op, generations)
    return True


def _changes_result(options: GenOptions) -> bool:
    """Returns True if options other than `reasoning` affect the generation's result."""
    return options != GenOptions(reasoning=options.reasoning)


def finish_generation(player: BasePlayer, op: GenOp, generations: Sequence[Generation]) -> None:
    """Finishes a generation whose answer has arrived: parses the answer and appends it."""
    try:
        values = _parse_or_validate(player, op, generations)
    except Exception as error:  # recorded, and raised again
        _record_failure(player, op, generations, error)
        raise
    _accept_answer(player, op, generations, values)


async def play_generation(player: BasePlayer, op: GenOp) -> None:
    """Executes a generation: requests answers until one is accepted, then appends it."""
    if op.expression.source is None:
        await _generate_answer(player, op)
    else:
        async with op.expression.source.guard_attempts(player.transcript.collect_text()):
            await _generate_answer(player, op)


async def _generate_answer(player: BasePlayer, op: GenOp) -> None:
    if player.pushed is not None:
        player.pushed.record_pieces_at_start(op, player.transcript.pieces)
    if player.run.kept is not None and player.run.kept.caller_supplies_answer(op):
        await _use_supplied_text(player, op, player.run.kept.value or "")
    elif op.expression.options is NO_OPTIONS and player.run.plain:
        finish_generation(player, op, await _call_backend(player, op, 0, live=True))
    else:
        await _call_with_retries(player, op)


async def _use_supplied_text(player: BasePlayer, op: GenOp, text: str) -> None:
    """Executes a generation with the text that the caller of `rerun` supplies.

    Raises:
        ParameterError: the node can't have this text.
    """
    if op.node.params.samples > 1:
        raise ParameterError(
            "value", f"{op.node.name!r} has several samples, which one text can't replace."
        )
    answers = [Generation(text, reasoning=None if op.expression.options.reasoning is None else "")]
    try:
        if op.expression.node.constraint is not None and not _may_stop_anywhere(player, op):
            validate(op.expression.node.constraint, text)
        values = await _parse_and_check(player, op, answers, time.monotonic())
        _accept_answer(player, op, answers, values)
    except (ParameterError, RequestTimeoutError):
        raise
    except Exception as error:  # a check may raise anything
        problem = (
            error.message if isinstance(error, SglError) else f"{type(error).__name__}: {error}"
        )
        raise ParameterError(
            "value", f"{text!r:.60} is not possible for {op.node.name!r}: {problem}"
        ) from error


async def _call_with_retries(player: BasePlayer, op: GenOp) -> None:
    run = player.run
    options = op.expression.options
    retries = run.settings.retries if options.retries is None else options.retries
    live = not retries and options.check is None  # text that may be rejected is not streamed

    answers: list[Generation] = []
    greedy = op.node.params.temperature == 0 or op.node.params.top_k == 1

    async def ask(attempt: int) -> tuple[list[Generation], list[Any]]:
        nonlocal answers
        answers = []
        began = time.monotonic()
        async with time_limit(options.timeout, "no answer within the node's timeout of"):
            ask_once = _call_within_budget if run.budgets else _call_backend
            answers = await ask_once(player, op, attempt, live=live)
        return answers, await _parse_and_check(player, op, answers, began)

    def note_failure(error: Exception) -> bool:
        _record_failure(player, op, answers, error)
        return (
            greedy
            and not next_prompt_shows_answer(op)
            and (bool(answers) or isinstance(error, ValueValidationError))
        )

    def ends_program(error: Exception) -> bool:
        """Returns True if a program has already run and the error is not about its text or value.
        The model could not fix such an error, and a retry would make the program's calls twice.
        """
        if not answers or CALLS not in answers[0].meta:
            return False
        return not (isinstance(error, ValueValidationError) and error.text in answers[0].text)

    generations, values = await run_attempts(run, retries, ask, note_failure, ends_program)
    # else it is another reader's log
    if not live and player.transcript.log is not None and player.is_current(op):
        AnswerStream(player.transcript.log, op).show_rest(generations[0])
    _accept_answer(player, op, generations, values)


def _backend_for_op(player: BasePlayer, op: GenOp) -> Backend:
    """Returns the backend that answers a generation: its own, or the run's."""
    own = op.expression.options.backend
    return player.backend if own is None else own


async def _call_within_budget(
    player: BasePlayer, op: GenOp, attempt: int, *, live: bool
) -> list[Generation]:
    """Makes one attempt within the budgets. Returns the samples in order."""
    backend = _backend_for_op(player, op)
    prompt = _build_prompt(player, op, attempt)
    most = partial(max_generation_usage, backend, prompt, op.node.params)
    with player.run.reserve_in_budgets(backend, most) as account:
        answers = await _call_backend(player, op, attempt, live=live)
        assert account is not None  # this run has a budget
        return account.record_answers(answers, prompt, [answer.text for answer in answers])


async def _call_backend(
    player: BasePlayer, op: GenOp, attempt: int, *, live: bool
) -> list[Generation]:
    """Calls the backend once. Returns the samples in order."""
    backend = _backend_for_op(player, op)
    log = player.transcript.log if player.is_current(op) else None
    show = AnswerStream(log, op) if live and log is not None else None
    events = _open_answer_events(backend, player, op, attempt)
    done: list[Generation] = []
    try:
        async for event in events:  # exhausted, unless the generator ends early or is cancelled
            if isinstance(event, Generation):
                done.append(event)
            elif show is not None and not event.index:
                show.show_delta(event)
    except SglError as error:
        player.run.account.record_failures([error.usage])
        raise
    if len(done) > 1:
        done.sort(key=_index)
    if not done:
        raise ProgramError(
            f"{name_of(backend)} ended without an answer.",
            hint="Its `agenerate` must yield a Generation.",
        )
    if show is not None:
        show.show_rest(done[0])
    return done


def _open_answer_events(
    backend: Backend, player: BasePlayer, op: GenOp, attempt: int
) -> AsyncGenerator[Any, None]:
    """Returns the events of an answer from the first source that has it: the earlier run, the
    pushed-down program, the expression's source, or the backend.
    """
    params = op.node.params
    if attempt and not isinstance(params.seed, Unset):  # the same seed would give the same answer
        params = msgspec.structs.replace(params, seed=seed_for_attempt(params.seed, attempt))
    if player.run.kept is not None:
        kept = player.run.kept.reuse_generations(op, player.transcript)
        if kept:
            return _iterate_async(kept)
    repairs = bool(attempt) and next_prompt_shows_answer(op)
    if op.pushed_node is not None and not op.has_own_prompt and not repairs:
        pushed, place = op.pushed_node
        if attempt or player.run.kept is not None:  # else it was asked for when it was pushed down
            pushed.request_another_answer(
                op, msgspec.structs.replace(op.node, params=params), player.transcript.pieces
            )
        return pushed.events.iterate_events((place, op.attempt), params.samples)
    asked.set((player, op))
    source = op.expression.source
    stream = player.transcript.log is not None
    prompt = _build_prompt(player, op, attempt)
    constraint = _effective_constraint(player, op)
    if source is not None:
        return source.agenerate(NodeQuestion(backend, prompt, params, constraint, stream))
    return backend.agenerate(prompt, params, constraint, stream=stream)


def _build_prompt(player: BasePlayer, op: GenOp, attempt: int = 0) -> Prompt:
    """Builds the prompt of an attempt. It includes the node's tools, is rendered for the node's own
    backend if it has one, and includes the rejected answer if the attempt repairs it.
    """
    own = op.expression.options.backend
    prompt = player.transcript.prompt(same_model=own is None)
    template = None
    if op.shows_tools and (tools := op.expression.tools) is not None:
        prompt = msgspec.structs.replace(
            prompt, tools=tools.to_prompt_tools(_backend_for_op(player, op).tool_family())
        )
    if own is not None and (op.shows_tools or not own.capabilities.continues):
        template = own.get_chat_template()
        prompt = rerender_with_template(prompt, template, player.run.template)
    if attempt and next_prompt_shows_answer(op):
        prompt = repair_prompt(prompt, op, template or player.run.template)
    return prompt


async def _iterate_async(generations: Sequence[Generation]) -> AsyncGenerator[Generation, None]:
    for each in generations:
        yield each


def _effective_constraint(player: BasePlayer, op: GenOp) -> Constraint | None:
    """Returns the constraint of a generation. Within an open grammar, this is the continuation of
    the grammar.
    """
    walk = player.transcript.matcher
    return (
        op.node.constraint
        if walk is None
        else Continuation(walk.constraint, walk.text, op.node.constraint)
    )


async def _parse_and_check(
    player: BasePlayer, op: GenOp, answers: list[Generation], began: float
) -> list[Any]:
    """Parses the samples, runs the sample if it is a program, and runs the node's check on each
    value.

    Args:
        answers: the samples. If the sample is a program, a record of its calls is added to it.
        began: `time.monotonic()` at which the node's timeout began.
    """
    values = _parse_or_validate(player, op, answers)
    options = op.expression.options
    if options.code is not None:
        message = "the program did not end within the node's timeout of"
        async with time_limit(_seconds_left(options, began), message, options.timeout):
            values = [await run_code(player, op, options.code, answers, values[0])]
    if options.check is not None:
        remaining = _seconds_left(options, began)
        async with time_limit(
            remaining, "the check did not end within the node's timeout of", options.timeout
        ):
            for value, answer in zip(values, answers):
                await check_value(options.check, value, answer.text)
    return values


def _seconds_left(options: GenOptions, began: float) -> float | None:
    """Returns the rest of the node's timeout, or None if it has none."""
    return None if options.timeout is None else began + options.timeout - time.monotonic()


def _record_failure(
    player: BasePlayer, op: GenOp, answers: Sequence[Generation], error: Exception
) -> None:
    op.record_failure(error, answers)
    usages = [answer.usage for answer in answers]
    player.run.account.record_failures(usages)
    if usages and isinstance(error, SglError) and error.usage is None:
        error.usage = total_usage(usages)


def _parse_or_validate(
    player: BasePlayer, op: GenOp, generations: Sequence[Generation]
) -> list[Any]:
    """Parses the samples, or validates them against their constraint, and returns their values.

    Raises:
        ValueValidationError: a text is not a value of the node's type, or breaks its constraint.
    """
    own = op.expression
    texts = list(map(_text, generations))
    if own.options.reasoning is not None:
        texts = [_split_reasoning(op, g)[1] for g in generations]
    if own.value_type is not None:
        return [
            _parse_typed_value(player, op, text, generation)
            for text, generation in zip(texts, generations)
        ]
    if own.node.constraint is not None:
        for generation, text in zip(generations, texts):
            if is_constrained_answer_truncated(op, generation):
                if truncation_policy(player.run, op, generation) == "raise":
                    raise truncation_error(player.run, op, generation, text)
            elif generation.finish_reason == "stop":
                _validate_finished_text(player, op, generation, text)
    return texts


def _validate_finished_text(
    player: BasePlayer, op: GenOp, generation: Generation, text: str
) -> None:
    """Validates a finished text against the node's JSON schema. Without a schema, validates it
    against the constraint if the backend does not enforce constraints. Skips this within a grammar,
    where the branch validates the text of all nodes together.
    """
    schema = op.expression.node.constraint
    constraint = op.node.constraint
    if isinstance(schema, JsonSchema):
        from sglang_lite.constraints.schema import parse_json

        parse_json(schema, text)
    elif constraint is not None and not _backend_for_op(player, op).enforces:
        stopped = generation.matched is not None or _may_stop_anywhere(player, op)
        if not stopped and player.transcript.matcher is None:
            validate(constraint, generation.text)


def _parse_typed_value(player: BasePlayer, op: GenOp, text: str, generation: Generation) -> Any:
    """Parses a text as a value of the node's type.

    Raises:
        ValueValidationError: the text is not a value of the type.
        TruncatedError: a limit cut the text, and it is not a value or the node's `shortened` is
            "raise".
        ParameterError: the limit was too small for any value.
    """
    value_type = op.expression.value_type
    assert value_type is not None, "as `_parse_or_validate` has found"
    if not is_constrained_answer_truncated(op, generation):
        return value_type.parse(text)
    if op.expression.tools is not None and (answer := _free_text_answer(op, text)) is not None:
        return answer
    try:
        value = value_type.parse(text)
    except ValueValidationError as error:
        raise truncation_error(player.run, op, generation, text, error.message) from error
    if truncation_policy(player.run, op, generation) == "raise":
        raise truncation_error(player.run, op, generation, text)
    return value


def _free_text_answer(op: GenOp, text: str) -> str | None:
    """Returns a text as the free-text answer of a node with tools. Returns None if the text is a
    tool call or the beginning of one.
    """
    assert op.expression.value_type is not None
    try:
        answer = op.expression.value_type.parse(text)
    except ValueValidationError:
        return None
    return answer if isinstance(answer, str) else None


def _may_stop_anywhere(player: BasePlayer, op: GenOp) -> bool:
    """Returns True if a stop parameter may end the text before its constraint is complete."""
    param_sets = (op.expression.node.params, player.run.settings.params)
    return any(
        not isinstance(getattr(params, stop), Unset) for params in param_sets for stop in _STOPS
    )


def _split_reasoning(op: GenOp, generation: Generation) -> tuple[str, str]:
    """Splits a generation into reasoning and answer. If it has a constraint, only the first
    reasoning block is split off, because a value may contain reasoning marks.
    """
    if generation.reasoning is not None:
        return generation.reasoning, generation.text
    assert op.expression.options.reasoning is not None
    return ReasoningParser.split(
        op.expression.options.reasoning, generation.text, once=op.node.constraint is not None
    )


def _accept_answer(
    player: BasePlayer, op: GenOp, generations: Sequence[Generation], values: Sequence[Any]
) -> None:
    """Appends the first sample to the text and sets the variable to its value, or to all values if
    there are several samples.
    """
    if not player.is_current(op):  # the branch was stopped meanwhile
        return
    samples = op.node.params.n
    several = not isinstance(samples, Unset) and samples > 1
    if several and len(generations) != samples:
        raise ProgramError(f"the backend returned {len(generations)} of {samples} samples.")
    if player.run.is_logged:
        log_answer(player, op, digest_question(player, op), generations)
    constraint = op.expression.node.constraint
    if constraint is not None:
        generations = [
            _add_truncation_warning(player, op, generation) for generation in generations
        ]
    if isinstance(constraint, JsonSchema) and KEYWORD in constraint.schema:
        generations = _add_quote_positions(op, constraint, generations)
    if _of_logprobs(op.node.params) != _NO_LOGPROBS and (
        unused := _unused_logprob_params(op.node.params)
    ):
        unread = f"{', '.join(unused)}: has no effect without return_logprob=True"
        generations = [_log_and_add_warning(op, generation, unread) for generation in generations]
    first = generations[0]
    options = op.expression.options
    if op.node.params.confidence is True or op.node.params.exact in (True, "bound"):
        constraint = _effective_constraint(player, op)
        prompt = _build_prompt(player, op)
        op.variable.question = AnsweredQuestion(
            _backend_for_op(player, op), prompt, constraint, op.node.params.lora_path
        )
    spans = (
        first.spans
        if first.spans and options.backend is None
        else (Span(first.text, special=False),)
    )
    if options.reasoning is not None:
        thoughts, answers = zip(*(_split_reasoning(op, g) for g in generations))
        behind = player.transcript.append_answer([Reasoned(spans, answers[0])])
        if op.thoughts is not None:
            op.thoughts.set(list(thoughts) if several else thoughts[0])
    else:
        behind = player.transcript.append_answer(spans)
    variable = op.variable
    variable.record = list(generations) if several else first
    variable.end_position = behind
    op.ended = player.run.account.record_result(variable.record)
    variable.set(list(values) if several else values[0])


def _add_quote_positions(
    op: GenOp, constraint: JsonSchema, generations: Sequence[Generation]
) -> Sequence[Generation]:
    """Adds the positions of quotes in the values to the generations' metadata."""
    reasons = op.expression.options.reasoning is not None
    found = []
    for generation in generations:
        text = _split_reasoning(op, generation)[1] if reasons else generation.text
        with suppress(ValueError, RecursionError):  # max_tokens may have cut the text of a schema
            quotes = list_quotes(constraint, json.loads(text))
            generation = msgspec.structs.replace(
                generation, meta={**generation.meta, "quotes": quotes}
            )
        found.append(generation)
    return found


def _unused_logprob_params(params: SamplingParams) -> list[str]:
    """Returns the names of parameters that have no effect because they only concern
    log-probabilities and return_logprob is not set.
    """
    if params.return_logprob is True:
        return []
    return [
        name
        for name, value in zip(_OF_LOGPROBS, _of_logprobs(params))
        if not isinstance(value, Unset) and value
    ]


def _add_truncation_warning(player: BasePlayer, op: GenOp, generation: Generation) -> Generation:
    """Adds a warning to a generation that a limit has cut, if its policy is to keep such answers
    with a warning.
    """
    if (
        not is_constrained_answer_truncated(op, generation)
        or truncation_policy(player.run, op, generation) != "warn"
    ):
        return generation
    return _log_and_add_warning(op, generation, truncation_warning(player.run, op, generation))


def _log_and_add_warning(op: GenOp, generation: Generation, message: str) -> Generation:
    _log.warning("%s [%s]", message, op.node.where)
    return msgspec.structs.replace(generation, meta=with_warnings(generation.meta, message))


class AnswerStream:
    """Writes an answer, piece by piece, to the text logs of its branch and its variable. All of its
    text and metadata are written exactly once.
    """

    __slots__ = ("_chars", "_early", "_ids", "_log", "_logprobs", "_op", "_parser", "_thoughts")

    def __init__(self, log: TextLog, op: GenOp) -> None:
        self._log = log
        self._op = op
        reasoning = op.expression.options.reasoning
        self._parser = (
            None
            if reasoning is None
            else ReasoningParser(reasoning, once=op.node.constraint is not None)
        )
        self._chars = self._ids = self._logprobs = self._thoughts = 0  # counts shown so far
        self._early: dict[str, Any] = {}  # metadata whose text has not come yet

    def show_delta(self, delta: Delta) -> None:
        """Shows a piece, with cumulative counts of tokens and log-probabilities, as SGLang's
        streams do.
        """
        if isinstance(delta, DeltaWithMeta):
            return self.show_piece(delta.text, delta.meta)
        self._ids += len(delta.token_ids)
        self._logprobs += len(delta.logprobs)
        meta = delta_meta(delta)
        if delta.logprobs:
            meta["output_token_logprobs_length"] = self._logprobs
        tokens = max(self._ids, self._logprobs)  # some backends report only one of the two
        if tokens and (delta.text or delta.logprobs):
            meta["completion_tokens"] = tokens
        if delta.reasoning:
            self._show_reasoning(delta.reasoning)
        return self.show_piece(delta.text, meta)

    def _show_reasoning(self, thought: str) -> None:
        """Streams reasoning that the backend reports separately. From then on, the text is not
        searched for reasoning, because it contains none.
        """
        self._parser = None
        self._thoughts += len(thought)
        if self._op.thoughts is not None and self._op.thoughts.log is not None:
            self._op.thoughts.log.append(thought)

    def show_piece(self, text: str, meta: dict[str, Json]) -> None:
        self._chars += len(text)
        if text:
            self._log.append(text)
        self._log_piece(*(("", text) if self._parser is None else self._parser.push(text)), meta)

    def show_rest(self, generation: Generation) -> None:
        """Shows those parts of a finished answer that have not been shown yet."""
        if generation.reasoning is not None:
            self._show_reasoning(generation.reasoning[self._thoughts :])
        self.show_delta(
            Delta(
                generation.text[self._chars :],
                generation.token_ids[self._ids :],
                generation.output_logprobs[self._logprobs :],
            )
        )
        if self._parser is not None:
            self._log_piece(*self._parser.flush(), {})
        if self._early and self._op.variable.log is not None:
            self._op.variable.log.append("", self._early)

    def _log_piece(self, thought: str, answer: str, meta: dict[str, Any]) -> None:
        op = self._op
        if self._early:
            meta = merge_meta(self._early, meta)
        self._early = {} if thought or answer else meta
        if thought and op.thoughts is not None and op.thoughts.log is not None:
            op.thoughts.log.append(thought, None if answer else meta)
        if answer and op.variable.log is not None:
            op.variable.log.append(answer, meta)
