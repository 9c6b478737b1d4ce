"""An encoder that answers too much, something else or with another kind of numbers is passed over."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from safetensors.torch import save

from sglang_lite.protocol import BackendError, Media
from sglang_lite.runtime.media.encoder_client import EncoderClient
from sglang_lite.runtime.tokens.image_span import MediaItem

ITEM = MediaItem(Media(b"picture", "image/png"), bytes(8), 2, 0)
ENDLESS = b"x" * (1 << 16)


class Answering(BaseHTTPRequestHandler):
    """A server that answers with `status` and `body`; ENDLESS again and again."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        self.rfile.read(int(self.headers["content-length"]))
        server.encodings.append(self.headers["accept-encoding"])
        self.send_response(server.status)
        self.send_header("content-length", str(len(server.body) if server.body is not ENDLESS else 5 << 30))
        self.end_headers()
        try:
            self.wfile.write(server.body)
            while server.body is ENDLESS:
                self.wfile.write(ENDLESS)
                server.sent += len(ENDLESS)
        except OSError:
            server.left.set()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    found: Any = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    found.daemon_threads, found.status, found.sent, found.encodings, found.left = True, 200, 0, [], threading.Event()
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def named(dtype: str, shape: list[int], data: bytes) -> bytes:
    head = json.dumps({ITEM.key.hex(): {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    return len(head).to_bytes(8, "little") + head + data


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, ENDLESS, "answers 200 with more than"),
        (500, ENDLESS, "answers 500 with more than"),
        (200, b"", "answers no features"),
        (200, (1 << 60).to_bytes(8, "little"), "answers no features"),
        (200, named("F4", [2, 3], bytes(3)), "answers no features"),
        (200, save({ITEM.key.hex(): torch.zeros(2, 3, dtype=torch.int64)}), "numbers of torch.int64"),
        (200, save({ITEM.key.hex(): torch.zeros(3, 2)}), "has 3 x 2 numbers"),
        (200, save({ITEM.key.hex(): torch.full((2, 3), float("nan"))}), "NaN or infinite"),
        (200, save({"another": torch.zeros(2, 3)}), "in another way"),
        (502, b"[" * 100_000, "answers 502"),
    ],
)
def test_what_is_no_answer_is_one_error(server: Any, status: int, body: bytes, why: str) -> None:
    server.status, server.body = status, body
    client = EncoderClient([f"http://127.0.0.1:{server.server_port}"], 3, 1, torch.float32, torch.device("cpu"))
    try:
        with pytest.raises(BackendError, match=why):
            client.prepare(ITEM)
    finally:
        client.close()
    assert server.encodings == ["identity"]
    if body is ENDLESS:
        assert server.left.wait(60)
        assert server.sent < 64 << 20


def test_features_are_the_servers(server: Any) -> None:
    features = torch.arange(6.0).view(2, 3)
    server.body = save({ITEM.key.hex(): features})
    client = EncoderClient([f"http://127.0.0.1:{server.server_port}"], 3, 1, torch.float32, torch.device("cpu"))
    (found,) = client.encode([client.prepare(ITEM)])
    assert torch.equal(found, features)
    client.close()
