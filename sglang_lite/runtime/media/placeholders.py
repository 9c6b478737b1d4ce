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
from sglang_lite.runtime.media.data_url import image_from
from sglang_lite.runtime.media.header import read_header
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.tokens.image_span import ImageSpan, MediaItem
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.runtime.tokens.virtual_ids import virtual_ids

Config: TypeAlias = Mapping[str, Any]  # parsed JSON
Part: TypeAlias = str | int  # a text, or a number of placeholders
_IDEFICS_LIMIT = 4096  # longest side that transformers' processor makes


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """Placeholders of a model's images.

    Attributes:
        token: text of the placeholder token.
        token_id: its id.
        vocab_size: size of the vocabulary, from which on ids are virtual.
        settings: hash of what images are prepared with.
        parts: function of an image's width and height that gives what stands for the image, in order.
    """

    token: str
    token_id: int
    vocab_size: int
    settings: bytes
    parts: Callable[[int, int], Sequence[Part]]

    def placed(self, spans: Sequence[Span]) -> Iterator[Span]:
        """Spans of a prompt that names its placeholders in text, with these by themselves. Text that can't name special
        tokens has none."""
        for span in spans:
            if span.ids is not None or not span.special:
                yield span
                continue
            first, *others = span.text.split(self.token)
            yield Span(first)
            for text in others:
                yield Span(self.token, ())
                yield Span(text)

    def spans(self, image: Image) -> tuple[Span, ...]:
        """Spans that stand for an image in a prompt. Reads the beginning of its bytes alone.

        Raises:
            ParameterError: the image is none that can be read, or is too large.
            CapabilityError: it is an address.
        """
        if image.url:
            image = image_from(image.url, "image")
        parts = self.parts(*read_header(image))
        count = sum(part for part in parts if isinstance(part, int))
        item = MediaItem(image, hashlib.blake2b(image.data, key=self.settings, digest_size=32).digest(), count)
        ids, start, spans = virtual_ids(item.key, count, self.vocab_size), 0, list[Span]()
        for part in parts:
            if isinstance(part, str):
                spans.append(Span(part))
            else:
                spans.append(ImageSpan(self.token, ids[start : start + part], item=None if start else item))
                start += part
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
        raise ParameterError(
            "prompt", f"has {places} placeholders, and {count} images.",
            hint=f"Write {images.token} where each one belongs." if named else "",
        )  # fmt: skip
    left = iter(prompt.images)
    return [each for span in spans for each in (images.spans(next(left)) if is_placeholder(span) else (span,))]


def _names_any(spans: Sequence[Span], images: ImageFormat | None) -> bool:
    """True if text that may spell special tokens has a placeholder's."""
    return images is not None and any(span.special and span.ids is None and images.token in span.text for span in spans)


def no_images_error(model_name: str) -> ParameterError:
    """Error for an image at a model that reads none."""
    return ParameterError("prompt", f"{model_name} can't see images.", hint="Describe what they show.")


def image_format(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> ImageFormat | None:
    """Placeholders of the images of the model in a folder, or None if it reads no images that are supported.

    Raises:
        ModelError: a setting that they need is missing or damaged.
    """
    config = read_json(folder / "config.json")
    make = _FAMILIES.get(config.get("model_type", ""))
    file = folder / "preprocessor_config.json"
    if make is None or not file.exists():
        return None
    settings = read_json(file)
    try:
        token_id: int = config["image_token_id" if "image_token_id" in config else "image_token_index"]
        parts = make(config, settings)
        token = tokenizer.control_text(token_id)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{folder}: its images can't be prepared: {error!r}.") from error
    digest = hashlib.blake2b(file.read_bytes(), digest_size=32).digest()
    return ImageFormat(token, token_id, vocab_size, digest, parts)


def _llava(config: Config, settings: Config) -> Callable[[int, int], Sequence[Part]]:
    """LLaVA 1.5: every image is cut to one square."""
    vision = config["vision_config"]
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    count = patches + (config.get("vision_feature_select_strategy", "default") == "full")
    return lambda width, height: (count,)


def _idefics(config: Config, settings: Config) -> Callable[[int, int], Sequence[Part]]:
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


_FAMILIES: Mapping[str, Callable[[Config, Config], Callable[[int, int], Sequence[Part]]]] = {
    "llava": _llava, "idefics3": _idefics, "smolvlm": _idefics,
}  # fmt: skip
