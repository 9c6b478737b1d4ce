"""Sends messages from the engine's process to its handle. A thread does this, so the step loop
never waits for a reader.

Unsent deltas of one stream are merged, so a handle that reads nothing costs no more memory than the
text of the open requests.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import msgspec

from sglang_lite.engine.connection import Connection
from sglang_lite.engine.frames import (
    AskReply,
    Log,
    Prefixes,
    Progress,
    Report,
    RequestEvent,
    encode_frame,
    serializable_failure,
)
from sglang_lite.program.nodes import Path
from sglang_lite.protocol import Delta, Generation, ParameterError
from sglang_lite.runtime.kv_cache.tree_changes import TreeChanges

MAX_LOGS = 1000  # maximum number of waiting log records while the handle reads nothing
_Stream = tuple[int, Path | None, int, int]  # submission, path of the node, attempt, sample


class _Joined:
    """Deltas of one stream that will be merged into a single event."""

    def __init__(self, first: RequestEvent) -> None:
        self.first = first
        self.deltas = [first.event]

    def merged_event(self) -> RequestEvent:
        first = self.first
        deltas = [delta for delta in self.deltas if isinstance(delta, Delta)]
        if len(deltas) == 1:
            return first
        joined = Delta(
            "".join([delta.text for delta in deltas]),
            tuple([i for delta in deltas for i in delta.token_ids]),
            tuple([each for delta in deltas for each in delta.logprobs]),
            deltas[0].index,
        )
        return RequestEvent(
            first.id, joined, first.cached, first.path, first.name, attempt=first.attempt
        )


class Outgoing:
    """Queue of messages to the handle, and the thread that sends them.

    Args:
        connection: connection to the handle, on which only this object sends.
        interval_s: minimum time in seconds between two frames that contain only deltas of streams
            that have begun.

    Attributes:
        tree: changes of the engine's radix tree, which are sent with the next frame, if the handle
            wants them.
    """

    tree: TreeChanges | None = None

    def __init__(self, connection: Connection, interval_s: float) -> None:
        self._connection = connection
        self._interval = interval_s
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._unsent: list[Report | _Joined] = []
        self._streams: dict[_Stream, _Joined] = {}  # unsent deltas, to which new ones are joined
        self._begun: dict[int, set[_Stream]] = {}  # streams with a delta so far, by submission
        self._logs = 0  # number of unsent log records
        self._urgent = False  # True if an unsent message is anything but a delta
        self._flushed = self._closing = False
        self._sending = threading.Lock()  # held while the thread sends
        self._thread = threading.Thread(
            target=self._send_until_closed, name="sglang_lite-send", daemon=True
        )
        self._thread.start()

    def put_event(self, told: RequestEvent) -> None:
        """Queues an event. Events are sent after the next `flush`."""
        with self._lock:
            event = told.event
            if isinstance(event, Delta):
                stream = (told.id, told.path, told.attempt, event.index)
                begun = self._begun.setdefault(told.id, set())
                if stream not in begun:
                    begun.add(stream)
                    self._urgent = True
                joined = self._streams.get(stream)
                if joined is None:
                    joined = self._streams[stream] = _Joined(told)
                    self._unsent.append(joined)
                else:
                    joined.deltas.append(event)
                return
            stream = (told.id, told.path, told.attempt, getattr(event, "index", 0))
            self._streams.pop(stream, None)
            begun = self._begun.get(told.id, set())
            begun.discard(stream)
            # an error ends all its streams
            if not begun or (told.path is None and not isinstance(event, Generation)):
                self._begun.pop(told.id, None)
            self._unsent.append(told)
            self._urgent = True

    def flush(self) -> None:
        """Makes the thread send the queued messages soon, in one frame if they fit."""
        with self._lock:
            if not self._flushed:
                self._flushed = True
                self._ready.notify()

    def post(self, message: Report) -> None:
        """Queues a message after the earlier ones and flushes. Drops log records if `MAX_LOGS` are
        already unsent.
        """
        with self._lock:
            if isinstance(message, Log):
                self._logs += 1
                if self._logs > MAX_LOGS:
                    return
            self._unsent.append(message)
            self._urgent = self._urgent or not isinstance(message, Progress)
        self.flush()

    def send_heartbeat(self) -> None:
        """Sends a sign of life, unless a message is being sent. If changes of the radix tree are
        waiting, sends them instead.
        """
        if self.tree is not None and self.tree.has_changes:
            self.flush()
        elif self._sending.acquire(blocking=False):
            try:
                # the handle is gone, and `serve` notices that, too
                with contextlib.suppress(OSError):
                    self._connection.send_heartbeat()
            finally:
                self._sending.release()

    def close(self) -> None:
        """Sends the queued messages, waits until they are sent, and ends the thread."""
        with self._lock:
            self._closing = self._urgent = self._flushed = True
            self._ready.notify()
        self._thread.join()

    def _send_until_closed(self) -> None:
        last = 0.0
        with contextlib.suppress(OSError):  # the handle is gone, and `serve` notices that, too
            while True:
                with self._lock:
                    while not self._flushed:
                        self._ready.wait()
                    while (
                        not self._urgent and (left := last + self._interval - time.monotonic()) > 0
                    ):
                        self._flushed = False
                        self._ready.wait(left)
                    unsent = self._unsent
                    self._unsent = []
                    self._logs = 0
                    self._streams.clear()
                    self._urgent = self._flushed = False
                    closing = self._closing
                last = time.monotonic()
                messages = [
                    each.merged_event() if isinstance(each, _Joined) else each for each in unsent
                ]
                change = None if self.tree is None else self.tree.take_changes()
                # first, so that the handle knows a request's prefix when the request ends
                if change is not None:
                    known = Prefixes(
                        change.gained.tobytes(), change.lost.tobytes(), change.forgotten
                    )
                    messages.insert(0, known)
                if messages:
                    self._send_frames(messages)
                if closing:
                    return

    def _send_frames(self, messages: Sequence[Report]) -> None:
        try:
            data = encode_frame(messages)
        except ParameterError as error:
            if len(messages) > 1:  # each half may fit into a frame
                half = len(messages) // 2
                self._send_frames(messages[:half])
                self._send_frames(messages[half:])
                return
            (message,) = messages
            if isinstance(message, RequestEvent):
                message = msgspec.structs.replace(
                    message, event=serializable_failure(error), ends=False
                )
            elif isinstance(message, AskReply):
                message = AskReply(message.id, failure=serializable_failure(error))
            else:
                return
            data = encode_frame([message])
        with self._sending:
            self._connection.send_now(data)
