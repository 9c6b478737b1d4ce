"""Conversion of images and videos (paths, URLs, bytes, PIL images, arrays) to the protocol's Image."""

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

from sglang_lite.errors import shown_address
from sglang_lite.lang.checks import check_whole
from sglang_lite.protocol import Image, Location, ParameterError

MAX_IMAGE_BYTES = 50 * 2**20
_MAX_SHOWN_PIXELS = 16 * 10**6  # of an image with a thumbnail: decoded in some 0.2 s
_THUMBNAIL = 96  # its longer side
_SHOWN = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"), (b"II*\0", "image/tiff"), (b"MM\0*", "image/tiff"),
)  # fmt: skip
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")  # PIL modes that PNG supports


def load_image(source: Any, where: Location | None = None) -> Image:  # PIL, arrays: by attribute
    """Image as encoded bytes with the media type that the bytes indicate; a URL is kept as a URL.

    Args:
        source: path, http(s) or data URL, encoded bytes, PIL image, or uint8 array or tensor of shape [height, width],
            [height, width, 1|3|4] or [1|3|4, height, width].
        where: user's line, for errors.

    Raises:
        ParameterError: the file can't be read, the source is not an image, or the image is larger than MAX_IMAGE_BYTES.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:image/")):
        return Image(url=source)
    if isinstance(source, str | os.PathLike):
        try:
            data = Path(source).read_bytes()
        except (OSError, ValueError) as error:
            raise ParameterError(
                "image",
                f"{os.fspath(source)!r} can't be read: {getattr(error, 'strerror', None) or error}.",
                where=where,
            ) from error
    elif isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    elif hasattr(source, "save") and hasattr(source, "mode"):  # a PIL image
        buffer = io.BytesIO()
        (source if source.mode in _PNG_MODES else source.convert("RGB")).save(buffer, format="PNG")
        data = buffer.getvalue()
    elif hasattr(source, "shape") and hasattr(source, "dtype"):
        data = _png(source, where)
    else:
        raise ParameterError(
            "image", f"a {type(source).__name__} is not an image.",
            hint="Give a path, an address, bytes, a PIL image or a uint8 array.", where=where,
        )  # fmt: skip
    if len(data) > MAX_IMAGE_BYTES:
        raise ParameterError("image", f"{len(data):,} bytes, the limit is {MAX_IMAGE_BYTES:,}.", where=where)
    return Image(data, _media_type(data, where))


def fetched(image: Image, where: Location | None = None) -> Image:
    """An image that is at an address, with its bytes. Blocks.

    Raises:
        ParameterError: it can't be fetched, is not at a public address, or is larger than MAX_IMAGE_BYTES.
    """
    from sglang_lite.fetching import FetchBounds, fetch

    try:
        data = fetch([image.address], FetchBounds(most_bytes=MAX_IMAGE_BYTES), "image")[image.address]
    except ParameterError as error:
        error.where = where
        raise
    return Image(data, _media_type(data, where))


def without_bytes(image: Image) -> Image:
    """Image as it is recorded: its digest in place of its bytes, and an address without what may be secret in it."""
    if image.data or image.url.startswith("data:"):
        content = image.data or image.url.encode()
        return Image(media_type=image.media_type, url=f"sha256:{hashlib.sha256(content).hexdigest()}")
    return Image(url=shown_address(image.url), media_type=image.media_type)


def thumbnail(image: Image) -> str:
    """Data URL of a small JPEG that shows an image. "" without pillow, and for an image that is large, damaged or at an
    address."""
    try:
        import PIL.Image
    except ImportError:
        return ""
    try:
        encoded = image.url.partition(";base64,")[2]
        with PIL.Image.open(io.BytesIO(image.data or base64.b64decode(encoded)), formats=_SHOWN) as picture:
            if math.prod(picture.size) > _MAX_SHOWN_PIXELS:
                return ""
            picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
            small = io.BytesIO()
            picture.convert("RGB").save(small, "JPEG", quality=70)
    except Exception:  # of pillow, which has errors of many kinds for damaged files
        return ""
    return f"data:image/jpeg;base64,{base64.b64encode(small.getvalue()).decode()}"


def load_video(path: str | os.PathLike[str], num_frames: int, where: Location | None = None) -> list[Image]:
    """Frames of a video file, evenly spread, as PNG images. Needs opencv-python.

    Args:
        num_frames: number of frames; frames that can't be read are left out.

    Raises:
        ParameterError: no frame can be read, `num_frames` is not a whole number above 0, or OpenCV is not installed.
    """
    check_whole("num_frames", num_frames, 1, where)
    try:
        import cv2
    except ImportError as error:
        raise ParameterError(
            "video", "reading videos needs OpenCV.", hint="pip install opencv-python", where=where
        ) from error
    capture: Any = cv2.VideoCapture(os.fspath(path))
    count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    frames = []
    for i in range(num_frames if count > 0 else 0):
        capture.set(cv2.CAP_PROP_POS_FRAMES, i * (count - 1) // max(num_frames - 1, 1))  # one frame in memory
        there, frame = capture.read()
        if there:
            frames.append(Image(cv2.imencode(".png", frame)[1].tobytes(), "image/png"))
    capture.release()
    if not frames:
        raise ParameterError("video", f"{os.fspath(path)!r} has no frames that can be read.", where=where)
    return frames


def _media_type(data: bytes, where: Location | None) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    raise ParameterError(
        "image", f"the data is not an image in a known format (it starts with {data[:8]!r}).", where=where
    )


def _png(array: Any, where: Location | None) -> bytes:
    """Content of a PNG file (RFC 2083) for a uint8 array."""
    shape = tuple(array.shape)
    if "uint8" not in str(array.dtype) or len(shape) not in (2, 3) or 0 in shape:
        raise ParameterError(
            "image", f"an array of {array.dtype} {list(shape)} is not an image.", hint="Give uint8 [height, width, 3].",
            where=where,
        )  # fmt: skip
    if len(shape) == 3 and shape[2] not in (1, 3, 4) and shape[0] in (1, 3, 4):
        array = array.permute(1, 2, 0) if hasattr(array, "permute") else array.transpose(1, 2, 0)
        shape = tuple(array.shape)
    channels = shape[2] if len(shape) == 3 else 1
    colour = {1: 0, 3: 2, 4: 6}.get(channels)
    if colour is None:
        raise ParameterError("image", f"{channels} channels are not supported. Give 1, 3 or 4.", where=where)
    pixels = bytes(array.cpu().contiguous().numpy() if hasattr(array, "contiguous") else array.tobytes())
    height, width = shape[:2]
    row = width * channels
    raw = b"".join(b"\0" + pixels[i * row : (i + 1) * row] for i in range(height))

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
