"""Whisper on the local engine gives transformers' probabilities, in chunks, from the cache, in
forks and constrained.
"""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoFeatureExtractor

import sglang_lite as sgl
from sglang_lite.protocol import Generation, Media, ParameterError, Regex, SamplingParams
from sglang_lite.runtime.loading.description import describe
from tests.media_files import RATE, wav
from tests.runtime.media.seeing import GREEDY, Seeing, check_with, engine_of, seen, submit
from tests.runtime.media.whispering import EN, EOT, NO_TIMES, PREFIX, SOT, TEXT, TRANSCRIBE

SAYS = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


def spectrogram(whisper: Seeing, sound: Media) -> torch.Tensor:
    with wave.open(io.BytesIO(sound.data)) as file:
        heard = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    extractor = AutoFeatureExtractor.from_pretrained(whisper.folder)
    found: torch.Tensor = extractor(heard, sampling_rate=RATE, return_tensors="pt").input_features
    return found


def check(whisper: Seeing, answer: Generation, sound: Media) -> None:
    assert answer.prompt_ids[:PREFIX] == (EOT,) * PREFIX

    def logprobs(ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            found = whisper.model(
                input_features=spectrogram(whisper, sound),
                decoder_input_ids=torch.tensor([ids[PREFIX:]]),
            ).logits[0]
        return torch.cat((torch.zeros(PREFIX, found.shape[1]), found.float().log_softmax(-1)))

    check_with(answer, logprobs)


def test_whisper_has_transformers_probabilities(whisper: Seeing) -> None:
    for sound in (wav(0.4), wav(3, pitch=600)):
        answer = whisper.engine.complete(seen(sound, SAYS), GREEDY)
        check(whisper, answer, sound)
    assert answer.usage.image_tokens == PREFIX
    assert answer.usage.prompt_tokens == PREFIX + 4


def test_whisper_says_what_transformers_generates(whisper: Seeing) -> None:
    sound = wav(1.3)
    rules = dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"))
    expected = whisper.model.generate(
        spectrogram(whisper, sound),
        language="en",
        task="transcribe",
        do_sample=False,
        max_new_tokens=16,
        **rules,
    )
    answer = whisper.engine.complete(
        seen(sound, SAYS), SamplingParams(max_tokens=16, temperature=0)
    )
    said, start = expected[0].tolist(), [SOT, EN, TRANSCRIBE, NO_TIMES]
    said = said[len(start) :] if said[: len(start)] == start else said  # as some versions give it
    assert list(answer.token_ids) == said[:16]  # it listens again where no end is said


def test_a_sound_is_computed_in_chunks_forked_and_found_in_the_cache(whisper: Seeing) -> None:
    sound = wav(0.8)
    with engine_of(whisper.folder, step_tokens=41) as engine:
        check(whisper, engine.complete(seen(sound, SAYS), GREEDY), sound)
        again = engine.complete(seen(sound, SAYS, "ab"), GREEDY)
        check(whisper, again, sound)
        assert again.usage.cached_image_tokens == PREFIX
        assert engine.stats()["images_encoded"] == 1

        @sgl.function
        def hear(s: sgl.ProgramState) -> None:
            s += sgl.audio(sound.data) + SAYS
            branches = s.fork(4)
            for i, branch in enumerate(branches):
                branch += f"{i}" + sgl.gen("said", regex="[A-Z]{3}", temperature=0)
            branches.join()
            s += "gh" + sgl.select("chosen", ["ij", "kl"])

        state = hear().run(backend=engine)
        params, constraint = SamplingParams(temperature=0), Regex("[A-Z]{3}")
        answers = [engine.complete(seen(sound, SAYS, f"{i}"), params, constraint) for i in range(4)]
        assert state["said"] == [each.text for each in answers]
        assert state["chosen"] in ("ij", "kl")
        assert engine.stats()["images_encoded"] == 1


def test_sounds_never_cross_and_wait_for_room(whisper: Seeing) -> None:
    def told(answer: Generation) -> list[float]:
        return [
            value for each in answer.output_logprobs for value in (each.token_id, each.logprob or 0)
        ]

    sounds = [wav(0.5), wav(0.5, pitch=900), wav(0.7)]
    alone = [told(whisper.engine.complete(seen(each, SAYS), GREEDY)) for each in sounds]
    assert all(alone[i] != pytest.approx(alone[i - 1], abs=1e-3) for i in range(3))
    # room for two
    with engine_of(whisper.folder, max_total_tokens=2 * 256, page_size=16) as engine:
        pending = [submit(engine, seen(sounds[i % 3], SAYS), GREEDY) for i in range(12)]
        for i, each in enumerate(pending):
            assert told(each.result()) == pytest.approx(alone[i % 3], abs=1e-3)


def test_a_constraint_holds_over_a_sound(whisper: Seeing) -> None:
    constraint = Regex(r'\{"a":"[xy]","b":[1-9]{2}\}')
    for i in range(4):
        answer = whisper.engine.complete(
            seen(wav(1), SAYS), SamplingParams(max_tokens=48, temperature=1, seed=i), constraint
        )
        assert json.loads(answer.text)["a"] in ("x", "y")


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (seen(SAYS), "has to begin with a sound and have no other"),
        (seen("ab", wav(0.2), SAYS), "has to begin with a sound and have no other"),
        (seen(wav(0.2), wav(0.3), SAYS), "has to begin with a sound and have no other"),
        (seen(wav(0.2)), "has nothing behind its sound"),
        (seen(wav(3.1), SAYS), "audio: is longer than 3 seconds, which the model hears at once"),
        (seen(wav(0), SAYS), "audio: has no samples"),
        (seen(wav(0.2), SAYS, "a" * 64), "tokens long; .* takes 216"),
    ],
)
def test_a_bad_prompt_is_one_error_and_others_go_on(whisper: Seeing, prompt: Any, why: str) -> None:
    other = submit(whisper.engine, seen(wav(0.2), SAYS), GREEDY)
    with pytest.raises(ParameterError, match=why):
        whisper.engine.complete(prompt, GREEDY)
    assert other.result().token_ids


