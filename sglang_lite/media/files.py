"""Videos and sounds in files. Detects their formats, and decodes frames and samples with PyAV,
within bounds.

A file is read from memory, in one of a few formats recognized by its first bytes. libav never looks
for other files.
"""

from __future__ import annotations

import io
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from sglang_lite.protocol import Media, MediaKind, ParameterError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image as Picture

MAX_BYTES = 50 * 2**20
MAX_SECONDS = 3600
# largest sample in a floating-point file; an encoder's sums of squares must be finite
_LOUDEST = 1_000_000
MAX_FRAME_PIXELS = 16 * 10**6  # of one frame: 4,000 x 4,000
MAX_PIXELS = 40 * 10**9  # of all frames, which takes a few minutes to decode
# By libav's name of a format: the offset and the bytes that identify its files, and its video and
# audio media types.
_FORMATS = {
    "mov": (4, (b"ftyp", b"moov", b"mdat", b"wide"), "video/mp4", "audio/mp4"),
    "matroska": (0, (b"\x1a\x45\xdf\xa3",), "video/webm", "audio/webm"),
    "avi": (8, (b"AVI ",), "video/x-msvideo", ""),
    "wav": (8, (b"WAVE",), "", "audio/wav"),
    "flac": (0, (b"fLaC",), "", "audio/flac"),
    "ogg": (0, (b"OggS",), "", "audio/ogg"),
    "mp3": (0, (b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"), "", "audio/mpeg"),
}
# Options for WAV files, and the numbers of bytes and samples that are processed together. Computing
# threads may run between two frames, and a compressed sound has about 40 per second. In 16 bits,
# libav would search the whole file for DTS.
_WAV = {"max_size": str(2**16), "max_probe_packets": "1"}
_JOINED = 2**18
_KNOWN = {"video": "MP4, MOV, WEBM, MKV and AVI", "audio": "WAV, FLAC, OGG, MP3, M4A and WEBM"}


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """Size, length and frame rate of a video.

    Attributes:
        frames: number of frames.
        fps: frames per second.
        width, height: pixels of a frame as displayed.
    """

    frames: int
    fps: float
    width: int
    height: int


def media_type(data: bytes, kind: MediaKind) -> str:
    """Returns the media type of a video or a sound, detected from its first bytes.

    Raises:
        ParameterError: the file has none of the known formats.
    """
    return _detect_format(data, kind)[1]


def read_video_header(video: Media) -> VideoHeader:
    """Reads the dimensions of a video. Also decodes its first frame.

    Raises:
        ParameterError: the file is not a video, has no frames, is damaged or exceeds a bound; or
            the package av is missing.
    """
    with _open_media(video, "video") as (container, stream):
        width = stream.codec_context.width
        height = stream.codec_context.height
        if width * height > MAX_FRAME_PIXELS:
            raise _media_error(
                "video",
                f"{width:,} x {height:,} pixels, the limit is {MAX_FRAME_PIXELS:,}.",
                "Scale it down.",
            )
        count = stream.frames or _count_packets(
            container, stream, MAX_PIXELS // max(width * height, 1)
        )
        if count * width * height > MAX_PIXELS:
            problem = (
                f"has {count:,} frames or more of {width:,} x {height:,} pixels; the limit is "
                f"{MAX_PIXELS:,} in all."
            )
            raise _media_error("video", problem, "Cut it, or scale it down.")
        rate = float(stream.average_rate or 24)
        _check_seconds("video", count / rate)
    with _open_media(video, "video") as (container, stream):  # libav may seek for minutes
        first = next(container.decode(stream), None)
        if first is None:
            raise _media_error("video", "has no frames.", "Send another file.")
        if first.rotation % 180:
            width, height = height, width
    return VideoHeader(count, rate, width, height)


def decode_frames(video: Media, header: VideoHeader, indices: Sequence[int]) -> Iterator[Picture]:
    """Yields frames of a video as displayed, in RGB.

    Args:
        video: the video.
        header: `read_video_header` of the video.
        indices: numbers of the frames in the video, ascending.

    Raises:
        ParameterError: it is damaged.
    """
    left = deque(indices)
    number = -1
    frame = None
    pixels = 0
    with _open_media(video, "video") as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            pixels += frame.width * frame.height  # later frames may be larger than the first
            if pixels > MAX_PIXELS:
                raise _media_error(
                    "video",
                    f"has more than {MAX_PIXELS:,} pixels in all.",
                    "Cut it, or scale it down.",
                )
            while left and left[0] == number:
                yield _rotate_upright(frame)
                left.popleft()
            if not left:
                return
        # Some formats count frames that are never shown.
        if frame is None or (number + 1) * 10 < header.frames * 9:
            problem = (
                f"is damaged or truncated: {number + 1:,} of {header.frames:,} frames can be read."
            )
            raise _media_error("video", problem, "Save it again.")
        for _ in left:
            yield _rotate_upright(frame)


def decode_samples(sound: Media, rate: int, most_seconds: float) -> NDArray[np.float32]:
    """Decodes the samples of a sound as the mean of all channels: float32, most of them between -1
    and 1.

    Args:
        sound: the sound.
        rate: samples per second to resample to.
        most_seconds: maximum length; longer sounds are refused.

    Raises:
        ParameterError: the file is not a sound, or is empty, damaged or too long; or the package av
            is missing.
    """
    parts = list[Any]()
    with _open_media(sound, "audio") as (container, stream):
        import av
        import numpy as np

        # before resampling, which may create many samples
        decoded = _limit_duration(container.decode(stream), most_seconds)
        # A joined file may change its form.
        for _, alike in groupby(
            decoded, lambda each: (each.format.name, each.layout.name, each.rate)
        ):
            resampler = av.AudioResampler(format="flt", rate=rate)
            joined = av.AudioFifo()
            for frame in alike:
                frame.pts = None
                joined.write(frame)
                if joined.samples >= _JOINED:
                    parts += map(_mean_of_channels, resampler.resample(joined.read()))
            for rest in (joined.read(), None):
                parts += map(_mean_of_channels, resampler.resample(rest))
    if not any(map(len, parts)):
        raise _media_error("audio", "has no samples.", "Send another file.")
    # rounding may have added one
    found: NDArray[np.float32] = np.concatenate(parts)[: int(rate * most_seconds)]
    if not np.isfinite(found).all():
        raise _media_error("audio", "has samples that are no numbers.", "Save it again.")
    if max(-found.min(), found.max()) > _LOUDEST:
        raise _media_error(
            "audio",
            f"has samples beyond {_LOUDEST:,}, and 1 is the loudest.",
            "Save it with samples from -1 to 1.",
        )
    return found


def count_samples(sound: Media, rate: int, most_seconds: float) -> int:
    """Returns how many samples `decode_samples` would return for a sound. If the sound already has
    this rate, counts its samples without converting or checking them.
    """
    with _open_media(sound, "audio") as (container, stream):
        count = 0
        for frame in _limit_duration(container.decode(stream), most_seconds):
            if frame.rate != rate:
                break
            count += frame.samples
        else:
            if count:
                return min(count, int(rate * most_seconds))
    return len(decode_samples(sound, rate, most_seconds))


def encode_wav(heard: NDArray[np.float32], rate: int) -> Media:
    """Encodes the samples of one channel, float32, losslessly as a WAV file."""
    data = heard.astype("<f4").tobytes()
    head = b"RIFF", 36 + len(data), b"WAVEfmt ", 16, 3, 1, rate, 4 * rate, 4, 32, b"data", len(data)
    return Media(struct.pack("<4sI8sIHHIIHH4sI", *head) + data, "audio/wav")


@contextmanager
# container and stream of av
def _open_media(media: Media, kind: MediaKind) -> Iterator[tuple[Any, Any]]:
    """Opens a file, and yields its container and the container's first stream of a kind."""
    try:
        import av
    except ImportError:
        hint = "pip install 'sglang-lite[media]'"
        raise _media_error(kind, "reading videos and sounds needs the package av.", hint) from None
    if not media.data:
        raise _media_error(kind, "is empty.", "Give the bytes of a file.")
    if len(media.data) > MAX_BYTES:
        raise _media_error(
            kind,
            f"{len(media.data):,} bytes, the limit is {MAX_BYTES:,}.",
            "Cut it, or save it smaller.",
        )
    try:
        name = _detect_format(media.data, kind)[0]
        if name == "mov":
            _check_mp4_sample_counts(media.data, kind)
        options = _WAV if name == "wav" else {}
        # Titles may be in any encoding.
        with av.open(
            io.BytesIO(media.data), format=name, options=options, metadata_errors="ignore"
        ) as container:
            streams = container.streams.video if kind == "video" else container.streams.audio
            found = [each for each in streams if each.codec_context is not None]
            if not found:
                problem = f"has no {'pictures' if kind == 'video' else 'sound'} in a known codec."
                raise _media_error(kind, problem, "Send another file.")
            _check_seconds(kind, (container.duration or 0) / av.time_base)
            if kind == "video":
                found[0].codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
            yield container, found[0]
    except av.error.FFmpegError as error:
        raise _media_error(kind, f"is damaged or truncated: {error}", "Save it again.") from None


def _detect_format(data: bytes, kind: MediaKind) -> tuple[str, str]:
    """Returns libav's name of a file's format, and the media type."""
    for name, (start, beginnings, *types) in _FORMATS.items():
        found = types[kind == "audio"]
        if found and data.startswith(beginnings, start):
            return name, found
    problem = f"begins with {data[:12]!r}: in no known format."
    raise _media_error(kind, problem, f"Known: {_KNOWN[kind]}.")


def _check_mp4_sample_counts(data: bytes, kind: MediaKind) -> None:
    """Rejects an MP4 file whose tables claim more samples than the file has bytes. libav would
    allocate memory for all of them (ISO/IEC 14496-12, 8.7.3 and 8.8.8).
    """
    start = count = 0
    while start < len(data):
        size = _read_integer(data, start)
        if size == 1:
            size = _read_integer(data, start + 8, 8)
        end = start + size if size >= 8 else len(data)
        for name, skipped in (
            ((b"stsz", 12), (b"trun", 8)) if data[start + 4 : start + 8] != b"mdat" else ()
        ):
            at = data.find(name, start, end)
            while at >= 0:
                count += _read_integer(
                    data, at + skipped + (8 if _read_integer(data, at - 4) == 1 else 0)
                )
                if count > len(data):
                    raise _media_error(
                        kind,
                        f"is damaged: {count:,} samples in {len(data):,} bytes.",
                        "Save it again.",
                    )
                at = data.find(name, at + 4, end)
        start = end


def _read_integer(data: bytes, at: int, size: int = 4) -> int:
    return int.from_bytes(data[at : at + size], "big")


def _count_packets(container: Any, stream: Any, most: int) -> int:
    """Counts the packets of a stream that contain a frame. Stops counting once there are more than
    `most`.
    """
    count = 0
    for packet in container.demux(stream):
        count += packet.size > 0
        if count > most:
            break
    return count


def _limit_duration(frames: Iterable[Any], most_seconds: float) -> Iterator[Any]:
    """Yields the frames of a sound. Raises ParameterError as soon as their total duration exceeds
    `most_seconds`.
    """
    seconds = 0.0
    for frame in frames:
        seconds += frame.samples / max(frame.rate, 1)
        if seconds > most_seconds + 1e-6:
            problem = f"is longer than {most_seconds:g} seconds, which the model hears at once."
            raise _media_error("audio", problem, "Cut it.")
        yield frame


def _mean_of_channels(frame: Any) -> NDArray[np.float32]:
    """Returns the mean of a frame's channels. The frame must be interleaved, because PyAV can't
    read more than 8 separate planes.
    """
    mean: NDArray[np.float32] = frame.to_ndarray().reshape(-1, len(frame.layout.channels)).mean(1)
    return mean


def _rotate_upright(frame: Any) -> Picture:
    picture: Picture = frame.to_image()
    return picture.rotate(frame.rotation, expand=True) if frame.rotation % 360 else picture


def _check_seconds(kind: MediaKind, seconds: float) -> None:
    if seconds > MAX_SECONDS:
        raise _media_error(
            kind, f"{seconds:,.0f} seconds long, the limit is {MAX_SECONDS:,}.", "Cut it."
        )


def _media_error(kind: MediaKind, problem: str, hint: str) -> ParameterError:
    return ParameterError(kind, problem, hint=hint)
