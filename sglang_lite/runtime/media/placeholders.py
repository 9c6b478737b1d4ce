"""Placeholders of an image, as families of models write them. Needs neither torch nor pillow."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from sglang_lite.protocol import Image, ModelError, ParameterError, Prompt, Span
from sglang_lite.protocol.prompt import is_placeholder
from sglang_lite.runtime.media.data_url import image_from, unfetched
from sglang_lite.runtime.media.header import read_header
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.models.folder_config import read_config
from sglang_lite.runtime.tokens.image_options import ImageOptions
from sglang_lite.runtime.tokens.image_span import ImageSpan, MediaItem
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.runtime.tokens.virtual_ids import virtual_ids

Config: TypeAlias = Mapping[str, Any]  # parsed JSON
# A text, a number of placeholders, or the rows and columns of a grid of them.
Part: TypeAlias = str | int | tuple[int, int]
Parts: TypeAlias = Callable[[int, int], Sequence[Part]]  # function of an image's width and height
_GEMMA_IMAGE = "<start_of_image>"
_IDEFICS_LIMIT = 4096  # longest side that transformers' processor makes


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """Placeholders of a model's images.

    Attributes:
        named: text that stands for an image in prompts.
        token: text of the placeholder token.
        token_id: its id.
        vocab_size: size of the vocabulary, from which on ids are virtual.
        settings: hash of what images are prepared with.
        parts: gives what stands for an image, in order. Raises ParameterError if the model can't see it.
        block: number of an image's tokens, if they attend to each other in both directions; else 0.
        most: largest number of images in a prompt; None for no limit.
    """

    named: str
    token: str
    token_id: int
    vocab_size: int
    settings: bytes
    parts: Parts
    block: int = 0
    most: int | None = None

    def placed(self, spans: Sequence[Span]) -> Iterator[Span]:
        """Spans of a prompt that names its placeholders in text, with these by themselves. Text that can't name special
        tokens has none."""
        for span in spans:
            if span.ids is not None or not span.special:
                yield span
                continue
            first, *others = span.text.split(self.named)
            yield Span(first)
            for text in others:
                yield Span(self.named, ())
                yield Span(text)

    def spans(self, image: Image) -> tuple[Span, ...]:
        """Spans that stand for an image in a prompt. Reads the beginning of its bytes alone.

        Raises:
            ParameterError: the image is none that can be read, or is too large.
            CapabilityError: it is an address.
        """
        if image.url:
            image = image_from(image.url, "image")
        if image.url:  # still: it is not a data URL
            raise unfetched(image.url, "image")
        parts = self.parts(*read_header(image))
        counts = [
            0 if isinstance(part, str) else part if isinstance(part, int) else part[0] * part[1] for part in parts
        ]
        grid = next((part for part in parts if isinstance(part, tuple)), None)
        key = hashlib.blake2b(image.data, key=self.settings, digest_size=32).digest()
        item = MediaItem(image, key, sum(counts), grid, both_ways=self.block > 0)
        ids, start, spans = virtual_ids(item.key, item.count, self.vocab_size), 0, list[Span]()
        for part, count in zip(parts, counts):
            if isinstance(part, str):
                spans.append(Span(part))
            else:
                spans.append(ImageSpan(self.token, ids[start : start + count], item=None if start else item))
                start += count
        return tuple(spans)


def prompt_spans(prompt: Prompt, images: ImageFormat | None, model_name: str) -> Sequence[Span]:
    """Spans of a prompt, with the placeholders of its images.

    Args:
        prompt: its images belong to its placeholders (`is_placeholder`). If it has none, they are named in its text.
        images: how prompts have images; None if the model reads none.
        model_name: name of the model, for messages.

    Raises:
        ParameterError: an image can't be read, the model reads none, or there are more or fewer than placeholders.
    """
    if not prompt.images and not any(map(is_placeholder, prompt.spans)) and not _names_any(prompt.spans, images):
        return prompt.spans
    if images is None:
        raise no_images_error(model_name)
    named = not any(map(is_placeholder, prompt.spans))
    spans = list(images.placed(prompt.spans) if named else prompt.spans)
    places, count = sum(map(is_placeholder, spans)), len(prompt.images)
    if places != count:
        problem = f"has {places} placeholder{'s' * (places != 1)}, and {count} image{'s' * (count != 1)}."
        cure = f"Write {images.named} where each one belongs."
        if places > count:
            cure = f"Give an image for each {images.named}: image_data= of generate, or sgl.image in a program."
        raise ParameterError("prompt", problem, hint=cure if named else "")
    left = iter(prompt.images)
    return [each for span in spans for each in (images.spans(next(left)) if is_placeholder(span) else (span,))]


def _names_any(spans: Sequence[Span], images: ImageFormat | None) -> bool:
    """True if text that may spell special tokens has a placeholder's."""
    return images is not None and any(span.special and span.ids is None and images.named in span.text for span in spans)


