"""Damaged images, sounds and videos of prompts: an error that says which, or an answer."""

from __future__ import annotations

import io
import math
import os
import random
import struct
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image as Picture
from PIL import PngImagePlugin

from sglang_lite.protocol import Media, ParameterError, SamplingParams, SglError
from tests.children import in_a_child
from tests.damage import damaged, examine, in_file
from tests.media_files import RATE, mp4, wav
from tests.runtime.media.seeing import encoded, engine_of, save_seeing, seen

EXAMPLES = int(os.environ.get("SGLANG_LITE_DAMAGED_FILES", "24"))  # of each kind: CONTRIBUTING.md
PARAMS = SamplingParams(max_tokens=1, temperature=0, return_logprob=True)


def pictures() -> list[bytes]:
    """Images of all formats, and of the forms in which they differ."""
    draw = np.random.default_rng(0)
    plain = Picture.fromarray(draw.integers(0, 255, (30, 26, 3), np.uint8))
    exif = Picture.Exif()
    exif[0x0112] = 6
    text = PngImagePlugin.PngInfo()
    text.add_text("a", "b" * 200, zip=True)
    return [
        encoded(plain, "PNG"), encoded(plain, "PNG", pnginfo=text), encoded(plain.convert("P"), "PNG", transparency=3),
        encoded(Picture.fromarray(draw.integers(0, 65535, (20, 20), np.uint16)), "PNG"), encoded(plain.convert("1"), "PNG"),
        encoded(plain, "JPEG", exif=exif), encoded(plain, "JPEG", progressive=True), encoded(plain.convert("L"), "JPEG"),
        encoded(plain.convert("P"), "GIF"), encoded(plain, "WEBP"), encoded(plain, "WEBP", lossless=True),
        encoded(plain.convert("RGBA"), "WEBP", exif=exif), encoded(plain, "BMP"), encoded(plain.convert("P"), "BMP"),
        encoded(plain, "TIFF"), encoded(plain, "TIFF", compression="tiff_lzw"), encoded(plain, "TIFF", compression="tiff_deflate"),
        encoded(plain, "TIFF", compression="jpeg"), encoded(plain.convert("1"), "TIFF", compression="group4"),
    ]  # fmt: skip


