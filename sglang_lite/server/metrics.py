"""Counts of the server and its engine in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

from sglang_lite.server.endpoint import HttpRequest, Route
from sglang_lite.server.request_metrics import MetricsNames
from sglang_lite.server.service import Service

# Keys of `Engine.stats` whose values never decrease.
_COUNTERS = {
    "steps", "requests_submitted", "programs_opened", "programs_extended", "grammars_compiled", "grammars_cached",
    "grammars_from_disk", "late_masks", "prompt_tokens", "prompt_tokens_cached", "appended_tokens",
    "adapter_copies", "adapter_reads", "images_encoded", "restarts",
}  # fmt: skip


# Engine metrics that SGLang's dashboards show, and vLLM's names for them, as functions of the
# stats.
_SHOWN: dict[str, dict[str, Callable[[Mapping[str, Any]], float]]] = {
    "sglang": {
        "num_running_reqs": lambda stats: stats["running"],
        "num_queue_reqs": lambda stats: stats["waiting"],
        "max_total_num_tokens": lambda stats: stats["total_tokens"],
        "num_used_tokens": lambda stats: stats["total_tokens"] - stats["free_tokens"],
        "token_usage": lambda stats: 1 - stats["free_tokens"] / stats["total_tokens"],
        "gen_throughput": lambda stats: stats["generated_per_s"],
        "cache_hit_rate": lambda stats: (
            stats["prompt_tokens_cached"] / max(stats["prompt_tokens"], 1)
        ),
    },
    "vllm": {
        "num_requests_running": lambda stats: stats["running"],
        "num_requests_waiting": lambda stats: stats["waiting"],
        "kv_cache_usage_perc": lambda stats: 1 - stats["free_tokens"] / stats["total_tokens"],
    },
}


_OF_THE_SERVER = {"generated_per_s", "gen_throughput"}  # replicas don't have these


class _Stats(Collector):
    """Metrics made from an engine's statistics. With several replicas, each replica has its own
    values, with the label `rank`.
    """

    def __init__(self, stats: Mapping[str, Any], model: str, names: MetricsNames) -> None:
        self._stats = stats
        self._model = model
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for name, value in self._stats.items():
            if isinstance(value, int | float):
                kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
                yield self._build_metric_family(
                    kind, f"sglang_lite_{name}", name, "model", itemgetter(name)
                )
        # not of encoders
        for name, of in _SHOWN[self._names].items() if self._stats["total_tokens"] else ():
            yield self._build_metric_family(
                GaugeMetricFamily, f"{self._names}:{name}", name, "model_name", of
            )

    def _build_metric_family(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        full: str,
        name: str,
        label: str,
        of: Callable[[Mapping[str, Any]], float],
    ) -> Metric:
        each = [] if name in _OF_THE_SERVER else self._stats.get("replicas", [])
        family = kind(full, name.replace("_", " "), labels=[label, *(["rank"] if each else [])])
        for stats in each or [self._stats]:
            family.add_metric([self._model, *([str(stats["dp_rank"])] if each else [])], of(stats))
        return family


async def metrics(service: Service, _: HttpRequest) -> Response:
    """Returns all counts in Prometheus' text format."""
    registry = CollectorRegistry()
    stats = await service.call_engine(service.engine.stats)
    stats = {**stats, "generated_per_s": service.metrics.measure_throughput()}
    registry.register(_Stats(stats, service.model_name, service.settings.metrics_names))
    content = generate_latest(service.metrics.registry) + generate_latest(registry)
    return Response(content, media_type=CONTENT_TYPE_LATEST)


ROUTES = (
    Route(
        "/metrics",
        metrics,
        "Counts for Prometheus",
        ("GET",),
        access="open",
        media_type="text/plain",
    ),
)