def no_images_error(model_name: str) -> ParameterError:
    """Error for an image at a model that reads none."""
    return ParameterError("prompt", f"{model_name} can't see images.", hint="Describe what they show.")


def image_format(folder: Path, tokenizer: Tokenizer, vocab_size: int, options: ImageOptions) -> ImageFormat | None:
    """Placeholders of the images of the model in a folder, or None if it reads no images that are supported.

    Raises:
        ModelError: a setting that they need is missing or damaged.
    """
    config = read_config(folder)
    make = _FAMILIES.get(config.get("model_type", ""))
    if make is None or (settings := _settings(folder)) is None:
        return None
    settings = {**settings, **options.processor}
    try:
        token_id: int = config["image_token_id" if "image_token_id" in config else "image_token_index"]
        parts = make(config, settings)
        token = tokenizer.control_text(token_id)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{folder}: its images can't be prepared: {error!r}.") from error
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=32).digest()
    named, block = (_GEMMA_IMAGE, config["mm_tokens_per_image"]) if config["model_type"] == "gemma3" else (token, 0)
    return ImageFormat(named, token, token_id, vocab_size, digest, parts, block, options.most)


def _settings(folder: Path) -> Config | None:
    """Settings of a folder's image processor, where transformers reads them; None if there are none."""
    whole, file = folder / "processor_config.json", folder / "preprocessor_config.json"
    nested = read_json(whole).get("image_processor") if whole.exists() else None  # written from transformers 5 on
    if isinstance(nested, dict):
        return nested
    return read_json(file) if file.exists() else None


def _llava(config: Config, settings: Config) -> Parts:
    """LLaVA 1.5: every image is cut to one square. Pixtral is of the same type, with another encoder."""
    vision = config["vision_config"]
    if vision.get("model_type") == "pixtral":
        return _pixtral(config, settings)
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    count = patches + (config.get("vision_feature_select_strategy", "default") == "full")
    return lambda width, height: (count,)


def _idefics(config: Config, settings: Config) -> Parts:
    """Idefics3 and SmolVLM: tiles in rows and columns, each with its place, and the whole image."""
    vision, tile = config["vision_config"], settings["max_image_size"]["longest_edge"]
    count = (vision["image_size"] // vision["patch_size"]) ** 2 // config["scale_factor"] ** 2
    longest = settings["size"]["longest_edge"] if settings.get("do_resize", True) else None
    around, whole = "<fake_token_around_image>", "<global-img>"

    def parts(width: int, height: int) -> Sequence[Part]:
        rows = columns = 0
        if settings.get("do_image_splitting", True):
            rows, columns = _tiles(width, height, longest, tile)
        found: list[Part] = []
        for row in range(rows):
            for column in range(columns):
                found += [f"{around}<row_{row + 1}_col_{column + 1}>", count]
            found.append("\n")
        return [*found, "\n" * (rows > 0) + around + whole, count, around]

    return parts


def _tiles(width: int, height: int, longest: int | None, tile: int) -> tuple[int, int]:
    """Rows and columns of tiles, as transformers' processor cuts them; 0 and 0 for an image of one tile."""
    if longest is not None:
        width, height = _scaled(width, height, min(longest, _IDEFICS_LIMIT))
    aspect = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / aspect) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * aspect) / tile)
    return (0, 0) if rows <= 1 and columns <= 1 else (rows, columns)


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Size after scaling the longer side to `longest`, with an even shorter side."""
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        width, height = int(longest * aspect), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _qwen(config: Config, settings: Config) -> Parts:
    """Qwen2-VL and its successors: a grid of patches, merged in squares, of about the image's own size."""
    size, merge, patch = settings.get("size") or {}, settings.get("merge_size", 2), settings.get("patch_size", 14)
    least = settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    unit = patch * merge

    def parts(width: int, height: int) -> Sequence[Part]:
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > most:
            shrink = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit**2 < least:
            grow = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return ((rows, columns),)

    return parts


