"""Placeholders of images, videos and sounds in prompts. Needs neither torch nor pillow, except to
read files.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from sglang_lite.media.files import count_samples, read_video_header
from sglang_lite.protocol import (
    CapabilityError,
    Media,
    MediaKind,
    ModelError,
    ParameterError,
    Prompt,
    Span,
)
from sglang_lite.protocol.prompt import is_placeholder
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.media.data_url import ARTICLES, parse_medium, unsupported_url_error
from sglang_lite.runtime.media.header import read_image_size
from sglang_lite.runtime.media.image_families import GEMMA_IMAGE, IMAGE_FAMILIES, Config, Part
from sglang_lite.runtime.media.sound_families import SOUND_FAMILIES, SoundFormat
from sglang_lite.runtime.media.video_families import (
    VIDEO_FAMILIES,
    VIDEO_SETTINGS,
    VideoFormat,
    video_settings,
)
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.models.folder_config import read_config
from sglang_lite.runtime.tokens.image_options import ImageOptions
from sglang_lite.runtime.tokens.image_span import Grid, ImageSpan, MediaItem
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.runtime.tokens.virtual_ids import find_virtual_positions, hash_to_virtual_ids

# for messages
NAMES: Mapping[MediaKind, str] = {"image": "image", "video": "video", "audio": "sound"}
_SENSES: Mapping[MediaKind, str] = {
    "image": "see images",
    "video": "watch videos",
    "audio": "hear sounds",
}
_CURES: Mapping[MediaKind, str] = {
    "image": "Describe what they show.",
    "video": "Send frames as images if the model reads these.",
    "audio": "Send what is said as text.",
}


@dataclass(frozen=True, slots=True)
class Placeholders:
    """How a model family's prompts represent one kind of media.

    Attributes:
        named: text that stands for a medium in prompts.
        token: text of the placeholder token.
        token_id: its id.
        parts: returns the texts and placeholders that stand for a medium, in order. Reads as little
            of the medium as possible. Raises ParameterError if the medium is damaged or the model
            can't take it.
        most: maximum number in a prompt; None for no limit.
    """

    named: str
    token: str
    token_id: int
    parts: Callable[[Media], Sequence[Part]]
    most: int | None = None


@dataclass(frozen=True, slots=True)
class MediaFormat:
    """How a model's prompts represent images, videos and sounds.

    Attributes:
        kinds: placeholders of each kind of media that the model takes.
        vocab_size: size of the vocabulary; ids from there on are virtual.
        settings: hash of the settings with which media are prepared.
        block: number of an image's tokens, if they attend to each other in both directions; else 0.
        video, sound: how the model takes videos and sounds; None if it takes none.
        begins: whether each prompt begins with one sound, and has no other.
    """

    kinds: Mapping[MediaKind, Placeholders]
    vocab_size: int
    settings: bytes
    block: int = 0
    video: VideoFormat | None = None
    sound: SoundFormat | None = None
    begins: bool = False

    def check_sound_comes_first(self, tokens: Ints, media: Sequence[MediaItem]) -> None:
        """Checks a prompt if the model's prompts must begin with a sound. Raises ParameterError
        unless the tokens are one sound followed by text.
        """
        if not self.begins:
            return
        places = find_virtual_positions(tokens, self.vocab_size)
        if len(media) != 1 or len(places) != media[0].count or places[-1] >= len(places):
            problem = "has to begin with a sound and have no other: the model writes what it hears."
            hint = (
                "Begin with sgl.audio(…) in a program; with <audio> and audio_data= for generate."
            )
            raise ParameterError("prompt", problem, hint=hint)
        if len(tokens) == len(places):
            problem = "has nothing behind its sound, where the model is told what to write."
            raise ParameterError(
                "prompt", problem, hint="Write <|startoftranscript|> and what follows it there."
            )

    def split_at_placeholders(self, spans: Sequence[Span]) -> Iterator[Span]:
        """Splits spans at the placeholder texts in them. Spans whose text can't name special tokens
        are not split.
        """
        for span in spans:
            if span.ids is not None or not span.special:
                yield span
                continue
            text = span.text
            while found := [
                (at, each.named)
                for each in self.kinds.values()
                if (at := text.find(each.named)) >= 0
            ]:
                at, named = min(found)
                yield Span(text[:at])
                yield Span(named, ())
                text = text[at + len(named) :]
            yield Span(text)

    def medium_spans(self, image: Media) -> tuple[Span, ...]:
        """Returns the spans that stand for an image, a video or a sound in a prompt. Reads only the
        beginning of an image.

        Raises:
            ParameterError: it can't be read or is too large.
            CapabilityError: it is an address, or the model takes none of its kind.
        """
        kind = image.kind
        frames = image.frames
        if frames < 0:
            raise ParameterError(
                kind, f"{frames:,} frames are none.", hint="Use 0 for as many as the model takes."
            )
        if kind not in self.kinds:
            raise CapabilityError(f"the model can't {_SENSES[kind]}.", hint=_CURES[kind])
        if image.url:
            image = replace(parse_medium(image.url, kind, kind), frames=frames)
        if image.url:  # the URL was not a data URL
            raise unsupported_url_error(image.url, kind)
        placeholders = self.kinds[kind]
        parts = placeholders.parts(image)
        counts = [
            0 if isinstance(part, str) else part.size if isinstance(part, Grid) else part
            for part in parts
        ]
        grids = tuple(part for part in parts if isinstance(part, Grid))
        hashed = hashlib.sha256(self.settings + f"{kind}{frames:11}".encode())
        hashed.update(image.data)
        item = MediaItem(
            image,
            hashed.digest(),
            sum(counts),
            placeholders.token_id,
            grids,
            both_ways=self.block > 0,
        )
        ids = hash_to_virtual_ids(item.key, item.count, self.vocab_size)
        start = 0
        spans = list[Span]()
        for part, count in zip(parts, counts):
            if isinstance(part, str):
                spans.append(Span(part))
            else:
                spans.append(
                    ImageSpan(
                        placeholders.token, ids[start : start + count], item=None if start else item
                    )
                )
                start += count
        return tuple(spans)

    def media_item(self, medium: Media) -> MediaItem:
        """Returns the `MediaItem` of an image, a video or a sound. Raises the same errors as
        `medium_spans`.
        """
        items = (span.item for span in self.medium_spans(medium) if isinstance(span, ImageSpan))
        return next(item for item in items if item is not None)


def prompt_spans(prompt: Prompt, media: MediaFormat | None, model_name: str) -> Sequence[Span]:
    """Returns the spans of a prompt, with its placeholders replaced by the spans of its images,
    videos and sounds.

    Args:
        prompt: the prompt. If it has placeholder spans (`is_placeholder`), these stand for its
            media in order. Otherwise its text contains placeholders, which stand for the media of
            each kind in order.
        media: how prompts contain media; None if the model takes none.
        model_name: name of the model, for messages.

    Raises:
        ParameterError: a medium can't be read, the model takes none, or there are more or fewer
            media than placeholders.
    """
    named = not any(map(is_placeholder, prompt.spans))
    if not prompt.images and named and not _contains_placeholder(prompt.spans, media):
        return prompt.spans
    if media is None:
        raise no_media_error(prompt.images[0].kind if prompt.images else "image", model_name)
    spans = list(media.split_at_placeholders(prompt.spans) if named else prompt.spans)
    places = [span.text for span in spans if is_placeholder(span)]
    if named:
        given: dict[str, deque[Media]] = {each.named: deque() for each in media.kinds.values()}
        for image in prompt.images:
            if image.kind not in media.kinds:
                raise no_media_error(image.kind, model_name)
            given[media.kinds[image.kind].named].append(image)
        for kind, each in media.kinds.items():
            _check_placeholder_count(
                places.count(each.named), len(given[each.named]), kind, each.named
            )
    else:
        _check_placeholder_count(len(places), len(prompt.images), "image", "")
        in_order = deque(prompt.images)
        given = dict.fromkeys(places, in_order)
    return [
        each
        for span in spans
        for each in (
            media.medium_spans(given[span.text].popleft()) if is_placeholder(span) else (span,)
        )
    ]


def _check_placeholder_count(places: int, count: int, kind: MediaKind, named: str) -> None:
    """Raises ParameterError if the number of placeholders, `places`, differs from the number of
    media, `count`. `named` is the text of a placeholder, or "" if the prompt's text has none.
    """
    if places == count:
        return
    problem = f"has {places} placeholder{'s' * (places != 1)}, and {count} {NAMES[kind]}{'s' * (count != 1)}."
    cure = f"Write {named} where each one belongs."
    if places > count:
        cure = f"Give {ARTICLES[kind]} for each {named}: {kind}_data= of generate, or sgl.{kind} in a program."
    raise ParameterError("prompt", problem, hint=cure if named else "")


def _contains_placeholder(spans: Sequence[Span], media: MediaFormat | None) -> bool:
    """Returns True if the text of a span contains a placeholder. Ignores spans whose text can't
    name special tokens.
    """
    return media is not None and any(
        each.named in span.text
        for span in spans
        if span.special and span.ids is None
        for each in media.kinds.values()
    )


def no_media_error(kind: MediaKind, model_name: str) -> ParameterError:
    """Returns the error for a medium sent to a model that takes none of its kind."""
    return ParameterError("prompt", f"{model_name} can't {_SENSES[kind]}.", hint=_CURES[kind])


def read_media_format(
    folder: Path, tokenizer: Tokenizer, vocab_size: int, options: ImageOptions
) -> MediaFormat | None:
    """Returns the media format of the model in a folder, or None if it takes no supported media.

    Raises:
        ModelError: a setting for these media is missing or damaged.
        ParameterError: the options contain an unknown setting for videos.
    """
    config = read_config(folder)
    family = config.get("model_type", "")
    if not isinstance(family, str) or (
        family not in IMAGE_FAMILIES and family not in SOUND_FAMILIES
    ):
        return None
    if unknown := [*(options.processors.get("video", {}).keys() - {*VIDEO_SETTINGS})]:
        problem = f"videos have no {unknown[0]!r:.60}."
        raise ParameterError(
            "mm_process_config", problem, hint=f"They have {', '.join(VIDEO_SETTINGS)}."
        )
    try:
        if family in SOUND_FAMILIES:
            return _sound_format(folder, config, tokenizer, vocab_size, options)
        return _image_format(folder, config, tokenizer, vocab_size, options)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{folder}: its images can't be prepared: {error!r}.") from error


def _image_format(
    folder: Path, config: Config, tokenizer: Tokenizer, vocab_size: int, options: ImageOptions
) -> MediaFormat | None:
    """Returns the media format of a model that takes images, and videos if its family does."""
    if (
        saved := _processor_settings(folder, "image_processor", "preprocessor_config.json")
    ) is None:
        return None
    settings = {**saved, **options.processors.get("image", {})}
    family = config["model_type"]
    parts = IMAGE_FAMILIES[family](config, settings)
    token_id = _token_id_in(config, "image_token")
    token = tokenizer.control_text(token_id)
    named, block = (
        (GEMMA_IMAGE, config["mm_tokens_per_image"]) if family == "gemma3" else (token, 0)
    )
    kinds: dict[MediaKind, Placeholders] = {
        "image": Placeholders(
            named,
            token,
            token_id,
            lambda image: parts(*read_image_size(image)),
            options.most.get("image"),
        )
    }
    if family not in VIDEO_FAMILIES:
        return MediaFormat(kinds, vocab_size, _digest_settings(settings), block)
    found = (
        _processor_settings(folder, "video_processor", "video_preprocessor_config.json") or saved
    )
    of_videos = video_settings(found, options.processors.get("video", {}))
    video = VIDEO_FAMILIES[family](config, of_videos)
    if family != "smolvlm":  # which writes frames as images
        token_id = _token_id_in(config, "video_token")
        token = tokenizer.control_text(token_id)
    kinds["video"] = Placeholders(
        video.named or token,
        token,
        token_id,
        lambda each: video.sample(read_video_header(each), each.frames).parts,
        options.most.get("video"),
    )
    return MediaFormat(kinds, vocab_size, _digest_settings(settings, of_videos), block, video)


def _sound_format(
    folder: Path, config: Config, tokenizer: Tokenizer, vocab_size: int, options: ImageOptions
) -> MediaFormat | None:
    """Returns the media format of a model that takes sounds."""
    if (
        settings := _processor_settings(folder, "feature_extractor", "preprocessor_config.json")
    ) is None:
        return None
    sound = SOUND_FAMILIES[config["model_type"]](config, settings)
    token_id = config["eos_token_id"] if sound.named else _token_id_in(config, "audio_token")
    token = tokenizer.control_text(token_id)

    def parts(each: Media) -> Sequence[Part]:
        return sound.sound_placeholders(count_samples(each, sound.rate, sound.seconds))

    kinds: dict[MediaKind, Placeholders] = {
        "audio": Placeholders(
            sound.named or token, token, token_id, parts, options.most.get("audio")
        )
    }
    return MediaFormat(
        kinds, vocab_size, _digest_settings(settings), sound=sound, begins=bool(sound.named)
    )


def _token_id_in(config: Config, name: str) -> int:
    """Returns the id of a placeholder token. In transformers' configs, its field ends with either
    `_id` or `_index`.
    """
    found: int = config[f"{name}_id" if f"{name}_id" in config else f"{name}_index"]
    return found


def _digest_settings(*settings: Config) -> bytes:
    return hashlib.blake2b(repr(settings).encode(), digest_size=32).digest()


def _processor_settings(folder: Path, part: str, name: str) -> Config | None:
    """Returns the settings of one part of a folder's processor, such as the one for images. Returns
    None if there are none.
    """
    whole = folder / "processor_config.json"
    file = folder / name
    # written from transformers 5 on
    nested = read_json(whole).get(part) if whole.exists() else None
    if isinstance(nested, dict):
        return nested
    return read_json(file) if file.exists() else None
