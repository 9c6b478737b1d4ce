"""Playing the nodes that a backend answers: attempts, time limits, checks, values; and where the answer comes from."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.choices import ChoicesDecision
from sglang_lite.lang.ir import GenOptions, SglSamplingParams, SglSelect
from sglang_lite.lang.loop import Mailbox
from sglang_lite.lang.results import decide, delta_meta
from sglang_lite.protocol import (
    CapabilityError,
    ConstraintError,
    Delta,
    EngineClosedError,
    Generation,
    Image,
    JsonSchema,
    ParameterError,
    ProgramError,
    RequestTimeoutError,
    Selection,
    Span,
    TemplateError,
    Unset,
    Usage,
    ValueValidationError,
)
from sglang_lite.text.reasoning import ReasoningParser

if TYPE_CHECKING:
    from sglang_lite.lang.interpreter import GenOp, SelectOp, StreamExecutor

_NO_OPTIONS = GenOptions()
_HOPELESS = (ParameterError, ConstraintError, CapabilityError, TemplateError, EngineClosedError)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between attempts, doubling


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A generation of which the user sees only a part: `answer` is what messages and variables show of it."""

    spans: tuple[Span, ...]
    answer: str

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


# ----------------------------------------------------------------------------------------------- generating


def at_once(branch: StreamExecutor, op: GenOp) -> bool:
    """Plays a generation whose answer is there without waiting. False: it has to wait."""
    backend = branch.backend
    if not backend.answers_now or op.node.options is not None or branch.log is not None:
        return False
    generations = backend.answer_now(branch.prompt(), op.params, op.node.constraint)
    if generations is None:
        return False
    _accept(branch, op, generations, _values(op, generations))
    return True


async def agenerate(branch: StreamExecutor, op: GenOp) -> None:
    """Plays a generation: asks the backend until the answer will do, and appends it."""
    run = branch.run
    if op.node.options is None and run.deadline is None and not run.settings.retries:
        generations = await _ask(branch, op, _NO_OPTIONS, 0, live=True)
        _accept(branch, op, generations, _values(op, generations))
        return
    options = op.node.options or _NO_OPTIONS
    retries = run.settings.retries if options.retries is None else options.retries
    attempt = 0
    while True:
        try:
            async with _time_limit(branch, options.timeout):
                # Text that may be taken back is not shown while it comes.
                generations = await _ask(branch, op, options, attempt, live=not retries and options.check is None)
            values = _values(op, generations)
            if options.check is not None:
                await _check(options.check, values[0], generations[0].text)
            break
        except Exception as error:  # foreign backends raise anything
            if attempt >= retries or isinstance(error, _HOPELESS) or _too_late(branch):
                raise
            if not isinstance(error, ValueValidationError):
                await asyncio.sleep(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE))
            attempt += 1
    _accept(branch, op, generations, values)


def generate(branch: StreamExecutor, op: GenOp) -> None:
    """`agenerate` on a thread of the backend's pool, for blocking hooks and nodes that wait for nothing else."""
    generations = _call_hooks(branch.backend, branch, op)
    _accept(branch, op, generations, _values(op, generations))


def needs_loop(branch: StreamExecutor, op: Any) -> bool:
    """Whether an operation of a backend with blocking hooks has to be played on the executor loop: where there are
    attempts or a time limit to watch, or another backend to ask."""
    node = getattr(op, "node", None)
    if node is None:
        return False
    run = branch.run
    limited = run.deadline is not None or run.settings.retries > 0
    return limited or getattr(node, "options", None) is not None


async def _ask(branch: StreamExecutor, op: GenOp, options: GenOptions, attempt: int, *, live: bool) -> list[Generation]:
    """One attempt: the samples, in order."""
    backend = branch.backend if options.backend is None else options.backend
    params = op.params
    if attempt and not isinstance(params.seed, Unset):  # the same draws would give the same answer
        params = replace(params, seed=(params.seed + attempt * 0x9E3779B97F4A7C15) % 2**64)
    stream = branch.log is not None
    reasoning = ReasoningParser(options.reasoning) if options.reasoning is not None else None
    done: list[Generation] = []
    shown = False
    if backend.blocking:
        events: AsyncGenerator[Delta | Generation, None] = _from_hooks(backend, branch, op)
    else:
        prompt = branch.prompt(same_model=options.backend is None)
        events = backend.agenerate(prompt, params, op.node.constraint, stream=stream)
    async for event in events:  # to its end: only the generator itself, or cancelling it, ends it sooner
        if isinstance(event, Generation):
            done.append(event)
        elif live and not event.index:
            shown = True
            _show(branch, op, event, reasoning)
    if len(done) > 1:
        done.sort(key=lambda g: g.index)
    if not done:
        raise ProgramError(f"{type(backend).__name__} ended without an answer.")
    if stream and not shown:
        _show(branch, op, Delta(done[0].text, done[0].token_ids), reasoning)
    return done


