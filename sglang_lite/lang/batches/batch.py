"""Runs of a program over many items: a limited number at a time, with results in order or as they
complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import queue
import threading
import warnings
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Required, TypeAlias, TypeVar, Unpack

from sglang_lite.lang.argument_names import unknown_argument_error
from sglang_lite.lang.backend.default import BackendLike, as_backend
from sglang_lite.lang.batches.body_pool import AsyncBodyPool, BodyPool, Outcome, Pool, Report
from sglang_lite.lang.batches.checkpoint import BatchFile, compute_batch_digests
from sglang_lite.lang.body_run import BodyRun
from sglang_lite.lang.checks import check_booleans
from sglang_lite.lang.execution.branch import find_raise_location
from sglang_lite.lang.execution.run import RunSettings
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.run_options import convert_to_settings, inherit_options, resolve_run_identity
from sglang_lite.lang.runs.line_codes import check_secret
from sglang_lite.lang.sampling_keywords import with_sampling_signature
from sglang_lite.lang.state import ProgramState, user_location
from sglang_lite.lang.states_table import build_results_table, states_table
from sglang_lite.lang.tracebacks import warn_here
from sglang_lite.notebook.markup import Markup
from sglang_lite.notebook.output import progress_bar
from sglang_lite.protocol import BatchError, ParameterError, SglError, Usage, total_usage
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import SamplingOptions

_LIVE_ROWS = 20  # rows that a notebook shows while a batch runs

OnError: TypeAlias = Literal["raise", "return", "skip"]
# positional and keyword arguments of a run
Item: TypeAlias = "tuple[Sequence[Any], dict[str, Any]]"
# an item as users give it
Given: TypeAlias = Mapping[str, UserValue] | list[UserValue] | tuple[UserValue, ...]

_BodyPool = TypeVar("_BodyPool", BodyPool, AsyncBodyPool)


class Cluster(Protocol):
    """Engines on other machines that run the items of a batch, described by
    `sglang_lite.ray.RayOptions`.
    """

    def identity(self) -> object:
        """Returns data that identifies everything that the answers depend on, like
        `Backend.identity`.
        """

    def rows(self, given: UserValue) -> UserValue:
        """Converts the user's argument, such as a Ray Dataset, to the items of a batch."""

    def pool(
        self, program: BaseProgram, plan: BatchPlan, report: Report, *, until_released: bool
    ) -> Pool:
        """Creates a pool that runs the items whose outcomes are not known yet."""


class BatchOptions(SamplingOptions, total=False):
    """Keywords of `run_batch` that don't change the type of its result."""

    max_new_tokens: int | None
    backend: BackendLike | None
    seed: int | None
    timeout: float | None
    wind_down: float | None
    retries: int
    push_down: bool
    priority: int
    max_cost: float | None
    max_total_tokens: int | None
    shortened: Literal["raise", "warn", "keep"] | None
    num_threads: str | int
    progress_bar: bool
    checkpoint: str | Path | None
    version: str | int | None
    skip_damaged: bool
    secret: str | None
    cluster: Cluster | None


class Listed(BatchOptions, total=False):
    """Keywords with which `run_batch` returns a list."""

    generator_style: Literal[False]
    ordered: Literal[True]


class Iterated(BatchOptions, total=False):
    """Keywords with which `run_batch` returns an iterator in the order of the items."""

    generator_style: Required[Literal[True]]
    ordered: Literal[True]


class Unordered(BatchOptions, total=False):
    """Keywords with which `run_batch` returns an iterator in the order in which runs finish."""

    generator_style: bool
    ordered: Required[Literal[False]]


@with_sampling_signature("run", sglang=True)
def batch_keywords(
    self: object,
    batch_kwargs: Iterable[Given],
    *,
    max_new_tokens: int | None = None,
    backend: BackendLike | None = None,
    num_threads: str | int = "auto",
    progress_bar: bool = False,
    generator_style: bool = False,
    seed: int | None = None,
    timeout: float | None = None,
    wind_down: float | None = None,
    retries: int = 0,
    push_down: bool = True,
    priority: int = 0,
    max_cost: float | None = None,
    max_total_tokens: int | None = None,
    shortened: Literal["raise", "warn", "keep"] | None = None,
    on_error: OnError = "raise",
    ordered: bool = True,
    checkpoint: str | Path | None = None,
    version: str | int | None = None,
    skip_damaged: bool = False,
    secret: str | None = None,
    cluster: Cluster | None = None,
    **sampling: Unpack[SamplingOptions],
) -> None:
    """Declares the parameters that `run_batch` and `arun_batch` share."""


