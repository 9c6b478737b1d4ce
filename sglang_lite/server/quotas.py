"""Quotas of API keys: requests and tokens per minute and per day."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from sglang_lite.server.errors import RateLimitError
from sglang_lite.server.settings import QUOTAS, ServerSettings


@dataclass(slots=True)
class _Remainder:
    """Remaining quota of a key. It can fall below 0, because the length of an answer is known only
    at its end and may exceed what was left.
    """

    count: float
    at: float  # time of that count, in seconds


class Quota:
    """Quota of each key, which refills evenly, up to the limit.

    Args:
        limit: most that a key may use in one go; an empty quota is full again after `period_s`.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self, limit: int, period_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._rate = limit / period_s
        self._clock = clock
        self._left: dict[str, _Remainder] = {}

    def seconds_until_available(self, key: str) -> float:
        """Returns the seconds until at least one unit of a key's quota is left, or 0.0 if one is
        left now.
        """
        return max((1 - self._refill(key).count) / self._rate, 0.0)

    def use(self, key: str, count: int) -> None:
        """Counts what a key has used."""
        self._refill(key).count -= count

    def _refill(self, key: str) -> _Remainder:
        now = self._clock()
        left = self._left.setdefault(key, _Remainder(self._limit, now))
        left.count = min(left.count + (now - left.at) * self._rate, self._limit)
        left.at = now
        return left


class Quotas:
    """Quotas of all keys, from the settings of a server. Without keys, all clients share one.

    Args:
        clock: as in Quota.
    """

    def __init__(
        self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._requests, self._tokens = (
            [
                Quota(limit, period_s, clock)
                for name, period_s in QUOTAS.items()
                if name.startswith(f"max_{what}") and (limit := getattr(settings, name)) is not None
            ]
            for what in ("requests", "tokens")
        )

    def charge_request(self, key: str) -> None:
        """Counts a request of a key. Raises RateLimitError if one of its quotas is used up."""
        named = {"requests": self._requests, "tokens": self._tokens}
        waits = [
            (math.ceil(quota.seconds_until_available(key)), what)
            for what, quotas in named.items()
            for quota in quotas
        ]
        seconds, what = max(waits, default=(0, ""))
        if seconds:
            raise RateLimitError(
                f"the quota of {what} of this key is used up.",
                hint=f"Try again in {seconds:,} s.",
                retry_after_s=seconds,
            )
        for quota in self._requests:
            quota.use(key, 1)

    def charge_tokens(self, key: str, tokens: int) -> None:
        """Subtracts tokens from the quotas of a key."""
        for quota in self._tokens:
            quota.use(key, tokens)
