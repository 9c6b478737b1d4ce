"""SGLang's gRPC service, by the stubs that smg-grpc-proto publishes."""

import contextlib
import hashlib
import io
import shutil
import socket
import subprocess
import sys
import zipfile

import grpc
import httpx2
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as services
from smg_grpc_proto.generated import common_pb2 as common
from tokenizers import Tokenizer
from transformers import BertModel

import sglang_lite as sgl
from sglang_lite.server.app import serve
from sglang_lite.server.settings import ServerSettings
from tests.runtime.embedding.tiny import saved
from tests.server.conftest import SETTINGS, TEMPLATE, Running
from tests.waiting import until

PROMPT = [5, 6, 7, 8]


class Client:
    """A server and the stub of its gRPC service."""

    def __init__(self, engine, key="", **settings):
        self.running = Running(engine, grpc_port=0, **settings)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self.running.service.grpc_port}")
        self.stub = services.SglangSchedulerStub(self._channel)
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._channel.close()
        self.running.stop()

    def call(self, name, request):
        return getattr(self.stub, name)(request, timeout=60, metadata=self._metadata)

    def generate(self, ids=PROMPT, stream=False, sampling=None, **more):
        params = pb.SamplingParams(
            **{"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, **(sampling or {})}
        )
        tokenized = pb.TokenizedInput(input_ids=ids)
        request = pb.GenerateRequest(
            request_id="mine", tokenized=tokenized, sampling_params=params, stream=stream, **more
        )
        return list(self.call("Generate", request))

    def whole(self, *args, **more):
        (found,) = self.generate(*args, **more)
        return found.complete


@pytest.fixture(scope="module")
def client(engine):
    with Client(engine, served_model_name="tiny") as client:
        yield client


def test_generate_says_what_the_engine_says(client, engine):
    expected = engine.generate(input_ids=PROMPT, sampling_params={
        "temperature": 0, "max_new_tokens": 6, "ignore_eos": True})  # fmt: skip
    found = client.whole()
    assert list(found.output_ids) == expected["output_ids"]
    assert (found.finish_reason, found.prompt_tokens, found.completion_tokens) == ("length", 4, 6)


def test_a_stream_has_the_same_ids_in_chunks_and_then_whole(client):
    *chunks, last = client.generate(stream=True)
    assert [id for each in chunks for id in each.chunk.token_ids] == list(client.whole().output_ids)
    assert list(last.complete.output_ids) == list(client.whole().output_ids)
    assert chunks[-1].chunk.completion_tokens == 6
    assert {each.request_id for each in chunks} == {"mine"}


def test_several_samples_each_have_their_index(client):
    found = client.generate(sampling={"n": 3, "temperature": 1})
    assert sorted(each.complete.index for each in found) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client, engine, stream):
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    meta = engine.generate(
        input_ids=PROMPT, sampling_params=params, return_logprob=True, logprob_start_len=0, top_logprobs_num=2,
        token_ids_logprob=[9, 10],
    )["meta_info"]  # fmt: skip
    more = dict(return_logprob=True, top_logprobs_num=2, token_ids_logprob=[9, 10])
    *chunks, last = client.generate(stream=stream, **more)
    whole = last.complete
    assert list(whole.output_logprobs.token_logprobs) == pytest.approx(
        [each[0] for each in meta["output_token_logprobs"]]
    )
    rows = [(row.values[0], row.token_ids[0]) for row in whole.output_logprobs.top_logprobs]
    assert rows == [(pytest.approx(top[0][0]), top[0][1]) for top in meta["output_top_logprobs"]]
    assert [list(row.token_ids) for row in whole.output_logprobs.token_ids_logprobs] == [
        [9, 10]
    ] * 6
    first, *others = whole.input_logprobs.token_logprobs
    assert not first.HasField("value")
    assert [each.value for each in others] == pytest.approx(
        [each[0] for each in meta["input_token_logprobs"][1:]]
    )
    assert list(whole.input_logprobs.token_ids) == PROMPT
    if stream:
        said = [value for each in chunks for value in each.chunk.output_logprobs.token_logprobs]
        assert said == pytest.approx(list(whole.output_logprobs.token_logprobs))


def test_constraints_and_stops(client, engine):
    def text(**sampling):
        found = client.whole(sampling={"ignore_eos": False, **sampling})
        return engine.tokenizer.decode(found.output_ids), found

    assert text(regex="ab{2}c")[0] == "abbc"
    assert text(json_schema='{"enum": [17]}')[0] == "17"
    assert text(ebnf_grammar='root ::= "xy"')[0] == "xy"
    said, found = text(regex="abcd", stop=["c"])
    assert (found.finish_reason, found.matched_stop_str) == ("stop", "c")
    assert said.startswith("ab")


