"""Attempts at an answer: how often, how long, and what the caller's check says of it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from sglang_lite.lang.concurrency.deadline import current_deadline
from sglang_lite.lang.concurrency.pool import elsewhere
from sglang_lite.protocol import (
    BackendError,
    BudgetError,
    CapabilityError,
    ConstraintError,
    EngineClosedError,
    ParameterError,
    RequestTimeoutError,
    SglError,
    TemplateError,
    ValueValidationError,
)
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.execution.player import Player

_T = TypeVar("_T")
_HOPELESS = (BudgetError, ParameterError, ConstraintError, CapabilityError, TemplateError, EngineClosedError)
_SAME_AGAIN = (
    "It was not tried again, because at temperature 0 the answer stays the same: set a temperature, or repair=True, "
    "which shows the model what was wrong."
)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between attempts, doubling


async def attempts(
    player: Player,
    retries: int,
    ask: Callable[[int], Awaitable[_T]],
    same_again: Callable[[Exception], bool] = lambda _: False,
) -> _T:
    """Asks until there is an answer, the run's time is over, or `retries` more attempts have failed.

    Args:
        same_again: an attempt has failed by what would be so in the next one.
    """
    deadline = player.run.deadline
    left = None if deadline is None else deadline - time.monotonic()
    attempt = 0
    async with limit(left, "the run took longer than its timeout of", player.run.timeout):
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
                    await asyncio.sleep(_pause(error, attempt, deadline))
                attempt += 1


def _pause(error: Exception, attempt: int, deadline: float | None) -> float:
    """Seconds until the next attempt: longer and longer ones, or as many as the provider asks for, if that is more.

    Raises:
        Exception: the error itself, where the run's time would be over before.
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
async def limit(left: float | None, message: str, timeout: float | None = None) -> AsyncGenerator[None, None]:
    """Cancels what is inside when it has taken too long.

    Args:
        left: seconds it may take, None for no limit.
        timeout: what was asked for, where that is not what is left.

    Raises:
        RequestTimeoutError: it has.
    """
    if left is None:
        yield
        return
    late = f"{message} {left if timeout is None else timeout:g} s."
    if left <= 0:
        raise RequestTimeoutError(late)
    outer = current_deadline.get()
    ends = time.monotonic() + left
    token = current_deadline.set(ends if outer is None else min(outer, ends))
    try:
        async with asyncio.timeout(left) as timer:
            yield
    except TimeoutError:
        if not timer.expired():  # it is the backend's own
            raise
        raise RequestTimeoutError(late) from None
    finally:
        current_deadline.reset(token)


async def check_value(check: Callable[[UserValue], UserValue], value: UserValue, text: str) -> None:
    name = getattr(check, "__name__", "check")
    try:
        if inspect.iscoroutinefunction(check):
            verdict = check(value)
        else:  # in a thread of its own, as it may wait for other programs, whose checks need threads too
            verdict = await elsewhere(
                lambda job: threading.Thread(target=job, daemon=True).start(), partial(check, value)
            )
        if inspect.isawaitable(verdict):
            verdict = await verdict
    except Exception as error:
        code = getattr(check, "__code__", None)
        error.add_note(f"in check={name}" + (f", {code.co_filename}:{code.co_firstlineno}" if code else ""))
        raise
    if type(verdict).__name__ not in ("bool", "bool_"):  # numpy's too
        raise ParameterError(
            "check",
            f"{name} returned {verdict!r:.60}, not True or False.",
            hint="Return True if the value is valid, else False.",
        )
    if not verdict:
        raise ValueValidationError(f"{name} refused the value {value!r}.", text=text, value=value)
