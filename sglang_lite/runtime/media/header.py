"""Checks an image before it is decoded: its format, size and colour mode."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from sglang_lite.protocol import Media, ParameterError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_BYTES = 50 * 2**20
MAX_PIXELS = 64 * 10**6  # 8,000 x 8,000: decoded, 192 MB
MAX_ASPECT = 200  # longer side over shorter side
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
# EXIF tag; from this value on, width and height are swapped
_ORIENTATION = 0x0112
_LYING = 5


def read_image_size(image: Media) -> tuple[int, int]:
    """Returns the width and height of an image as displayed.

    Raises:
        ParameterError: see `open_image`.
    """
    with open_image(image) as picture:
        width, height = picture.size
        return (height, width) if _orientation(picture) >= _LYING else (width, height)


def decode_upright(picture: Picture) -> Picture:
    """Decodes an image to 8-bit RGB pixels in its displayed orientation, with white where it is
    transparent. Pillow may raise many kinds of errors.
    """
    import PIL.Image
    import PIL.ImageOps

    shown = PIL.ImageOps.exif_transpose(picture) if _orientation(picture) > 1 else picture
    if shown.mode.startswith("I"):  # 16-bit grey, which pillow would clip at 255
        return (
            shown.convert("I")
            .point(lambda value: value * (1 / 257) + 0.5)
            .convert("L")
            .convert("RGB")
        )
    if shown.has_transparency_data:
        shown = PIL.Image.alpha_composite(
            PIL.Image.new("RGBA", shown.size, "white"), shown.convert("RGBA")
        )
    return shown.convert("RGB")


def _orientation(picture: Picture) -> int:
    """Returns the orientation as an EXIF number. For a PNG this is always 1 (upright), since
    reading it would decode the pixels.
    """
    try:
        return 1 if picture.format == "PNG" else int(picture.getexif().get(_ORIENTATION, 1))
    except Exception:  # raised by pillow for damaged metadata
        return 1


def open_image(image: Media) -> Picture:
    """Opens an image without decoding its pixels.

    Raises:
        ParameterError: it has no bytes or too many, is not an image, is in an unknown format,
            animated, has several pages, is in CMYK or 32-bit grey, is too large, or too long and
            narrow; or the package pillow is missing.
    """
    try:
        import PIL.Image
    except ImportError:
        raise _error(
            "reading images needs the package pillow.", "pip install 'sglang-lite[media]'"
        ) from None
    if not image.data:
        raise _error("is empty.", "Give the bytes of a PNG, JPEG, WEBP, GIF, BMP or TIFF file.")
    if len(image.data) > MAX_BYTES:
        raise _error(f"{len(image.data):,} bytes, the limit is {MAX_BYTES:,}.", "Save it smaller.")
    try:
        picture = PIL.Image.open(io.BytesIO(image.data), formats=FORMATS)
    except PIL.Image.DecompressionBombError as error:
        raise _error(f"is too large: {error}", "Scale it down.") from None
    except PIL.UnidentifiedImageError:
        problem = f"begins with {image.data[:8]!r}: no image in a known format, or damaged there."
        raise _error(problem, f"Known: {', '.join(FORMATS)}.") from None
    except Exception as error:  # pillow raises errors of many kinds for damaged files
        raise _error(f"can't be read: {error}", "Save it again.") from None
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise _error(
            f"{width:,} x {height:,} pixels, the limit is {MAX_PIXELS:,} in all.", "Scale it down."
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise _error(
            f"{width:,} x {height:,} pixels: one side is over {MAX_ASPECT} times the other.",
            "Cut it.",
        )
    # Of a JPEG with several pictures, use the first: the others are previews, depth or gain maps of
    # the same photo.
    if getattr(picture, "is_animated", False) and picture.format != "MPO":
        if picture.format == "TIFF":
            raise _error("has several pages.", "Send each as an image.")
        raise _error("is animated.", "Send its frames as images.")
    if picture.mode == "F" or (picture.mode == "I" and picture.format == "TIFF"):
        raise _error("has 32 bits a pixel, of an unknown range.", "Save it with 8 or 16 bits.")
    if picture.mode == "CMYK":
        raise _error("is in CMYK, a printer's colours.", "Save it in RGB.")
    return picture


def _error(problem: str, hint: str) -> ParameterError:
    return ParameterError("image", problem, hint=hint)
