"""Playing the nodes that a backend answers: attempts, time limits, checks, values; and where the answer comes from."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import msgspec

from sglang_lite.constraints.matching import validate
from sglang_lite.lang.backend.asked import AskedNode, asked_node, scores_needed
from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.backend.rendering import rendered
from sglang_lite.lang.concurrency.pool import elsewhere, in_pool
from sglang_lite.lang.execution import blocking_hooks
from sglang_lite.lang.execution.budget import most_of_generation, most_of_selection
from sglang_lite.lang.execution.operations import GenOp, JoinOp, Op, SelectOp
from sglang_lite.lang.execution.repairs import repaired, shows
from sglang_lite.lang.execution.transcript import Reasoned
from sglang_lite.lang.expressions import GenOptions, only_picks
from sglang_lite.lang.results import delta_meta, joined_meta
from sglang_lite.program.choosing import ChoicesDecision, decide
from sglang_lite.program.nodes import Select
from sglang_lite.program.seeds import reseeded
from sglang_lite.protocol import (
    BudgetError,
    CapabilityError,
    Constraint,
    ConstraintError,
    Continuation,
    Delta,
    EngineClosedError,
    Generation,
    JsonSchema,
    ParameterError,
    ProgramError,
    Prompt,
    RequestTimeoutError,
    Selection,
    SglError,
    Span,
    TemplateError,
    Unset,
    ValueValidationError,
    total_usage,
)
from sglang_lite.text.reasoning import ReasoningParser

if TYPE_CHECKING:
    from sglang_lite.lang.execution.player import Player

_T = TypeVar("_T")
_NO_OPTIONS = GenOptions()
_HOPELESS = (BudgetError, ParameterError, ConstraintError, CapabilityError, TemplateError, EngineClosedError)
_STOPS = ("stop", "stop_token_ids", "stop_regex")
_SAME_AGAIN = (
    "It was not tried again, as `retries` at temperature 0 give the same answer: set a temperature, or repair=True, "
    "which shows the model what was wrong."
)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between attempts, doubling


# ----------------------------------------------------------------------------------------------- generating


def at_once(branch: Player, op: GenOp) -> bool:
    """Plays a generation whose answer is there without waiting. False: it has to wait."""
    backend = branch.backend
    if not backend.answers_now or _decides(op.own.options) or branch.log is not None or not branch.run.plain:
        return False
    _says_what_asks(branch, op)
    generations = backend.answer_now(branch.transcript.prompt(), op.node.params, _constraint(branch, op))
    if generations is None:
        return False
    if not backend.enforces:
        _hold(branch, op, generations)
    _accept(branch, op, generations, _checked(branch, op, generations))
    return True


def _says_what_asks(branch: Player, op: GenOp | SelectOp) -> None:
    """Lets the backend know which node asks."""
    called = branch.run.called
    scores_needed.set(isinstance(op, SelectOp) and not only_picks(op.own))
    asked_node.set(AskedNode("" if called is None else called.program.name, op.place, op.node.name))


def _decides(options: GenOptions | None) -> bool:
    """Tells whether more than the answer has a say in what comes of a generation."""
    return options is not None and options != GenOptions(reasoning=options.reasoning)


def is_only_answered(op: Op, branch: Player) -> TypeGuard[GenOp]:
    """Tells whether an operation is a generation, handed over, of which one whole answer will come, and nothing of the
    caller's has a say in it."""
    return (
        type(op) is GenOp
        and op.asked is not None
        and op.own.options is None
        and op.own.value_type is None
        and branch.log is None
        and branch.run.plain
        and (isinstance(op.node.params.n, Unset) or op.node.params.n == 1)
    )


def take_answer(branch: Player, op: GenOp) -> bool:
    """Plays such a generation, if its answer is there. On the executor loop."""
    assert op.asked is not None
    pushed, place = op.asked
    pushed.reach(op, branch.transcript.pieces)
    answer = pushed.answer(place)
    if answer is None:
        return False
    if isinstance(answer, SglError):
        raise answer
    if not branch.backend.enforces:
        _hold(branch, op, [answer])
    _accept(branch, op, [answer], _checked(branch, op, [answer]))
    return True


async def agenerate(branch: Player, op: GenOp) -> None:
    """Plays a generation, when its branch's gate is open."""
    gate, branch.gate = branch.gate, None
    if gate is None:
        await _generate(branch, op, None)
        return
    leads = await gate.enter()
    try:
        await _generate(branch, op, gate.open if leads else None)
    finally:
        if leads:  # whatever has come of it
            gate.open()


