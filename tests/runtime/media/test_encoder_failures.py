"""An encoder that fails for an image, or makes nothing of it, fails the requests about that image,
by name.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_lite as sgl
from sglang_lite.protocol import BackendError, OverloadedError
from sglang_lite.runtime.core.media_part import IMAGE_THREADS
from sglang_lite.runtime.models.vision_tower import VisionTower
from tests.media_files import wav
from tests.runtime.media.seeing import GREEDY, engine_of, png, save_seeing, seen, submit


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_seeing("llava", folder)
    return folder


@pytest.mark.parametrize(
    ("failure", "kind", "why"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"),
            OverloadedError,
            "not enough memory",
        ),
        (ValueError("no such shape"), BackendError, "can't be encoded: ValueError"),
        (None, BackendError, "features that are NaN or infinite"),
    ],
)
def test_an_image_that_cant_be_encoded_fails_alone(
    failure: Exception | None,
    kind: type[Exception],
    why: str,
    llava: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode, bad, other = VisionTower.encode, png(28, 28, seed=1), png(28, 28, seed=2)

    def failing(tower: VisionTower, images: Sequence[Any]) -> list[torch.Tensor]:
        found = encode(tower, images)
        if tried:
            return found
        tried.append(images)
        if failure is not None:
            raise failure
        return [each * float("nan") for each in found]

    tried: list[Any] = []
    with engine_of(llava, device="cpu") as engine:
        expected = engine.complete(seen("ab", other), GREEDY).token_ids
        monkeypatch.setattr(VisionTower, "encode", failing)
        waiting = [
            submit(engine, each, GREEDY)
            for each in (seen("ab", bad), seen("ab", other), seen("abc"))
        ]
        with pytest.raises(kind, match=why):
            waiting[0].result(60)
        assert waiting[1].result(60).token_ids == expected
        assert len(waiting[2].result(60).token_ids) == 6
        # what has failed left nothing behind
        assert len(engine.complete(seen("ab", bad), GREEDY).token_ids) == 6


class _Holding(BaseHTTPRequestHandler):
    """An encoder that answers nothing until it may, and then that it can't."""

    def do_POST(self) -> None:
        server: Any = self.server
        self.rfile.read(int(self.headers["content-length"]))
        server.asked.release()
        assert server.allowed.wait(60)
        self.send_error(500)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def holding() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Holding)
    server.daemon_threads, server.asked, server.allowed = (
        True,
        threading.Semaphore(0),
        threading.Event(),
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.allowed.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_features_of_a_request_that_has_left_are_not_fetched(llava: Path, holding: Any) -> None:
    url = f"http://127.0.0.1:{holding.server_port}"
    with engine_of(llava, device="cpu", language_only=True, encoder_urls=[url]) as engine:
        prompts = [seen("ab", png(28, 28, seed=seed)) for seed in range(IMAGE_THREADS + 4)]
        events: list[Any] = []
        requests = [engine.submit(each, GREEDY, sink=events.append) for each in prompts]
        for _ in range(IMAGE_THREADS):
            assert holding.asked.acquire(timeout=60)
        for each in requests:
            each.abort()
        assert len(engine.complete("text alone", GREEDY).token_ids) == 6
        assert len(events) == len(requests)
        holding.allowed.set()
    assert not holding.asked.acquire(blocking=False)


def test_settings_that_make_other_sounds_are_refused_by_name(tmp_path: Path) -> None:
    save_seeing("qwen2_audio", tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dither": 0.1}))
    with pytest.raises(
        sgl.ModelError, match=r"preprocessor_config.json: dither 0.1 is not supported. Set it to 0"
    ):
        engine_of(tmp_path)


def test_a_gpu_without_memory_for_a_spectrogram_is_no_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    save_seeing("qwen2_audio", tmp_path)
    monkeypatch.setattr(torch, "hann_window", full)
    with pytest.raises(sgl.ModelError, match="not enough memory to start: CUDA out of memory"):
        engine_of(tmp_path, device="cpu").complete(seen("a", wav(0.4)), GREEDY)
