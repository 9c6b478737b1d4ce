"""Videos and sounds in files: what is read, within which bounds, and one named error for each bad
one.
"""

from __future__ import annotations

import io
import struct
from typing import Any

import av
import numpy as np
import pytest

from sglang_lite.media import files as media_files
from sglang_lite.media.files import (
    VideoHeader,
    count_samples,
    decode_frames,
    decode_samples,
    encode_wav,
    media_type,
    read_video_header,
)
from sglang_lite.protocol import Media, ParameterError
from tests.media_files import RATE, frames_in, mp4, wav


@pytest.mark.parametrize(
    ("kind", "found"),
    [("mp4", "video/mp4"), ("matroska", "video/webm"), ("avi", "video/x-msvideo")],
)
def test_a_video_has_its_size_and_its_frames(kind: str, found: str) -> None:
    video = mp4(10, 48, 32, fps=5, kind=kind)
    header = read_video_header(video)
    assert header == VideoHeader(10, 5.0, 48, 32)
    assert media_type(video.data, "video") == found
    shown = frames_in(video)
    taken = [*decode_frames(video, header, (0, 3, 3, 9))]
    assert [np.asarray(each).tolist() for each in taken] == [
        np.asarray(shown[i]).tolist() for i in (0, 3, 3, 9)
    ]


def test_a_video_that_players_turn_is_read_upright() -> None:
    stored = mp4(2, 48, 32)
    # the matrix of the track's header (ISO/IEC 14496-12, 8.3.2)
    at = stored.data.index(b"tkhd") + 4 + 4 + 20 + 16
    clockwise = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    turned = Media(stored.data[:at] + clockwise + stored.data[at + 36 :], "video/mp4")
    header = read_video_header(turned)
    assert (header.width, header.height) == (32, 48)
    (shown,), (lying, _) = decode_frames(turned, header, (0,)), frames_in(stored)
    assert np.array_equal(np.asarray(shown), np.rot90(np.asarray(lying), -1))


