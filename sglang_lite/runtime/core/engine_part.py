"""Interface between an engine's core and the features that only some engines have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang_lite.runtime.calls import EngineCall
from sglang_lite.runtime.core.preparation import Preparation
from sglang_lite.runtime.executor.step_record import RecordColumn, TokenReplacer
from sglang_lite.runtime.requests.resource import Resource

if TYPE_CHECKING:
    from sglang_lite.runtime.capacity import Capacity
    from sglang_lite.runtime.core.inbox import Inbox
    from sglang_lite.runtime.core.request_builder import RequestBuilder
    from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
    from sglang_lite.runtime.scheduler.queues import Queues

# Calls and their answers have many types; `EngineCall` pairs them for its callers.
CallTable: TypeAlias = Mapping[type[EngineCall[Any]], Callable[[Any], Future[Any]]]
Run: TypeAlias = Callable[..., Future[Any]]
Counts: TypeAlias = dict[str, Any]  # numbers, and mappings of numbers


class EnginePart:
    """Feature of an engine, such as adapters or images.

    A core knows its parts only through this class, and rejects calls and parameters that no part
    handles. It calls `join_scheduler`, `join_builder` and `answers` once, in this order, and the
    others whenever they are needed. A part overrides the methods that concern it. Only one part of
    an engine may have a `replacer`, a `preparation` or `device_memory`.

    Attributes:
        resource: resource that the part's requests hold while they run; set by `join_scheduler`.
        column: the part's column of step records; set by `join_scheduler`.
        replacer: replaces the part's tokens in step records; set by `join_scheduler`.
        preparation: work that the part's requests wait for before they are scheduled; set by
            `join_scheduler`.
        device_memory: memory that the part gives to the runner.
    """

    resource: Resource | None = None
    column: RecordColumn | None = None
    replacer: TokenReplacer | None = None
    preparation: Preparation | None = None
    device_memory: Any = None  # a type of the runner's, which knows its parts by name

    def join_scheduler(self, store: PrefixCache, queues: Queues, capacity: Capacity) -> None:
        """Creates the part's objects for the scheduler and the step loop. Called before graphs are
        captured.

        Args:
            store: pages, slots and radix tree.
            queues: requests that wait for a slot or run.
            capacity: sizes and limits of the engine.
        """

    def join_builder(self, builder: RequestBuilder) -> None:
        """Tells the builder of requests which parameters the part takes."""

    def answers(self, inbox: Inbox, run: Run) -> CallTable:
        """Returns the functions that answer the part's calls, by type of the call.

        Args:
            inbox: inbox of the loop.
            run: runs a function with its arguments on a thread that may wait.
        """
        return {}

    def stats(self) -> Counts:
        """Returns counts for `Engine.stats`."""
        return {}

    def memory_stats(self) -> dict[str, int]:
        """Returns how many bytes of the device's memory the part uses while the weights are loaded."""
        return {}

    def drop_with_weights(self) -> None:
        """Frees tensors on a CPU that belong to the weights. Called when the weights are released
        and the host keeps no copy of them.
        """

    def restore_with_weights(self, *, dropped: bool) -> None:
        """Restores tensors that belong to the weights. Called when the weights have memory again.

        Args:
            dropped: whether `drop_with_weights` was called; otherwise a device lost its contents.
        """

    def close(self) -> None:
        """Ends the part's threads, on any thread."""