def bombs() -> list[bytes]:
    """Small files that say that they are large, or unpack to much."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    def bomb(
        width: int,
        height: int,
        data: bytes,
        *more: bytes,
        depth: int = 8,
        colour: int = 2,
        interlaced: int = 0,
    ) -> bytes:
        size = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
        return (
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", size)
            + b"".join(more)
            + chunk(b"IDAT", data)
            + chunk(b"IEND", b"")
        )

    zeros = zlib.compress(bytes(64 << 20), 9)
    text = b"a\0\0" + zeros
    profile = b"a\0\0" + zeros
    gif = b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0xF7, 0, 0) + bytes(768)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x08\x02\x00\x01\x00;"
    return [
        bomb(7900, 7900, zeros), bomb(2**31 - 1, 1, zeros), bomb(1, 2**31 - 1, zeros), bomb(8000, 8000, b""),
        bomb(7900, 7900, zeros, interlaced=1), bomb(8, 8, zeros), bomb(8, 8, zlib.compress(bytes(8 * 25)), chunk(b"zTXt", text)),
        bomb(8, 8, zlib.compress(bytes(8 * 25)), *[chunk(b"iCCP", profile)] * 3),
        bomb(8, 8, zlib.compress(bytes(8 * 25)), *[chunk(b"iTXt", b"a\0\1\0\0\0" + zeros)] * 5), gif + frame, gif + frame[:8],
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 30_000, -30_000, 1, 24, 0, 0, 0, 0, 0, 0),
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 2**31 - 1, 2**31 - 1, 1, 1, 1, 0, 0, 0, 0, 0),
    ]  # fmt: skip


def sounds() -> list[Media]:
    """Sounds of all formats."""
    tone = (np.sin(np.arange(RATE // 2) / 20) * 9000).astype(np.int16)[None]
    found = [wav(0.3), wav(0.2, rate=8000, channels=2), wav(0.2, width=1)]
    for kind, codec, layout, mime in (
        ("flac", "flac", "mono", "audio/flac"), ("ogg", "libvorbis", "stereo", "audio/ogg"), ("ogg", "libopus", "mono", "audio/ogg"),
        ("mp3", "libmp3lame", "mono", "audio/mpeg"), ("mp4", "aac", "mono", "audio/mp4"), ("webm", "libopus", "mono", "audio/webm"),
        ("wav", "pcm_f32le", "mono", "audio/wav"), ("wav", "adpcm_ima_wav", "mono", "audio/wav"),
    ):  # fmt: skip
        if codec not in av.codecs_available:
            continue
        file = io.BytesIO()
        with av.open(file, "w", format=kind) as container:
            stream = container.add_stream(
                codec, rate=48_000 if "opus" in codec else RATE, layout=layout
            )
            samples = tone if layout == "mono" else np.repeat(tone, 2, 0)
            planes = samples if layout == "mono" else samples.T.reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(
                np.ascontiguousarray(planes), format="s16", layout=layout
            )
            frame.rate = RATE
            resampler = av.AudioResampler(
                stream.codec_context.format, layout, stream.codec_context.rate
            )
            fifo = av.AudioFifo()
            for each in (*resampler.resample(frame), *resampler.resample(None)):
                each.pts = None
                fifo.write(each)
            size = stream.codec_context.frame_size or 1024
            while part := fifo.read(size, partial=True):
                container.mux(stream.encode(part))
            container.mux(stream.encode(None))
        found.append(Media(file.getvalue(), mime))
    return found


def hostile_sounds() -> list[Media]:
    """Small files that say that they are long, or have samples that are no numbers."""

    def head(rate: int, channels: int, bits: int, size: int, form: int = 1) -> bytes:
        width = channels * bits // 8
        fields = (
            b"RIFF",
            size & 0xFFFFFFFF,
            b"WAVEfmt ",
            16,
            form,
            channels,
            rate,
            rate * width & 0xFFFFFFFF,
            width & 0xFFFF,
            bits,
        )
        return struct.pack("<4sI8sIHHIIHH", *fields) + struct.pack(
            "<4sI", b"data", size & 0xFFFFFFFF
        )

    made = [
        head(16_000, 1, 32, 64, form=3) + np.full(16, np.nan, np.float32).tobytes(),
        head(16_000, 1, 32, 64, form=3) + np.full(16, 1e38, np.float32).tobytes(),
        head(16_000, 1, 16, 2**32 - 1) + bytes(100), head(1, 1, 16, 200) + bytes(200), head(0, 1, 16, 200) + bytes(200),
        head(2**31 - 1, 1, 16, 200) + bytes(200), head(16_000, 65_535, 16, 200) + bytes(200), head(16_000, 0, 16, 200) + bytes(200),
        head(1, 1, 8, 40 << 20) + bytes(40 << 20),
    ]  # fmt: skip
    return [Media(each, "audio/wav") for each in made]


def _examined(
    family: str, kind: str, first: int, count: int, made: Callable[[random.Random, int], Media]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        save_seeing(family, Path(name))
        with engine_of(Path(name), threads=1) as engine:
            number = iter(range(first, first + count))

            def case(draw: random.Random) -> tuple[str, str]:
                try:
                    answer = engine.complete(seen("ab", made(draw, next(number)), "c"), PARAMS)
                except ParameterError as error:
                    return "refused", in_file(error, kind)
                except SglError as error:
                    return "another error", f"not the fault of the engine: {error!r}"
                finite = all(
                    each.logprob is not None and math.isfinite(each.logprob)
                    for each in answer.output_logprobs
                )
                return "read", "" if finite else "the answer has no probabilities"

            return examine(first, count, case)


def images(first: int, count: int) -> dict[str, Any]:
    """Damaged images."""
    plain, hostile = pictures(), bombs()

    def made(draw: random.Random, number: int) -> Media:
        if number < len(hostile):
            return Media(hostile[number], "image/png")
        return Media(damaged(draw, draw.choice(plain), 200), "image/png")

    return _examined("llava", "image", first, count, made)


def heard(first: int, count: int) -> dict[str, Any]:
    """Damaged sounds."""
    plain, hostile = sounds(), hostile_sounds()

    def made(draw: random.Random, number: int) -> Media:
        if number < len(hostile):
            return hostile[number]
        sound = draw.choice(plain)
        return Media(damaged(draw, sound.data, 300), sound.media_type)

    return _examined("qwen2_audio", "audio", first, count, made)


def videos(first: int, count: int) -> dict[str, Any]:
    """Damaged videos."""
    plain = [mp4(6, 40, 32), mp4(5, 32, 48, kind="matroska"), mp4(4, 32, 32, kind="avi")]

    def made(draw: random.Random, number: int) -> Media:
        return Media(damaged(draw, draw.choice(plain).data, 600), "video/mp4")

    return _examined("qwen2_vl", "video", first, count, made)


KINDS = {"images": images, "sounds": heard, "videos": videos}


def every_kind(first: int, count: int) -> dict[str, Any]:
    """Outcomes and problems of each kind."""
    return {kind: damage(first, count) for kind, damage in KINDS.items()}


@cache
def found_in(part: int, count: int) -> dict[str, Any]:
    """What one process finds, since to import what a kind needs takes longer than its cases."""
    found: dict[str, Any] = in_a_child(every_kind, 250 * part, count)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(-(-EXAMPLES // 250)))
def test_damaged_media_are_refused_by_name_or_answered(kind: str, part: int) -> None:
    count = min(EXAMPLES - 250 * part, 250)
    found = found_in(part, count)[kind]
    assert found["problems"] == [], found["outcomes"]
    assert found["outcomes"].get("read", 0) >= count // 20, found["outcomes"]
    assert found["outcomes"].get("refused", 0) >= count // 10, found["outcomes"]
