"""A real Whisper writes what transformers writes, and what is said; by the engine and by the
server.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoFeatureExtractor, WhisperForConditionalGeneration

import sglang_lite as sgl
from sglang_lite.media.files import decode_samples, encode_wav
from sglang_lite.protocol import Media, SamplingParams
from sglang_lite.runtime.media.speech import WhisperSpeech, load_speech_format
from tests.real.conftest import file_of
from tests.real.convert_whisper import convert
from tests.server.conftest import Running

RATE, END = 16_000, 50_257
# The language of each sound, and a pattern of words in it.
SOUNDS = {
    "beckett": ("en", "ever failed no matter try again fail again fail better"),
    "nature": ("en", "some call me nature others call me mother nature"),
    "rainbow": (
        "en",
        "the difference in the rainbow depends considerably upon the size of the drops",
    ),
    "chinese": ("zh", "[这這]就是我[万萬]人"),  # it writes times with traditional characters
}


def hear(name: str) -> NDArray[np.float32]:
    """Returns the samples of a sound: of a file, or one that says nothing."""
    if name == "noise":
        return np.random.default_rng(0).normal(0, 0.1, 5 * RATE).astype(np.float32)
    if name == "silence":
        return np.zeros(2 * RATE, np.float32)
    if name == "window":
        return in_a_row("rainbow", "beckett", "nature", "rainbow", "beckett")[: 30 * RATE]
    return decode_samples(Media(file_of(f"speech-{name}").read_bytes(), "audio/*"), RATE, 60)


def in_a_row(*names: str) -> NDArray[np.float32]:
    """Returns the samples of sounds with half a second behind each."""
    pause = np.zeros(RATE // 2, np.float32)
    return np.concatenate([part for name in names for part in (hear(name), pause)])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        convert(file_of("whisper-base").parent, Path(made))
        yield Path(made)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[sgl.Engine]:
    with sgl.Engine(
        folder, device="cpu", dtype="float32", served_model_name="whisper", in_process=True
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return WhisperForConditionalGeneration.from_pretrained(folder, dtype="float32")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("name", [*SOUNDS, "noise", "silence", "window"])
def test_a_transcript_has_transformers_tokens(
    engine: sgl.Engine, theirs: Any, folder: Path, name: str, timed: bool
) -> None:
    language = SOUNDS.get(name, ("en", ""))[0]
    sound = hear(name)
    speech = load_speech_format(engine.core.builder.media, engine.tokenizer, lambda: folder)
    assert isinstance(speech, WhisperSpeech)
    start = speech.instructions(language, "transcribe", timed=timed)
    answer: Future[Any] = Future()
    engine.submit(
        speech.prompt(encode_wav(sound, RATE), start), SamplingParams(max_tokens=200, temperature=0),
        sink=answer.set_result, logit_processor=speech.logit_rules(start, timed=timed),
    )  # fmt: skip
    features = AutoFeatureExtractor.from_pretrained(folder)(
        sound, sampling_rate=RATE, return_tensors="pt"
    )
    expected = theirs.generate(
        features.input_features, language=language, task="transcribe", return_timestamps=timed, do_sample=False,
        max_new_tokens=200,
        # Otherwise it goes on, where a window ends in the middle of speech, with a second answer
        # from the last time on.
        force_unique_generate_call=timed or None,
    )[0].tolist()  # fmt: skip
    # as some versions give it
    expected = expected[len(start) :] if expected[: len(start)] == start else expected
    assert [each for each in answer.result().token_ids if each != END] == [
        each for each in expected if each != END
    ]


@pytest.fixture(scope="module")
def server(engine: sgl.Engine) -> Iterator[str]:
    running = Running(engine)
    yield running.url
    running.stop()


def transcribe(server: str, sound: NDArray[np.float32]) -> Any:
    """Returns the server's transcript with times, in a language that it has to find out."""
    answer = httpx2.post(
        f"{server}/v1/audio/transcriptions", files={"file": ("sound.wav", encode_wav(sound, RATE).data)},
        data={"response_format": "verbose_json"}, timeout=600,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return answer.json()


def words(text: str) -> str:
    """Returns a text without punctuation and capitals."""
    return " ".join(re.findall(r"\w+", text.lower()))


@pytest.mark.parametrize("name", SOUNDS)
def test_what_is_said_is_written_in_its_language(server: str, name: str) -> None:
    language, said = SOUNDS[name]
    found = transcribe(server, hear(name))
    assert found["language"] == language
    assert re.search(said, words(found["text"]))


def test_a_sound_of_several_windows_is_written_whole(server: str) -> None:
    order = ("rainbow", "beckett", "nature", "rainbow", "beckett")
    sound = in_a_row(*order)
    assert len(sound) > 45 * RATE
    found = transcribe(server, sound)
    assert re.search(".*".join(SOUNDS[name][1] for name in order), words(found["text"]))
    times = [time for segment in found["segments"] for time in (segment["start"], segment["end"])]
    assert times == sorted(times)
    assert times[-1] <= len(sound) / RATE


def test_speech_that_goes_on_at_the_end_of_a_window_is_written(server: str) -> None:
    """The model's answer of 30 seconds ends with a time at which a segment has begun. As
    transformers, the server asks again from there on.
    """
    found = transcribe(server, hear("window"))
    said = [SOUNDS[name][1] for name in ("rainbow", "beckett", "nature")]
    assert re.search(
        ".*".join([*said, "the difference in the rainbow depends considerably upon"]),
        words(found["text"]),
    )
    assert found["segments"][-1]["end"] <= 30
