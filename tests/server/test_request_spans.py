"""A server's OpenTelemetry spans, in the SDK's own exporter; and what a collector that is down
costs.
"""

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import sglang_lite as sgl
from sglang_lite.lang.trace import spans
from sglang_lite.server import app
from sglang_lite.server.request_spans import export_spans
from sglang_lite.server.settings import ServerSettings
from tests.server.conftest import SETTINGS, serving
from tests.waiting import until

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SHORT = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def exporter():
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def tracer(exporter):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


@pytest.fixture(scope="module")
def url(engine, tracer):
    with serving(engine, tracer=tracer) as url:
        yield url


@pytest.fixture
def finished(exporter):
    """Function that returns the spans, or those of a trace, once so many requests to generate are
    among them.
    """
    exporter.clear()

    def of(trace):
        return [
            span for span in exporter.get_finished_spans() if trace in (None, span.context.trace_id)
        ]

    def wait(requests=1, trace=None):
        names = ("POST /program", "POST /generate", "POST /v1/chat/completions")
        until(lambda: sum(span.name in names for span in of(trace)) >= requests)
        return of(trace)

    return wait


def test_a_request_is_a_span_below_its_callers_and_has_its_generation(url, finished):
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "mine"}
    body = {
        "messages": [{"role": "user", "content": "a secret"}],
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
    }
    httpx2.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    *stages, generation, request = finished()
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, CALLER)
    assert (request.name, request.kind) == ("POST /v1/chat/completions", SpanKind.SERVER)
    assert request.attributes == {
        "http.request.method": "POST", "http.route": "/v1/chat/completions", "http.response.status_code": 200,
        "sglang_lite.request_id": "mine",
    }  # fmt: skip
    assert generation.parent.span_id == request.context.span_id
    assert request.start_time <= generation.start_time <= generation.end_time <= request.end_time
    assert generation.attributes["gen_ai.operation.name"] == "chat"
    assert generation.attributes["gen_ai.usage.output_tokens"] == 3
    assert generation.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert [stage.name for stage in stages] == ["queue", "prefill", "decode"]
    assert {stage.parent.span_id for stage in stages} == {generation.context.span_id}
    borders = [generation.start_time, *(stage.end_time for stage in stages)]
    assert [stage.start_time for stage in stages] == borders[:-1]
    assert borders[-1] == generation.end_time
    assert "secret" not in request.to_json() + generation.to_json()


@pytest.mark.parametrize("stream", [False, True])
def test_each_sample_of_each_text_is_a_span(url, finished, stream):
    body = {"text": ["a", "b"], "sampling_params": {**SHORT, "n": 2}, "stream": stream}
    httpx2.post(f"{url}/generate", json=body, timeout=60)
    *below, request = finished()
    samples = [
        span for span in below if span.attributes.get("gen_ai.operation.name") == "text_completion"
    ]
    assert len(samples) == 4
    assert {span.parent.span_id for span in samples} == {request.context.span_id}
    assert {span.name for span in below if span not in samples} == {"queue", "prefill", "decode"}


def test_an_error_is_a_status_and_polls_are_no_spans(url, finished):
    assert httpx2.get(f"{url}/health").status_code == 200
    assert httpx2.post(f"{url}/generate", json={"text": 3}, timeout=60).status_code == 400
    (request,) = finished()
    assert request.attributes["http.response.status_code"] == 400
    assert request.status.status_code is StatusCode.UNSET


def test_a_request_whose_client_leaves_is_499(url, finished):
    body = {
        "text": "a",
        "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True},
        "stream": False,
    }
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{url}/generate", json=body, timeout=0.2)
    (request,) = finished()
    assert request.attributes["http.response.status_code"] == 499


@sgl.function
def program(s):
    s += "a"
    s += sgl.gen("first", max_tokens=2, temperature=0)
    branches = s.fork(2)
    branches += sgl.gen("inner", max_tokens=2, temperature=0)
    branches.join()
    s += sgl.select("choice", ["a", "b"])


@pytest.mark.parametrize("whole", [True, False])
def test_a_program_and_its_nodes_on_the_server_are_one_trace(url, tracer, finished, whole):
    backend = sgl.RuntimeEndpoint(url)
    backend.plays_programs = whole
    with tracer.start_as_current_span("caller") as caller:
        state = program.run(backend=backend)
        spans(state.trace(), tracer)
    found = finished(1 if whole else 4, caller.context.trace_id)
    asked = {span.context.span_id for span in found if span.kind is SpanKind.SERVER}
    assert {span.parent.span_id for span in found if span.context.span_id in asked} == {
        caller.context.span_id
    }
    nodes = [span for span in found if span.parent is not None and span.parent.span_id in asked]
    assert len(nodes) == 4 if whole else len(nodes) >= 4
    if whole:
        assert [span.attributes.get("sglang_lite.node") for span in nodes].count("inner") == 2
    assert any(
        span.name == "program program" and span.parent.span_id == caller.context.span_id
        for span in found
    )


def test_a_request_without_a_span_sends_no_headers(url, finished):
    state = program.run(backend=sgl.RuntimeEndpoint(url))
    assert state["choice"]
    assert all(span.parent is None for span in finished() if span.kind is SpanKind.SERVER)


def test_a_collector_that_is_down_costs_one_line(engine, caplog, monkeypatch):
    monkeypatch.setattr("sglang_lite.server.request_spans._EXPORT_S", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and it never listens
        with (
            caplog.at_level("DEBUG"),
            export_spans(f"127.0.0.1:{taken.getsockname()[1]}", "here") as tracer,
            serving(engine, tracer=tracer) as url,
        ):
            for _ in range(3):
                body = {"text": "a", "sampling_params": SHORT}
                assert httpx2.post(f"{url}/generate", json=body, timeout=60).status_code == 200
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "the collector at 127.0.0.1" in told[0]


def test_without_the_exporter_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with (
        pytest.raises(sgl.CapabilityError, match=r"sglang-lite\[tracing\]"),
        export_spans("localhost:4317", "here"),
    ):
        pass


class Collector(TraceServiceServicer):
    """Collector of OpenTelemetry, which keeps the names of spans."""

    def __init__(self):
        self.names = []

    def Export(self, request, context):
        scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
        self.names += [span.name for scope in scopes for span in scope.spans]
        return ExportTraceServiceResponse()


@pytest.fixture
def collector():
    """A collector that listens, and its address."""
    found, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(found, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield found, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_server_sends_its_spans_to_the_collector_that_it_is_told(folder, collector, monkeypatch):
    # of the whole process
    monkeypatch.setattr("sglang_lite.server.log.configure", lambda settings: None)
    monkeypatch.setattr("sglang_lite.server.app.gc.freeze", lambda: None)
    found, address = collector
    settings = ServerSettings(port=0, enable_trace=True, otlp_traces_endpoint=address)
    listening = app.bind_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def run(server, sockets):
        with _running(server, sockets):
            asked = {"text": "a", "sampling_params": SHORT}
            assert httpx2.post(f"{url}/generate", json=asked, timeout=60).status_code == 200

    monkeypatch.setattr(app.HttpServer, "run", run)
    app.serve(
        settings, {"model": folder, **SETTINGS, "in_process": True}, lambda line: None, listening
    )
    assert "POST /generate" in found.names


@contextlib.contextmanager
def _running(server, sockets):
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=sockets),))
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
