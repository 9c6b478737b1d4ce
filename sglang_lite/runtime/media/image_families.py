"""Placeholders of an image in each model family's format. Needs neither torch nor pillow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.tokens.image_span import Grid

Config: TypeAlias = Mapping[str, Any]  # parsed JSON
Part: TypeAlias = str | int | Grid  # a text, a number of placeholders, or a grid of them
Parts: TypeAlias = Callable[[int, int], Sequence[Part]]  # function of an image's width and height
GEMMA_IMAGE = "<start_of_image>"
_AROUND = "<fake_token_around_image>"
IDEFICS_LIMIT = 4096  # longest side that transformers' processor makes


def _llava_placeholders(config: Config, settings: Config) -> Parts:
    """Returns the placeholders of LLaVA 1.5 or Pixtral, which have the same model type. LLaVA 1.5
    crops every image to a square of fixed size.
    """
    vision = config["vision_config"]
    if vision.get("model_type") == "pixtral":
        return _pixtral_placeholders(config, settings)
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    count = patches + (config.get("vision_feature_select_strategy", "default") == "full")
    return lambda width, height: (count,)


def _idefics_placeholders(config: Config, settings: Config) -> Parts:
    """Returns the placeholders of Idefics3 and SmolVLM: tiles in rows and columns, each with its
    position, then the whole image.
    """
    tile = settings["max_image_size"]["longest_edge"]
    whole = idefics_tile_placeholders(config)
    count = whole[1]
    longest = settings["size"]["longest_edge"] if settings.get("do_resize", True) else None

    def parts(width: int, height: int) -> Sequence[Part]:
        rows = columns = 0
        if settings.get("do_image_splitting", True):
            rows, columns = _count_tile_rows_and_columns(width, height, longest, tile)
        found: list[Part] = []
        for row in range(rows):
            for column in range(columns):
                found += [f"{_AROUND}<row_{row + 1}_col_{column + 1}>", count]
            found.append("\n")
        return [*found, *["\n"] * (rows > 0), *whole]

    return parts


def idefics_tile_placeholders(config: Config) -> tuple[str, int, str]:
    """Returns the text and placeholders of a one-tile image in Idefics3 and SmolVLM."""
    vision = config["vision_config"]
    count: int = (vision["image_size"] // vision["patch_size"]) ** 2 // config["scale_factor"] ** 2
    return f"{_AROUND}<global-img>", count, _AROUND


def _count_tile_rows_and_columns(
    width: int, height: int, longest: int | None, tile: int
) -> tuple[int, int]:
    """Returns the rows and columns of tiles into which transformers' processor cuts an image.
    Returns 0 and 0 if it leaves the image in one tile.
    """
    if longest is not None:
        width, height = scale_to_longest(width, height, min(longest, IDEFICS_LIMIT))
    aspect = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / aspect) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * aspect) / tile)
    return (0, 0) if rows <= 1 and columns <= 1 else (rows, columns)


def scale_to_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Returns the width and height after scaling the longer side to `longest`. The shorter one is
    rounded up to an even number.
    """
    aspect = width / height
    if width >= height:
        width = longest
        height = int(longest / aspect)
        height += height % 2
    else:
        width = int(longest * aspect)
        height = longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _qwen_placeholders(config: Config, settings: Config) -> Parts:
    """Returns the placeholders of Qwen2-VL and its successors: a grid of patches, merged in
    squares. The image keeps about its own size, within the model's limits.
    """
    size = settings.get("size") or {}
    merge = settings.get("merge_size", 2)
    patch = settings.get("patch_size", 14)
    least = settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    unit = patch * merge
    return lambda width, height: (Grid(*fit_to_grid(width, height, unit, least, most)),)


