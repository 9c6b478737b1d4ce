"""Exports a trace as OpenTelemetry spans. The program has one span. Below it, each generation and
selection has a span, with one more below that for each of its requests.

Attribute names follow the semantic conventions for generative AI where those define a name. Spans
contain no texts: texts may be private, and a collector may belong to someone else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from sglang_lite.lang.runs.trace import Trace
from sglang_lite.protocol import CapabilityError, Generation, Selection, TraceNode
from sglang_lite.protocol.span_attributes import result_attributes

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

# Provider names by backend.
_PROVIDER: Final = {"OpenAI": "openai", "Anthropic": "anthropic", "VertexAI": "gcp.vertex_ai"}


def spans(trace: Trace, tracer: Tracer) -> None:
    """Exports a finished run to a tracer. The program's span is a child of the current span. Below
    it, each generation and selection has a span. Each of their requests, including failed attempts,
    has a span below that.

    Raises:
        CapabilityError: `opentelemetry` is not installed.
    """
    try:
        from opentelemetry.trace import SpanKind, set_span_in_context
    except ModuleNotFoundError as error:
        raise CapabilityError(
            "spans need OpenTelemetry.", hint="pip install opentelemetry-sdk"
        ) from error

    def begin_child_span(
        name: str, at: float, context: Context | None, attributes: Mapping[str, Any], *, asks: bool
    ) -> Span:
        kind = SpanKind.CLIENT if asks else SpanKind.INTERNAL
        return tracer.start_span(
            name, context, kind, attributes, start_time=_nanoseconds(trace, at)
        )

    def export_request(
        node: TraceNode, inside: Context, result: Generation | Selection | None, error: str | None
    ) -> None:
        attributes = _request_attributes(trace, result)
        took = (
            node.end - result.usage.total_s
            if result is not None and result.usage.total_s
            else node.start
        )
        span = begin_child_span(
            f"text_completion {trace.head.model}",
            max(took, node.start),
            inside,
            attributes,
            asks=True,
        )
        _end_span(span, trace, node, error)

    title = next((node.where[2] for node in trace.nodes if node.where is not None), "program")
    program = begin_child_span(
        f"program {title}", 0.0, None, _program_attributes(trace), asks=False
    )
    inside = set_span_in_context(program)
    for node in trace.nodes:
        if node.kind not in ("gen", "select"):
            continue
        name = node.kind if node.name is None else f"{node.kind} {node.name}"
        own = begin_child_span(name, node.start, inside, _node_attributes(node), asks=False)
        within = set_span_in_context(own)
        for attempt in node.attempts:
            export_request(
                node, within, attempt.answers[0] if attempt.answers else None, attempt.error
            )
        for result in node.results:
            export_request(node, within, result, None)
        _end_span(own, trace, node, node.error)
    program.end(_nanoseconds(trace, trace.head.seconds))


def _nanoseconds(trace: Trace, at: float) -> int:
    return int((trace.head.started + at) * 1e9)


def _end_span(span: Span, trace: Trace, node: TraceNode, error: str | None) -> None:
    from opentelemetry.trace import StatusCode

    if error is not None:
        span.set_attribute("error.type", error.partition(":")[0])
        span.set_status(StatusCode.ERROR, error.partition(":")[0])
    span.end(_nanoseconds(trace, node.end))


def _program_attributes(trace: Trace) -> dict[str, Any]:
    usage = trace.usage
    return {
        "sglang_lite.nodes": len(trace.nodes),
        "sglang_lite.thrown_away_tokens": trace.thrown_away,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }


def _node_attributes(node: TraceNode) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "sglang_lite.kind": node.kind,
        "sglang_lite.path": list(node.path),
        "sglang_lite.place": node.place,
        "sglang_lite.attempts": len(node.attempts) + 1,
        "sglang_lite.rejected": node.rejected,
    }
    if node.where is not None:
        attributes |= dict(
            zip(("code.file.path", "code.line.number", "code.function.name"), node.where)
        )
    if node.adapter is not None:
        attributes["sglang_lite.adapter"] = node.adapter
    if node.miss is not None:
        attributes |= {
            "sglang_lite.cache_miss.reason": node.miss.reason,
            "sglang_lite.cache_miss.at": node.miss.at,
        }
    return attributes


def _request_attributes(trace: Trace, result: Generation | Selection | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": _PROVIDER.get(trace.head.backend, "sglang_lite"),
        "gen_ai.request.model": trace.head.model,
    }
    if result is None:
        return attributes
    return attributes | result_attributes(result)