@pytest.mark.parametrize(("more", "code", "told"), [
    ({"sampling": {"temperature": -1}}, "INVALID_ARGUMENT", "temperature"),
    ({"sampling": {"regex": "("}}, "INVALID_ARGUMENT", ""),
    ({"ids": [10**6]}, "INVALID_ARGUMENT", "10000"), ({"ids": [5] * 3000}, "INVALID_ARGUMENT", "3,00"),
    ({"return_hidden_states": True}, "INVALID_ARGUMENT", "return_hidden_states: is not supported"),
    ({"lora_id": "none"}, "NOT_FOUND", "'none'"),
])  # fmt: skip
def test_a_mistake_is_a_status(client, more, code, told):
    with pytest.raises(grpc.RpcError) as refused:
        client.generate(**more)
    assert (refused.value.code().name, told in refused.value.details()) == (code, True)


def test_a_call_is_a_line_of_the_log_a_count_and_a_span_without_text(engine, caplog):
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with caplog.at_level("INFO"), Client(engine, tracer=provider.get_tracer("test")) as client:
        client.whole()
        with pytest.raises(grpc.RpcError):
            client.generate(sampling={"regex": "SECRET("})
        counts = httpx2.get(f"{client.running.url}/metrics").text
    lines = [
        record.request
        for record in caplog.records
        if getattr(record, "request", {}).get("method") == "gRPC"
    ]
    assert [(line["route"], line["status"], line["request_id"]) for line in lines] == [
        ("/Generate", 200, "mine"), ("/Generate", 400, "mine")
    ]  # fmt: skip
    assert 'method="gRPC",route="/Generate",status="400"' in counts
    good, refused = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    service = "sglang.grpc.scheduler.SglangScheduler"
    assert good.name == f"{service}/Generate"
    common = {
        "rpc.system": "grpc", "rpc.service": service, "rpc.method": "Generate", "sglang_lite.request_id": "mine",
    }  # fmt: skip
    assert (good.attributes, refused.attributes) == (
        {**common, "rpc.grpc.status_code": 0}, {**common, "rpc.grpc.status_code": 3}
    )  # fmt: skip
    assert refused.status.status_code is StatusCode.UNSET
    assert "SECRET" not in refused.to_json()


def test_a_call_that_is_cancelled_ends_its_request_and_abort_ends_another(engine):
    with Client(engine) as client:
        for end in (
            lambda call: call.cancel(),
            lambda _: client.call("Abort", pb.AbortRequest(request_id="mine")),
        ):
            params = pb.SamplingParams(temperature=0, max_new_tokens=1900, ignore_eos=True)
            tokenized = pb.TokenizedInput(input_ids=PROMPT)
            request = pb.GenerateRequest(
                request_id="mine", tokenized=tokenized, sampling_params=params, stream=True
            )
            call = client.call("Generate", request)
            next(call)
            end(call)
            with pytest.raises(grpc.RpcError) as ended:
                list(call)
            assert ended.value.code() is grpc.StatusCode.CANCELLED
            until(
                lambda: client.running.service.async_engine.open == engine.stats()["running"] == 0
            )


def test_what_is_told_of_the_server(client, engine):
    info = client.call("GetModelInfo", pb.GetModelInfoRequest())
    assert (info.max_context_length, info.vocab_size, info.is_generation) == (2048, 258, True)
    assert (list(info.eos_token_ids), info.bos_token_id, info.model_type) == ([0], 1, "llama")
    server = client.call("GetServerInfo", pb.GetServerInfoRequest())
    args = server.server_args
    assert (args["dtype"], args["served_model_name"], info.served_model_name) == (
        "float32",
        "tiny",
        "tiny",
    )
    loads = client.call("GetLoads", pb.GetLoadsRequest())
    assert (
        loads.dp_rank_count,
        loads.loads[0].max_total_num_tokens,
        loads.aggregate.total_reqs,
    ) == (1, 16384, 0)
    assert client.call("FlushCache", common.FlushCacheRequest()).success
    with pytest.raises(grpc.RpcError) as missing:
        client.call("LoadLoRAAdapter", pb.LoadLoRAAdapterRequest())
    assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_it_is_healthy_once_it_has_made_a_token(client):
    until(lambda: client.call("HealthCheck", pb.HealthCheckRequest()).healthy)


def test_the_tokenizer_is_an_archive(client, engine):
    pieces = list(client.call("GetTokenizer", common.GetTokenizerRequest()))
    data = b"".join(piece.data for piece in pieces)
    assert [piece.sha256 for piece in pieces] == [""] * (len(pieces) - 1) + [
        hashlib.sha256(data).hexdigest()
    ]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
        assert archive.read("chat_template.jinja").decode() == engine.chat_template().source
    assert tokenizer.encode("a b", add_special_tokens=False).ids == list(
        engine.tokenizer.encode("a b", first=False)
    )


