"""An encoder that answers too much, something else or with another kind of numbers is passed over."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Picture
from safetensors.torch import load, save
from transformers import AutoImageProcessor

import sglang_lite as sgl
from sglang_lite.protocol import BackendError, Media
from sglang_lite.runtime.calls import EncodeMedia
from sglang_lite.runtime.media.encoder_client import EncoderClient
from sglang_lite.runtime.tokens.image_span import MediaItem
from tests.runtime.media.seeing import png, save_seeing

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
        self.send_header(
            "content-length", str(len(server.body) if server.body is not ENDLESS else 5 << 30)
        )
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
    found.daemon_threads, found.status, found.sent, found.encodings, found.left = (
        True,
        200,
        0,
        [],
        threading.Event(),
    )
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def named(dtype: str, shape: list[int], data: bytes) -> bytes:
    head = json.dumps(
        {ITEM.key.hex(): {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}
    ).encode()
    return len(head).to_bytes(8, "little") + head + data


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, ENDLESS, "answers 200 with more than"),
        (500, ENDLESS, "answers 500 with more than"),
        (200, b"", "answers no features"),
        (200, (1 << 60).to_bytes(8, "little"), "answers no features"),
        (200, named("F4", [2, 3], bytes(3)), "answers no features"),
        (
            200,
            save({ITEM.key.hex(): torch.zeros(2, 3, dtype=torch.int64)}),
            "numbers of torch.int64",
        ),
        (200, save({ITEM.key.hex(): torch.zeros(3, 2)}), "has 3 x 2 numbers"),
        (200, save({ITEM.key.hex(): torch.full((2, 3), float("nan"))}), "NaN or infinite"),
        (200, save({"another": torch.zeros(2, 3)}), "in another way"),
        (502, b"[" * 100_000, "answers 502"),
    ],
)
def test_what_is_no_answer_is_one_error(server: Any, status: int, body: bytes, why: str) -> None:
    server.status, server.body = status, body
    client = EncoderClient(
        [f"http://127.0.0.1:{server.server_port}"], 3, 1, torch.float32, torch.device("cpu")
    )
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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    client = EncoderClient([f"http://127.0.0.1:{server.server_port}"], 3, 1, torch.float32, device)
    (found,) = client.encode([client.prepare(ITEM)])
    assert torch.equal(found.cpu(), features)
    client.close()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_an_engine_that_encodes_alone_makes_transformers_features(
    family: str, tmp_path: Path
) -> None:
    model, images = save_seeing(family, tmp_path), [png(60, 40, seed=seed) for seed in range(3)]
    inputs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(
        images=[Picture.open(io.BytesIO(each)) for each in images], return_tensors="pt"
    )
    with torch.inference_mode():
        made = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    planes = [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
    # by images
    planes = [each if isinstance(each, torch.Tensor) else torch.cat([*each]) for each in planes]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with sgl.Engine(
        str(tmp_path), encoder_only=True, in_process=True, dtype="float32", device=device
    ) as engine:
        answer = engine.core.submit_call(
            EncodeMedia(tuple(Media(each, "image/png") for each in images))
        ).result(60)
        items = [engine.core.builder.media.media_item(Media(each, "image/png")) for each in images]
    found = torch.cat([load(answer)[item.key.hex()] for item in items])
    assert torch.allclose(found, torch.cat(planes, -1), atol=1e-4)