def _show(branch: StreamExecutor, op: GenOp, delta: Delta, reasoning: ReasoningParser | None) -> None:
    """Puts new text into the streams that are read."""
    if not delta.text or branch.log is None:
        return
    branch.log.append(delta.text)
    thought, answer = reasoning.push(delta.text) if reasoning is not None else ("", delta.text)
    if thought and op.thoughts_log is not None:
        op.thoughts_log.append(thought)
    if answer and op.log is not None:
        op.log.append(answer, delta_meta(delta))


def _values(op: GenOp, generations: Sequence[Generation]) -> list[Any]:
    """The samples' values.

    Raises:
        ValueValidationError: a text is no value of the node's type, or breaks its schema.
    """
    node = op.node
    texts = [g.text for g in generations]
    if node.options is not None and node.options.reasoning is not None:
        texts = [ReasoningParser.split(node.options.reasoning, text)[1] for text in texts]
    if node.value_type is not None:
        return [node.value_type.parse(text) for text in texts]
    if isinstance(node.constraint, JsonSchema):
        from sglang_lite.constraints.schema import parse_json

        for generation, text in zip(generations, texts):
            if generation.finish_reason == "stop":  # text that max_tokens cut short says so in its metadata
                parse_json(node.constraint, text)
    return texts


async def _check(check: Callable[[Any], Any], value: Any, text: str) -> None:
    if inspect.iscoroutinefunction(check):
        verdict = await check(value)
    else:
        verdict = await asyncio.to_thread(check, value)
    if not verdict:
        name = getattr(check, "__name__", "check")
        raise ValueValidationError(f"{name} refused the value {value!r}.", text=text, value=value)


def _accept(branch: StreamExecutor, op: GenOp, generations: Sequence[Generation], values: Sequence[Any]) -> None:
    """Appends the first sample to the text and gives the variable its value."""
    first, options = generations[0], op.node.options or _NO_OPTIONS
    own = options.backend is None
    spans = first.spans if first.spans and own else (Span(first.text),)
    if options.reasoning is not None:
        thought, answer = ReasoningParser.split(options.reasoning, first.text)
        branch.append([Reasoned(spans, answer)])
        if op.thoughts is not None:
            op.thoughts.set(thought)
        if op.thoughts_log is not None:
            op.thoughts_log.close()
    elif spans[0].ids is None and len(spans) == 1:
        branch.append((first.text,))
    else:
        branch.append([span if span.ids is not None else span.text for span in spans])
    several = not isinstance(op.params.n, Unset) and op.params.n > 1
    op.cell.record = list(generations) if several else first
    branch.run.played(op.cell.record)
    op.cell.set(list(values) if several else values[0])
    if op.log is not None:
        op.log.close()


@contextlib.asynccontextmanager
async def _time_limit(branch: StreamExecutor, timeout: float | None) -> AsyncGenerator[None, None]:
    """Cancels what is inside when the node or the run has taken too long.

    Raises:
        RequestTimeoutError: it has.
    """
    deadline = branch.run.deadline
    left = None if deadline is None else deadline - time.monotonic()
    limit = min((t for t in (timeout, left) if t is not None), default=None)
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError as error:
        if isinstance(error, RequestTimeoutError) or limit is None:
            raise
        if limit == left:
            message = f"the run took longer than its timeout of {branch.run.settings.timeout:g} s."
        else:
            message = f"no answer within the node's timeout of {timeout:g} s."
        raise RequestTimeoutError(message) from None


def _too_late(branch: StreamExecutor) -> bool:
    return branch.run.deadline is not None and time.monotonic() >= branch.run.deadline


# ------------------------------------------------------------------------------------- SGLang's blocking hooks


def _call_hooks(backend: BaseBackend, branch: StreamExecutor, op: GenOp) -> list[Generation]:
    """Calls `generate` or `generate_stream`. In a stream, what comes is shown while it comes."""
    given = SglSamplingParams.of(op.params, op.node.constraint)
    if branch.log is None:
        text, meta = backend.generate(branch, given)
        texts = text if isinstance(text, list) else [text]
        metas = meta if isinstance(meta, list) else [meta] * len(texts)
        return [_generation(t, m, i) for i, (t, m) in enumerate(zip(texts, metas))]
    pieces: list[str] = []
    meta = {}
    for piece, meta in backend.generate_stream(branch, given):  # noqa: B007 # the last one is the node's
        pieces.append(piece)
        _show(branch, op, Delta(piece), None)
    return [_generation("".join(pieces), meta, 0)]


