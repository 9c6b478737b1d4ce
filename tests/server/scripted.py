"""An engine that says what it is told, in pieces, for what a small model never says."""

import asyncio

from sglang_lite.protocol import (
    Delta,
    EngineClosedError,
    Generation,
    RequestAbortedError,
    SglError,
    Usage,
)
from sglang_lite.text.chat_template import JinjaTemplate

_HOPS = 8  # of the event loop between two pieces, in which who reads takes one


class Scripted:
    """
    Args:
        engine: for everything else.
        said: the pieces of every answer; an error ends it.
        template: of chats, instead of the engine's.
        finish, matched: of the answers.
        endless: answers have no end, until they are aborted.
    """

    def __init__(self, engine, said, *, template=None, finish="stop", matched=None, endless=False):
        self._engine, self._said, self._endless = engine, list(said), endless
        self._template = engine.chat_template() if template is None else JinjaTemplate(template)
        self._finish, self._matched = finish, matched
        self.asked: list = []  # the prompt, parameters and constraint of each request
        self.submitted: list[Answer] = []
        self.core = _Core(engine.core, self._submit)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def chat_template(self):
        return self._template

    def _submit(self, request, sink, flush):
        self.asked.append((request.prompt, request.params, request.constraint))
        text = "".join(piece for piece in self._said if isinstance(piece, str))
        usage = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=len(self._said))
        whole = Generation(text, finish_reason=self._finish, matched=self._matched, usage=usage)
        events = [Delta(piece) if isinstance(piece, str) else piece for piece in self._said]
        if not self._endless and not isinstance(events[-1], SglError):
            events.append(whole)
        if not request.stream:
            events = [event for event in events if not isinstance(event, Delta)]
        answer = Answer(sink, flush, events, request.rid)
        self.submitted.append(answer)
        answer.begin()
        return answer

    def abort(self, rid):
        next(answer for answer in self.submitted if answer.rid == rid).end(
            RequestAbortedError("it was aborted.")
        )

    def close(self):
        for answer in self.submitted:
            answer.end(EngineClosedError("it was closed."))


class _Core:
    """A core whose submissions are taken by a function."""

    def __init__(self, core, submit):
        self._core, self.submit = core, submit

    def __getattr__(self, name):
        return getattr(self._core, name)


class Answer:
    """An answer that is under way."""

    def __init__(self, sink, flush, events, rid):
        self._sink, self._flush, self._events, self.rid = sink, flush, events, rid
        self._loop = asyncio.get_running_loop()
        self.aborted = False

    def begin(self):
        self._step(0, 0)

    def abort(self):
        """Ends it without an event, as its reader has left."""
        self.aborted = True

    def end(self, error):
        """Ends it with an error."""
        self.abort()
        self._loop.call_soon_threadsafe(self._tell, error)

    def _tell(self, event):
        self._sink(event)
        self._flush()

    def _step(self, at, hops):
        if at >= len(self._events) or self.aborted:
            return
        if hops == 0:
            self._tell(self._events[at])
        at, hops = (at + 1, 0) if hops == _HOPS else (at, hops + 1)
        self._loop.call_soon(self._step, at, hops)