async def _generate(branch: Player, op: GenOp, came: Callable[[], None] | None) -> None:
    """Asks the backend until the answer will do, and appends it.

    Args:
        came: to be called when something of an answer has come.
    """
    run = branch.run
    if branch.pushed is not None:
        branch.pushed.reach(op, branch.transcript.pieces)
    if op.own.options is None and run.plain:
        generations = await _ask(branch, op, _NO_OPTIONS, 0, came, live=True)
        _accept(branch, op, generations, _checked(branch, op, generations))
        return
    options = op.own.options or _NO_OPTIONS
    retries = run.settings.retries if options.retries is None else options.retries
    live = not retries and options.check is None  # text that may be taken back is not shown while it comes

    answers: list[Generation] = []
    greedy = op.node.params.temperature == 0 or op.node.params.top_k == 1

    async def ask(attempt: int) -> tuple[list[Generation], list[Any]]:
        nonlocal answers
        answers = []
        began = time.monotonic()
        try:
            async with _limit(options.timeout, "no answer within the node's timeout of"):
                answers = await _ask(branch, op, options, attempt, came, live=live)
            values = _values(op, answers)
            if options.check is not None:
                left = None if options.timeout is None else began + options.timeout - time.monotonic()
                async with _limit(left, "the check did not end within the node's timeout of", options.timeout):
                    for value, answer in zip(values, answers):
                        await _check(options.check, value, answer.text)
        except Exception as error:  # noted, and raised on
            _refuse(branch, op, answers, error)
            raise
        return answers, values

    def same_again(error: Exception) -> bool:
        return greedy and not shows(options, op) and (bool(answers) or isinstance(error, ValueValidationError))

    generations, values = await _attempts(branch, retries, ask, same_again)
    if not live:
        _Show(branch, op, options.reasoning).end(generations[0])
    _accept(branch, op, generations, values)


async def _attempts(
    branch: Player,
    retries: int,
    ask: Callable[[int], Awaitable[_T]],
    same_again: Callable[[Exception], bool] = lambda _: False,
) -> _T:
    """Asks until there is an answer, the run's time is over, or `retries` more attempts have failed.

    Args:
        same_again: an attempt has failed by what would be so in the next one.
    """
    deadline = branch.run.deadline
    left = None if deadline is None else deadline - time.monotonic()
    attempt = 0
    async with _limit(left, "the run took longer than its timeout of", branch.run.timeout):
        while True:
            try:
                return await ask(attempt)
            except Exception as error:  # foreign backends raise anything
                if attempt >= retries or isinstance(error, _HOPELESS):
                    raise
                if same_again(error):
                    if isinstance(error, SglError):
                        error.hint = _SAME_AGAIN
                    else:
                        error.add_note(_SAME_AGAIN)
                    raise
                if not isinstance(error, ValueValidationError):
                    await asyncio.sleep(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE))
                attempt += 1


@contextlib.asynccontextmanager
async def _limit(left: float | None, message: str, timeout: float | None = None) -> AsyncGenerator[None, None]:
    """Cancels what is inside when it has taken too long.

    Args:
        left: seconds it may take, None for no limit.
        timeout: what was asked for, where that is not what is left.

    Raises:
        RequestTimeoutError: it has.
    """
    late = f"{message} {left if timeout is None else timeout:g} s." if left is not None else ""
    if left is not None and left <= 0:
        raise RequestTimeoutError(late)
    try:
        async with asyncio.timeout(left) as limit:
            yield
    except TimeoutError:
        if not limit.expired():  # it is the backend's own
            raise
        raise RequestTimeoutError(late) from None


def generate(branch: Player, op: GenOp) -> None:
    """`agenerate` on a thread of the backend's pool, for blocking hooks and nodes that wait for nothing else."""
    show = _Show(branch, op, None) if branch.log is not None else None
    generations = blocking_hooks.generate(branch.backend, branch, op, None if show is None else show.piece)
    _hold(branch, op, generations)
    if show is not None:
        show.end(generations[0])
    _accept(branch, op, generations, _checked(branch, op, generations))


