"""Whisper's transcripts follow transformers' rules, and their times tell what was said when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from sglang_lite.protocol import CapabilityError, ParameterError, SamplingParams
from sglang_lite.runtime.media.speech import WhisperSpeech, load_speech_format
from sglang_lite.runtime.media.whisper_rules import apply_whisper_rules
from tests.media_files import wav
from tests.runtime.media.seeing import Seeing, engine_of
from tests.runtime.media.test_whisper import spectrogram
from tests.runtime.media.whispering import (
    EN,
    EOT,
    FIRST_TIME,
    GENERATION,
    NO_TIMES,
    SOT,
    TRANSCRIBE,
    save_whisper,
)

START = [SOT, EN, TRANSCRIBE]
NEVER, NOT_FIRST = GENERATION["suppress_tokens"], GENERATION["begin_suppress_tokens"]


@pytest.fixture
def speech(whisper: Seeing) -> WhisperSpeech:
    engine = whisper.engine
    found = load_speech_format(engine.core.builder.media, engine.tokenizer, lambda: whisper.folder)
    assert isinstance(found, WhisperSpeech)
    return found


def theirs() -> LogitsProcessorList:
    """transformers' processors, in the order in which its `generate` runs them."""
    config = GenerationConfig(eos_token_id=EOT, bos_token_id=EOT)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = NO_TIMES, 50
    return LogitsProcessorList([
        SuppressTokensLogitsProcessor(NEVER), SuppressTokensAtBeginLogitsProcessor(NOT_FIRST, begin_index=len(START)),
        WhisperTimeStampLogitsProcessor(config, begin_index=len(START)),
    ])  # fmt: skip


def test_the_rules_are_transformers() -> None:
    random, rules = np.random.default_rng(0), theirs()
    for _ in range(150):
        drawn = [FIRST_TIME, 7][: random.integers(0, 3)]
        for _ in range(random.integers(0, 6) if drawn else 0):  # times do not go back
            drawn.append(
                int(
                    random.choice(
                        [8, max(drawn) + (max(drawn) >= FIRST_TIME) * int(random.integers(0, 9))]
                    )
                )
            )
        logits = torch.from_numpy(random.normal(0, 3, FIRST_TIME + 151).astype(np.float32))
        expected = rules(torch.tensor([START + drawn]), logits[None].clone())[0]
        found = apply_whisper_rules(
            SOT,
            len(START),
            EOT,
            FIRST_TIME,
            50,
            NEVER,
            NOT_FIRST,
            [999_999, SOT, *START[1:], *drawn],
            logits,
        )
        assert torch.equal(found, expected)


def test_a_transcript_with_times_is_the_one_that_transformers_draws(
    whisper: Seeing, speech: WhisperSpeech
) -> None:
    sound, start = wav(1.3), speech.instructions("en", "transcribe", timed=True)
    assert start == START
    expected = GenerationMixin.generate(
        whisper.model, spectrogram(whisper, sound), decoder_input_ids=torch.tensor([start]), do_sample=False,
        max_new_tokens=20, logits_processor=theirs(), generation_config=GenerationConfig(eos_token_id=EOT, pad_token_id=EOT),
    )  # fmt: skip
    answer: Future[Any] = Future()
    params = SamplingParams(max_tokens=20, temperature=0)
    rules = speech.logit_rules(start, timed=True)
    whisper.engine.submit(
        speech.prompt(sound, start), params, sink=answer.set_result, logit_processor=rules
    )
    assert list(answer.result().token_ids) == expected[0, len(start) :].tolist()


def t(seconds: float) -> int:
    return FIRST_TIME + round(50 * seconds)


@pytest.mark.parametrize(
    ("ids", "segments", "complete"),
    [
        ([t(0), 7, 8, t(1.5), EOT], [(0, 1.5, (7, 8))], 3),
        ([t(0), 7, t(1), t(1.2), 8, t(2), EOT], [(0, 1, (7,)), (1.2, 2, (8,))], 3),
        ([t(0), 7, t(1), t(1.2), 8, 9], [(0, 1, (7,))], 1),  # cut off within the second segment
        ([t(0), 7, t(1), t(1), EOT], [(0, 1, (7,))], 1),
        ([t(0.4), 7, 8, EOT], [(0.4, 3, (7, 8))], 3),
        ([7, EOT], [(0, 3, (7,))], 3),
        ([EOT], [], 3),
        ([t(0), t(0), EOT], [], 3),
        ([], [], 3),
    ],
)
def test_times_tell_segments(
    speech: WhisperSpeech,
    ids: Sequence[int],
    segments: list[tuple[float, float, tuple[int, ...]]],
    complete: float,
) -> None:
    found, end = speech.read_segments(ids, 3)
    assert ([tuple(each) for each in found], end) == (segments, complete)


def test_instructions_that_the_model_has_not_are_refused(
    speech: WhisperSpeech, tmp_path: Path
) -> None:
    with pytest.raises(
        ParameterError, match=r"language: 'fr' is no language of the model\. It has en, de"
    ):
        speech.instructions("fr", "transcribe", timed=True)
    save_whisper(tmp_path, is_multilingual=False)
    with engine_of(tmp_path) as engine:
        english = load_speech_format(engine.core.builder.media, engine.tokenizer, lambda: tmp_path)
        assert isinstance(english, WhisperSpeech)
        assert english.instructions("en", "transcribe", timed=False) == [SOT, NO_TIMES]
        with pytest.raises(CapabilityError, match="knows English alone"):
            english.instructions(None, "translate", timed=False)
        (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": None}))
        assert english.logit_rules([SOT], timed=False) is not None
