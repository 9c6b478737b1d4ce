"""Limits on calls to a provider. The user may declare them, and the headers of the provider's
answers may report them.

All programs of a process that use one provider with one key share them. Times come from a monotonic
clock. Limits are used on the executor loop only, so nothing here is shared between threads.
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from sglang_lite.lang.argument_names import explains_wrong_fields
from sglang_lite.lang.checks import check_positive

_LONGEST_PAUSE_S = 600.0  # longest wait that a header may ask for


@dataclass(slots=True)
class Bucket:
    """Token bucket that refills evenly. Callers take from it before a call.

    Attributes:
        per_minute: rate of refilling, and capacity; None for no limit.
        available: content at time `at`; negative if waiting callers have taken more than there was.
    """

    per_minute: float | None = None
    available: float = 0.0
    at: float = 0.0

    def take_tokens(self, amount: float, now: float) -> float:
        """Takes an amount from the bucket. Returns the number of seconds after which the amount is
        available.
        """
        if self.per_minute is None:
            return 0.0
        self._refill(now)
        amount = min(amount, self.per_minute)  # an amount that never fits waits for a full bucket
        self.available -= amount
        return max(0.0, -self.available * 60 / self.per_minute)

    def refund(self, amount: float) -> None:
        """Returns an unused amount to the bucket."""
        if self.per_minute is not None:
            self.available = min(self.per_minute, self.available + min(amount, self.per_minute))

    def set_rate(self, per_minute: float, now: float) -> None:
        """Sets the limit. If the bucket had no limit before, it starts full."""
        if self.per_minute is None:
            self.available = per_minute
            self.at = now
        self.per_minute = per_minute

    def cap_at(self, remaining: float, now: float) -> None:
        """Lowers the content to the amount that the provider reports as remaining."""
        if self.per_minute is not None:
            self._refill(now)
            self.available = min(self.available, remaining)

    def _refill(self, now: float) -> None:
        assert self.per_minute is not None
        gained = max(0.0, now - self.at) * self.per_minute / 60
        self.available = min(self.per_minute, self.available + gained)
        self.at = now


@explains_wrong_fields
@dataclass(slots=True, weakref_slot=True)
class RateLimit:
    """Limit on the calls to a provider. To share it among backends, pass the same object to each of
    them (`rate_limit=`).

    Args:
        requests_per_minute, tokens_per_minute: maximum per minute, or None for the limit that the
            provider's headers report, if any. The tokens of a call are estimated: a quarter of the
            prompt's characters, plus `max_tokens`.

    Raises:
        ParameterError: a limit is not above 0.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    now: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)
    _requests: Bucket = field(default_factory=Bucket, init=False, repr=False)
    _tokens: Bucket = field(default_factory=Bucket, init=False, repr=False)
    _paused_until: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, bucket in (
            ("requests_per_minute", self._requests),
            ("tokens_per_minute", self._tokens),
        ):
            limit = getattr(self, name)
            if limit is None:
                continue
            check_positive(name, limit)
            bucket.set_rate(limit, self.now())

    async def wait(self, tokens: float) -> float:
        """Delays until a call of about `tokens` tokens may be made. Returns the seconds waited."""
        now = self.now()
        remaining = max(
            self._requests.take_tokens(1, now),
            self._tokens.take_tokens(tokens, now),
            self._paused_until - now,
        )
        waited = 0.0
        try:
            while remaining > 0:
                await self.sleep(remaining)
                waited += remaining
                # An answer to another call may have asked for a longer pause.
                remaining = self._paused_until - self.now()
        except BaseException:  # the call is not made
            self._requests.refund(1)
            self._tokens.refund(tokens)
            raise
        return waited

    def update_from_response(self, status: int, headers: Mapping[str, str]) -> None:
        """Adjusts the limits according to an answer's status and headers."""
        now = self.now()
        if status in (429, 503, 529):
            pause = retry_after(headers)
            if pause is not None:
                self._paused_until = max(self._paused_until, now + pause)
        for kind, bucket, declared in (
            ("requests", self._requests, self.requests_per_minute),
            ("tokens", self._tokens, self.tokens_per_minute),
        ):
            limit = _read_limit(headers, kind, "limit")
            remaining = _read_limit(headers, kind, "remaining")
            if limit is not None and limit > 0 and declared is None:
                bucket.set_rate(limit, now)
            if remaining is not None:
                bucket.cap_at(remaining, now)


def _read_limit(headers: Mapping[str, str], kind: str, what: str) -> float | None:
    """Returns a limit from the headers of an answer. Knows the names that OpenAI, Anthropic and
    compatible providers use.
    """
    for name in (f"x-ratelimit-{what}-{kind}", f"anthropic-ratelimit-{kind}-{what}"):
        found = _parse_count(headers.get(name, ""))
        if found is not None:
            return found
    return None


def _parse_count(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,12}(\.\d+)?", text) else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Returns how many seconds an answer asks to wait. Returns None if it has no such header, or an
    invalid one.
    """
    for name, parts in (("retry-after-ms", 1000), ("retry-after", 1)):
        found = _parse_count(headers.get(name, ""))
        if found is not None:
            return min(found / parts, _LONGEST_PAUSE_S)
    until = _parse_date(headers.get("retry-after", ""))
    sent = _parse_date(headers.get("date", ""))
    if until is None:
        return None
    # By the sender's clock, if it is reported, because ours may differ.
    wait = until - (sent or datetime.datetime.now(datetime.UTC))
    return min(max(0.0, wait.total_seconds()), _LONGEST_PAUSE_S)


def _parse_date(text: str) -> datetime.datetime | None:
    """Parses a date in a header. Returns None if the text is not a date."""
    try:
        found = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=datetime.UTC)


# One limit for each provider and key, while a backend uses it: the allowance of a process does not
# depend on the number of its backends.
_shared: WeakValueDictionary[tuple[str, str], RateLimit] = WeakValueDictionary()


def shared_limit(server: str, key: object) -> RateLimit:
    """Returns the limit shared by all backends that use this server with this key. Stores only a
    digest of the key.
    """
    account = server, hashlib.sha256(str(key).encode()).hexdigest()
    limit = _shared.get(account)
    if limit is None:
        limit = _shared[account] = RateLimit()
    return limit