def _pixtral(config: Config, settings: Config) -> Parts:
    """Pixtral and Mistral 3: patches of the image's own size, with a token behind each row."""
    size, patch = settings.get("size") or {"longest_edge": 1024}, settings.get("patch_size", 16)
    unit = (patch if isinstance(patch, int) else patch["height"]) * config.get("spatial_merge_size", 1)
    least = 1 if "spatial_merge_size" not in config else 2  # transformers' Mistral 3 can't encode one alone
    most_rows, most_columns = (size.get("longest_edge") or size[side] for side in ("height", "width"))

    def parts(width: int, height: int) -> Sequence[Part]:
        ratio = max(height / most_rows, width / most_columns, 1)
        rows, columns = (-(-math.floor(side / ratio) // unit) for side in (height, width))
        if (count := rows * columns) < least:
            problem = f"{width:,} x {height:,} pixels have {count} of at least {least} patches of {unit} x {unit}."
            raise ParameterError("image", problem, hint="Cut it less narrow, or scale it up.")
        return [*[columns, "[IMG_BREAK]"] * (rows - 1), columns, "[IMG_END]"]

    return parts


def _gemma(config: Config, settings: Config) -> Parts:
    """Gemma 3: every image is made one square, between two tokens and empty lines."""
    count: int = config["mm_tokens_per_image"]
    if settings.get("do_pan_and_scan"):
        raise ValueError("do_pan_and_scan is not supported")
    return lambda width, height: (f"\n\n{_GEMMA_IMAGE}", count, "<end_of_image>\n\n")


def _onevision(config: Config, settings: Config) -> Parts:
    """LLaVA-OneVision: tiles, scaled down if there are many."""
    if config.get("vision_feature_select_strategy", "full") != "full":
        raise ValueError("vision_feature_select_strategy must be 'full'")
    sides = range(384, 2305, 384)
    sizes = settings.get("image_grid_pinpoints") or [(rows, columns) for rows in sides for columns in sides]
    most = config.get("vision_aspect_ratio", "anyres_max_9")
    return _tiled(config, settings["size"]["height"], sizes, int(most.removeprefix("anyres_max_")))


def _llava_next(config: Config, settings: Config) -> Parts:
    """LLaVA-NeXT (1.6): tiles of a few sizes."""
    if config.get("vision_feature_select_strategy", "default") != "default":
        raise ValueError("vision_feature_select_strategy must be 'default'")
    sizes = settings.get("image_grid_pinpoints") or [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
    return _tiled(config, settings["crop_size"]["height"], sizes)


def _tiled(config: Config, tile: int, sizes: Sequence[Sequence[int]], most_tiles: float = math.inf) -> Parts:
    """The whole image, then tiles without their padding, with a token behind each row."""
    side = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]

    def parts(width: int, height: int) -> Sequence[Part]:
        tall, wide = max(sizes, key=lambda size: _fit(width, height, size[1], size[0]))
        rows, columns = side * (tall // tile), side * (wide // tile)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        shrink = math.sqrt(rows * columns / (most_tiles * side**2))
        if shrink > 1.1:
            rows, columns = int(rows // shrink), int(columns // shrink)
        return (side**2 + rows * (columns + 1),)

    return parts


def _fit(width: int, height: int, wide: int, tall: int) -> tuple[int, int]:
    """Rank of a size for an image, as transformers ranks them: by its pixels there, then by those left empty."""
    scale = min(wide / width, tall / height)
    pixels = min(int(width * scale) * int(height * scale), width * height)
    return pixels, pixels - wide * tall


_FAMILIES: Mapping[str, Callable[[Config, Config], Parts]] = {
    "llava": _llava, "llava_next": _llava_next, "llava_onevision": _onevision, "idefics3": _idefics,
    "smolvlm": _idefics, "mistral3": _pixtral,
    "qwen2_vl": _qwen, "qwen2_5_vl": _qwen, "qwen3_vl": _qwen, "gemma3": _gemma,
}  # fmt: skip