def test_settings_that_whisper_has_not_are_refused(whisper: Seeing) -> None:
    for settings, why in (
        ({"deterministic": True}, "deterministic"),
        ({"context_length": PREFIX}, "context_length: a sound alone takes 192 tokens"),
        ({"page_size": 20}, "page_size: the 192 tokens of a sound are no whole pages"),
        (
            {"encoder_only": True, "max_total_tokens": None},
            "encoder_only: .* no engine takes features from elsewhere",
        ),
        ({"language_only": True, "encoder_urls": ("http://127.0.0.1:1",)}, "language_only"),
        ({"enable_multimodal": False}, "hears nothing without a tokenizer"),
        (
            {"expert_distribution_recorder_mode": "stat"},
            "expert_distribution_recorder_mode: Whisper",
        ),
    ):
        with pytest.raises(sgl.SglError, match=why):
            engine_of(whisper.folder, **settings)
    with pytest.raises(
        sgl.CapabilityError,
        match="transformers' code runs this model: its memory can't be given back",
    ):
        whisper.engine.release_memory_occupation()


def test_generate_and_eight_bit_and_stereo_sounds(whisper: Seeing) -> None:
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    for sound in (wav(0.5), wav(0.5, channels=2), wav(0.5, width=1), wav(0.5, rate=8000)):
        expected = whisper.engine.complete(seen(sound, SAYS), GREEDY)
        answer: Any = whisper.engine.generate(f"<audio>{SAYS}", params, audio_data=sound.data)
        assert answer["output_ids"] == list(expected.token_ids)
    assert whisper.engine.media_kinds == {"audio"}


def test_models_tells_the_encoder_of_a_whisper(whisper: Seeing) -> None:
    found = describe(str(whisper.folder))
    text = [
        value.numel()
        for name, value in whisper.model.model.named_parameters()
        if name.startswith("decoder.")
    ]
    sound = [value.numel() for value in whisper.model.model.encoder.parameters()]
    item = 4 if found.dtype == "float32" else 2
    assert (found.loaded_bytes, found.tower_bytes) == (sum(text) * item, sum(sound) * item)
    assert (found.runs, found.refused, found.media) == ("native", (), ("audio",))
    assert found.cache_bytes == 2 * 2 * 32 * item
    assert found.context_length == PREFIX + TEXT
