"""Converts images, videos and sounds (paths, URLs, bytes, PIL images, arrays) to the protocol's
Media.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec

from sglang_lite.errors import redact_address
from sglang_lite.media.files import decode_frames, media_type, read_video_header
from sglang_lite.protocol import Location, Media, MediaKind, ParameterError

MAX_IMAGE_BYTES = 50 * 2**20
_MAX_SHOWN_PIXELS = 16 * 10**6  # largest image that gets a thumbnail; decoding takes about 0.2 s
_THUMBNAIL = 96  # pixels of the longer side
_SHOWN = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
)
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")  # PIL modes that PNG supports


def load_image(source: Any, where: Location | None = None) -> Media:  # PIL, arrays: by attribute
    """Returns an image as encoded bytes, with the media type detected from the bytes. A URL is kept
    as a URL.

    Args:
        source: path, http(s) or data URL, encoded bytes, PIL image, or uint8 array or tensor of
            shape [height, width], [height, width, 1|3|4] or [1|3|4, height, width].
        where: user's line, for errors.

    Raises:
        ParameterError: the file can't be read, the source is not an image, or the image is larger
            than MAX_IMAGE_BYTES.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:image/")):
        return Media(url=source)
    if (found := _read_source_bytes(source, "image", where)) is not None:
        data = found
    elif hasattr(source, "save") and hasattr(source, "mode"):  # a PIL image
        buffer = io.BytesIO()
        (source if source.mode in _PNG_MODES else source.convert("RGB")).save(buffer, format="PNG")
        data = buffer.getvalue()
    elif hasattr(source, "shape") and hasattr(source, "dtype"):
        data = _encode_png(source, where)
    else:
        raise ParameterError(
            "image",
            f"a {type(source).__name__} is not an image.",
            hint="Give a path, an address, bytes, a PIL image or a uint8 array.",
            where=where,
        )
    if len(data) > MAX_IMAGE_BYTES:
        raise ParameterError(
            "image", f"{len(data):,} bytes, the limit is {MAX_IMAGE_BYTES:,}.", where=where
        )
    return Media(data, _detect_image_type(data, where))


def load_file(source: object, kind: MediaKind, where: Location | None = None) -> Media:
    """Returns a video or sound as encoded bytes, with the media type detected from the bytes. An
    http(s) URL is kept as a URL.

    Args:
        source: path, http(s) or data URL, or encoded bytes.
        kind: "video" or "audio".
        where: user's line, for errors.

    Raises:
        ParameterError: the file can't be read, or its format is not known.
    """
    if isinstance(source, str) and (remote := Media(url=source, media_type=f"{kind}/*")).address:
        return remote
    if isinstance(source, str) and source.startswith(f"data:{kind}/"):
        try:
            source = base64.b64decode(source.partition(";base64,")[2], validate=True)
        except ValueError as error:
            raise ParameterError(kind, f"is no base64: {error}", where=where) from None
    if (data := _read_source_bytes(source, kind, where)) is None:
        problem = f"a {type(source).__name__} is not a file."
        raise ParameterError(kind, problem, hint="Give a path, an address or bytes.", where=where)
    return Media(data, _detect_file_type(data, kind, where))


