"""Transcripts by OpenAI's client are the engine's own answers, in every format, and each bad
request is one error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

import sglang_lite as sgl
from sglang_lite.protocol import Generation, OverloadedError, SamplingParams
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.async_engine import AsyncEngine
from sglang_lite.server.http.form import parse_form
from tests.media_files import wav
from tests.runtime.media.seeing import engine_of, save_seeing, seen
from tests.runtime.media.whispering import EOT, SECONDS, save_whisper
from tests.server.conftest import Running

SOUND = wav(1.3)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, sgl.Engine]]:
    folder = tmp_path_factory.mktemp("whisper")
    save_whisper(folder, suppress_tokens=None, begin_suppress_tokens=None)
    with engine_of(folder, served_model_name="whisper-1") as engine:
        server = Running(engine)
        yield server, engine
        server.stop()


@pytest.fixture
def audio(whisper: tuple[Running, sgl.Engine]) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{whisper[0].url}/v1", api_key="x", max_retries=0) as client:
        yield client.audio


def said(engine: sgl.Engine, instructions: str) -> str:
    params = SamplingParams(max_tokens=64, temperature=0)
    return engine.complete(seen(SOUND, instructions), params).text.strip()


def ask(
    server: Running,
    kind: str = "transcriptions",
    data: bytes = SOUND.data,
    **fields: str | list[str],
) -> httpx2.Response:
    return httpx2.post(
        f"{server.url}/v1/audio/{kind}", files={"file": ("a.wav", data)}, data=fields
    )


def test_a_transcript_is_the_engines_own(whisper: tuple[Running, sgl.Engine], audio: Any) -> None:
    file, engine = ("a.wav", SOUND.data), whisper[1]
    expected = said(engine, "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>")
    answer = audio.transcriptions.create(file=file, model="whisper-1", language="de")
    assert (answer.text, answer.usage.seconds) == (expected, 2)
    assert (
        audio.transcriptions.create(
            file=file, model="whisper-1", language="de", response_format="text"
        ).strip()
        == expected
    )
    english = ask(whisper[0], "translations", language="de").json()
    assert english["text"] == said(
        engine, "<|startoftranscript|><|de|><|translate|><|notimestamps|>"
    )
    before = audio.transcriptions.create(file=file, model="whisper-1", language="en", prompt="ab")
    start = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    assert before.text == said(engine, f"<|startofprev|> ab{start}")
    told = list(
        audio.transcriptions.create(file=file, model="whisper-1", language="de", stream=True)
    )
    assert [each.type for each in told] == ["transcript.text.delta"] * (len(told) - 1) + [
        "transcript.text.done"
    ]
    assert told[-1].text == "".join(each.delta for each in told[:-1]).strip() == expected


def test_a_stream_that_fails_ends_with_the_error(
    whisper: tuple[Running, sgl.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, asked = AsyncEngine.results, []

    async def results(self: AsyncEngine, request: GenerateRequest) -> list[Generation]:
        asked.append(request)
        if len(asked) > 1:
            raise OverloadedError("too many.")
        return await whole(self, request)

    monkeypatch.setattr(AsyncEngine, "results", results)
    told = ask(whisper[0], data=wav(2 * SECONDS).data, language="de", stream="true")
    *_, error, done = told.text.split("\n\n")[:-1]
    assert "too many." in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert (told.status_code, done) == (200, "data: [DONE]")


def test_a_language_that_is_not_told_is_the_likeliest(
    whisper: tuple[Running, sgl.Engine], audio: Any
) -> None:
    scores = whisper[1].complete(
        seen(SOUND, "<|startoftranscript|>"),
        SamplingParams(
            max_tokens=1, temperature=0, logit_bias=((EOT + 2, 100.0), (EOT + 3, 100.0))
        ),
    )
    likeliest = {EOT + 2: "en", EOT + 3: "de"}[scores.token_ids[0]]
    answer = audio.transcriptions.create(
        file=("a.wav", SOUND.data), model="whisper-1", response_format="verbose_json"
    )
    assert answer.language == likeliest


def test_segments_and_subtitles_have_times(whisper: tuple[Running, sgl.Engine], audio: Any) -> None:
    seconds = SECONDS + 0.5
    file = ("a.wav", wav(seconds).data)
    answer = audio.transcriptions.create(
        file=file,
        model="whisper-1",
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    assert answer.duration == pytest.approx(seconds)
    starts = [each.start for each in answer.segments]
    assert starts == sorted(starts)
    assert answer.segments[-1].seek > 0  # of a later window
    assert all(
        each.start <= each.end <= seconds + 1e-6 and each.avg_logprob <= 0
        for each in answer.segments
    )
    assert all(token < EOT for each in answer.segments for token in each.tokens)
    assert answer.text == "".join(each.text for each in answer.segments).strip()
    subtitles = audio.transcriptions.create(
        file=file, model="whisper-1", language="en", response_format="srt"
    )
    first, second, *_ = subtitles.splitlines()
    assert first == "1"
    assert second.startswith("00:00:0")
    assert " --> " in second
    assert subtitles.count(" --> ") == len(answer.segments)
    file = ("a.wav", SOUND.data)
    web = audio.transcriptions.create(
        file=file, model="whisper-1", language="en", response_format="vtt"
    )
    assert web.startswith("WEBVTT\n\n00:00:0")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"language": "fr"}, "is no language of the model"),
        ({"language": "<|de|>"}, "is no language of the model"),
        (
            {"timestamp_granularities[]": ["word"], "response_format": "verbose_json"},
            "'word' is not supported",
        ),
        ({"timestamp_granularities[]": ["segment"]}, "is for the detailed answer alone"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"temperature": "2"}, "is not between 0 and 1"),
        ({"temperature": "warm"}, "temperature"),
        ({"stream": "true", "response_format": "srt"}, "'srt' is not streamed"),
        ({"include[]": ["logprobs"]}, "include"),
        ({"nonsense": "1"}, "is not a field of this request"),
        ({"language": ["de", "en"]}, "is given twice"),
        ({"language": "de", "language[]": "en"}, "language: is given twice"),
        ({"prompt": "a" * 300}, "tokens long"),
    ],
)
def test_a_bad_field_is_one_error(
    whisper: tuple[Running, sgl.Engine], fields: dict[str, Any], why: str
) -> None:
    answer = ask(whisper[0], **fields)
    assert (answer.status_code, why in answer.text) == (400, True), answer.text


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"), (wav(0).data, "has no samples"), (b"\0" * 99, "in no known format"),
        (SOUND.data[:30], "audio: "),
        (wav(3700, rate=100, width=1).data, "3,700 seconds long, the limit is 3,600"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_error(
    whisper: tuple[Running, sgl.Engine], data: bytes, why: str
) -> None:
    answer = ask(whisper[0], data=data)
    assert (answer.status_code, why in answer.text) == (400, True), answer.text


def test_the_sounds_of_open_requests_are_bounded(
    whisper: tuple[Running, sgl.Engine], monkeypatch: Any
) -> None:
    # bytes; a second has 64,000
    monkeypatch.setattr("sglang_lite.server.sound_decoder._MAX_BYTES", 100_000)
    found = [ask(whisper[0], data=wav(seconds).data, language="en") for seconds in (1.3, 2.5, 1.3)]
    assert [each.status_code for each in found] == [200, 503, 200]
    assert "would take more than 100,000 bytes" in found[1].text


def test_another_body_or_model_is_refused(
    whisper: tuple[Running, sgl.Engine], tmp_path: Any
) -> None:
    url = f"{whisper[0].url}/v1/audio/transcriptions"
    assert "and no form" in httpx2.post(url, json={"file": "a"}).text
    assert httpx2.post(url, files={"other": b"a"}).status_code == 400
    assert ask(whisper[0], model="another").status_code == 404
    save_seeing("qwen2_audio", tmp_path)
    with engine_of(tmp_path) as engine:
        server = Running(engine)
        answer = ask(server)
        server.stop()
    assert (answer.status_code, "writes no transcripts" in answer.text) == (400, True), answer.text


def test_voxtral_transcribes_by_its_own_tokens(tmp_path: Any) -> None:
    save_seeing("voxtral", tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokens = ["[INST]", "[BEGIN_AUDIO]", "[/INST]", "[TRANSCRIBE]"]
    for token, text in zip(tokenizer["added_tokens"][-4:], tokens):
        token["content"] = text
    file.write_text(json.dumps(tokenizer))
    with engine_of(tmp_path, context_length=96) as engine:
        params = SamplingParams(max_tokens=engine.context_length, temperature=0)
        expected = engine.complete(
            seen("[INST][BEGIN_AUDIO]", SOUND, "[/INST]lang:en[TRANSCRIBE]"), params
        ).text.strip()
        server = Running(engine)
        answers = [
            ask(server, language="en"),
            ask(server, response_format="srt"),
            ask(server, language="[INST]"),
        ]
        server.stop()
    assert answers[0].json()["text"] == expected
    assert "writes transcripts alone" in answers[1].text
    assert "is no code of a language" in answers[2].text


def test_forms_are_read_in_any_order_and_cut_ones_refused() -> None:
    body = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n1\r\n--x\r\nContent-Disposition: form-data; filename="name"; name="file"\r\nContent-Type: audio/wav\r\n\r\n\r\n\r\n--y\r\n--x--\r\n'
    assert parse_form(body, "multipart/form-data; boundary=x") == [
        ("a", b"1"),
        ("file", b"\r\n\r\n--y"),
    ]
    assert parse_form(body.replace(b"--x", b"--a b"), 'multipart/form-data; boundary="a b"')[0] == (
        "a",
        b"1",
    )
    for bad in (body[:-6], b""):
        with pytest.raises(sgl.ParameterError, match="cut off"):
            parse_form(bad, "multipart/form-data; boundary=x")
    with pytest.raises(sgl.ParameterError, match="without a name"):
        parse_form(b"--x\r\n\r\n1\r\n--x--", "multipart/form-data; boundary=x")