def needs_loop(branch: Player, op: Op) -> bool:
    """Tells whether an operation of a backend with blocking hooks has to be played on the executor loop: where it waits
    for other branches (a thread that waited for them could be the one they need), where there are attempts or a time
    limit to watch, or another backend to ask."""
    if isinstance(op, GenOp | SelectOp):
        return not branch.run.plain or (isinstance(op, GenOp) and op.own.options is not None)
    return isinstance(op, JoinOp)


async def _ask(
    branch: Player, op: GenOp, options: GenOptions, attempt: int, came: Callable[[], None] | None, *, live: bool
) -> list[Generation]:
    """Makes one attempt, if the budgets allow it. Returns the samples, in order."""
    if not branch.run.budgets:
        return await _call(branch, op, options, attempt, came, live=live)
    backend = branch.backend if options.backend is None else options.backend
    prompt = _prompt(branch, op, options, attempt)
    with branch.run.within_budget(backend, partial(most_of_generation, backend, prompt, op.node.params)) as used:
        answers = await _call(branch, op, options, attempt, came, live=live)
        used += [answer.usage for answer in answers]
    return answers


async def _call(
    branch: Player, op: GenOp, options: GenOptions, attempt: int, came: Callable[[], None] | None, *, live: bool
) -> list[Generation]:
    """Asks the backend once. Returns the samples, in order."""
    backend = branch.backend if options.backend is None else options.backend
    params = op.node.params
    if attempt and not isinstance(params.seed, Unset):  # the same draws would give the same answer
        params = msgspec.structs.replace(params, seed=reseeded(params.seed, attempt))
    stream = branch.log is not None or came is not None
    show = _Show(branch, op, options.reasoning) if live and branch.log is not None else None
    done: list[Generation] = []
    known = None
    if backend.remembers and branch.pushed is not None:
        known = backend.remembered(_prompt(branch, op, options, attempt), params, _constraint(branch, op))
    if known is not None:
        events: AsyncGenerator[Any, None] = _each(known)
    elif branch.pushed is not None and options.backend is None and not (attempt and shows(options, op)):
        first = op.asked if not attempt else None
        pushed, place = first or (branch.pushed, branch.pushed.gen(op, params, branch.transcript.pieces))
        count = 1 if isinstance(params.n, Unset) else params.n
        events = pushed.answers(place, count)
    elif backend.blocking:
        events = _from_hooks(backend, branch, op, show)
    else:
        _says_what_asks(branch, op)
        prompt = _prompt(branch, op, options, attempt)
        constraint = _constraint(branch, op)
        if op.turn is None or (attempt and shows(options, op)):
            if op.turn is not None:
                op.turn[0].forget()
            if op.equal is None or attempt:
                events = backend.agenerate(prompt, params, constraint, stream=stream)
            else:
                events = op.equal.answers(backend, prompt, params, constraint, stream=stream)
        else:
            turn, place = op.turn
            events = turn.answers(place, backend, prompt, params, constraint, attempt, stream=stream)
    try:
        async for event in events:  # to its end: only the generator itself, or cancelling it, ends it sooner
            if came is not None:
                came()
            if isinstance(event, Generation):
                done.append(event)
            elif show is not None and not event.index:
                show.delta(event)
    except SglError as error:
        branch.run.failed([error.usage])
        raise
    if len(done) > 1:
        done.sort(key=lambda g: g.index)
    if not done:
        raise ProgramError(f"{type(backend).__name__} ended without an answer.")
    if not backend.enforces:
        try:
            _hold(branch, op, done)
        except SglError as error:
            error.usage = total_usage(answer.usage for answer in done)
            branch.run.failed([error.usage])
            raise
    if show is not None:
        show.end(done[0])
    return done


def _prompt(branch: Player, op: GenOp, options: GenOptions, attempt: int) -> Prompt:
    """The prompt of an attempt."""
    prompt, template = branch.transcript.prompt(same_model=options.backend is None), None
    if options.backend is not None and not options.backend.capabilities.continues:  # a chat, whose marks are others
        template = options.backend.get_chat_template()
        prompt = rendered(prompt, template, branch.run.template)
    if attempt and shows(options, op):
        prompt = repaired(prompt, op, template or branch.run.template)
    return prompt


async def _each(known: Sequence[Generation]) -> AsyncGenerator[Generation, None]:
    for each in known:
        yield each