def _read_source_bytes(source: object, kind: MediaKind, where: Location | None) -> bytes | None:
    """Returns the bytes of a file, or the source itself if it is bytes. Returns None for other
    sources.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not isinstance(source, str | os.PathLike):
        return None
    try:
        return Path(source).read_bytes()
    except (OSError, ValueError) as error:
        problem = (
            f"{os.fspath(source)!r} can't be read: {getattr(error, 'strerror', None) or error}."
        )
        missing = isinstance(error, FileNotFoundError)
        hint = "A relative path begins where Python was started. Beside the program: Path(__file__).with_name(…)."
        raise ParameterError(kind, problem, hint=hint if missing else "", where=where) from error


def fetch_medium(image: Media, where: Location | None = None) -> Media:
    """Downloads an image, video or sound from its address, and returns it with its bytes. Blocks.

    Raises:
        ParameterError: the medium can't be fetched, is not at a public address, or is larger than
            MAX_IMAGE_BYTES.
    """
    from sglang_lite.media.fetching import FetchBounds, fetch_files

    try:
        data = fetch_files([image.address], FetchBounds(most_bytes=MAX_IMAGE_BYTES), image.kind)[
            image.address
        ]
    except ParameterError as error:
        error.where = where
        raise
    return Media(data, _detect_file_type(data, image.kind, where), frames=image.frames)


def redact_media(image: Media) -> Media:
    """Returns a medium in the form in which it is recorded. A digest replaces its bytes, and parts
    of its address that may be secret are removed.
    """
    if image.data or image.url.startswith("data:"):
        shown = f"sha256:{hashlib.sha256(image.data or image.url.encode()).hexdigest()}"
    else:
        shown = redact_address(image.url)
    without: Media = msgspec.structs.replace(image, data=b"", url=shown)
    return without


def thumbnail(image: Media) -> str:
    """Returns a data URL of a small JPEG of an image. Returns "" if pillow is missing, or if the
    image is very large, damaged, or only given by its address.
    """
    try:
        import PIL.Image
    except ImportError:
        return ""
    try:
        encoded = image.url.partition(";base64,")[2]
        with PIL.Image.open(
            io.BytesIO(image.data or base64.b64decode(encoded)), formats=_SHOWN
        ) as picture:
            if math.prod(picture.size) > _MAX_SHOWN_PIXELS:
                return ""
            picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
            small = io.BytesIO()
            picture.convert("RGB").save(small, "JPEG", quality=70)
    except Exception:  # pillow raises errors of many kinds for damaged files
        return ""
    return f"data:image/jpeg;base64,{base64.b64encode(small.getvalue()).decode()}"


def extract_frames(video: Media, where: Location | None = None) -> list[Media]:
    """Returns evenly spaced frames of a video as PNG images: `video.frames` of them, or all if the
    video has fewer.

    Raises:
        ParameterError: the video can't be read, or the packages av and pillow are missing.
    """
    found = []
    try:
        header = read_video_header(video)
        count = min(video.frames, header.frames)
        indices = [i * (header.frames - 1) // max(count - 1, 1) for i in range(count)]
        for picture in decode_frames(video, header, indices):
            file = io.BytesIO()
            picture.save(file, "PNG")
            found.append(Media(file.getvalue(), "image/png"))
    except ParameterError as error:
        error.where = where
        raise
    return found


def _detect_file_type(data: bytes, kind: MediaKind, where: Location | None) -> str:
    """Detects the media type of an image, video or sound from its first bytes."""
    if kind == "image":
        return _detect_image_type(data, where)
    try:
        return media_type(data, kind)
    except ParameterError as error:
        error.where = where
        raise


def _detect_image_type(data: bytes, where: Location | None) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    raise ParameterError(
        "image",
        f"the data is not an image in a known format (it starts with {data[:8]!r}).",
        where=where,
    )


def _encode_png(array: Any, where: Location | None) -> bytes:
    """Returns the content of a PNG file (RFC 2083) for a uint8 array."""
    shape = tuple(array.shape)
    if "uint8" not in str(array.dtype) or len(shape) not in (2, 3) or 0 in shape:
        raise ParameterError(
            "image",
            f"an array of {array.dtype} {list(shape)} is not an image.",
            hint="Give uint8 [height, width, 3].",
            where=where,
        )
    if len(shape) == 3 and shape[2] not in (1, 3, 4) and shape[0] in (1, 3, 4):
        array = array.permute(1, 2, 0) if hasattr(array, "permute") else array.transpose(1, 2, 0)
        shape = tuple(array.shape)
    channels = shape[2] if len(shape) == 3 else 1
    colour = {1: 0, 3: 2, 4: 6}.get(channels)
    if colour is None:
        raise ParameterError(
            "image", f"{channels} channels are not supported. Give 1, 3 or 4.", where=where
        )
    pixels = bytes(
        array.cpu().contiguous().numpy() if hasattr(array, "contiguous") else array.tobytes()
    )
    height, width = shape[:2]
    row = width * channels
    raw = b"".join(b"\0" + pixels[i * row : (i + 1) * row] for i in range(height))

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(raw))
        + chunk(b"IEND", b"")
    )