def fit_to_grid(width: int, height: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """Returns the rows and columns of squares to which Qwen2-VL scales an image. A square is `unit`
    pixels wide. The scaled image has `least` to `most` pixels.
    """
    rows = round(height / unit)
    columns = round(width / unit)
    if rows * columns * unit**2 > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
    elif rows * columns * unit**2 < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
    return rows, columns


def _pixtral_placeholders(config: Config, settings: Config) -> Parts:
    """Returns the placeholders of Pixtral and Mistral 3: patches of the image at its own size, with
    a token after each row.
    """
    size = settings.get("size") or {"longest_edge": 1024}
    patch = settings.get("patch_size", 16)
    unit = (patch if isinstance(patch, int) else patch["height"]) * config.get(
        "spatial_merge_size", 1
    )
    # transformers' Mistral 3 can't encode a single patch
    least = 1 if "spatial_merge_size" not in config else 2
    most_rows, most_columns = (
        size.get("longest_edge") or size[side] for side in ("height", "width")
    )

    def parts(width: int, height: int) -> Sequence[Part]:
        ratio = max(height / most_rows, width / most_columns, 1)
        rows, columns = (-(-math.floor(side / ratio) // unit) for side in (height, width))
        if (count := rows * columns) < least:
            problem = f"{width:,} x {height:,} pixels have {count} of at least {least} patches of {unit} x {unit}."
            raise ParameterError("image", problem, hint="Cut it less narrow, or scale it up.")
        return [*[columns, "[IMG_BREAK]"] * (rows - 1), columns, "[IMG_END]"]

    return parts


def _gemma_placeholders(config: Config, settings: Config) -> Parts:
    """Returns the placeholders of Gemma 3, which scales every image to one square. A special token
    and an empty line come before and after the image's tokens.
    """
    count: int = config["mm_tokens_per_image"]
    if settings.get("do_pan_and_scan"):
        raise ValueError("do_pan_and_scan is not supported")
    return lambda width, height: (f"\n\n{GEMMA_IMAGE}", count, "<end_of_image>\n\n")


def _onevision_placeholders(config: Config, settings: Config) -> Parts:
    """Returns the placeholders of LLaVA-OneVision: tiles, scaled down if there are many."""
    if config.get("vision_feature_select_strategy", "full") != "full":
        raise ValueError("vision_feature_select_strategy must be 'full'")
    sides = range(384, 2305, 384)
    sizes = settings.get("image_grid_pinpoints") or [
        (rows, columns) for rows in sides for columns in sides
    ]
    most = config.get("vision_aspect_ratio", "anyres_max_9")
    return _tile_placeholders(
        config, settings["size"]["height"], sizes, int(most.removeprefix("anyres_max_"))
    )


def _llava_next_placeholders(config: Config, settings: Config) -> Parts:
    """Returns the placeholders of LLaVA-NeXT (1.6), which fits an image to one of a few sizes and
    divides it into tiles.
    """
    if config.get("vision_feature_select_strategy", "default") != "default":
        raise ValueError("vision_feature_select_strategy must be 'default'")
    sizes = settings.get("image_grid_pinpoints") or [
        (336, 672),
        (672, 336),
        (672, 672),
        (1008, 336),
        (336, 1008),
    ]
    return _tile_placeholders(config, settings["crop_size"]["height"], sizes)


def _tile_placeholders(
    config: Config, tile: int, sizes: Sequence[Sequence[int]], most_tiles: float = math.inf
) -> Parts:
    """Returns the placeholders of the downscaled whole image, followed by those of its tiles.
    Padding has no placeholders. Each row ends with an extra token.
    """
    side = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]

    def parts(width: int, height: int) -> Sequence[Part]:
        tall, wide = max(sizes, key=lambda size: _size_preference(width, height, size[1], size[0]))
        rows = side * (tall // tile)
        columns = side * (wide // tile)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        shrink = math.sqrt(rows * columns / (most_tiles * side**2))
        if shrink > 1.1:
            rows = int(rows // shrink)
            columns = int(columns // shrink)
        return (side**2 + rows * (columns + 1),)

    return parts


def _size_preference(width: int, height: int, wide: int, tall: int) -> tuple[int, int]:
    """Returns the key by which transformers ranks candidate sizes for an image. Sizes that keep
    more of the image's pixels come first, then sizes with fewer empty pixels.
    """
    scale = min(wide / width, tall / height)
    pixels = min(int(width * scale) * int(height * scale), width * height)
    return pixels, pixels - wide * tall


IMAGE_FAMILIES: Mapping[str, Callable[[Config, Config], Parts]] = {
    "llava": _llava_placeholders,
    "llava_next": _llava_next_placeholders,
    "llava_onevision": _onevision_placeholders,
    "idefics3": _idefics_placeholders,
    "smolvlm": _idefics_placeholders,
    "mistral3": _pixtral_placeholders,
    "qwen2_vl": _qwen_placeholders,
    "qwen2_5_vl": _qwen_placeholders,
    "qwen3_vl": _qwen_placeholders,
    "qwen3_vl_moe": _qwen_placeholders,
    "gemma3": _gemma_placeholders,
}
