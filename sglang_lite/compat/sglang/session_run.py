"""Sessions of `sgl.Engine`, in which a native request can continue an earlier one. They use the
server's `Session`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.calls import EndSession
from sglang_lite.server.errors import NotFoundError
from sglang_lite.server.http.body import convert
from sglang_lite.server.sessions import (
    OpenSession,
    Session,
    SessionParams,
    Sessions,
    read_session_tokens,
)
from sglang_lite.server.sglang.request import NativeRequest
from sglang_lite.server.sglang.run import NativeRun, Post

if TYPE_CHECKING:
    from sglang_lite.engine.core import Core
    from sglang_lite.engine.engine import Engine
    from sglang_lite.runtime.requests.output_builder import Event

_NO_KEY = ""  # an engine's caller has no API key


class SessionRun(NativeRun):
    """Running request of a session. When it ends, the session gets its output.

    Args:
        session: session of the request, in which it has already begun.
        engine, post, request: see `NativeRun`.

    Raises: see `NativeRun`.
    """

    def __init__(self, session: Session, engine: Core, post: Post, request: NativeRequest) -> None:
        self._session = session
        (call,) = request.calls
        assert call.rid is not None  # `read_request` names each
        self._rid = call.rid
        self._ended = False
        try:
            super().__init__(engine, post, request)
        except BaseException:
            self._finish(None)
            raise

    def add_event(self, item: tuple[int, Event] | None) -> list[Json]:
        answers: list[Any] = super().add_event(item)
        for answer in answers:
            if answer["meta_info"]["finish_reason"] is not None:
                self._finish(answer["output_ids"])
        return answers

    def abort(self) -> None:
        super().abort()
        self._finish(None)

    def _finish(self, output: list[int] | None) -> None:
        if not self._ended:
            self._ended = True
            self._session.finish_request(self._rid, output)


class CallerSessions:
    """Open sessions of an engine.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._core = engine.core
        self._lock = threading.Lock()  # callers may be on any threads
        self._sessions = Sessions(lambda rid, _: engine.abort(rid))

    def open(self, request: OpenSession) -> str:
        """Opens a session, and returns its name. Raises like `Sessions.open`."""
        with self._lock:
            return self._sessions.open(_NO_KEY, request)

    def close(self, id: str) -> None:
        """Closes a session, and aborts its requests. Raises ParameterError if it is not open."""
        with self._lock, _naming("session_id"):
            session = self._sessions.close(_NO_KEY, id)
        self._core.submit_call(EndSession(session.own_name)).result()

    def join(self, request: NativeRequest, given: object) -> tuple[Session, NativeRequest]:
        """Returns the session that a request names, and the request with its whole prompt.

        Args:
            request: request with only its new text.
            given: `session_params` of the request.

        Raises:
            ParameterError: the session is not open, or the request can't belong to a session.
        """
        params = convert(given, SessionParams, "session_params")
        (only, *_) = request.calls
        tokens = read_session_tokens(self._core.builder, only, in_list=request.is_list)
        assert only.rid is not None  # `read_request` names each
        with self._lock:
            with _naming("session_params.id"):
                session = self._sessions.find_session(_NO_KEY, params.id)
            prompt = session.begin_request(only.rid, tokens, params, self._core.tokenizer.bos_id)
        call = replace(only, prompt=prompt, session=session.own_name)
        return session, replace(request, calls=[call])


@contextlib.contextmanager
def _naming(parameter: str) -> Iterator[None]:
    """Replaces the server's error for a session that is not open with ParameterError."""
    try:
        yield
    except NotFoundError as error:
        raise ParameterError(parameter, error.message, hint="Open one: open_session.") from None
