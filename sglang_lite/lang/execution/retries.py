"""Retries: how many attempts an answer gets, how long an attempt may take, the caller's check of
the value, and the prompt that shows the model its rejected answer (`gen(repair=True)`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from sglang_lite.errors import short_repr
from sglang_lite.lang.backend.base import Backend, unsupported_feature_error
from sglang_lite.lang.backend.rendering import with_user_reply
from sglang_lite.lang.concurrency.loop import current_deadline, winds_down_at
from sglang_lite.lang.concurrency.pool import run_on_other_thread
from sglang_lite.lang.execution.operations import FailedAttempt, GenOp
from sglang_lite.lang.execution.program_log import CALLS, describe_calls
from sglang_lite.lang.execution.run import Run
from sglang_lite.lang.expressions import SglGen
from sglang_lite.protocol import (
    BackendError,
    BudgetError,
    CapabilityError,
    CodeError,
    ConstraintError,
    EngineClosedError,
    Location,
    ParameterError,
    Prompt,
    RequestAbortedError,
    RequestTimeoutError,
    SamplingParams,
    SglError,
    TemplateError,
    ToolError,
    ValueValidationError,
)
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.text.chat_template import TurnTemplate


_T = TypeVar("_T")
_NOT_RETRIED = (
    BudgetError,
    ParameterError,
    ConstraintError,
    CapabilityError,
    RequestAbortedError,
    TemplateError,
    ToolError,
    EngineClosedError,
)
_SAME_AGAIN = (
    "It was not tried again, because at temperature 0 the answer stays the same: set a temperature, or repair=True, "
    "which shows the model what was wrong."
)
# Seconds between attempts: the first pause, doubled after each attempt up to the longest.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0


async def run_attempts(
    run: Run,
    retries: int,
    ask: Callable[[int], Awaitable[_T]],
    failed: Callable[[Exception], bool],
    is_final: Callable[[Exception], bool] = lambda _: False,
) -> _T:
    """Awaits `ask` until it returns. Gives up when the run's deadline has passed or when `retries`
    more attempts have failed.

    Args:
        ask: makes an attempt; its argument is the number of the attempt, from 0.
        failed: called with the error of each attempt. Returns True if another attempt would fail
            the same way; none is made then.
        is_final: called with an error after which another attempt could be made. Returns True if
            that attempt could do harm; it is not made then.
    """
    remaining = None if run.deadline is None else run.deadline - time.monotonic()
    attempt = 0
    winds_down_at.set(run.winds_down_at)
    async with time_limit(remaining, "the run took longer than its timeout of", run.timeout):
        while True:
            try:
                return await ask(attempt)
            except Exception as error:  # foreign backends may raise anything
                same_again = failed(error)
                if attempt >= retries or isinstance(error, _NOT_RETRIED) or is_final(error):
                    raise
                if same_again:
                    if isinstance(error, SglError):
                        error.hint = _SAME_AGAIN
                    else:
                        error.add_note(_SAME_AGAIN)
                    raise
                if not isinstance(error, ValueValidationError):
                    await asyncio.sleep(_pause_before_retry(error, attempt, run.deadline))
                attempt += 1


def _pause_before_retry(error: Exception, attempt: int, deadline: float | None) -> float:
    """Returns the seconds until the next attempt: exponential backoff or the delay that the
    provider requests, whichever is longer.

    Raises:
        BackendError: `error` itself, if the run's deadline would pass during the delay.
    """
    pause: float = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE)
    if not isinstance(error, BackendError) or error.retry_after is None:
        return pause
    if deadline is not None and time.monotonic() + error.retry_after >= deadline:
        wants = f"The provider allows another try after {error.retry_after:g} s"
        error.hint = f"{wants}, but the run's timeout ends before that, so it was not tried again."
        raise error
    return max(pause, error.retry_after)


@contextlib.asynccontextmanager
async def time_limit(
    remaining: float | None, message: str, timeout: float | None = None
) -> AsyncGenerator[None, None]:
    """Cancels the `with` block when its time is up.

    Args:
        remaining: seconds that the block may take, or None for no limit.
        message: beginning of the error message, which ends with the number of seconds.
        timeout: seconds to name in the message, or None for `remaining`.

    Raises:
        RequestTimeoutError: the block has taken longer than `remaining` seconds.
    """
    if remaining is None:
        yield
        return
    late = f"{message} {remaining if timeout is None else timeout:g} s."
    if remaining <= 0:
        raise RequestTimeoutError(late)
    outer = current_deadline.get()
    ends = time.monotonic() + remaining
    token = current_deadline.set(ends if outer is None else min(outer, ends))
    try:
        async with asyncio.timeout(remaining) as timer:
            yield
    except TimeoutError:
        if not timer.expired():  # the backend's own timeout
            raise
        raise RequestTimeoutError(late) from None
    finally:
        current_deadline.reset(token)


async def check_value(check: Callable[[UserValue], UserValue], value: UserValue, text: str) -> None:
    name = getattr(check, "__name__", "check")
    try:
        if inspect.iscoroutinefunction(check):
            verdict = check(value)
        # in a fresh thread, as the check may wait for other programs, whose checks need threads too
        else:
            verdict = await run_on_other_thread(
                lambda job: threading.Thread(target=job, daemon=True).start(), partial(check, value)
            )
        if inspect.isawaitable(verdict):
            verdict = await verdict
    except Exception as error:
        code = getattr(check, "__code__", None)
        error.add_note(
            f"in check={name}" + (f", {code.co_filename}:{code.co_firstlineno}" if code else "")
        )
        raise
    if type(verdict).__name__ not in ("bool", "bool_"):  # numpy's bool_ included
        raise ParameterError(
            "check",
            f"{name} returned {verdict!r:.60}, not True or False.",
            hint="Return True if the value is valid, else False.",
        )
    if not verdict:
        name = "the check" if name == "<lambda>" else name
        problem = f"{name} refused the value {short_repr(value)}."
        raise ValueValidationError(
            problem, text=text, value=value, hint="Raise retries=, or relax the check."
        )


def check_repair(
    own: SglGen,
    backend: Backend,
    retries: int,
    role: str | None,
    params: SamplingParams,
    where: Location | None,
) -> None:
    """Rejects a generation whose failed answer could not be shown to the model.

    Args:
        retries: number of retries of the run.
        role: role of the open turn, or None if no turn is open.
        params: sampling parameters of the node, merged with those of the run.

    Raises:
        ParameterError: the generation has no retries, or several samples.
        CapabilityError: no assistant turn is open, or the backend has blocking hooks, which see no
            prompt.
    """
    if not (retries if own.options.retries is None else own.options.retries):
        hint = "Set retries= to the number of attempts after the first."
        raise ParameterError("repair", "it has no effect with retries=0.", hint=hint, where=where)
    if params.samples > 1:
        raise ParameterError(
            "repair", "it works with one sample only.", hint="Leave n out.", where=where
        )
    if not backend.capabilities.reads_prompts:
        raise unsupported_feature_error(
            backend,
            own,
            "repair with SGLang's blocking hooks",
            "Leave it out, or write agenerate.",
            where,
        )
    if role != "assistant":
        instead = "Write turns: s += sgl.user(…), then s += sgl.assistant(sgl.gen(…))."
        raise unsupported_feature_error(
            backend, own, "repair outside an assistant's turn", instead, where
        )


def failed_answer_text(refused: FailedAttempt) -> str | None:
    """Returns the text of a failed attempt's answer, or None if the attempt got no answer."""
    if refused.answers:
        return refused.answers[0].text
    return (
        refused.error.text
        if isinstance(refused.error, ValueValidationError) and refused.error.text
        else None
    )


