"""OpenTelemetry spans of a server. Each request has a span below its caller's (`traceparent`).
Below it are the spans of its generations and selections, and below those the spans of their stages
in the engine's process. Spans contain no texts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_lite.protocol import CapabilityError, Generation, Played, Selection, Usage
from sglang_lite.protocol.span_attributes import result_attributes
from sglang_lite.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger("sglang_lite.server")
_EXPORT_S = 5  # longest time of an export with its repetitions
_GRPC_FAULTS = (2, 4, 12, 13, 14, 15)  # codes that are the server's fault, by the conventions
_CHATS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/invocations")


class RequestSpans:
    """Spans of a server's requests. All methods are called on the event loop.

    Args:
        tracer: tracer that makes the spans.
        model: name of the model.
    """

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model

    @contextlib.contextmanager
    def open_span(
        self,
        name: str,
        attributes: Mapping[str, str],
        headers: Mapping[str, str],
        told: Mapping[str, str | int],
    ) -> Iterator[None]:
        """Opens the span of a request within the context. `record_events` puts its own spans below
        it.

        Args:
            told: attributes that become known while the request runs, and are read at its end.
        """
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        with self._tracer.start_as_current_span(
            name,
            extract(headers),
            SpanKind.SERVER,
            attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            finally:
                span.set_attributes(told)
                faulty = int(told.get("http.response.status_code", 0)) >= 500
                if faulty or told.get("rpc.grpc.status_code") in _GRPC_FAULTS:
                    span.set_status(StatusCode.ERROR)

    def record_events(self, events: Iterable[object]) -> None:
        """Creates a span for each event of the engine that ends a generation or a selection, below
        the request's span, which must be the current one. Ignores other events.
        """
        from opentelemetry.trace import SpanKind, get_current_span

        above: Any = get_current_span()
        # the server's own first token, or a request that isn't sampled
        if not above.is_recording():
            return
        route = above.attributes
        now = time.time_ns()
        operation = "chat" if route.get("http.route") in _CHATS else "text_completion"
        for event in events:
            node, result = _unpack_event_result(event)
            if not isinstance(result, Generation | Selection):
                continue
            start = now - int(result.usage.total_s * 1e9)
            span = self._tracer.start_span(
                f"{operation} {self._model}",
                kind=SpanKind.INTERNAL,
                start_time=start,
                attributes={
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": "sglang_lite",
                    "gen_ai.request.model": self._model,
                    **node,
                    **result_attributes(result),
                },
            )
            self._add_stages(span, result.usage, start, now)
            span.end(now)

    def _add_stages(self, span: Span, usage: Usage, start: int, end: int) -> None:
        """Creates the spans of a request's stages in the engine's process, which has measured how
        long they took.
        """
        from opentelemetry.trace import set_span_in_context

        within = set_span_in_context(span)
        ends = (start + int(usage.queue_s * 1e9), start + int(usage.first_token_s * 1e9), end)
        for name, until in zip(("queue", "prefill", "decode"), ends):
            if until > start:  # a selection has no decoding
                self._tracer.start_span(name, within, start_time=start).end(until)
                start = until


def _unpack_event_result(event: object) -> tuple[dict[str, Any], object]:
    """Returns span attributes for an event, and the result in the event. The attributes name the
    node if the event belongs to a program.
    """
    if isinstance(event, tuple):  # an event with its place
        event = event[1]
    if not isinstance(event, Played):
        return {}, event
    name = {} if event.name is None else {"sglang_lite.node": event.name}
    return {"sglang_lite.path": list(event.path), **name}, event.event


@contextlib.contextmanager
def export_spans(endpoint: str, instance: str) -> Iterator[Tracer]:
    """Yields a tracer whose spans a thread sends to a collector, in OTLP over gRPC. If the
    collector doesn't answer, spans are dropped, with one line in the log.

    Args:
        endpoint: "host:port" of the collector.
        instance: name of this server among those of the service.

    Raises:
        CapabilityError: OpenTelemetry's SDK or its exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise CapabilityError(
            "enable_trace needs OpenTelemetry.",
            hint="pip install 'sglang-lite[tracing]'",
            parameter="enable_trace",
        ) from error
    for name in ("opentelemetry.exporter", "opentelemetry.sdk"):  # each attempt would log a line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    names = {
        "service.name": "sglang_lite",
        "service.version": __version__,
        "service.instance.id": instance,
    }
    provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
    sender: Any = _QuietExporter(
        OTLPSpanExporter(endpoint, insecure=True, timeout=_EXPORT_S), endpoint
    )
    provider.add_span_processor(BatchSpanProcessor(sender))
    try:
        yield provider.get_tracer("sglang_lite", __version__)
    finally:
        provider.shutdown()


class _QuietExporter:
    """Exporter that logs once when exports begin to fail. Not a subclass of the SDK's exporter,
    because the SDK is imported late.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        failed = result.name != "SUCCESS"
        if failed and not self._failing:
            logger.warning(
                "Spans are dropped: the collector at %s does not answer.", self._endpoint
            )
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
