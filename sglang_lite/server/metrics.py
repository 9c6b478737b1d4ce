"""Counts of the engine in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

from sglang_lite.server.endpoint import HttpRequest, Route
from sglang_lite.server.service import Service

# Keys of `Engine.stats` whose values never decrease.
_COUNTERS = {
    "steps", "requests_submitted", "programs_opened", "programs_extended", "grammars_compiled", "grammars_cached",
    "grammars_from_disk", "late_masks", "prompt_tokens", "prompt_tokens_cached", "appended_tokens",
}  # fmt: skip


class _Stats(Collector):
    def __init__(self, stats: Mapping[str, Any], model: str) -> None:
        self._stats, self._model = stats, model

    def collect(self) -> Iterator[Metric]:
        for name, value in self._stats.items():
            if isinstance(value, int | float):
                kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
                family = kind(f"sglang_lite_{name}", name.replace("_", " "), labels=["model"])
                family.add_metric([self._model], value)
                yield family


async def metrics(service: Service, _: HttpRequest) -> Response:
    """Returns the counts."""
    registry = CollectorRegistry()
    registry.register(_Stats(await service.call_engine(service.engine.stats), service.model_name))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


ROUTES = (Route("/metrics", metrics, "Counts for Prometheus", ("GET",), access="open", media_type="text/plain"),)