def next_prompt_shows_answer(op: GenOp) -> bool:
    """Returns True if the next attempt's prompt contains the last attempt's answer."""
    repair = op.expression.options.repair
    return (
        repair
        and bool(op.failed_attempts)
        and failed_answer_text(op.failed_attempts[-1]) is not None
    )


def repair_prompt(prompt: Prompt, op: GenOp, template: TurnTemplate | None) -> Prompt:
    """Builds the prompt of the next attempt: the original prompt, then the last answer and what was
    wrong with it.

    Raises:
        TemplateError: the model has no chat template.
    """
    if template is None:
        raise TemplateError(
            "the model has no chat template, so no answer can be shown.", hint="Leave repair out."
        )
    refused = op.failed_attempts[-1]
    answer = failed_answer_text(refused) or ""
    error = refused.error
    wrong = error.message if isinstance(error, SglError) else f"{error}" or type(error).__name__
    if isinstance(error, CodeError):
        wrong += f" {error.hint}"
    elif refused.answers:
        wrong += describe_calls(refused.answers[0].meta.get(CALLS, ()))
    begun = prompt.partial.strip()
    again = f"Write again only what comes after {begun[-60:]!r}" if begun else "Answer again"
    return with_user_reply(
        prompt, answer, f"That will not do: {wrong} {again}, and nothing else.", template
    )
