"""Prometheus metrics of the requests that a server has answered: counts, tokens and times, under
the names that dashboards expect.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram

from sglang_lite.protocol import Generation, Played, RequestAbortedError, Selection

MetricsNames: TypeAlias = Literal["sglang", "vllm"]

# Names of SGLang's dashboards, and vLLM's.
_NAMES = {
    "sglang": {
        "requests": "num_requests", "aborted": "num_aborted_requests", "prompt": "prompt_tokens",
        "cached": "cached_tokens", "generated": "generation_tokens", "queue": "queue_time_seconds",
        "first": "time_to_first_token_seconds", "between": "inter_token_latency_seconds",
        "whole": "e2e_request_latency_seconds",
    },
    "vllm": {
        "requests": "request_success", "aborted": "request_aborted", "prompt": "prompt_tokens",
        "cached": "prefix_cache_hits", "generated": "generation_tokens", "queue": "request_queue_time_seconds",
        "first": "time_to_first_token_seconds", "between": "inter_token_latency_seconds",
        "whole": "e2e_request_latency_seconds",
    },
}  # fmt: skip
_TEXTS = {
    "requests": "generations and selections that ended",
    "aborted": "those that were aborted",
    "prompt": "tokens of their prompts",
    "cached": "tokens of their prompts that were in the prefix cache",
    "generated": "tokens that were generated",
    "queue": "from submission to the first computation",
    "first": "from submission to the first token",
    "between": "between two tokens, the mean of a generation",
    "whole": "from submission to the end",
}
OTHER_ROUTE: Final = "other"  # label of unknown paths and methods, which any client can invent
_FAST = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
)
_SLOW = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.4,
    0.6,
    0.8,
    1.0,
    2.0,
    4.0,
    6.0,
    8.0,
    10.0,
    20.0,
    40.0,
    60.0,
    120.0,
    300.0,
)


class RequestMetrics:
    """Counts and times of requests. All methods are called on the event loop.

    Args:
        model: name of the model, the label `model_name` of all metrics.
        names: project whose metric names are used.

    Attributes:
        registry: the metrics.
    """

    def __init__(self, model: str, names: MetricsNames = "sglang") -> None:
        self.registry = CollectorRegistry()
        found = {key: f"{names}:{name}" for key, name in _NAMES[names].items()}
        self._counters = {
            key: Counter(found[key], _TEXTS[key], ["model_name"], registry=self.registry).labels(
                model
            )
            for key in ("requests", "aborted", "prompt", "cached", "generated")
        }
        self._times = {
            key: Histogram(
                found[key],
                _TEXTS[key],
                ["model_name"],
                buckets=_FAST if key == "between" else _SLOW,
                registry=self.registry,
            ).labels(model)
            for key in ("queue", "first", "between", "whole")
        }
        self._generated = 0
        # time of the last call of `measure_throughput`, and tokens until then
        self._looked = time.monotonic(), 0
        labels = ["route", "method", "status", "key"]
        self._responses = Counter(
            "sglang_lite_http_responses",
            "HTTP responses; `key` is the beginning of the key's SHA-256",
            labels,
            registry=self.registry,
        )
        self._over_quota = Counter(
            "sglang_lite_over_quota",
            "requests refused as a quota of their key was used up",
            ["key"],
            registry=self.registry,
        )
        self._used = Counter(
            "sglang_lite_tokens",
            "tokens of prompts and answers, as quotas count them",
            ["key", "kind"],
            registry=self.registry,
        )
        self._response_s = Histogram(
            "sglang_lite_http_response_seconds",
            "from a request's headers to the end of its response",
            ["route"],
            buckets=_SLOW,
            registry=self.registry,
        )

    def measure_throughput(self) -> float:
        """Returns the number of generated tokens per second since the last call. Counts only
        requests that have ended.
        """
        now = (time.monotonic(), self._generated)
        before = self._looked
        self._looked = now
        return (now[1] - before[1]) / max(now[0] - before[0], 1e-3)

    def count_events(self, events: Iterable[object], key: str = "") -> int:
        """Counts the engine's events that end a generation or a selection, and ignores others.

        Args:
            key: key of their request; "" if none was required or given.

        Returns:
            Tokens of answers and prompts; a prompt with several answers counts once.
        """
        prompt = completion = 0
        for event in events:
            if isinstance(event, tuple):  # an event with its place
                event = event[1]
            if isinstance(event, Played):
                event = event.event
            if isinstance(event, Generation | Selection):
                self._count_result(event)
                prompt += _charged_prompt(event)
                completion += event.usage.completion_tokens
            elif isinstance(event, RequestAbortedError):
                self._counters["aborted"].inc()
                if event.partial is not None:
                    usage = event.partial.usage
                    prompt += _charged_prompt(event.partial)
                    completion += usage.completion_tokens
                    self._generated += usage.completion_tokens
                    self._counters["generated"].inc(usage.completion_tokens)
        for kind, count in (("prompt", prompt), ("completion", completion)):
            if count:
                self._used.labels(_hash_prefix(key), kind).inc(count)
        return prompt + completion

    def count_response(self, route: str, method: str, status: int, key: str) -> None:
        """Counts an HTTP response.

        Args:
            key: key of the request; "" if none was required or given.
        """
        self._responses.labels(route, method, str(status), _hash_prefix(key)).inc()

    def count_quota_refusal(self, key: str) -> None:
        """Counts a request that is refused because one of its key's quotas is used up."""
        self._over_quota.labels(_hash_prefix(key)).inc()

    def observe_response_time(self, route: str, seconds: float) -> None:
        """Records the time of an HTTP request until the end of its response."""
        self._response_s.labels(route).observe(seconds)

    def _count_result(self, event: Generation | Selection) -> None:
        usage = event.usage
        self._generated += usage.completion_tokens
        for key, count in (
            ("requests", 1),
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("generated", usage.completion_tokens),
        ):
            self._counters[key].inc(count)
        self._times["queue"].observe(usage.queue_s)
        self._times["whole"].observe(usage.total_s)
        if isinstance(event, Generation) and usage.completion_tokens:
            self._times["first"].observe(usage.first_token_s)
            if usage.completion_tokens > 1:
                self._times["between"].observe(
                    (usage.total_s - usage.first_token_s) / (usage.completion_tokens - 1)
                )


def _charged_prompt(event: Generation | Selection) -> int:
    """Returns the number of prompt tokens to count for an event. It is 0 for all but the first
    answer to a prompt.
    """
    is_further = isinstance(event, Generation) and event.index > 0
    return 0 if is_further else event.usage.prompt_tokens


def _hash_prefix(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:8] if key else ""
