"""A trace as OpenTelemetry spans, in its SDK's own exporter."""

import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import sglang_lite as sgl
from sglang_lite.lang.trace import Trace, spans
from sglang_lite.protocol import TraceHead


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


@sgl.function
def program(s):
    s += "a secret question "
    s += sgl.gen("a", max_tokens=4)
    s += sgl.gen("b", retries=1, check=lambda value: False, temperature=1)


def test_a_program_has_its_nodes_and_they_their_requests(tracer, exporter):
    trace = program.run(backend=sgl.ScriptedBackend(default="two words")).trace()
    spans(trace, tracer)
    found = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in found}
    above = {
        span.name: by_id[span.parent.span_id].name for span in found if span.parent is not None
    }
    (root,) = [span for span in found if span.parent is None]
    assert root.name == "program program"
    assert above == {"gen a": root.name, "gen b": root.name, "text_completion scripted": "gen b"}
    requests = [span for span in found if span.name.startswith("text_completion")]
    assert [span.kind for span in requests] == [SpanKind.CLIENT] * 3
    assert requests[0].attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "sglang_lite",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 2,
        "sglang_lite.forced_tokens": 0,
        "sglang_lite.queue_s": 0.0,
        "sglang_lite.first_token_s": 0.0,
    }
    assert [span.status.status_code for span in requests[1:]] == [StatusCode.ERROR] * 2
    assert all(
        root.start_time <= span.start_time <= span.end_time <= root.end_time for span in found
    )
    (node,) = [span for span in found if span.name == "gen a"]
    assert node.attributes["code.file.path"] == __file__
    assert "secret" not in "".join(span.to_json() for span in found)


def test_an_empty_trace_is_one_span(tracer, exporter):
    spans(Trace(TraceHead(0), ()), tracer)
    assert [span.name for span in exporter.get_finished_spans()] == ["program program"]


def test_without_opentelemetry_it_says_what_to_install(monkeypatch, tracer):
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(sgl.CapabilityError, match="pip install opentelemetry-sdk"):
        spans(Trace(TraceHead(0), ()), tracer)
