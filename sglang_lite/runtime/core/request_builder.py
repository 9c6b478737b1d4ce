"""What is asked of an engine, as requests: prompts become token ids, parameters are checked, and the open ones counted.

Knows nothing of how they are run.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from sglang_lite.protocol import (
    Delta,
    OverloadedError,
    ParameterError,
    Played,
    Prompt,
    SamplingParams,
    Span,
)
from sglang_lite.runtime.executor.sampler import sample_seed
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.load import LoadedModel
from sglang_lite.runtime.request import Request, Sink
from sglang_lite.runtime.sampling_params import ResolvedParams, resolve_params, shown
from sglang_lite.runtime.tokens.token_log import TokenLog

_COUNTED = ("requests_submitted", "programs_opened", "programs_extended")


class Ticket:
    """Something that was submitted: its events go to the sink it was submitted with."""

    def __init__(self, abort: Callable[[], None], requests: Sequence[Request] = ()) -> None:
        self._abort, self._requests = abort, requests

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the cache, so far as is known."""
        return max((request.cached_tokens for request in self._requests), default=0)

    def abort(self) -> None:
        """Ends it with RequestAbortedError, unless it has ended."""
        self._abort()


class Intake:
    """
    Args:
        most_open: requests that may run or wait.
        seed: of the requests that set none; None for fresh randomness.
        loaded: the engine's model.
        longest: longest sequence in tokens, prompt and answer.
        all_special: every text can name special tokens.
    """

    def __init__(
        self, most_open: int, seed: int | None, loaded: LoadedModel, longest: int, *, all_special: bool = False
    ) -> None:
        self._most_open, self._first_seed, self._longest = most_open, seed, longest
        self._all_special = all_special
        # Not `loaded` itself: nothing that outlives the engine's thread may hold its model.
        self._model_name, self._tokenizer = loaded.name, loaded.tokenizer
        self._vocab_size, self._eos_ids = loaded.vocab_size, loaded.eos_ids
        self._fresh = random.Random(secrets.randbits(256))  # asking the system lets go of the interpreter's lock
        self._ids = itertools.count()
        self._draws = itertools.count()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._open = 0  # what was submitted and has not ended
        self._queue: deque[tuple[Callable[[], object], int]] = deque()  # who waits for room, and for how much
        self._tickets: dict[str, Ticket] = {}  # of that, what has a name

    def prompt_ids(self, prompt: Prompt | str | Sequence[int]) -> Sequence[int]:
        """The token ids of a prompt.

        Raises:
            ParameterError: it is empty, not text, or has an image.
        """
        ids: Sequence[int]
        if isinstance(prompt, str | Prompt):
            ids = self.log(prompt).ids()
        elif isinstance(prompt, list | tuple | array):
            ids = prompt[:]
        else:
            raise ParameterError("prompt", f"{type(prompt).__name__} is neither text nor a list of token ids.")
        if not ids:
            raise ParameterError("prompt", "is empty.", hint="A model continues text: give it at least one token.")
        return ids

    def log(self, prompt: Prompt | str) -> TokenLog:
        """A prompt that can grow.

        Raises:
            ParameterError: it has an image.
        """
        if isinstance(prompt, Prompt) and prompt.images:
            raise ParameterError("prompt", f"{self._model_name} can't see images.")
        spans = prompt.spans if isinstance(prompt, Prompt) else (Span(prompt),)
        return TokenLog(self._tokenizer, spans, all_special=self._all_special)

    def requests(
        self,
        ids: Sequence[int],
        params: ResolvedParams,
        sink: Sink,
        *,
        stream: bool = False,
        namespace: str = "",
        score_from: int | None = None,
    ) -> list[Request]:
        """Requests that are not started yet, one a sample.

        Raises:
            ParameterError: as `tokens`.
        """
        tokens = self.tokens(ids, params)
        start = params.logprob_start_len if params.return_logprob else -1
        return [
            Request(
                id=next(self._ids),
                tokens=tokens,
                prompt_len=len(tokens),
                limit=min(len(tokens) + params.max_tokens, self._longest),
                params=params,
                seed=self._seed() if params.seed is None else sample_seed(params.seed, index),
                sink=sink,
                tokenizer=self._tokenizer,
                ends=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids),
                stream=stream,
                namespace=namespace,
                score_from=score_from if score_from is not None else start if start >= 0 else None,
            )
            for index in range(params.n)
        ]

    def resolved(self, params: SamplingParams) -> ResolvedParams:
        """Parameters with the engine's defaults. Raises ParameterError: a bad one."""
        return resolve_params(params, self._vocab_size)

    def tokens(self, ids: Sequence[int], params: ResolvedParams) -> Ints:
        """The prompt of a request that could be run.

        Raises:
            ParameterError: an id is no token's, or the prompt does not fit.
        """
        vocab_size = self._vocab_size
        try:
            tokens = np.array(ids)
        except ValueError:  # lists in the list
            tokens = np.empty(0, dtype=object)
        if tokens.dtype.kind != "i" or tokens.ndim > 1 or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            bad = next((i for i in ids if type(i) is not int or not 0 <= i < vocab_size), ids)
            raise ParameterError("input_ids", f"{shown(bad)} is no token id (0 to {vocab_size - 1:,}).")
        room = self._longest - len(ids)
        if room < (1 if params.max_tokens else 0):
            raise ParameterError(
                "prompt",
                f"{len(ids):,} tokens long; {self._model_name} takes {self._longest:,}, the answer included.",
                hint="Shorten it, or raise context_length and max_total_tokens.",
            )
        if params.return_logprob and params.logprob_start_len > len(ids):
            raise ParameterError(
                "logprob_start_len", f"{params.logprob_start_len:,} is beyond the prompt's {len(ids):,} tokens."
            )
        return tokens.astype(np.int32, copy=False)

    def _seed(self) -> int:
        if self._first_seed is None:
            return self._fresh.getrandbits(64)
        return (self._first_seed << 32) + next(self._draws)

    def counted(
        self, sink: Callable[[Any], None], count: int = 1, rid: str | None = None, ticket: Ticket | None = None
    ) -> Callable[[Any], None]:
        """Counts something that was submitted as open, and keeps its name, until its sink gets its last event.

        Args:
            count: of last events.

        Raises:
            ParameterError: the name is taken.
            OverloadedError: too much is open.
        """
        left = count
        with self._lock:
            if rid in self._tickets:
                raise ParameterError("rid", f"{rid!r} is the name of a request that has not ended.")
            if self._open + count > self._most_open:
                raise self._overloaded()
            self._open += count
            if rid is not None and ticket is not None:
                self._tickets[rid] = ticket

        def counted(event: Any) -> None:
            nonlocal left
            if not isinstance(event, Delta | Played):
                with self._lock:
                    self._open -= 1
                    left -= 1
                    if not left and rid is not None:
                        del self._tickets[rid]
                self._call_next()
            sink(event)

        return counted

    def count(self, what: str, number: int = 1) -> None:
        """Counts what was asked for."""
        with self._lock:
            self._counts[what] += number

    def counts(self) -> dict[str, int]:
        with self._lock:
            return {what: self._counts[what] for what in _COUNTED}

    def enter_now(self) -> None:
        """`enter`. Raises OverloadedError: there is no room."""
        if not self.enter():
            raise self._overloaded()

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(
            f"{self._open:,} requests are waiting or running.", hint="Try again later, or raise max_queued."
        )

    def enter(self) -> bool:
        """Counts one more as open, if there is room. Whoever entered goes out again."""
        with self._lock:
            if self._open >= self._most_open:
                return False
            self._open += 1
            return True

    def go_out(self) -> None:
        """It is not open any more."""
        with self._lock:
            self._open -= 1
        self._call_next()

    def wait_for_room(self, call: Callable[[], object], count: int, *, first: bool = False) -> None:
        """Calls back once, on any thread, when so many requests could be submitted: now, or in the order of asking as
        others end. The room is not kept: who is called tries again, and then waits as the first, or says that it left.

        Raises:
            OverloadedError: there never will be.
        """
        if count > self._most_open:
            raise OverloadedError(
                f"{count:,} samples at once; {self._most_open:,} may wait or run.", hint="Raise max_queued."
            )
        with self._lock:
            if self._open + count > self._most_open:
                self._queue.insert(0 if first else len(self._queue), (call, count))
                return
        call()

    def leave(self, call: Callable[[], object]) -> None:
        """Who was or is to be called back wants no room any more; the next one in the order gets it."""
        with self._lock:
            waiting = next((place for place in self._queue if place[0] is call), None)
            if waiting is not None:
                self._queue.remove(waiting)
        self._call_next()

    def _call_next(self) -> None:
        with self._lock:
            if not self._queue or self._open + self._queue[0][1] > self._most_open:
                return
            call, _ = self._queue.popleft()
        call()

    async def admitted(self, submit: Callable[[], Ticket], count: int) -> Ticket:
        """What `submit()` gives, as soon as there is room for `count` requests.

        Raises:
            SglError: as `submit`; but OverloadedError only where there never will be room.
        """
        call: Callable[[], object] | None = None
        try:
            while True:
                try:
                    ticket = submit()
                    call = None
                    return ticket
                except OverloadedError:
                    first, loop = call is not None, asyncio.get_running_loop()
                    room = loop.create_future()
                    call = partial(loop.call_soon_threadsafe, _resolve, room)
                    self.wait_for_room(call, count, first=first)
                await room
        finally:
            if call is not None:
                self.leave(call)

    def ticket(self, rid: str) -> Ticket:
        """What was submitted under this name.

        Raises:
            ParameterError: nothing that is waiting or running.
        """
        with self._lock:
            ticket = self._tickets.get(rid) if isinstance(rid, str) else None
        if ticket is None:
            raise ParameterError("rid", f"{shown(rid)} is no request that is waiting or running.")
        return ticket


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
