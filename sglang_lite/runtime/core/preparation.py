"""Work on the loop's thread that some requests wait for before they are scheduled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from sglang_lite.protocol import SglError
from sglang_lite.runtime.requests.request import Request


class Preparation(Protocol):
    """Prepares requests between two steps. All methods are called on the loop's thread.

    Attributes:
        wake: function that makes the loop run, called on any thread; set by the loop.
    """

    wake: Callable[[], None]

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests that wait for their preparation."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `prepare_next` can make progress."""
        ...

    @property
    def blocks_steps(self) -> bool:
        """Whether no step may run, because something that running requests need was lost."""
        ...

    def requires_preparation(self, request: Request) -> bool:
        """Returns whether a request has to be prepared."""
        ...

    def queue_request(self, request: Request) -> None:
        """Queues a request that has to be prepared. Raises SglError if there is no room for it."""
        ...

    def claim_if_ready(self, request: Request) -> bool:
        """Prepares a request if that is possible without waiting. Returns False if the request has
        to wait.
        """
        ...

    def prepare_next(self, fail: Callable[[Request, SglError], None]) -> list[Request]:
        """Does a part of the work that is due. Returns the requests that may now be scheduled.

        Args:
            fail: function that ends a request that can't be prepared.
        """
        ...

    def redo_preparation(self) -> None:
        """Starts to prepare running requests again, because results were lost or the weights have
        changed.
        """
        ...
