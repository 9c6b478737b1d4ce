"""Videos and sounds in files: what is read, within which bounds, and one named error for each bad one."""

from __future__ import annotations

import io
import struct
from typing import Any

import av
import numpy as np
import pytest

from sglang_lite import decoding
from sglang_lite.decoding import VideoHeader, frames, media_type, samples, video_header
from sglang_lite.protocol import Image, ParameterError
from tests.media_files import RATE, frames_in, mp4, wav


@pytest.mark.parametrize(
    ("kind", "found"), [("mp4", "video/mp4"), ("matroska", "video/webm"), ("avi", "video/x-msvideo")]
)
def test_a_video_has_its_size_and_its_frames(kind: str, found: str) -> None:
    video = mp4(10, 48, 32, fps=5, kind=kind)
    header = video_header(video)
    assert header == VideoHeader(10, 5.0, 48, 32)
    assert media_type(video.data, "video") == found
    shown = frames_in(video)
    taken = [*frames(video, header, (0, 3, 3, 9))]
    assert [np.asarray(each).tolist() for each in taken] == [np.asarray(shown[i]).tolist() for i in (0, 3, 3, 9)]


def test_a_video_that_players_turn_is_read_upright() -> None:
    stored = mp4(2, 48, 32)
    at = stored.data.index(b"tkhd") + 4 + 4 + 20 + 16  # the matrix of the track's header (ISO/IEC 14496-12, 8.3.2)
    clockwise = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    turned = Image(stored.data[:at] + clockwise + stored.data[at + 36 :], "video/mp4")
    header = video_header(turned)
    assert (header.width, header.height) == (32, 48)
    (shown,), (lying, _) = frames(turned, header, (0,)), frames_in(stored)
    assert np.array_equal(np.asarray(shown), np.rot90(np.asarray(lying), -1))


@pytest.mark.parametrize(
    ("rate", "channels", "width"),
    [(RATE, 1, 2), (RATE, 2, 2), (8000, 1, 1), (44_100, 2, 2), (48_000, 1, 2), (11_025, 1, 2)],
)
def test_a_sound_of_any_form_is_its_samples_in_one_channel(rate: int, channels: int, width: int) -> None:
    found = samples(wav(0.5, rate=rate, channels=channels, width=width), RATE, 30)
    assert abs(len(found) - RATE // 2) <= 32
    tone = np.sin(np.arange(len(found)) / RATE * 2 * np.pi * 440) * (30_000 / 32_768 if width == 2 else 120 / 128)
    assert np.abs(found - tone)[500:-500].max() < 0.03


@pytest.mark.parametrize("kind", ["flac", "mp3", "ogg"])
def test_compressed_sounds_are_read(kind: str) -> None:
    file = io.BytesIO()
    with av.open(io.BytesIO(wav(0.5).data)) as source, av.open(file, "w", format=kind) as container:
        stream: Any = container.add_stream({"flac": "flac", "mp3": "libmp3lame", "ogg": "libopus"}[kind], rate=48_000)
        resampler = av.AudioResampler(stream.format, stream.layout, 48_000, stream.frame_size or None)
        for frame in (*source.decode(audio=0), None):
            for part in resampler.resample(frame):
                container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    found = samples(Image(file.getvalue(), "audio/*"), RATE, 30)
    assert abs(len(found) - RATE // 2) < 2000
    peak = np.abs(np.fft.rfft(found[1000:7000])).argmax() * RATE / 6000
    assert peak == pytest.approx(440, abs=5)


def _cut(video: Image) -> Image:
    """A video without the second half of its frames, of which the first part tells all."""
    return Image(video.data[: len(video.data) * 6 // 10], video.media_type)


@pytest.mark.parametrize(
    ("video", "why"),
    [
        (Image(b""), "is empty"),
        (Image(b"GIF89a" + b"\0" * 20), "in no known format. Known: MP4, MOV, WEBM, MKV and AVI"),
        (Image(b"#EXTM3U\nhttp://a.example/b.ts"), "in no known format"),
        (Image(b"\0\0\0\x18ftypisom" + b"\0" * 50), "is damaged or truncated"),
        (mp4(0, 48, 32), "has no frames|is damaged or truncated|has no pictures"),
        (_cut(mp4(10, 48, 32)), "is damaged or truncated"),
    ],
    ids=["empty", "gif", "playlist", "header", "no frames", "cut"],
)
def test_a_bad_video_is_one_error(video: Image, why: str) -> None:
    with pytest.raises(ParameterError, match=f"video: .*({why})"):
        video_header(video)


def test_a_video_that_ends_early_is_damaged() -> None:
    whole = mp4(20, 48, 32, kind="matroska")
    with pytest.raises(ParameterError, match="is damaged or truncated: 20 of 40 frames can be read"):
        list(frames(whole, VideoHeader(40, 4.0, 48, 32), (0, 39)))


@pytest.mark.parametrize(
    ("bound", "value", "why"),
    [
        ("MAX_BYTES", 100, "bytes, the limit is 100"),
        ("MAX_SECONDS", 1, "2 seconds long, the limit is 1. Cut it."),
        ("MAX_FRAME_PIXELS", 1000, "48 x 32 pixels, the limit is 1,000"),
        ("MAX_PIXELS", 10_000, "has 10 frames or more of 48 x 32 pixels; the limit is 10,000 in all"),
    ],
)
def test_a_video_beyond_a_bound_is_one_error(monkeypatch: pytest.MonkeyPatch, bound: str, value: int, why: str) -> None:
    video = mp4(10, 48, 32, fps=5)
    monkeypatch.setattr(decoding, bound, value)
    with pytest.raises(ParameterError, match=why):
        video_header(video)


def test_a_long_sound_is_read_no_further_than_its_bound() -> None:
    with pytest.raises(
        ParameterError, match=r"audio: is longer than 2 seconds, which the model hears at once\. Cut it\."
    ):
        samples(wav(60, rate=8000), 8000, 2)


def test_a_file_of_the_other_kind_is_named() -> None:
    with pytest.raises(ParameterError, match="audio: has no sound"):
        samples(mp4(2, 48, 32), RATE, 30)
    with pytest.raises(ParameterError, match="video: begins with b'RIFF"):
        video_header(wav(0.1))
