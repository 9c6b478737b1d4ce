"""The body of a streamed run, from the point of view of the run's caller."""

from __future__ import annotations

from collections.abc import Callable

from sglang_lite.lang.concurrency.variables import copy_as_sgl_error
from sglang_lite.lang.execution.reading import check_may_block
from sglang_lite.lang.execution.run import Run
from sglang_lite.lang.suspension import Suspension
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.protocol import SglError
from sglang_lite.protocol.anything import UserValue


class StreamedBody:
    """Lets the caller of a streamed run wait for the end of the body, or cancel the run.

    Args:
        run: the run.
        ret_value: returns the value that the body returned.

    Attributes:
        ended: True if the caller has waited for the end of the body.
        cancelled: error with which the caller cancelled the run without having waited for the end
            of the body, or None.
        ret_value: the argument.
    """

    def __init__(self, run: Run, ret_value: Callable[[], UserValue]) -> None:
        self._run = run
        self.ret_value = ret_value
        self.ended = False
        self.cancelled: SglError | None = None

    def wait_for_end(self, instead: str = "await s.async_sync() first") -> None:
        """Waits until the body has ended, blocking the thread.

        Args:
            instead: expression to suggest if the caller may not block.

        Raises:
            RequestAbortedError: the caller has cancelled the run.
            ProgramError: the body is a coroutine of this thread's event loop.
        """
        if self.ended:
            return
        self._raise_if_cancelled_early()
        assert self._run.body_end is not None
        check_may_block(self._run, instead, user_location())
        self._run.body_end.wait()
        self._raise_if_cancelled_early()  # as another thread may have cancelled it meanwhile
        self._suspend_enclosing_run()
        self.ended = True

    async def await_end(self) -> None:
        """Awaits the end of the body, like `wait_for_end`."""
        if self.ended:
            return
        self._raise_if_cancelled_early()
        assert self._run.body_end is not None
        await self._run.body_end.wait_async()
        self._raise_if_cancelled_early()
        self._suspend_enclosing_run()
        self.ended = True

    def cancel(self, error: SglError) -> bool:
        """Records that the caller cancels the run. Returns False if the caller has already waited
        for the end of the body.
        """
        if self.ended:
            return False
        self.cancelled = self.cancelled or error
        return True

    def _suspend_enclosing_run(self) -> None:
        """Raises Suspension if the body was suspended and the run is inside another program."""
        run = self._run
        if run.pending and run.outer is not None and not run.is_item:
            raise Suspension(run.pending)

    def _raise_if_cancelled_early(self) -> None:
        if self.cancelled is not None:
            raise copy_as_sgl_error(self.cancelled, user_location())
