"""Common base of the cores and loops of engines that read texts or media and generate no text."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import Future, InvalidStateError
from typing import Any, ClassVar, NoReturn

from sglang_lite.protocol import CapabilityError, EngineClosedError, SglError
from sglang_lite.runtime.calls import CompileGrammar, EngineCall, FreezeObjects, R
from sglang_lite.runtime.capacity import Capacity, Sizes
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.gate import CLOSED
from sglang_lite.runtime.core.inbox import Inbox
from sglang_lite.runtime.core.open_requests import OpenRequests
from sglang_lite.runtime.embedding.request import not_a_generator_error
from sglang_lite.runtime.host.garbage import freeze_objects

logger = logging.getLogger("sglang_lite")


class ReadingLoop(ABC):
    """Loop that alternates between commands of other threads and a step.

    Attributes:
        inbox: the commands.
        stepping_since: start of the running step on the monotonic clock, or None.
        steps: number of steps so far.
    """

    _waiting: Sized  # work for the next steps

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.stepping_since: float | None = None
        self.steps = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def run(self) -> None:
        """Runs the loop until its inbox is closed. Must be called once, on the thread that loaded
        the model.
        """
        inbox = self.inbox
        inbox.gate.claim_thread()
        try:
            while not inbox.closing:
                if not self._waiting:
                    inbox.wait()
                inbox.run()
                self.stepping_since = time.monotonic()
                self._step()
                self.stepping_since = None
        except BaseException as error:
            inbox.crash = error
            logger.exception("the engine's loop has crashed")
            raise
        finally:
            self.stepping_since = None
            inbox.reject_commands()
            inbox.run()
            self._fail_all(EngineClosedError("the engine was closed before the request finished."))

    @abstractmethod
    def _step(self) -> None:
        """Computes waiting work, if any. An exception ends the loop."""

    @abstractmethod
    def _fail_all(self, error: SglError) -> None:
        """Fails all waiting work with an error."""


class ReadingCore:
    """Core of an engine that generates no text. Must be made on the thread that runs its loop.

    Args:
        config: configuration of the engine.
        model_name: name of its model.
        longest, step_tokens: maximum numbers of tokens in a text and in a step.
        inbox: inbox of its loop.

    Attributes: see `Core` in engine/core.py.
    """

    eos_ids: frozenset[int] = frozenset()
    responds = True  # unlike a stopped process
    pids: Sequence[int] = ()  # it has no process of its own
    generates = False
    _reads_media: ClassVar[bool]
    # functions that answer calls, by type of the call
    _answers: ClassVar[Mapping[type[EngineCall[Any]], Callable[..., Future[Any]]]]

    def __init__(
        self, config: EngineConfig, model_name: str, longest: int, step_tokens: int, inbox: Inbox
    ) -> None:
        self.thread = threading.current_thread()
        self.config = config
        self.model_name = model_name
        self.capacity = Capacity(Sizes(config.max_queued, step_tokens, 1), longest, 0, longest)
        self.open_requests = OpenRequests(config.max_queued)
        self.gate = inbox.gate
        self.call_soon = inbox.post_lock_free
        self._inbox = inbox

    def submit(self, *_: object) -> NoReturn:
        """Raises CapabilityError, like `open_program`, because the model generates no text."""
        raise not_a_generator_error(self.model_name, encoder_only=self._reads_media)

    open_program = submit

    def submit_call(self, call: EngineCall[R]) -> Future[R]:
        """Returns a future of the answer to a call.

        Raises:
            OverloadedError: too many requests are waiting.
            EngineClosedError: the engine is closed.
            CapabilityError: the call is for a model that generates text.
        """
        self.gate.check_open()
        if type(call) is CompileGrammar:
            self.submit()
        if isinstance(call, FreezeObjects):
            frozen: Future[Any] = self._inbox.post_for_result(freeze_objects)
            return frozen
        if type(call) not in self._answers:
            kind = "with encoder_only" if self._reads_media else "of an embedding model"
            raise CapabilityError(f"an engine {kind} can't do that.", hint="Start another engine.")
        return self._answers[type(call)](self, call)

    def close(self) -> None:
        """Ends the loop. Ends nothing in a forked copy of the process, because the loop runs in the
        original.
        """
        self.gate.reason = CLOSED
        if self.gate.is_forked_copy:
            return
        self._inbox.close()
        if threading.current_thread() is not self.thread:
            self.thread.join()


def fail_future(answer: Future[Any], error: BaseException) -> None:  # to any call
    """Fails a future unless it is already done or cancelled; a request of several parts may fail
    more than once.
    """
    with contextlib.suppress(InvalidStateError):
        answer.set_exception(error)