BATCH_OPTIONS = inspect.signature(batch_keywords).parameters.keys() - {"self", "batch_kwargs"}


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Checked settings of a batch that is ready to start.

    Attributes:
        program: program that runs.
        items: positional and keyword arguments of each run.
        options: keyword arguments of `run_batch`.
        settings: settings of each run.
        window: maximum number of runs under way.
        file: checkpoint file that stores outcomes, or None.
        saved_outcomes: outcomes from the checkpoint file, by index of the item.
        progress: progress bar, or None.
        cluster: cluster that runs the items, or None to run them in this process.
        on_error, ordered: arguments of `run_batch`.
    """

    program: BaseProgram
    items: list[Item]
    options: Mapping[str, Any]
    settings: RunSettings
    window: int
    file: BatchFile | None
    saved_outcomes: Mapping[int, Outcome]
    progress: ProgressBar | None
    cluster: Cluster | None
    on_error: OnError
    ordered: bool

    @property
    def yields_states(self) -> bool:
        """True if the caller receives an iterator, which yields states as runs finish, rather than
        a list at the end.
        """
        return bool(self.options["generator_style"]) or not self.ordered

    @property
    def pending(self) -> list[tuple[int, Item]]:
        return [(i, item) for i, item in enumerate(self.items) if i not in self.saved_outcomes]

    def __enter__(self) -> None:
        """Enters the batch. Leaving it closes the progress bar and releases the checkpoint file,
        even after an error.
        """

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.close()
        if self.file is not None:
            self.file.close()


def prepare_batch(
    program: BaseProgram, method: str, batch_kwargs: object, given: Mapping[str, UserValue]
) -> BatchPlan:
    """Checks the items and settings of a batch and returns its plan. Raises errors for invalid ones
    before anything runs. `given` contains the keyword arguments that the caller has given to
    `method`.
    """
    for name in given:
        if name == "journal":
            raise ParameterError(
                "journal",
                f"{method} takes none: a journal belongs to one run.",
                hint="Give checkpoint=…, which keeps finished items, or run the items with run(journal=…).",
                where=user_location(),
            )
        if name not in BATCH_OPTIONS:
            raise unknown_argument_error(method, name, BATCH_OPTIONS)
    try:
        return _build_batch_plan(program, batch_kwargs, inherit_options(given))
    except ParameterError as error:
        error.where = error.where or user_location()
        raise


def _build_batch_plan(
    program: BaseProgram, batch_kwargs: object, given: Mapping[str, UserValue]
) -> BatchPlan:
    options = {**(batch_keywords.__kwdefaults__ or {}), **given}
    checkpoint = options["checkpoint"]
    version = options["version"]
    skip_damaged = options["skip_damaged"]
    cluster = options["cluster"]
    secret = options["secret"]
    if secret is not None:
        check_secret(secret)
    if cluster is not None:
        _check_cluster(cluster, options)
        batch_kwargs = cluster.rows(batch_kwargs)
    if isinstance(batch_kwargs, Mapping):
        raise ParameterError(
            "batch_kwargs",
            "one mapping is not a list of arguments.",
            hint="Give a list: run_batch([{…}, {…}]).",
        )
    if isinstance(batch_kwargs, str) or not isinstance(batch_kwargs, Iterable):
        raise ParameterError("batch_kwargs", f"{batch_kwargs!r:.60} is not a list of arguments.")
    check_booleans(
        **{
            name: options[name]
            for name in ("skip_damaged", "progress_bar", "generator_style", "ordered")
        }
    )
    if options["backend"] is not None:
        options["backend"] = as_backend(options["backend"])  # one for all items
    settings = convert_to_settings(given)
    if options["on_error"] not in ("raise", "return", "skip"):
        raise ParameterError(
            "on_error", f"{options['on_error']!r} is not 'raise', 'return' or 'skip'."
        )
    items = [_bind_item(program, i, item) for i, item in enumerate(batch_kwargs)]
    if settings.seed is not None and settings.params.temperature != 0:
        _warn_of_equal_items(items, settings.seed)
    window = min(_parse_num_threads(options["num_threads"]), max(len(items), 1))
    file = None
    if checkpoint is not None:
        if not isinstance(checkpoint, str | Path):
            raise ParameterError("checkpoint", f"{checkpoint!r:.60} is not a path.")
        identity = resolve_run_identity(options) if cluster is None else cluster.identity()
        parts = compute_batch_digests(program.func, settings, identity, version)
        file = BatchFile(
            Path(checkpoint), program.name, parts, items, skip_damaged=skip_damaged, secret=secret
        )
    else:
        _reject_checkpoint_options(
            version=version, skip_damaged=skip_damaged or None, secret=secret
        )
    saved_outcomes = dict(file.states) if file is not None else {}
    progress = ProgressBar(len(items), len(saved_outcomes)) if options["progress_bar"] else None
    return BatchPlan(
        program,
        items,
        options,
        settings,
        window,
        file,
        saved_outcomes,
        progress,
        cluster,
        on_error=options["on_error"],
        ordered=options["ordered"],
    )


@contextlib.contextmanager
def allow_equal_items() -> Iterator[None]:
    """Suppresses the warning about equal items in the `with` block, for batches where they are
    intended, such as the rows of an evaluation.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="items [0-9]+ and [0-9]+ are equal")
        yield


