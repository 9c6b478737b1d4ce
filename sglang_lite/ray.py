"""Batches on a Ray cluster: each actor has an engine, and rows that share a long text go to the
same actor.

`program.run_batch(rows, cluster=RayOptions(engine={"model": …}))`. Depends on the language's
batches; here, engines are only described by their settings.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from sglang_lite.lang.batches.batch import BatchPlan, Item, allow_equal_items
from sglang_lite.lang.batches.body_pool import Outcome, Report
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.function import SglFunction
from sglang_lite.lang.load_state import load_finished_run
from sglang_lite.lang.runs.saving import to_saved_run
from sglang_lite.protocol import BackendError, CapabilityError, ParameterError, SglError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.wire.failure import as_error, as_failure

logger = logging.getLogger("sglang_lite")

_LANES = 2  # simultaneous groups of rows at an actor, so that it is not idle between two groups
_FEWEST = 8  # minimum size of split groups, so that computing a shared prefix pays off
_DRIVERS = {  # options of a batch that are not passed to actors
    "backend", "cluster", "checkpoint", "version", "skip_damaged", "secret", "progress_bar", "generator_style",
    "ordered", "on_error", "num_threads",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options of a batch on a Ray cluster. Its engines are started for the batch and end with it.

    Attributes:
        engine: keywords of each actor's `Engine`, or a function without arguments that creates its
            backend.
        actors: number of actors; None for one per GPU of the cluster, or one per node if the
            cluster has no GPUs.
        num_cpus: number of CPUs that Ray reserves for each actor.
        num_gpus: number of GPUs that Ray reserves for each actor; None for 1 if the cluster has
            GPUs, else 0.
        start_timeout_s: maximum time in seconds for the start of an actor: waiting for resources
            and loading the model.

    Raises:
        ParameterError: an option has an invalid value.
    """

    engine: Mapping[str, Any] | Callable[[], Any] = field(default_factory=dict)
    actors: int | None = None
    num_cpus: float = 1.0
    num_gpus: float | None = None
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not (isinstance(self.engine, Mapping) or callable(self.engine)):
            raise ParameterError(
                "engine",
                f"{self.engine!r:.60} is neither keywords of `Engine` nor a function.",
                hint='Give RayOptions(engine={"model": …}).',
            )
        actors = self.actors
        if actors is not None and (
            isinstance(actors, bool) or not isinstance(actors, int) or actors < 1
        ):
            raise ParameterError(
                "actors",
                f"{actors!r:.60} is not a whole number of at least 1.",
                hint="Leave it out for one per GPU.",
            )
        for name in ("num_cpus", "num_gpus", "start_timeout_s"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            unset = value is None and name != "num_cpus"
            if not unset and not (is_number and value >= 0):  # NaN is not, either
                raise ParameterError(
                    name, f"{value!r:.60} is not a number of at least 0.", hint="Give 0 or more."
                )

    def identity(self) -> object:
        """Returns data that identifies the engine: its settings, or the name of the function that
        creates it. A checkpoint can only be used by batches with equal data.
        """
        if isinstance(self.engine, Mapping):
            return "sglang_lite.ray", sorted(
                (name, str(value)) for name, value in self.engine.items()
            )
        return "sglang_lite.ray", self.engine.__module__, self.engine.__qualname__

    def rows(self, given: UserValue) -> UserValue:
        """Returns the items of a batch: the rows of a Ray Dataset, or other items unchanged."""
        return list(given.iter_rows()) if hasattr(given, "iter_rows") else given

    def pool(
        self, program: BaseProgram, plan: BatchPlan, report: Report, *, until_released: bool
    ) -> ActorPool:
        """Creates a pool of actors that run the items of a batch. Items with a known outcome are
        skipped.

        Raises:
            CapabilityError: Ray is not installed.
        """
        return ActorPool(self, program, plan, report, until_released=until_released)


def group_rows(rows: Sequence[tuple[int, Item]], max_rows: int) -> list[list[int]]:
    """Groups rows that share a long text, such as several questions about one document. A row's
    group is determined by its longest text that some other rows share, but not all. Rows without
    such a text form one group. Groups are in the order of their first rows.

    Args:
        rows: index and arguments of each row.
        max_rows: maximum number of rows of a group; larger groups are split.

    Returns:
        Indices of the rows of each group.
    """
    texts = {
        index: {v for v in (*args, *kwargs.values()) if isinstance(v, str) and v}
        for index, (args, kwargs) in rows
    }
    counts = Counter(text for found in texts.values() for text in found)
    found: dict[object, list[int]] = {}
    for index, own in texts.items():
        shared = [text for text in own if 1 < counts[text] < len(rows)]
        found.setdefault(max(shared, key=lambda text: (len(text), text), default=None), []).append(
            index
        )
    return [
        group[i : i + max_rows] for group in found.values() for i in range(0, len(group), max_rows)
    ]


class ActorPool:
    """Runs the items of a batch on Ray actors, like the pool in lang/batches/body_pool.py does on
    threads. A thread supervises each actor.

    Args:
        report: called with each row's index and outcome.
        until_released: whether a row counts towards the limit of unfinished rows until
            `release_run_slot` is called; rows then run in their order.
    """

    def __init__(
        self,
        options: RayOptions,
        program: BaseProgram,
        plan: BatchPlan,
        report: Report,
        *,
        until_released: bool,
    ) -> None:
        self._options = options
        self._program = program
        self._plan = plan
        self._report = report
        self._until_released = until_released
        self._ray = _import_ray()
        self._items = dict(plan.pending)
        self._unfinished = set(self._items)
        self._tried: Counter[int] = Counter()  # number of actors that died with a row
        self._waiting: deque[list[int]] = deque()
        self._room = 0
        self._seats = 0  # supervising threads whose actor is running or may still start
        self._actors: set[Any] = set()
        self._bell = threading.Condition()
        self._over = False

    def start(self) -> None:
        ray = self._ray
        options = self._options
        if not ray.is_initialized():
            ray.init()
        total = ray.cluster_resources()
        num_gpus = (
            options.num_gpus if options.num_gpus is not None else float(total.get("GPU", 0) >= 1)
        )
        count = options.actors or int(
            total.get("GPU", 0) / num_gpus
            if num_gpus
            else _count_usable_nodes(ray, options.num_cpus)
        )
        count = max(min(count, len(self._items)), 1)
        order = list(self._plan.pending)
        max_rows = max(-(-len(order) // (2 * _LANES * count)), _FEWEST)
        self._waiting.extend(
            [[i for i, _ in order]] if self._until_released else group_rows(order, max_rows)
        )
        self._seats = count
        self._room = self._plan.window * count
        settings = {
            name: value for name, value in self._plan.options.items() if name not in _DRIVERS
        }
        window = max(self._plan.window // _LANES, 1)
        ray.util.register_serializer(
            SglFunction, serializer=serialize_program, deserializer=deserialize_program
        )
        task = ray.put((self._program, {**settings, "num_threads": window}))
        kind = ray.remote(num_cpus=options.num_cpus, num_gpus=num_gpus, max_concurrency=_LANES)(
            _Actor
        )
        for _ in range(count):
            threading.Thread(
                target=self._supervise_actor,
                args=(kind, task, max_rows),
                name="sglang_lite-actor",
                daemon=True,
            ).start()

    def stop(self) -> None:
        """Ends the pool: starts no more rows, and kills the actors."""
        with self._bell:
            self._over = True
            actors = self._actors
            self._actors = set()
            self._bell.notify_all()
        for actor in actors:
            self._ray.kill(actor)

    def release_run_slot(self) -> None:
        """Lets one more row start. Called when a row no longer counts towards the limit of
        unfinished rows.
        """
        with self._bell:
            self._room += 1
            self._bell.notify_all()

    # --------------------------------------------------------------------------- an actor's threads

    def _supervise_actor(self, kind: Any, task: Any, max_rows: int) -> None:
        """Starts an actor and sends it rows until none are left. If the actor dies, does the same
        with a second one.
        """
        error: Exception = BackendError("it was stopped.")
        for _ in range(2):
            with self._bell:
                if self._over or not self._unfinished:
                    break
                actor = kind.remote(self._options.engine, task)
                self._actors.add(actor)
            try:
                self._ray.get(actor.ready.remote(), timeout=self._options.start_timeout_s)
            except Exception as failed:  # errors of Ray, and of the engine
                error = failed
                self._kill_actor(actor)
                if not isinstance(failed, self._ray.exceptions.RayActorError):
                    break
                continue
            lanes = [
                threading.Thread(target=self._feed_actor, args=(actor, max_rows), daemon=True)
                for _ in range(_LANES)
            ]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
            self._kill_actor(actor)
            error = BackendError("the actor has died.")
        with self._bell:
            self._seats -= 1
            lost = [] if self._seats or self._over else [*self._unfinished]
        for index in lost:
            self._finish_row(index, _no_actor_error(error))

    def _feed_actor(self, actor: Any, max_rows: int) -> None:
        """Sends groups of rows to an actor until none are left or the actor has died."""
        exceptions = self._ray.exceptions
        while rows := self._take_rows(actor, max_rows):
            items = [(index, self._items[index]) for index in rows]
            try:
                for found in actor.run.options(num_returns="streaming").remote(items):
                    index, kind, data = self._ray.get(found)
                    self._finish_row(index, _restore_outcome(kind, data))
            except exceptions.RayTaskError as error:  # concerns all rows of the group
                for index in rows:
                    self._finish_row(index, _no_actor_error(error))
            except exceptions.RayError as error:
                self._requeue_rows(actor, rows, error)
                return

    def _take_rows(self, actor: Any, max_rows: int) -> list[int]:
        """Waits until the limit lets more rows start, and returns the indices of the next rows.
        Returns an empty list if no rows are left or the actor has died.
        """
        with self._bell:
            while self._unfinished and actor in self._actors and not (self._waiting and self._room):
                self._bell.wait()
            if not self._unfinished or actor not in self._actors:
                return []
            group = self._waiting.popleft()
            count = min(len(group), self._room, max_rows)
            if group[count:]:
                self._waiting.appendleft(group[count:])
            self._room -= count
            return group[:count]

    def _finish_row(self, index: int, outcome: Outcome) -> None:
        with self._bell:
            if index not in self._unfinished or self._over:
                return
            self._unfinished.discard(index)
            if not self._until_released:
                self._room += 1
            self._bell.notify_all()
        self._report(index, outcome)

    def _requeue_rows(self, actor: Any, rows: list[int], error: Exception) -> None:
        """Requeues the unfinished rows of a dead actor. A row fails if this is the second actor
        that has died with it.
        """
        with self._bell:
            self._actors.discard(actor)
            rows = [index for index in rows if index in self._unfinished]
            self._tried.update(rows)
            again = [index for index in rows if self._tried[index] < 2]
            if again:
                self._waiting.appendleft(again)
                self._room += len(again)
            if not self._over:
                logger.warning(
                    "an actor has died; %d rows run again: %s",
                    len(again),
                    str(error).partition("\n")[0],
                )
            self._bell.notify_all()
        for index in set(rows) - set(again):
            self._finish_row(index, _no_actor_error(error))

    def _kill_actor(self, actor: Any) -> None:
        with self._bell:
            self._actors.discard(actor)
        self._ray.kill(actor)


class _Actor:
    """Ray actor with an engine and the program that runs on it."""

    def __init__(
        self,
        engine: Mapping[str, Any] | Callable[[], Any],
        task: tuple[SglFunction, dict[str, Any]],
    ) -> None:
        from sglang_lite import Engine

        self._program, self._settings = task
        self._backend = Engine(**engine) if isinstance(engine, Mapping) else engine()

    def ready(self) -> bool:
        return True

    def run(self, rows: list[tuple[int, Item]]) -> Iterator[tuple[int, str, Any]]:
        """Executes rows, and yields the index and outcome of each as it finishes."""
        items = [list(args) if args else kwargs for _, (args, kwargs) in rows]
        with allow_equal_items():  # otherwise the driver has already warned
            outcomes = self._program.run_batch(
                items,
                backend=self._backend,
                generator_style=True,
                ordered=False,
                on_error="return",
                **self._settings,
            )
        for i, outcome in outcomes:
            yield rows[i][0], *_serialize_outcome(outcome)


_Sent = bytes | tuple[Callable[..., UserValue], int | None, dict[str, UserValue], bool]


def serialize_program(program: SglFunction) -> _Sent:
    """Converts a program to data for an actor. Most programs are sent by name. A program of the
    running script is sent as code, because actors can't import the script.
    """
    if program.func.__module__ != "__main__":
        return pickle.dumps(program)
    return (
        program.func,
        program.num_api_spec_tokens,
        program.bind_arguments,
        program.untrusted_arguments,
    )


def deserialize_program(data: _Sent) -> SglFunction:
    """Restores a program from the data of `serialize_program`."""
    if isinstance(data, bytes):
        found: SglFunction = pickle.loads(data)
        return found
    return SglFunction(*data)


def _serialize_outcome(outcome: Outcome) -> tuple[str, Any]:
    """Converts an outcome to data that can be sent to another process. Returns the outcome's kind
    ("state", "failure" or "error") and the data.
    """
    if not isinstance(outcome, Exception):
        try:
            return "state", to_saved_run(outcome.branch, outcome.ret_value, again=False)
        except SglError as error:
            outcome = error
    if isinstance(outcome, SglError):
        return "failure", as_failure(outcome)
    try:
        pickle.loads(pickle.dumps(outcome))
    except Exception:  # pickling may raise any exception of the error's own code
        return "failure", as_failure(BackendError(f"{type(outcome).__name__}: {outcome}"))
    return "error", outcome


def _restore_outcome(kind: str, data: Any) -> Outcome:
    if kind == "state":
        return load_finished_run(data)
    found: Exception = as_error(data) if kind == "failure" else data
    return found


def _no_actor_error(error: Exception) -> BackendError:
    cause = getattr(error, "cause", None) or error
    return BackendError(f"the cluster could not run it: {cause}", hint="Ray's logs say more.")


def _count_usable_nodes(ray: Any, num_cpus: float) -> int:
    return sum(
        node["Alive"] and node["Resources"].get("CPU", 0) >= max(num_cpus, 1)
        for node in ray.nodes()
    )


def _import_ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise CapabilityError(
            "a cluster needs Ray.", hint="pip install 'sglang-lite[ray]'"
        ) from error
    return ray