def test_keys_and_limits_are_those_of_http(engine):
    keys = dict(api_key=("secret",), admin_api_key="admin")
    with Client(engine, "secret", **keys) as client:
        assert client.whole().completion_tokens == 6
        with pytest.raises(grpc.RpcError) as refused:
            client.call("FlushCache", common.FlushCacheRequest())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with Client(engine, "wrong", **keys) as client, pytest.raises(grpc.RpcError) as refused:
        client.whole()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_client_has_so_many_connections(engine):
    with Client(engine, max_connections_per_client=1) as client:
        address = f"127.0.0.1:{client.running.service.grpc_port}"
        with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            other = services.SglangSchedulerStub(channel)
            params = pb.SamplingParams(max_new_tokens=1900, ignore_eos=True)
            tokenized = pb.TokenizedInput(input_ids=PROMPT)
            long = client.call(
                "Generate",
                pb.GenerateRequest(tokenized=tokenized, sampling_params=params, stream=True),
            )
            next(long)
            # over the same connection
            assert client.call("GetLoads", pb.GetLoadsRequest()).dp_rank_count == 1
            with pytest.raises(grpc.RpcError, match="1 connections of this client") as refused:
                other.GetLoads(pb.GetLoadsRequest(), timeout=60)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            long.cancel()
            until(lambda: client.running.service.async_engine.open == 0)
            assert other.GetLoads(pb.GetLoadsRequest(), timeout=60).dp_rank_count == 1


def test_embeddings(tmp_path):
    saved(BertModel, tmp_path)
    with sgl.Engine(tmp_path, in_process=True, threads=1) as engine, Client(engine) as client:
        found = client.call("Embed", pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[4, 5])))
        with pytest.raises(grpc.RpcError) as refused:
            client.whole()
        expected = engine.encode([[4, 5]])[0]["embedding"]
        (load,) = client.call("GetLoads", pb.GetLoadsRequest()).loads
        assert (load.num_running_reqs, load.cache_hit_rate) == (0, 0)
        assert "sglang_lite_texts{" in httpx2.get(f"{client.running.url}/metrics").text
    assert list(found.embedding) == pytest.approx(expected, abs=1e-6)
    assert (found.embedding_dim, found.prompt_tokens) == (len(expected), 2)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("settings", "problem"), [
    ({"grpc_port": 70000}, "not between 0 and 65535"),
    ({"grpc_port": 1, "port": 1}, "1 is that of HTTP, too"),
    ({"grpc_port": 1, "ssl_certfile": "a.pem"}, "spoken without TLS"),
])  # fmt: skip
def test_a_port_that_cant_be_is_refused_at_the_start(settings, problem):
    with pytest.raises(sgl.ParameterError, match=problem):
        ServerSettings(**settings)


def test_what_gRPC_lacks_is_told_before_a_model_is_loaded(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(sgl.BackendError, match="--grpc-port"):
            serve(
                ServerSettings(port=0, grpc_port=taken.getsockname()[1]), {"model": "/none/there"}
            )
    monkeypatch.setitem(sys.modules, "sglang_lite.server.grpc_service", None)
    monkeypatch.delattr("sglang_lite.server.grpc_service", raising=False)
    with pytest.raises(sgl.CapabilityError, match=r"sglang-lite\[grpc\]"):
        serve(ServerSettings(port=0, grpc_port=0), {"model": "/none/there"})


def test_smg_sends_the_requests_of_its_clients_to_two_workers(folder, tmp_path):
    """With its own tokenizer and chat template, which it reads from the model's folder."""
    pytest.importorskip("smg")
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    (copied / "chat_template.jinja").write_text(TEMPLATE)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a quick"}],
        "max_tokens": 6,
        "temperature": 0,
    }
    settings: dict = {**SETTINGS, "in_process": True}
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(sgl.Engine(str(copied), **settings)) for _ in range(2)]
        workers = [
            stack.enter_context(Client(engine, served_model_name="tiny")) for engine in engines
        ]
        urls = [f"grpc://127.0.0.1:{worker.running.service.grpc_port}" for worker in workers]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        gateway = [
            sys.executable,
            "-c",
            "from smg.cli import main; main()",
            "launch",
            "--port",
            str(port),
        ]
        process = subprocess.Popen([*gateway, "--worker-urls", *urls, "--policy", "round_robin"])
        try:
            http = stack.enter_context(
                httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
            )

            def answered():
                assert process.poll() is None
                with contextlib.suppress(httpx2.TransportError):
                    response = http.post("/v1/chat/completions", json=body)
                    return (
                        response.json()["choices"][0]["message"]["content"]
                        if response.status_code == 200
                        else None
                    )

            said = until(answered)
            expected = httpx2.post(
                f"{workers[0].running.url}/v1/chat/completions", json=body, timeout=60
            ).json()
            before = [engine.stats()["requests_submitted"] for engine in engines]
            assert [answered() for _ in range(4)] == [said] * 4
            assert said == expected["choices"][0]["message"]["content"]
            after = [engine.stats()["requests_submitted"] for engine in engines]
            assert [a - b for a, b in zip(after, before)] == [2, 2]
        finally:
            process.kill()
            process.wait()