def _warn_of_equal_items(items: Sequence[Item], seed: int) -> None:
    """Warns if two items are equal, because with the same seed they get the same answer."""
    seen = dict[object, int]()
    for index, (positional, named) in enumerate(items):
        key = tuple(
            (name, type(value), value)
            for name, value in [*enumerate(positional), *sorted(named.items())]
        )
        try:
            first = seen.setdefault(key, index)
        except TypeError:  # a value without a hash: the item is only compared with the one before
            first = index - 1 if index and _are_equal(items[index - 1], items[index]) else index
        if first != index:
            warn_here(
                f"items {first} and {index} are equal, and with seed={seed} so are their answers, as each item is "
                f"played like run(seed={seed}). For different answers leave seed out, or add branches: s.fork(n)."
            )
            return


def _are_equal(one: Item, other: Item) -> bool:
    try:
        return bool(one == other)
    except Exception:  # raised by a value's own code
        return False


def _reject_checkpoint_options(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ParameterError(
                name,
                "it has no effect without a checkpoint file.",
                hint="Give checkpoint=…, or leave it out.",
            )


def _check_cluster(cluster: object, options: Mapping[str, UserValue]) -> None:
    if not hasattr(cluster, "pool"):
        raise ParameterError(
            "cluster",
            f"{cluster!r:.60} is not a cluster.",
            hint="Give sglang_lite.ray.RayOptions(…).",
        )
    if options["backend"] is not None:
        raise ParameterError(
            "backend",
            "it is given with cluster=, whose engines run the items.",
            hint="Leave backend out, or cluster.",
        )
    for name in ("max_cost", "max_total_tokens"):
        if options[name] is not None:
            raise ParameterError(
                name, "has no effect over several machines, so it is refused with cluster=."
            )


def _bind_item(program: BaseProgram, index: int, item: Given) -> Item:
    """Returns the positional and keyword arguments of an item, checked against the program's
    signature.
    """
    what = f"batch_kwargs[{index}]"
    if isinstance(item, Mapping):
        return (), program.bind_call((), dict(item), what)
    if not isinstance(item, list | tuple):
        raise ParameterError(
            what,
            f"{item!r:.80} is neither a mapping nor a list.",
            hint="Give arguments by name: {'name': value}.",
        )
    return tuple(item), program.bind_call(item, {}, what)


def _create_pool(plan: BatchPlan, report: Report) -> Pool:
    """Creates the pool that runs the batch's items whose outcomes are not known yet. `report` is
    called with the index and outcome of each of them.
    """
    if plan.cluster is not None:
        saved = _wrap_with_saving(report, plan.file)
        return plan.cluster.pool(plan.program, plan, saved, until_released=plan.yields_states)
    if plan.program.is_async:
        return _create_body_pool(AsyncBodyPool, plan, report)
    return _create_body_pool(BodyPool, plan, report)


def _create_body_pool(kind: type[_BodyPool], plan: BatchPlan, report: Report) -> _BodyPool:
    options = {"backend": plan.options["backend"]}

    def prepare(item: Item) -> BodyRun:
        call: BodyRun = plan.program.prepare_run(*item, options, plan.settings, is_item=True)
        return call

    saved = _wrap_with_saving(report, plan.file)
    return kind(prepare, plan.pending, plan.window, saved, until_released=plan.yields_states)


def _wrap_with_saving(report: Report, file: BatchFile | None) -> Report:
    """Wraps the `report` callback so that successful outcomes are also stored in the checkpoint
    file. If storing one fails, the failure becomes that item's outcome. A suspended item has no
    result yet, so it is not stored.
    """
    if file is None:
        return report

    def save(index: int, outcome: Outcome) -> None:
        if isinstance(outcome, ProgramState) and not outcome.pending():
            try:
                file.save_item(index, outcome)
            except Exception as error:  # saving failed: reported as the item's error
                outcome = error
        report(index, outcome)

    return save


def gather_outcomes(plan: BatchPlan) -> dict[int, Outcome]:
    """Runs a batch and returns the outcome of each item by its index, including outcomes from the
    checkpoint file. The calling thread wakes up only once, at the end.
    """
    outcomes = dict(plan.saved_outcomes)
    ended = threading.Event()

    def report(index: int, outcome: Outcome) -> None:
        outcomes[index] = outcome
        if len(outcomes) == len(plan.items):
            ended.set()

    workers = _create_pool(plan, report)
    try:
        if plan.pending:
            workers.start()
            ended.wait()
    finally:
        workers.stop()
    return outcomes


def iterate_outcomes(plan: BatchPlan) -> Generator[tuple[int, Outcome], None, None]:
    """Runs a batch, and yields the index and outcome of each item, including outcomes from the
    checkpoint file. If the caller receives an iterator, a run counts as under way until its outcome
    has been consumed. This limits the runs that are running or unread to `window`.
    """
    finished: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
    workers = _create_pool(plan, lambda index, outcome: finished.put((index, outcome)))
    order = _Order(plan)
    try:
        if order.awaited:
            workers.start()
        while order.remaining:
            for index, outcome in order.pop_ready_outcomes():
                yield index, outcome
                if plan.yields_states and index not in plan.saved_outcomes:
                    workers.release_run_slot()
            if order.awaited:
                order.add_outcome(*finished.get())
    finally:
        workers.stop()


async def aiterate_outcomes(plan: BatchPlan) -> AsyncGenerator[tuple[int, Outcome], None]:
    """Asynchronous form of `iterate_outcomes`. The bodies run on this event loop."""
    finished: asyncio.Queue[tuple[int, Outcome] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def report_from_thread(*reported: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finished.put_nowait, reported)

    workers: Pool
    if plan.cluster is None:
        workers = bodies = _create_body_pool(
            AsyncBodyPool, plan, lambda *reported: finished.put_nowait(reported)
        )
        running = asyncio.ensure_future(bodies.run())
    else:
        workers = _create_pool(plan, report_from_thread)
        running = asyncio.ensure_future(asyncio.to_thread(workers.start))
    running.add_done_callback(lambda _: finished.put_nowait(None))
    order = _Order(plan)
    try:
        while order.remaining:
            for index, outcome in order.pop_ready_outcomes():
                yield index, outcome
                if plan.yields_states and index not in plan.saved_outcomes:
                    workers.release_run_slot()
            if order.awaited:
                reported = await finished.get()
                if reported is None:
                    running.result()  # raises the error that ended the pool early
                else:
                    order.add_outcome(*reported)
    finally:
        workers.stop()
        running.cancel()


class _Order:
    """Buffer for outcomes that arrive in any order. Yields them in the order of the items if the
    batch needs that, otherwise as they arrive.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self._ready = dict(plan.saved_outcomes)
        self._progress = plan.progress
        # a list is ordered at the end by `collect_results`
        self._ordered = plan.ordered and plan.yields_states
        self._next = 0
        self.remaining = len(plan.items)
        self.awaited = self.remaining - len(plan.saved_outcomes)

    def add_outcome(self, index: int, outcome: Outcome) -> None:
        self._ready[index] = outcome
        self.awaited -= 1
        if self._progress is not None:
            self._progress.show_outcome(index, outcome)

    def pop_ready_outcomes(self) -> Iterator[tuple[int, Outcome]]:
        while self._ready and (not self._ordered or self._next in self._ready):
            index = self._next if self._ordered else next(iter(self._ready))
            self._next += 1
            self.remaining -= 1
            yield index, self._ready.pop(index)


class BatchResults(list[UserValue]):
    """Results of a batch, a list that notebooks show as a table."""

    def __repr__(self) -> str:
        failed = sum(isinstance(each, Exception) for each in self)
        return (
            super().__repr__()
            if len(self) < 2
            else f"BatchResults({len(self):,} results, {failed:,} failed)"
        )

    def _repr_html_(self) -> str:
        return states_table(self, of_runs=True)


def collect_results(plan: BatchPlan, outcomes: Mapping[int, Outcome]) -> BatchResults:
    """Returns the results of a batch in the order of its items. Failures are returned, skipped or
    raised, as the plan's `on_error` specifies.

    Raises:
        BatchError: some items failed and `on_error` is "raise"; the error carries all results.
    """
    results = BatchResults(outcomes[index] for index in range(len(plan.items)))
    failed = [i for i, result in enumerate(results) if isinstance(result, Exception)]
    if not failed or plan.on_error == "return":
        return results
    if plan.on_error == "skip":
        return BatchResults(result for result in results if not isinstance(result, Exception))
    first = results[failed[0]]
    message = f"{len(failed)} of {len(results)} programs failed, the first is item {failed[0]}: "
    if isinstance(first, SglError):  # the text of an SglError ends with its location
        where = first.where
        message = message + str(first).removesuffix(f" [{first.where}]")
    else:
        where = find_raise_location(first)
        message = f"{message}{type(first).__name__}: {first}"
    raise BatchError(message, results, where=where or user_location()) from first


class ProgressBar:
    """Progress bar with the number of finished programs, the tokens per second and the share of
    cached prompt tokens. In a notebook, it also shows the latest results until the batch ends.
    """

    def __init__(self, total: int, done: int) -> None:
        self._last: deque[tuple[int, Outcome]] = deque(maxlen=_LIVE_ROWS)
        self._bar = progress_bar(self._render_rows, total=total, initial=done, unit="program")
        self._usage = Usage()

    def show_outcome(self, index: int, outcome: Outcome) -> None:
        self._last.appendleft((index, outcome))
        if isinstance(outcome, ProgramState):
            usage = self._usage = total_usage([self._usage, outcome.branch.run.account.usage()])
            rate = usage.completion_tokens / (self._bar.format_dict["elapsed"] or 1e-9)
            share = usage.cached_tokens / max(usage.prompt_tokens, 1)
            self._bar.set_postfix_str(f"{rate:,.0f} tok/s, {share:.0%} cached", refresh=False)
        self._bar.update()

    def _render_rows(self) -> Markup:
        return build_results_table(dict(self._last), of_runs=True)

    def close(self) -> None:
        self._bar.close()


def _parse_num_threads(num_threads: str | int) -> int:
    if num_threads == "auto":
        return min(max(96, (os.cpu_count() or 1) * 16), 256)
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
        raise ParameterError(
            "num_threads", f"{num_threads!r} is not 'auto' or a whole number of at least 1."
        )
    return num_threads


def _should_yield(outcome: Outcome, on_error: OnError) -> bool:
    """Returns True if an iterator yields an outcome. Raises the outcome if it is an error and
    `on_error` is "raise".
    """
    if isinstance(outcome, Exception) and on_error == "raise":
        raise outcome
    return on_error != "skip" or not isinstance(outcome, Exception)


def yield_results(
    plan: BatchPlan, outcomes: Generator[tuple[int, Outcome], None, None]
) -> Iterator[UserValue]:
    with plan, contextlib.closing(outcomes):
        for index, outcome in outcomes:
            if _should_yield(outcome, plan.on_error):
                yield outcome if plan.ordered else (index, outcome)


async def ayield_results(
    plan: BatchPlan, outcomes: AsyncGenerator[tuple[int, Outcome], None]
) -> AsyncIterator[UserValue]:
    with plan:
        async with contextlib.aclosing(outcomes):
            async for index, outcome in outcomes:
                if _should_yield(outcome, plan.on_error):
                    yield outcome if plan.ordered else (index, outcome)
