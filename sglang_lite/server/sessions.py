"""Sessions of SGLang's native protocol. The server keeps the tokens of each request, so a client
can continue a request by sending only new text. The tokens are cached like those of any prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import OverloadedError, ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.server.errors import NotFoundError
from sglang_lite.server.tenants import scope_name_to_key

if TYPE_CHECKING:
    from sglang_lite.runtime.core.request_builder import RequestBuilder
    from sglang_lite.runtime.core.submission import GenerateRequest

MAX_SESSIONS: Final = 4096


class SessionParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Session fields of a request. The request continues the session's request `rid` or, if that is
    not given, starts from the beginning.

    Attributes:
        id: name of the session.
        offset: number of tokens of the request `rid` to keep, prompt and output; all of them if
            it is 0 or not given.
        replace: whether to abort and forget earlier continuations of the request `rid`, or without
            `rid` all requests.
        drop_previous_output: whether to leave out the output of the request `rid`.
    """

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class OpenSession(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to open a session. `capacity_of_str_len` is the maximum number of tokens of a prompt."""

    capacity_of_str_len: int
    session_id: str | None = None


class CloseSession(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to close a session."""

    session_id: str


@dataclass(slots=True)
class _Turn:
    """Request of a session; its `output` is None while it runs."""

    prompt: list[int]
    parent: str | None
    output: list[int] | None = None


class Session:
    """Requests of a session by name.

    Args:
        own_name: name by which the engine knows the session.
        capacity: maximum number of tokens of a prompt.
        abort: aborts a request of the session's client by its name.
    """

    def __init__(self, own_name: str, capacity: int, abort: Callable[[str], object]) -> None:
        self.own_name = own_name
        self._capacity = capacity
        self._abort = abort
        self._turns: dict[str, _Turn] = {}

    def begin_request(
        self, rid: str, ids: list[int], given: SessionParams, bos_id: int | None
    ) -> list[int]:
        """Begins a request, and returns its whole prompt.

        Args:
            rid: name of the request.
            ids: new tokens of the request.
            bos_id: token at the beginning of a text, which is dropped from the tokens that continue
                a request.

        Raises:
            ParameterError: the request that it continues is unknown, or still runs; the session
                already has a request of its name; or its prompt is too long.
        """
        before = self._turns.get(given.rid) if given.rid is not None else None
        if given.rid is not None and before is None:
            raise _session_params_error(f"the session has no request {given.rid[:60]!r}.")
        if before is not None and before.output is None and not given.replace:
            raise _session_params_error(
                f"the request {given.rid!r} of the session has not ended.", "Wait for its answer."
            )
        if rid in self._turns:
            raise ParameterError("rid", f"the session has a request {rid[:60]!r} already.")
        if given.offset is not None and given.offset < 0:
            raise _session_params_error(f"offset: {given.offset} is negative.")
        tokens = ids
        if before is not None:
            kept = before.prompt + ([] if given.drop_previous_output else before.output or [])
            tokens = kept[: given.offset or None] + ids[bool(ids) and ids[0] == bos_id :]
        if len(tokens) > self._capacity:
            raise _session_params_error(
                f"{len(tokens):,} tokens are more than its capacity_of_str_len, {self._capacity:,}."
            )
        if given.replace:
            self._abort_continuations(given.rid)
        self._turns[rid] = _Turn(tokens, given.rid)
        return tokens

    def finish_request(self, rid: str, output: list[int] | None) -> None:
        """Ends a request. Without an output, the request has failed and is forgotten."""
        if output is None:
            self._turns.pop(rid, None)
        elif rid in self._turns:
            self._turns[rid].output = output

    def close(self) -> None:
        """Aborts running requests, and forgets everything."""
        self._abort_continuations(None)

    def _abort_continuations(self, parent: str | None) -> None:
        """Aborts and forgets the requests that continue `parent`, or all requests if it is None."""
        for rid, turn in list(self._turns.items()):
            if rid in self._turns and (parent is None or turn.parent == parent):
                if parent is not None:
                    self._abort_continuations(rid)
                if self._turns.pop(rid).output is None:
                    self._abort(rid)


class Sessions:
    """Open sessions of a server.

    Args:
        abort: aborts a request by its name and the API key of its client.
    """

    def __init__(self, abort: Callable[[str, str], object]) -> None:
        self._abort = abort
        self._open: dict[str, Session] = {}  # by `own_name`

    def open(self, key: str, request: OpenSession) -> str:
        """Opens a session of a client, whose API key is `key`, and returns its name.

        Raises:
            ParameterError: the client has a session of this name, or the capacity is below 1.
            OverloadedError: too many sessions are open.
        """
        if request.capacity_of_str_len < 1:
            raise ParameterError(
                "capacity_of_str_len", f"{request.capacity_of_str_len} is less than 1."
            )
        id = request.session_id or random_id()
        name = scope_name_to_key(key, id)
        if name in self._open:
            raise ParameterError("session_id", f"a session {id[:60]!r} is open already.")
        if len(self._open) >= MAX_SESSIONS:
            raise OverloadedError(
                f"{MAX_SESSIONS:,} sessions are open.", hint="Close some: POST /close_session."
            )
        self._open[name] = Session(
            name, request.capacity_of_str_len, lambda rid: self._abort(rid, key)
        )
        return id

    def find_session(self, key: str, id: str) -> Session:
        """Returns a client's open session by its name. Raises NotFoundError if the client has none
        of that name.
        """
        session = self._open.get(scope_name_to_key(key, id))
        if session is None:
            raise NotFoundError(
                f"no session {id[:60]!r} is open.", hint="Open one: POST /open_session."
            )
        return session

    def close(self, key: str, id: str) -> Session:
        """Closes a session, aborts its requests, and returns it. Raises NotFoundError if it is not
        open.
        """
        session = self.find_session(key, id)
        session.close()
        return self._open.pop(session.own_name)


def read_session_tokens(
    builder: RequestBuilder, call: GenerateRequest, *, in_list: bool
) -> list[int]:
    """Checks a request of a session, and returns the tokens of its new text.

    Args:
        in_list: whether the request's answer is a list.

    Raises:
        ParameterError: the request can't belong to a session.
    """
    if in_list:
        raise _session_params_error("a session takes one prompt with one answer at a time.")
    checked = builder.validate_request(call)
    if checked.media:
        raise _session_params_error("a session takes texts, no images.", "Leave it out.")
    ids: Any = checked.prompt  # which it has tokenised
    return list(ids)


async def record_output(
    session: Session, rid: str, answers: AsyncGenerator[list[dict[str, Json]], None]
) -> AsyncGenerator[list[dict[str, Json]], None]:
    """Yields the answers of a session's request. When the request ends, records its output in the
    session.
    """
    output: list[int] | None = None
    try:
        async with contextlib.aclosing(answers):
            async for changed in answers:
                for each in changed:
                    if each["meta_info"]["finish_reason"] is not None:
                        output = each["output_ids"]
                        session.finish_request(rid, output)
                yield changed
    finally:
        if output is None:
            session.finish_request(rid, None)


def _session_params_error(problem: str, hint: str = "") -> ParameterError:
    return ParameterError("session_params", problem, hint=hint)