@pytest.mark.parametrize(
    ("rate", "channels", "width"),
    [(RATE, 1, 2), (RATE, 2, 2), (8000, 1, 1), (44_100, 2, 2), (48_000, 1, 2), (11_025, 1, 2)],
)
def test_a_sound_of_any_form_is_its_samples_in_one_channel(
    rate: int, channels: int, width: int
) -> None:
    sound = wav(0.5, rate=rate, channels=channels, width=width)
    found = decode_samples(sound, RATE, 30)
    assert abs(len(found) - RATE // 2) <= 32
    assert count_samples(sound, RATE, 30) == len(found)
    tone = np.sin(np.arange(len(found)) / RATE * 2 * np.pi * 440) * (
        30_000 / 32_768 if width == 2 else 120 / 128
    )
    assert np.abs(found - tone)[500:-500].max() < 0.03


@pytest.mark.parametrize("kind", ["flac", "mp3", "ogg"])
def test_compressed_sounds_are_read(kind: str) -> None:
    file = io.BytesIO()
    with av.open(io.BytesIO(wav(0.5).data)) as source, av.open(file, "w", format=kind) as container:
        stream: Any = container.add_stream(
            {"flac": "flac", "mp3": "libmp3lame", "ogg": "libopus"}[kind], rate=48_000
        )
        resampler = av.AudioResampler(
            stream.format, stream.layout, 48_000, stream.frame_size or None
        )
        for frame in (*source.decode(audio=0), None):
            for part in resampler.resample(frame):
                container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    found = decode_samples(Media(file.getvalue(), "audio/*"), RATE, 30)
    assert abs(len(found) - RATE // 2) < 2000
    assert count_samples(Media(file.getvalue(), "audio/*"), RATE, 30) == len(found)
    peak = np.abs(np.fft.rfft(found[1000:7000])).argmax() * RATE / 6000
    assert peak == pytest.approx(440, abs=5)


def _cut(video: Media) -> Media:
    """A video without the second half of its frames, of which the first part tells all."""
    return Media(video.data[: len(video.data) * 6 // 10], video.media_type)


@pytest.mark.parametrize(
    ("video", "why"),
    [
        (Media(b""), "is empty"),
        (Media(b"GIF89a" + b"\0" * 20), "in no known format. Known: MP4, MOV, WEBM, MKV and AVI"),
        (Media(b"#EXTM3U\nhttp://a.example/b.ts"), "in no known format"),
        (Media(b"\0\0\0\x18ftypisom" + b"\0" * 50), "is damaged or truncated"),
        (mp4(0, 48, 32), "has no frames|is damaged or truncated|has no pictures"),
        (_cut(mp4(10, 48, 32)), "is damaged or truncated"),
    ],
    ids=["empty", "gif", "playlist", "header", "no frames", "cut"],
)
def test_a_bad_video_is_one_error(video: Media, why: str) -> None:
    with pytest.raises(ParameterError, match=f"video: .*({why})"):
        read_video_header(video)


def test_a_video_that_ends_early_is_damaged() -> None:
    whole = mp4(20, 48, 32, kind="matroska")
    with pytest.raises(
        ParameterError, match="is damaged or truncated: 20 of 40 frames can be read"
    ):
        list(decode_frames(whole, VideoHeader(40, 4.0, 48, 32), (0, 39)))


@pytest.mark.parametrize(
    ("bound", "value", "why"),
    [
        ("MAX_BYTES", 100, "bytes, the limit is 100"),
        ("MAX_SECONDS", 1, "2 seconds long, the limit is 1. Cut it."),
        ("MAX_FRAME_PIXELS", 1000, "48 x 32 pixels, the limit is 1,000"),
        (
            "MAX_PIXELS",
            10_000,
            "has 10 frames or more of 48 x 32 pixels; the limit is 10,000 in all",
        ),
    ],
)
def test_a_video_beyond_a_bound_is_one_error(
    monkeypatch: pytest.MonkeyPatch, bound: str, value: int, why: str
) -> None:
    video = mp4(10, 48, 32, fps=5)
    monkeypatch.setattr(media_files, bound, value)
    with pytest.raises(ParameterError, match=why):
        read_video_header(video)


def test_a_long_sound_is_read_no_further_than_its_bound() -> None:
    with pytest.raises(
        ParameterError,
        match=r"audio: is longer than 2 seconds, which the model hears at once\. Cut it\.",
    ):
        decode_samples(wav(60, rate=8000), 8000, 2)


def _riff_wave(rate: int, channels: int, values: np.ndarray, info: bytes = b"") -> Media:
    """Sound of 8 bits or of floats, with any number of channels."""
    kind, each = (3, 4) if values.dtype == np.float32 else (1, 1)
    form = struct.pack(
        "<HHIIHH", kind, channels, rate, rate * channels * each, channels * each, each * 8
    )
    parts = ((b"fmt ", form), *([(b"LIST", info)] if info else ()), (b"data", values.tobytes()))
    body = b"WAVE" + b"".join(name + struct.pack("<I", len(data)) + data for name, data in parts)
    return Media(b"RIFF" + struct.pack("<I", len(body)) + body, "audio/wav")


@pytest.mark.parametrize(
    ("rate", "channels", "count"), [(RATE, 9, 25), (44_100, 40, 500), (1, 8, 25)]
)
def test_a_sound_of_many_channels_is_their_mean(rate: int, channels: int, count: int) -> None:
    values = np.tile(np.arange(channels, dtype=np.float32), count)
    found = decode_samples(_riff_wave(rate, channels, values), RATE, 30)
    assert len(found)
    assert found[len(found) // 2] == pytest.approx((channels - 1) / 2, abs=0.2)


def test_a_low_rate_makes_no_small_file_large() -> None:
    with pytest.raises(ParameterError, match="is longer than 30 seconds"):
        decode_samples(_riff_wave(1, 1, np.zeros(31, np.uint8)), RATE, 30)
    assert len(decode_samples(_riff_wave(1, 1, np.zeros(25, np.uint8)), RATE, 30)) > 20 * RATE


def test_a_sound_of_exactly_the_bound_is_heard() -> None:
    assert len(decode_samples(wav(30, rate=11_025), RATE, 30)) == 30 * RATE


def test_a_sound_that_is_read_in_pieces_is_whole() -> None:
    heard = np.random.default_rng(0).normal(0, 0.1, 2**19 + 7).astype(np.float32)
    assert np.array_equal(decode_samples(encode_wav(heard, RATE), RATE, 60), heard)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(ParameterError, match="audio: has samples that are no numbers"):
        decode_samples(_riff_wave(RATE, 1, np.full(100, value, np.float32)), RATE, 30)


def test_titles_may_be_in_any_encoding() -> None:
    title = b"INFOINAM\x06\0\0\0caf\xe9s\0"
    assert len(decode_samples(_riff_wave(RATE, 1, np.zeros(100, np.uint8), title), RATE, 30)) == 100


def test_a_sound_whose_form_changes_is_read_on() -> None:
    files = []
    for rate in (44_100, 22_050):
        files.append(io.BytesIO())
        plain = {"write_xing": "0", "id3v2_version": "0"}
        with av.open(files[-1], "w", format="mp3", options=plain) as container:
            stream: Any = container.add_stream("libmp3lame", rate=rate, layout="mono")
            frame = av.AudioFrame.from_ndarray(np.zeros((1, rate), np.float32), "fltp", "mono")
            frame.rate = rate
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    found = decode_samples(
        Media(b"".join(file.getvalue() for file in files), "audio/mpeg"), RATE, 30
    )
    assert abs(len(found) - 2 * RATE) < 3000


def test_a_small_file_that_claims_many_frames_is_damaged() -> None:
    """libav would keep a record of each, and search them all again and again."""
    data = bytearray(mp4(10, 48, 32).data)
    for name, claimed in ((b"stsz", (1, 10**6)), (b"stsc", (1, 10**6)), (b"stts", (10**6,))):
        at = data.index(name) + (8 if name == b"stsz" else 12)
        data[at : at + 4 * len(claimed)] = struct.pack(f">{len(claimed)}I", *claimed)
    with pytest.raises(ParameterError, match="video: is damaged: 1,000,000 samples in"):
        read_video_header(Media(bytes(data), "video/mp4"))


def test_fragments_that_claim_many_frames_together_are_damaged() -> None:
    runs = b"".join(struct.pack(">I4sII", 16, b"trun", 0, 500) for _ in range(9))
    data = mp4(2, 48, 32).data + struct.pack(">I4s", len(runs) + 8, b"moof") + runs
    with pytest.raises(ParameterError, match=r"video: is damaged: [0-9,]+ samples in"):
        read_video_header(Media(data, "video/mp4"))


def test_frames_that_grow_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    video = mp4(10, 48, 32)
    header = read_video_header(video)
    monkeypatch.setattr(media_files, "MAX_PIXELS", 5 * 48 * 32)
    with pytest.raises(ParameterError, match="has more than 7,680 pixels in all"):
        list(decode_frames(video, header, (9,)))


def test_a_file_of_the_other_kind_is_named() -> None:
    with pytest.raises(ParameterError, match="audio: has no sound"):
        decode_samples(mp4(2, 48, 32), RATE, 30)
    with pytest.raises(ParameterError, match="video: begins with b'RIFF"):
        read_video_header(wav(0.1))
