"""The GPU's kernels give Whisper transformers' probabilities: on a GPU, or on the CPU under
Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import sglang_lite as sgl
from sglang_lite.protocol import Regex, SamplingParams
from tests.media_files import wav
from tests.runtime.kernels import needs_kernels
from tests.runtime.media.seeing import GREEDY, Seeing, seen, submit
from tests.runtime.media.test_whisper import SAYS, check
from tests.runtime.media.whispering import PREFIX, save_whisper

pytestmark = needs_kernels
GPU = torch.cuda.is_available()


def kernels(folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> sgl.Engine:
    if not GPU:
        monkeypatch.setattr("sglang_lite.runtime.models.whisper.WhisperDecoder.fused", True)
    settings = {
        "dtype": "float32",
        "max_total_tokens": 1024,
        "threads": 1,
        "device": "cuda" if GPU else "cpu",
    }
    return sgl.Engine(str(folder), in_process=True, **{**settings, **config})


@pytest.mark.parametrize("backend", ["triton", "torch"] if GPU else ["triton"])
def test_whisper_in_chunks_and_behind_a_cached_sound(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sound, few = (
        save_whisper(tmp_path),
        wav(0.8),
        msgspec.structs.replace(GREEDY, max_tokens=2),
    )
    for step_tokens in (7, 100, 512) if GPU else (100,):
        settings: dict[str, Any] = {
            "step_tokens": step_tokens,
            "max_running": 4,
            "attention_backend": backend,
        }
        with kernels(tmp_path, monkeypatch, **settings, page_size=16) as engine:
            for text in ("", "d") if GPU else ("",):
                answer = engine.complete(seen(sound, SAYS, text), few)
                check(Seeing(tmp_path, model, engine), answer, sound)
            assert answer.usage.cached_image_tokens == (PREFIX if GPU else 0)


@pytest.mark.skipif(not GPU, reason="takes the interpreter long")
def test_many_sounds_at_once_and_forks_by_captured_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sounds = (
        save_whisper(tmp_path),
        [wav(0.3 + i / 10, pitch=300 + 50 * i) for i in range(8)],
    )
    params = msgspec.structs.replace(GREEDY, max_tokens=16)
    with kernels(tmp_path, monkeypatch, max_total_tokens=4096) as engine:
        pending = [submit(engine, seen(each, SAYS), params) for each in sounds for _ in range(2)]
        for i, each in enumerate(pending):
            check(Seeing(tmp_path, model, engine), each.result(), sounds[i // 2])

        @sgl.function
        def hear(s: sgl.ProgramState) -> None:
            s += sgl.audio(sounds[0].data) + SAYS
            branches = s.fork(8)
            for i, branch in enumerate(branches):
                branch += f"{i}" + sgl.gen("said", regex="[A-Z]{3}", temperature=0)
            branches.join()

        state, greedy = hear().run(backend=engine), SamplingParams(temperature=0)
        alone = [
            engine.complete(seen(sounds[0], SAYS, f"{i}"), greedy, Regex("[A-Z]{3}")).text
            for i in range(8)
        ]
        assert state["said"] == alone
