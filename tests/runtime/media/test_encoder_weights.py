"""An encoder's weights are replaced, read back and dropped with the decoder's, and features of the
old ones forgotten.
"""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sglang_lite as sgl
from sglang_lite.protocol import Generation, SamplingParams, SglError
from sglang_lite.runtime.media.encoder_client import EncoderClient
from sglang_lite.runtime.tokens.image_span import MediaItem
from tests.media_files import wav
from tests.runtime.media.seeing import GREEDY, engine_of, png, save_seeing, seen

PROMPTS = {
    "llava": seen("ab", png(28, 28), "c"), "qwen2_5_vl": seen("ab", png(60, 40), "c"), "qwen2_audio": seen("a", wav(0.4)),
}  # fmt: skip
LONG = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


def pair(family: str, root: Path) -> tuple[Path, Path]:
    """Folders of two models of a family with different weights."""
    old, new = root / "old", root / "new"
    save_seeing(family, old)
    shutil.copytree(old, new)
    tensors = {name: tensor * 0.8 for name, tensor in tensors_of(old).items()}
    save_file(tensors, new / "model.safetensors", {"format": "pt"})
    return old, new


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def told(engine: sgl.Engine, family: str) -> tuple[Any, ...]:
    engine.flush_cache()  # a cached prefix rounds otherwise
    answer = engine.complete(PROMPTS[family], GREEDY)
    return answer.token_ids, answer.output_logprobs


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", PROMPTS)
def test_new_weights_equal_those_of_an_engine_that_loads_them(family: str, tmp_path: Path) -> None:
    old, new = pair(family, tmp_path)
    given = tensors_of(new)
    of_encoder = next(name for name in given if "tower" in name or "visual" in name)
    with engine_of(new) as engine:
        expected = told(engine, family)
    with engine_of(old, enable_memory_saver=True) as engine:
        before = told(engine, family)
        assert before != expected
        engine.update_weights(str(new))
        assert told(engine, family) == expected
        engine.sleep(2)
        engine.wake()
        assert told(engine, family) == expected
        engine.update_weights_from_tensor(tensors_of(old))
        assert told(engine, family) == before
        items = list(given.items())
        for start in range(0, len(items), 16):
            engine.update_weights_from_tensor(
                items[start : start + 16], flush_cache=start + 16 >= len(items)
            )
        assert told(engine, family) == expected
        read = torch.tensor(engine.get_weights_by_name(of_encoder, 10_000))
        assert torch.equal(read, given[of_encoder])
        for tensors, why in (
            ({of_encoder: given[of_encoder][:-1]}, "has shape"),
            ({of_encoder: given[of_encoder] * float("nan")}, "NaN or infinite"),
            ({f"{of_encoder}.what": given[of_encoder]}, "has no place for"),
        ):
            with pytest.raises(sgl.ModelError, match=why):
                engine.update_weights_from_tensor(tensors)
        assert told(engine, family) == expected


def begun(engine: sgl.Engine) -> Future[Generation | SglError]:
    """Future of a long answer whose first token has arrived."""
    first: Future[Any] = Future()
    end: Future[Generation | SglError] = Future()

    def take(event: Any) -> None:
        if isinstance(event, Generation | SglError):
            end.set_result(event)
        elif not first.done():
            first.set_result(event)

    engine.submit(PROMPTS["llava"], LONG, sink=take, stream=True)
    first.result(60)
    return end


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_under_way_read_features_of_the_new_weights(mode: str, tmp_path: Path) -> None:
    old, new = pair("llava", tmp_path)
    with engine_of(new) as engine:
        expected = told(engine, "llava")
    with engine_of(old) as engine:
        told(engine, "llava")
        end = begun(engine)
        engine.pause_generation(mode)
        engine.update_weights_from_tensor(tensors_of(new))
        encoded = engine.stats()["images_encoded"]
        engine.continue_generation()
        answer = end.result(60)
        assert engine.stats()["images_encoded"] == encoded + 1
        assert isinstance(answer, Generation)
        assert len(answer.token_ids) == 60
        assert told(engine, "llava") == expected


def test_an_engine_answers_while_other_servers_encode_for_its_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = pair("llava", tmp_path)
    allowed = threading.Event()

    def prepare(client: EncoderClient, item: MediaItem) -> dict[str, torch.Tensor]:
        assert allowed.wait(60)
        return {"features": torch.ones(item.count, client.width)}

    monkeypatch.setattr(EncoderClient, "prepare", prepare)
    elsewhere: dict[str, Any] = {"language_only": True, "encoder_urls": ["http://127.0.0.1:9"]}
    with engine_of(old, **elsewhere) as engine:
        allowed.set()
        end = begun(engine)
        allowed.clear()
        engine.pause_generation("retract")
        engine.update_weights_from_tensor(tensors_of(new))
        engine.continue_generation()
        assert engine.stats()["images_stored"] == 1
        allowed.set()
        answer = end.result(60)
        assert isinstance(answer, Generation)
        assert len(answer.token_ids) == 60