def _generation(text: str, meta: dict[str, Any] | None, index: int) -> Generation:
    meta = dict(meta or {})
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    usage = Usage(
        prompt_tokens=meta.get("prompt_tokens") or 0,
        cached_tokens=meta.get("cached_tokens") or 0,
        completion_tokens=meta.get("completion_tokens") or 0,
    )
    return Generation(text, finish_reason="length" if kind == "length" else "stop", usage=usage, index=index, meta=meta)


async def _from_hooks(
    backend: BaseBackend, branch: StreamExecutor, op: GenOp
) -> AsyncGenerator[Delta | Generation, None]:
    for event in await _in_pool(backend, partial(_call_hooks, backend, branch, op)):
        yield event


async def _in_pool(backend: BaseBackend, work: Callable[[], Any]) -> Any:
    """Runs blocking work on the backend's pool. Cancelling leaves the thread to finish by itself."""
    mailbox = Mailbox(asyncio.get_running_loop())
    future: asyncio.Future[Any] = mailbox.loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def run() -> None:
        try:
            result, failure = work(), None
        except Exception as error:  # a hook may raise anything; it is the caller's
            result, failure = None, error
        mailbox.post(settle, result, failure)

    backend.pool.submit(run)
    return await future


def before_fork(branch: StreamExecutor, size: int) -> None:
    """SGLang's hint: several continuations of this text will follow."""
    if size > 1 and branch.backend.blocking:
        branch.backend.commit_lazy_operations(branch)


# ------------------------------------------------------------------------------------------------ selecting


def select_at_once(branch: StreamExecutor, op: SelectOp) -> bool:
    """Plays a selection whose scores are there without waiting. False: it has to wait."""
    if not branch.backend.answers_now or op.node.multi is not None or branch.log is not None:
        return False
    node = op.node
    selection = branch.backend.select_now(
        branch.prompt(), node.choices, unconditional=node.choices_method.requires_unconditional_logprobs
    )
    if selection is None:
        return False
    _picked(branch, op, selection, decide(node, selection, op.seed))
    return True


async def aselect(branch: StreamExecutor, op: SelectOp) -> None:
    """Plays a selection."""
    backend, node = branch.backend, op.node
    unconditional = node.choices_method.requires_unconditional_logprobs
    async with _time_limit(branch, None):
        if backend.blocking:
            _picked(branch, op, None, await _in_pool(backend, partial(_select_hook, branch, op)))
        elif node.multi is None:
            selection = await backend.aselect(branch.prompt(), node.choices, unconditional=unconditional)
            _picked(branch, op, selection, decide(node, selection, op.seed))
        else:
            await _select_several(branch, op, unconditional)


async def _select_several(branch: StreamExecutor, op: SelectOp, unconditional: bool) -> None:
    node, multi = op.node, op.node.multi
    assert multi is not None
    left, taken, records = list(node.choices), list[str](), []
    while left:
        before = multi.separator if taken else ""
        texts = [before + choice for choice in left] + ([multi.end] if taken else [])
        step = replace(node, choices=tuple(texts), multi=None)
        selection = await branch.backend.aselect(branch.prompt(), texts, unconditional=unconditional)
        records.append((selection, decide(step, selection, op.seed)))
        decision = records[-1][1].decision
        if decision == multi.end:
            break
        branch.write(decision)
        taken.append(decision.removeprefix(before))
        left.remove(taken[-1])
    op.cell.record = records
    branch.run.played(records)
    if op.log is not None:
        op.log.append(multi.separator.join(taken))
        op.log.close()
    op.cell.set(taken)


def select(branch: StreamExecutor, op: SelectOp) -> None:
    """`aselect` with blocking hooks, on a thread of the backend's pool."""
    _picked(branch, op, None, _select_hook(branch, op))


def _select_hook(branch: StreamExecutor, op: SelectOp) -> ChoicesDecision:
    node: SglSelect = op.node
    if node.multi is not None:
        raise CapabilityError(
            f"select(multi=…) is not possible on {type(branch.backend).__name__}: it picks without scores."
        )
    return branch.backend.select(branch, list(node.choices), node.temperature, node.choices_method)


def _picked(branch: StreamExecutor, op: SelectOp, selection: Selection | None, decision: ChoicesDecision) -> None:
    branch.write(decision.decision)
    op.cell.record = (selection or Selection((), picked=decision.decision), decision)
    branch.run.played(op.cell.record)
    if op.log is not None:
        op.log.append(decision.decision)
        op.log.close()
    op.cell.set(decision.decision)


def data_url(image: Image) -> str:
    """An image's address: its own, or its bytes as a data URL."""
    return image.url or f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
