"""Files of videos and sounds, made for tests."""

from __future__ import annotations

import io
import wave

import av
import numpy as np
from PIL import Image as Picture

from sglang_lite.protocol import Media

RATE = 16_000  # samples in a second


def mp4(frames: int, width: int, height: int, *, fps: int = 4, kind: str = "mp4") -> Media:
    """Video of a square that moves over noise."""
    file, pixels = (
        io.BytesIO(),
        np.random.default_rng(frames).integers(0, 99, (height, width, 3), np.uint8),
    )
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(
            "mpeg4", rate=fps, width=width, height=height, pix_fmt="yuv420p"
        )
        container.start_encoding()
        for i in range(frames):
            shown = pixels.copy()
            shown[:, i * width // frames :][:, :4] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown)))
        container.mux(stream.encode(None))
    return Media(file.getvalue(), "video/mp4")


def frames_in(video: Media) -> list[Picture.Image]:
    """All frames of a video."""
    with av.open(io.BytesIO(video.data)) as container:
        return [
            Picture.fromarray(frame.to_ndarray(format="rgb24"))
            for frame in container.decode(video=0)
        ]


def wav(
    seconds: float, *, rate: int = RATE, channels: int = 1, width: int = 2, pitch: float = 440.0
) -> Media:
    """Sound of a tone."""
    file, count = io.BytesIO(), int(seconds * rate)
    tone = np.sin(np.arange(count) / rate * 2 * np.pi * pitch)
    values = (tone * 30_000).astype("<i2") if width == 2 else (tone * 120 + 128).astype(np.uint8)
    with wave.open(file, "wb") as out:
        out.setparams((channels, width, rate, 0, "NONE", ""))
        out.writeframes(np.repeat(values, channels).tobytes())
    return Media(file.getvalue(), "audio/wav")
