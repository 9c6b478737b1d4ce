"""Sounds on the local engine give transformers' probabilities, are shared when they are the same,
and never cross.
"""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoFeatureExtractor

import sglang_lite as sgl
from sglang_lite.protocol import (
    CapabilityError,
    Generation,
    Media,
    ParameterError,
    Prompt,
    Regex,
    SamplingParams,
    Span,
)
from tests.media_files import RATE, wav
from tests.runtime.media.seeing import (
    GREEDY,
    Seeing,
    check_with,
    engine_of,
    png,
    save_seeing,
    seen,
    submit,
)


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("models") / "qwen2_audio"
    model = save_seeing("qwen2_audio", folder)
    with engine_of(folder) as engine:
        yield Seeing(folder, model, engine)


def heard(sound: Media) -> np.ndarray[Any, Any]:
    """Samples of a file of 16 bits, of one channel and the model's rate."""
    with wave.open(io.BytesIO(sound.data)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def check(hearing: Seeing, answer: Generation, *sounds: Media) -> None:
    extractor = AutoFeatureExtractor.from_pretrained(hearing.folder)
    inputs = extractor(
        [heard(each) for each in sounds], sampling_rate=RATE, padding="max_length", return_attention_mask=True,
        return_tensors="pt",
    )  # fmt: skip

    def logprobs(ids: Sequence[int]) -> torch.Tensor:
        tokens = torch.tensor([list(ids)])
        with torch.inference_mode():
            found = hearing.model(
                input_ids=tokens, input_features=inputs["input_features"], attention_mask=torch.ones_like(tokens),
                feature_attention_mask=inputs["attention_mask"],
            )  # fmt: skip
        return found.logits[0].float().log_softmax(-1)  # type: ignore[no-any-return] # of transformers

    check_with(answer, logprobs)


def test_sounds_have_transformers_probabilities(hearing: Seeing) -> None:
    first, second, whole = wav(0.4), wav(0.65, pitch=600), wav(1)
    for sounds in ([first], [first, second], [whole], [second, first, whole]):
        answer = hearing.engine.complete(
            seen("ab", *(part for each in sounds for part in (each, "cd"))), GREEDY
        )
        check(hearing, answer, *sounds)
    assert answer.usage.image_tokens == 16 + 10 + 25


def test_voxtral_hears_windows_of_a_sound_with_transformers_probabilities(tmp_path: Path) -> None:
    folder = tmp_path / "voxtral"
    model = save_seeing("voxtral", folder)
    extractor = AutoFeatureExtractor.from_pretrained(folder)

    def logprobs(ids: Sequence[int]) -> torch.Tensor:
        windows = []
        # as transformers' processor cuts them, which needs Mistral's own tokenizer
        for each in sounds:
            found = extractor(
                heard(each), sampling_rate=RATE, padding=True, pad_to_multiple_of=RATE, truncation=False,
                return_tensors="pt",
            )  # fmt: skip
            windows.append(found["input_features"].reshape(16, -1, 100).transpose(0, 1))
        with torch.inference_mode():
            logits = model(
                input_ids=torch.tensor([list(ids)]), input_features=torch.cat(windows)
            ).logits
        return logits[0].float().log_softmax(-1)  # type: ignore[no-any-return] # of transformers

    with engine_of(folder) as engine:
        for sounds in ([wav(0.4)], [wav(2.3, pitch=600), wav(1)]):
            answer = engine.complete(
                seen("ab", *(part for each in sounds for part in (each, "cd"))), GREEDY
            )
            check_with(answer, logprobs)
        assert answer.usage.image_tokens == (3 + 1) * 25


@pytest.mark.parametrize("step_tokens", [7, 64])
def test_a_sound_is_computed_in_chunks_forked_and_found_in_the_cache(
    hearing: Seeing, step_tokens: int
) -> None:
    sound = wav(0.8)
    with engine_of(hearing.folder, step_tokens=step_tokens, page_size=2) as engine:
        check(hearing, engine.complete(seen("ab", sound, "cd"), GREEDY), sound)
        again = engine.complete(seen("ab", sound, "ef"), GREEDY)
        check(hearing, again, sound)
        assert again.usage.image_tokens == 20
        assert again.usage.cached_image_tokens == again.usage.image_tokens == 20
        assert engine.stats()["images_encoded"] == 1

        @sgl.function
        def listen(s: sgl.ProgramState) -> None:
            s += "ab" + sgl.audio(sound.data)
            branches = s.fork(4)
            for i, branch in enumerate(branches):
                branch += f"{i}" + sgl.gen("answer", regex="[A-Z]{3}", temperature=0)
            branches.join()
            s += "gh" + sgl.select("chosen", ["ij", "kl"])

        state = listen().run(backend=engine)
        params, constraint = SamplingParams(temperature=0), Regex("[A-Z]{3}")
        answers = [engine.complete(seen("ab", sound, f"{i}"), params, constraint) for i in range(4)]
        assert state["answer"] == [each.text for each in answers]
        assert state["chosen"] in ("ij", "kl")
        assert engine.stats()["images_encoded"] == 1


def test_sounds_of_equal_length_never_cross(hearing: Seeing) -> None:
    sounds = [wav(0.5), wav(0.5, pitch=900)]
    alone = [hearing.engine.complete(seen("q", each), GREEDY).token_ids for each in sounds]
    pending = [submit(hearing.engine, seen("q", sounds[i % 2]), GREEDY) for i in range(20)]
    assert [each.result().token_ids for each in pending] == alone * 10


def test_generate_takes_sounds_that_the_text_names(hearing: Seeing, tmp_path: Path) -> None:
    sound = wav(0.5)
    (tmp_path / "tone.wav").write_bytes(sound.data)
    expected = hearing.engine.complete(Prompt((Span("ab<image>cd"),), images=(sound,)), GREEDY)
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    sources: tuple[Any, ...] = (sound.data, tmp_path / "tone.wav", str(tmp_path / "tone.wav"))
    for source in sources:
        answer: Any = hearing.engine.generate("ab<image>cd", params, audio_data=source)
        assert answer["output_ids"] == list(expected.token_ids)
    with pytest.raises(
        ParameterError,
        match=r"has 1 placeholder, and 0 sounds\. Give a sound for each <image>: audio_data=",
    ):
        hearing.engine.generate("ab<image>cd", params)
    with pytest.raises(ParameterError, match="can't see images"):
        hearing.engine.generate("ab<image>cd", params, image_data=png(9, 9))
    assert hearing.engine.media_kinds == {"audio"}


def test_the_limit_of_sounds_is_their_own(hearing: Seeing) -> None:
    with engine_of(hearing.folder, limit_mm_data_per_request={"audio": 1, "image": 9}) as engine:
        assert engine.complete(seen("a", wav(0.2)), GREEDY).token_ids
        with pytest.raises(ParameterError, match="has 2 sounds, and 1 is the limit"):
            engine.complete(seen("a", wav(0.2), wav(0.2)), GREEDY)


@pytest.mark.parametrize(
    ("sound", "why"),
    [
        (wav(1.1), "audio: is longer than 1 seconds"),
        (wav(0), "audio: has no samples"),
        (wav(0.01), "audio: 160 samples are too short to hear"),
        (Media(wav(0.5).data[:30], "audio/wav"), "audio: "),
        (
            Media(b"\0" * 100, "audio/wav"),
            "audio: begins with .*: in no known format. Known: WAV, ",
        ),
        (Media(b"", "audio/wav"), "audio: is empty"),
        (
            Media(url="https://a.example/b.wav", media_type="audio/wav"),
            "is an address, and none is fetched here",
        ),
    ],
)
def test_a_bad_sound_is_one_error_and_others_go_on(hearing: Seeing, sound: Media, why: str) -> None:
    other = submit(hearing.engine, seen("a", wav(0.2)), GREEDY)
    with pytest.raises((ParameterError, CapabilityError), match=why):
        hearing.engine.complete(seen("ab", sound, "cd"), GREEDY)
    assert other.result().token_ids


def test_a_model_without_sounds_names_them(tmp_path: Path) -> None:
    save_seeing("llava", tmp_path)
    with engine_of(tmp_path) as engine:
        with pytest.raises(
            ParameterError, match=r"can't hear sounds\. Send what is said as text\."
        ):
            engine.generate("<image>", {}, audio_data=wav(0.2).data)

        @sgl.function
        def listen(s: sgl.ProgramState) -> None:
            s += "ab" + sgl.audio(wav(0.2).data) + sgl.gen("answer", max_tokens=1)

        with pytest.raises(
            sgl.CapabilityError, match=r"can't honour sounds\. Describe what it says"
        ):
            listen().run(backend=engine)


def test_an_extractor_that_transformers_has_not_is_a_named_error(tmp_path: Path) -> None:
    save_seeing("qwen2_audio", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"feature_extractor_type": "OfTomorrow"})
    )
    with pytest.raises(sgl.ModelError, match="can't make its extractor of sounds"):
        engine_of(tmp_path)
