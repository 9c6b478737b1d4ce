"""What hostile or dying clients do to the gRPC service: each loses its own call, and the next one
is served.
"""

import random
import signal
import socket
import subprocess
import sys

import grpc
import pytest

from tests.children import send
from tests.server.test_grpc import PROMPT, Client
from tests.waiting import until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
# their length, and no such index of a header behind it
HEADERS = b"\x00\x00\x04\x01\x05\x00\x00\x00\x01"
RUBBISH = {
    "nothing": b"", "random": random.Random(7).randbytes(20_000), "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), "half a preface": PREFACE[:10],
    "random frames": PREFACE + SETTINGS + random.Random(8).randbytes(20_000),
    "a frame of 16 MB": PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(1000),
    "a broken header": PREFACE + SETTINGS + HEADERS + b"\xff\xff\xff\xff",
    "pings": PREFACE + SETTINGS + (b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + bytes(8)) * 5000,
    "resets": PREFACE + SETTINGS + b"".join(
        b"\x00\x00\x04\x03\x00" + each.to_bytes(4, "big") + bytes(4) for each in range(1, 4001, 2)
    ),
    "a continuation without end": PREFACE + SETTINGS + b"\x00\x40\x00\x09\x00\x00\x00\x00\x01" + bytes(16_384),
}  # fmt: skip


@pytest.fixture(scope="module")
def client(engine):
    with Client(engine, max_body_mb=1) as client:
        yield client


@pytest.mark.parametrize("name", RUBBISH)
def test_rubbish_harms_no_other_call(client, name):
    port = client.running.service.grpc_port
    for ends in (True, False):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            try:
                connection.sendall(RUBBISH[name])
                if ends:
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
            except OSError:  # it has cut the connection
                pass
    assert len(client.whole().output_ids) == 6


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\xff" * 1000, grpc.StatusCode.INVALID_ARGUMENT), (b"\x0a\xff\xff\xff\xff\x0f", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x0a" + b"\x80" * 20, grpc.StatusCode.INVALID_ARGUMENT), (bytes(2_000_000), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"", grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["no message", "a length beyond the end", "a number without end", "too large", "empty"],
)  # fmt: skip
def test_a_message_that_is_none_is_a_status(client, caplog, data, code):
    with grpc.insecure_channel(f"127.0.0.1:{client.running.service.grpc_port}") as channel:
        raw = channel.unary_stream("/sglang.grpc.scheduler.SglangScheduler/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(raw(data, timeout=60))
        assert caught.value.code() == code
    assert "Traceback" not in caplog.text
    assert len(client.whole().output_ids) == 6


def test_a_client_that_is_killed_ends_its_request(client, engine):
    """In the middle of a stream, and of several on one connection."""
    code = """if True:
        import sys
        import grpc
        from smg_grpc_proto import sglang_scheduler_pb2 as pb
        from smg_grpc_proto import sglang_scheduler_pb2_grpc as services
        stub = services.SglangSchedulerStub(grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}"))
        params = pb.SamplingParams(temperature=0, max_new_tokens=1900, ignore_eos=True)
        ids = pb.TokenizedInput(input_ids=[5, 6, 7])
        calls = [
            stub.Generate(pb.GenerateRequest(request_id=str(i), tokenized=ids, sampling_params=params, stream=True))
            for i in range(3)
        ]
        for each in calls:
            next(each)
        print("begun", flush=True)
        sys.stdin.read()
    """
    port = str(client.running.service.grpc_port)
    child = subprocess.Popen(
        [sys.executable, "-c", code, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"begun\n"
        send(child.pid, signal.SIGKILL)
        until(
            lambda: not engine.stats()["running"] and not client.running.service.async_engine.open
        )
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    assert list(client.whole().output_ids) == list(client.whole(PROMPT).output_ids)
