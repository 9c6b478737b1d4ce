"""Routes of OpenAI's API that transcribe speech or translate it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import zlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from starlette.responses import Response

from sglang_lite.media.files import encode_wav
from sglang_lite.protocol import (
    CapabilityError,
    Generation,
    Media,
    ParameterError,
    Prompt,
    SamplingParams,
)
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.runtime.media.sound_families import SoundFormat
from sglang_lite.runtime.media.speech import Task, VoxtralSpeech, WhisperSpeech
from sglang_lite.server.async_engine import wait_for_first_event
from sglang_lite.server.endpoint import HttpRequest, Route, json_response
from sglang_lite.server.fields import Fields
from sglang_lite.server.http.form import parse_form
from sglang_lite.server.http.sse import EventStream, encode_event
from sglang_lite.server.service import Service

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sglang_lite.runtime.requests.logit_processors import LogitProcessor


class TranscriptionRequest(msgspec.Struct, kw_only=True):
    """OpenAI's request for a transcript, as a form."""

    file: bytes
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float | None = None
    timestamp_granularities: list[str] = []
    stream: bool | None = None

    @property
    def timed(self) -> bool:
        """True if the format of the answer includes times."""
        return self.response_format not in ("json", "text")


TRANSCRIPTIONS: Fields[TranscriptionRequest] = Fields(
    TranscriptionRequest,
    {},
    {
        "include": (),
        "chunking_strategy": (),
        "known_speaker_names": (),
        "known_speaker_references": (),
    },
)
_FORMAT = "response_format"


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a transcript.

    Attributes:
        start, end: seconds from the beginning of the sound.
        text: what is said.
        details: further fields of OpenAI's segments.
    """

    start: float
    end: float
    text: str
    details: dict[str, Any]


class _Transcript:
    """Transcript of a sound.

    Args:
        service: service of the server.
        body: the request.
        task: whether to transcribe or to translate.
        heard: samples of the sound.
        form: format of the model's sounds.

    Attributes:
        language: code of the language, once it is known.
        seconds: length of the sound.
    """

    def __init__(
        self,
        service: Service,
        body: TranscriptionRequest,
        task: Task,
        heard: NDArray[np.float32],
        form: SoundFormat,
    ) -> None:
        self._service = service
        self._body = body
        self._task = task
        self._heard = heard
        self._form = form
        self.language = body.language
        self.seconds = len(heard) / form.rate

    async def generate_parts(
        self, speech: WhisperSpeech | VoxtralSpeech
    ) -> AsyncGenerator[list[_Part], None]:
        """Yields the parts of the transcript as they are generated. Closing the generator ends the
        work.
        """
        params = SamplingParams(
            max_tokens=self._service.engine.context_length,
            temperature=self._body.temperature or 0.0,
            return_logprob=self._body.timed,
        )
        if isinstance(speech, VoxtralSpeech):
            found = await self._generate(
                speech.prompt(_uploaded_sound(self._body), self.language), params
            )
            yield [_Part(0.0, self.seconds, found.text, {})]
            return
        instructions = speech.instructions(self.language, self._task, timed=False)
        if speech.languages and self.language is None:
            self.language = await self._detect_language(speech, instructions)
        at = 0
        form = self._form
        # timestamps show where the next window begins
        timed = self._body.timed or len(self._heard) > form.window
        instructions = speech.instructions(self.language, self._task, timed=timed)
        while at < len(self._heard):
            window = self._heard[at : at + form.window]
            prompt = speech.prompt(
                encode_wav(window, form.rate), instructions, self._body.prompt or ""
            )
            found = await self._generate(
                prompt, params, speech.logit_rules(instructions, timed=timed)
            )
            seconds = len(window) / form.rate
            start = at / form.rate
            segments, complete = speech.read_segments(found.token_ids, seconds)
            yield [
                _Part(
                    start + part.start,
                    start + part.end,
                    self._text(part.ids),
                    self._verbose_fields(found, part.ids, start),
                )
                for part in segments
            ]
            at += max(round(complete * form.rate), 1)

    async def _detect_language(self, speech: WhisperSpeech, instructions: Sequence[int]) -> str:
        """Returns the code of the language that the model finds most likely, from the first window."""
        first = encode_wav(self._heard[: self._form.window], self._form.rate)
        biases = tuple((token, 100.0) for token in speech.languages.values())
        params = SamplingParams(max_tokens=1, temperature=0.0, logit_bias=biases)
        found = await self._generate(speech.prompt(first, instructions), params)
        return next(code for code, token in speech.languages.items() if token == found.token_ids[0])

    async def _generate(
        self, prompt: Prompt, params: SamplingParams, rules: LogitProcessor | None = None
    ) -> Generation:
        request = GenerateRequest(prompt, params, logit_processor=rules)
        (found,) = await self._service.async_engine.results(
            self._service.select_requested_adapter(self._body.model, request)
        )
        return found

    def _text(self, ids: Sequence[int]) -> str:
        return self._service.engine.tokenizer.decode(ids)

    def _verbose_fields(
        self, found: Generation, ids: Sequence[int], start: float
    ) -> dict[str, Any]:
        if not self._body.timed:
            return {}
        text = self._text(ids).encode()
        logprobs = [each.logprob or 0.0 for each in found.output_logprobs]
        return {
            "seek": round(start * 100),
            "tokens": list(ids),
            "temperature": self._body.temperature or 0.0,
            "avg_logprob": sum(logprobs) / max(len(logprobs), 1),
            "compression_ratio": len(text) / len(zlib.compress(text)),
        }


async def transcribe(service: Service, call: HttpRequest) -> Response:
    """Transcribes the speech in a sound."""
    return await _transcribe(service, call, "transcribe")


async def translate(service: Service, call: HttpRequest) -> Response:
    """Translates the speech in a sound to English."""
    return await _transcribe(service, call, "translate")


async def _transcribe(service: Service, call: HttpRequest, task: Task) -> Response:
    speech = await asyncio.to_thread(lambda: service.speech)
    body = await asyncio.to_thread(_read_transcription_form, call)
    service.find_requested_adapter(body.model)  # rejects an unknown model
    _check_transcription_support(body, speech, task)
    heard = await service.sounds.decode_sound(_uploaded_sound(body), speech.sound.rate)
    transcript = _Transcript(service, body, task, heard, speech.sound)
    parts = transcript.generate_parts(speech)
    if body.stream:
        events = await wait_for_first_event(parts)
        return EventStream(events, partial(_stream_transcript, transcript), "openai")
    found: list[_Part] = []
    async with contextlib.aclosing(parts):
        async for some in parts:
            found += some
    text = "".join(part.text for part in found).strip()
    match body.response_format:
        case "text":
            return Response(f"{text}\n", media_type="text/plain")
        case "srt" | "vtt" as kind:
            return Response(
                _format_subtitles(found, kind),
                media_type="text/vtt" if kind == "vtt" else "text/plain",
            )
        case "verbose_json":
            segments = [
                {"id": i, "start": part.start, "end": part.end, "text": part.text, **part.details}
                for i, part in enumerate(found)
            ]
            content = {
                "task": task,
                "language": transcript.language or "en",
                "duration": transcript.seconds,
                "text": text,
                "segments": segments,
            }
            return json_response({**content, "usage": _transcript_duration(transcript)})
    return json_response({"text": text, "usage": _transcript_duration(transcript)})


def _read_transcription_form(call: HttpRequest) -> TranscriptionRequest:
    """Reads a request from a form. Raises ParameterError if the body is not a form, or a field is
    invalid.
    """
    values: dict[str, Any] = {}
    for name, content in parse_form(call.data, call.headers.get("content-type", "")):
        value: Any = content if name == "file" else content.decode("utf-8", "replace")
        listed = name.removesuffix("[]")
        if listed in values and (listed == name or not isinstance(values[listed], list)):
            raise ParameterError(listed[:100], "is given twice.")
        if listed == name:
            values[name] = value
        else:
            values.setdefault(listed, []).append(value)
    return TRANSCRIPTIONS.parse_record(values, call.unused if call.reports else None, strict=False)


def _check_transcription_support(
    body: TranscriptionRequest, speech: WhisperSpeech | VoxtralSpeech, task: Task
) -> None:
    """Raises ParameterError or CapabilityError if the request needs something that the model, or
    this server, can't do.
    """
    if others := [each for each in body.timestamp_granularities if each != "segment"]:
        hint = 'Leave it out, or use "segment".'
        raise ParameterError(
            "timestamp_granularities", f"{others[0]!r:.50} is not supported.", hint=hint
        )
    if body.timestamp_granularities and body.response_format != "verbose_json":
        hint = 'Use response_format="verbose_json".'
        raise ParameterError(
            "timestamp_granularities", "is for the detailed answer alone.", hint=hint
        )
    if body.temperature is not None and not 0 <= body.temperature <= 1:
        raise ParameterError("temperature", f"{body.temperature:g} is not between 0 and 1.")
    if body.stream and body.response_format not in ("json", "text"):
        raise ParameterError(
            _FORMAT, f"{body.response_format!r} is not streamed.", hint='Use "json" or "text".'
        )
    if isinstance(speech, WhisperSpeech):
        return
    told = {_FORMAT: body.timed, "prompt": body.prompt, "language": task == "translate"}
    if name := next((name for name, wanted in told.items() if wanted), None):
        problem = "the model writes transcripts alone, without times and what was said before."
        raise CapabilityError(
            problem, parameter=name, hint='Use /v1/audio/transcriptions with "json" or "text".'
        )


def _uploaded_sound(body: TranscriptionRequest) -> Media:
    return Media(body.file, "audio/*")


def _transcript_duration(transcript: _Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcript.seconds)}


async def _stream_transcript(
    transcript: _Transcript, parts: AsyncGenerator[list[_Part], None]
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a transcript: one for each new piece of text, and one at the end with
    the whole text.
    """
    text = ""
    async for some in parts:
        if delta := "".join(part.text for part in some):
            delta = delta if text else delta.lstrip()
            text += delta
            yield encode_event({"type": "transcript.text.delta", "delta": delta})
    yield encode_event(
        {"type": "transcript.text.done", "text": text, "usage": _transcript_duration(transcript)}
    )


def _format_subtitles(parts: Sequence[_Part], kind: Literal["srt", "vtt"]) -> str:
    """Formats a transcript as subtitles in SubRip's or WebVTT's format."""
    lines = ["WEBVTT\n"] if kind == "vtt" else []
    for i, part in enumerate(parts, 1):
        number = f"{i}\n" if kind == "srt" else ""
        start = _format_subtitle_time(part.start, kind)
        end = _format_subtitle_time(part.end, kind)
        lines.append(f"{number}{start} --> {end}\n{part.text.strip()}\n")
    return "\n".join(lines)


def _format_subtitle_time(seconds: float, kind: Literal["srt", "vtt"]) -> str:
    """Formats a time of subtitles: hours, minutes, seconds and milliseconds."""
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    point = "," if kind == "srt" else "."
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


ROUTES = tuple(
    Route(
        f"/v1/audio/{name}",
        handler,
        summary,
        protocol="openai",
        fields=TRANSCRIPTIONS,
        body_type="multipart/form-data",
        streams=True,
        counts_as_open=True,
    )
    for name, handler, summary in (
        ("transcriptions", transcribe, "Write what is said"),
        ("translations", translate, "Write it in English"),
    )
)
