"""Running a program over many items: a window of runs under way, results as they complete or in order."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from sglang_lite.lang.state import ProgramState
from sglang_lite.protocol import BatchError, Usage

# An item's outcome: its state, executed to the end, or what its body raised.
Outcome: TypeAlias = "tuple[int, ProgramState | Exception]"
Body: TypeAlias = Callable[[Any], ProgramState]
AsyncBody: TypeAlias = Callable[[Any], Coroutine[Any, Any, ProgramState]]


def as_completed(body: Body | None, abody: AsyncBody | None, items: Sequence[Any], window: int) -> Iterator[Outcome]:
    """Runs a body over the items, `window` of them under way at a time; yields outcomes as they come. Nothing new is
    started while the consumer does not ask.

    Args:
        body: runs a plain program's body and returns its state; on a pool of at most `window` threads.
        abody: the same for a coroutine; on one event loop in one thread.
    """
    done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def finished(i: int, state: ProgramState) -> None:
        """The body has returned; the outcome is there when its nodes have been played."""
        cell = state.stream_executor.read("nothing")
        cell.when_done(lambda: done.put((i, state)))

    def in_thread(i: int, item: Any) -> None:
        assert body is not None
        try:
            state = body(item)
        except Exception as error:  # a body may raise anything; it is that item's outcome
            done.put((i, error))
        else:
            finished(i, state)

    async def in_loop(i: int, item: Any) -> None:
        assert abody is not None
        try:
            state = await abody(item)
        except Exception as error:  # as above
            done.put((i, error))
        else:
            finished(i, state)

    runners: ThreadPoolExecutor | _LoopThread = (
        ThreadPoolExecutor(window, thread_name_prefix="sglang_lite-body") if body is not None else _LoopThread()
    )
    with runners:
        under_way, left = 0, enumerate(items)
        while True:
            while under_way < window and (job := next(left, None)) is not None:
                if isinstance(runners, _LoopThread):
                    runners.submit(in_loop(*job))
                else:
                    runners.submit(in_thread, *job)
                under_way += 1
            if not under_way:
                return
            outcome = done.get()
            under_way -= 1
            yield outcome


def in_order(outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    """The same outcomes, in the order of the items."""
    early: dict[int, ProgramState | Exception] = {}
    following = 0
    for i, outcome in outcomes:
        early[i] = outcome
        while following in early:
            yield following, early.pop(following)
            following += 1


def with_progress(outcomes: Iterator[Outcome], total: int) -> Iterator[Outcome]:
    """The same outcomes, with a bar that shows programs done, tokens per second and the share of cached tokens."""
    from tqdm.auto import tqdm

    generated = prompt = cached = 0
    with tqdm(total=total, unit="program") as bar:
        for i, outcome in outcomes:
            if isinstance(outcome, ProgramState):
                usage: Usage = outcome.stream_executor.run.usage()
                generated += usage.completion_tokens
                prompt += usage.prompt_tokens
                cached += usage.cached_tokens
                elapsed = bar.format_dict["elapsed"] or 1e-9
                bar.set_postfix_str(f"{generated / elapsed:,.0f} tok/s, {cached / max(prompt, 1):.0%} cached")
            bar.update()
            yield i, outcome


def collect(outcomes: Iterator[Outcome], count: int) -> list[ProgramState]:
    """All results in the order of the items.

    Raises:
        BatchError: some item failed; after all have finished, with all results.
    """
    results: list[Any] = [None] * count
    for i, outcome in outcomes:
        error = outcome if isinstance(outcome, Exception) else outcome.stream_executor.failure
        results[i] = outcome if error is None else error
    failed = [i for i, result in enumerate(results) if isinstance(result, Exception)]
    if failed:
        first = results[failed[0]]
        raise BatchError(
            f"{len(failed)} of {count} programs failed, the first is item {failed[0]}: {first}", results
        ) from first
    return results


class _LoopThread:
    """An event loop in a thread, for the bodies of async programs that run from synchronous code."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang_lite-body", daemon=True)

    def submit(self, body: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(body, self._loop)

    def __enter__(self) -> _LoopThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