def _constraint(branch: Player, op: GenOp) -> Constraint | None:
    """The constraint of a generation where the branch is now."""
    walk = branch.transcript.walk
    return op.node.constraint if walk is None else Continuation(walk.constraint, walk.text, op.node.constraint)


class _Show:
    """Puts an answer into the streams that are read, piece by piece: all of its text and metadata, none twice."""

    __slots__ = ("_chars", "_early", "_ids", "_log", "_logprobs", "_op", "_parser", "_thoughts")

    def __init__(self, branch: Player, op: GenOp, reasoning: str | None) -> None:
        self._log, self._op = branch.log, op
        self._parser = None if reasoning is None else ReasoningParser(reasoning, once=op.node.constraint is not None)
        self._chars = self._ids = self._logprobs = self._thoughts = 0  # shown so far
        self._early: dict[str, Any] = {}  # metadata whose text is yet to come

    def delta(self, delta: Delta) -> None:
        """Shows a piece, with the counts of all so far that SGLang's streams have."""
        self._ids += len(delta.token_ids)
        self._logprobs += len(delta.logprobs)
        meta = delta_meta(delta)
        if delta.logprobs:
            meta["output_token_logprobs_length"] = self._logprobs
        tokens = max(self._ids, self._logprobs)  # not every backend tells them
        if tokens and (delta.text or delta.logprobs):
            meta["completion_tokens"] = tokens
        if delta.reasoning:
            self._think(delta.reasoning)
        self.piece(delta.text, meta)

    def _think(self, thought: str) -> None:
        """Shows reasoning that is told apart: then there is none in the text."""
        self._parser = None
        self._thoughts += len(thought)
        if self._op.thoughts_log is not None:
            self._op.thoughts_log.append(thought)

    def piece(self, text: str, meta: dict[str, Any]) -> None:
        if self._log is None:
            return
        self._chars += len(text)
        if text:
            self._log.append(text)
        self._give(*(("", text) if self._parser is None else self._parser.push(text)), meta)

    def end(self, generation: Generation) -> None:
        """Shows what has not been shown of a finished answer."""
        if self._log is None:
            return
        if generation.reasoning is not None:
            self._think(generation.reasoning[self._thoughts :])
        self.delta(
            Delta(
                generation.text[self._chars :],
                generation.token_ids[self._ids :],
                generation.output_logprobs[self._logprobs :],
            )
        )
        if self._parser is not None:
            self._give(*self._parser.flush(), {})
        if self._early and self._op.log is not None:
            self._op.log.append("", self._early)

    def _give(self, thought: str, answer: str, meta: dict[str, Any]) -> None:
        op = self._op
        if self._early:
            meta = joined_meta(self._early, meta)
        self._early = {} if thought or answer else meta
        if thought and op.thoughts_log is not None:
            op.thoughts_log.append(thought, None if answer else meta)
        if answer and op.log is not None:
            op.log.append(answer, meta)


def _checked(branch: Player, op: GenOp, generations: Sequence[Generation]) -> list[Any]:
    """`_values` of an only attempt."""
    try:
        return _values(op, generations)
    except Exception as error:  # as in `ask`
        _refuse(branch, op, generations, error)
        raise


def _refuse(branch: Player, op: GenOp, answers: Sequence[Generation], error: Exception) -> None:
    op.refuse(answers, error)
    branch.run.failed(answer.usage for answer in answers)


def _values(op: GenOp, generations: Sequence[Generation]) -> list[Any]:
    """The samples' values.

    Raises:
        ValueValidationError: a text is no value of the node's type, or breaks its schema.
    """
    own = op.own
    texts = [g.text for g in generations]
    if own.options is not None and own.options.reasoning is not None:
        texts = [_split(op, g)[1] for g in generations]
    if own.value_type is not None:
        return [own.value_type.parse(text) for text in texts]
    if isinstance(own.node.constraint, JsonSchema):
        from sglang_lite.constraints.schema import parse_json

        for generation, text in zip(generations, texts):
            if generation.finish_reason == "stop":  # text that max_tokens cut short says so in its metadata
                parse_json(own.node.constraint, text)
    return texts


