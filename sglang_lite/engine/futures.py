"""Combinators of futures. A callback runs on the thread that completes the last future, or on a
timer's thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

R = TypeVar("R")


def convert_result(future: Future[Any], convert: Callable[[Any], R]) -> Future[R]:  # of anything
    """Returns a future of another future's result, converted by a function. If the conversion
    fails, the new future has its error.
    """
    converted: Future[R] = Future()

    def settle(_: object) -> None:
        with contextlib.suppress(InvalidStateError):  # the future was cancelled
            try:
                result = convert(future.result())
            except Exception as error:  # any exception is the result
                converted.set_exception(error)
            else:
                converted.set_result(result)

    future.add_done_callback(settle)
    return converted


def all_done_future(futures: Sequence[Future[Any]]) -> Future[None]:  # of anything
    """Returns a future that is done once all the given futures are done, whether they succeed or
    fail. At least one future must be given.
    """
    ended: Future[None] = Future()
    missing = len(futures)
    lock = threading.Lock()

    def settle(_: object) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            last = not missing
        if last:
            ended.set_result(None)

    for future in futures:
        future.add_done_callback(settle)
    return ended


def all_done_or_any_after_delay(
    futures: Sequence[Future[Any]], seconds: float
) -> Future[None]:  # of anything
    """Returns a future that is done once all the given futures are done. After some seconds, a
    single one of them is enough.
    """
    ended: Future[None] = Future()

    def settle(_: object = None) -> None:
        timer.cancel()
        with contextlib.suppress(InvalidStateError):  # it is already done
            ended.set_result(None)

    def late() -> None:
        for future in futures:
            future.add_done_callback(settle)

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    all_done_future(futures).add_done_callback(settle)
    return ended


def gather_results(futures: Sequence[Future[R]]) -> Future[list[R]]:
    """Returns a future of the results of all the given futures. If some of them fail, it has the
    error of the first that failed, in the given order. At least one future must be given.
    """
    return convert_result(
        all_done_future(futures), lambda _: [future.result() for future in futures]
    )