def _hold(branch: Player, op: GenOp, generations: Sequence[Generation]) -> None:
    """Holds finished texts against the node's constraint. (`_values` does it with types and JSON, the branch with a
    grammar that spans several nodes.)

    Raises:
        ValueValidationError: a text breaks it.
    """
    constraint = op.node.constraint
    if (
        constraint is None
        or branch.transcript.walk is not None
        or op.own.value_type
        or isinstance(constraint, JsonSchema)
    ):
        return
    given = (op.own.node.params, branch.run.settings.params)
    if any(not isinstance(getattr(params, stop), Unset) for params in given for stop in _STOPS):
        return  # they may end it anywhere
    for generation in generations:
        if generation.finish_reason == "stop" and generation.matched is None:
            validate(constraint, generation.text)


def _split(op: GenOp, generation: Generation) -> tuple[str, str]:
    """Reasoning and answer. In one that is constrained marks of reasoning may be part of a value."""
    if generation.reasoning is not None:
        return generation.reasoning, generation.text
    assert op.own.options is not None
    assert op.own.options.reasoning is not None
    return ReasoningParser.split(op.own.options.reasoning, generation.text, once=op.node.constraint is not None)


async def _check(check: Callable[[Any], Any], value: Any, text: str) -> None:
    if inspect.iscoroutinefunction(check):
        verdict = check(value)
    else:  # in a thread of its own, as it may wait for other programs, whose checks need threads too
        verdict = await elsewhere(lambda job: threading.Thread(target=job, daemon=True).start(), partial(check, value))
    if inspect.isawaitable(verdict):
        verdict = await verdict
    name = getattr(check, "__name__", "check")
    if type(verdict).__name__ not in ("bool", "bool_"):  # numpy's too
        raise ParameterError(
            "check", f"{name} returned {verdict!r:.60}, not True or False.", hint="Return whether the value will do."
        )
    if not verdict:
        raise ValueValidationError(f"{name} refused the value {value!r}.", text=text, value=value)


def _accept(branch: Player, op: GenOp, generations: Sequence[Generation], values: Sequence[Any]) -> None:
    """Appends the first sample to the text and gives the variable its value."""
    if not branch.is_at(op):  # stopped meanwhile
        return
    several = not isinstance(op.node.params.n, Unset) and op.node.params.n > 1
    if several and len(generations) != op.node.params.n:
        raise ProgramError(f"the backend gave {len(generations)} of {op.node.params.n} samples.")
    first, options = generations[0], op.own.options or _NO_OPTIONS
    own = options.backend is None
    spans = first.spans if first.spans and own else (Span(first.text, special=False),)
    if options.reasoning is not None:
        thoughts, answers = zip(*(_split(op, g) for g in generations))
        branch.transcript.append([Reasoned(spans, answers[0])])
        if op.thoughts is not None:
            op.thoughts.set(list(thoughts) if several else thoughts[0])
        if op.thoughts_log is not None:
            op.thoughts_log.close()
    else:
        branch.transcript.append(spans)
    op.variable.record = list(generations) if several else first
    op.ended = branch.run.played(op.variable.record)
    op.variable.behind = branch.transcript.behind
    op.variable.set(list(values) if several else values[0])
    if op.log is not None:
        op.log.close()


async def _from_hooks(
    backend: BaseBackend, branch: Player, op: GenOp, show: _Show | None
) -> AsyncGenerator[Delta | Generation, None]:
    for event in await in_pool(
        backend.pool, partial(blocking_hooks.generate, backend, branch, op, None if show is None else show.piece)
    ):
        yield event


# ------------------------------------------------------------------------------------------------ selecting


def select_at_once(branch: Player, op: SelectOp) -> bool:
    """Plays a selection whose scores are there without waiting. False: it has to wait."""
    if not branch.backend.answers_now or op.own.multi is not None or branch.log is not None or not branch.run.plain:
        return False
    unconditional = op.own.choices_method.requires_unconditional_logprobs
    _says_what_asks(branch, op)
    selection = branch.backend.select_now(
        branch.transcript.prompt(), _choices(branch, op.node), unconditional=unconditional
    )
    if selection is None:
        return False
    _picked(branch, op, selection, _decided(op, selection))
    return True


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

    return await _attempts(branch, branch.run.settings.retries, attempt)


async def _score(branch: Player, op: SelectOp, texts: Sequence[str]) -> Selection:
    unconditional = op.own.choices_method.requires_unconditional_logprobs
    if branch.pushed is None:
        _says_what_asks(branch, op)
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
            run.failed([error.usage])
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
    op.ended = branch.run.played(record)
    if op.log is not None:
        op.log.append(text)
        op.log.close()
    op.variable.set(value)
