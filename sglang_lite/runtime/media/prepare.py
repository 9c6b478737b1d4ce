"""Prepares images, videos and sounds for an encoder: bounded decoding, then transformers'
processors or equivalent arithmetic. This is slow, so it must not run on the event loop's thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from sglang_lite.media.files import decode_frames, decode_samples, read_video_header
from sglang_lite.protocol import Media, MediaKind, ModelError, ParameterError, SglError
from sglang_lite.runtime.media.header import decode_upright, open_image
from sglang_lite.runtime.media.placeholders import MediaFormat
from sglang_lite.runtime.media.sound_families import SoundFormat
from sglang_lite.runtime.media.video_families import VideoFormat
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.tokens.image_options import ImageOptions
from sglang_lite.runtime.tokens.image_span import MediaItem

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Pixels: TypeAlias = dict[str, torch.Tensor]  # inputs of an encoder, by name


class MediaPreparer:
    """Prepares images, videos and sounds for the model in a folder, with the folder's settings.

    Args:
        folder: folder of the model.
        media: how the model takes them.
        options: options of the engine.
        pinned: whether results are in pinned memory, from which a GPU copies while the host
            continues.

    Raises:
        ModelError: transformers has no such processor.
        ParameterError: the image processor lacks a setting of the options.
    """

    def __init__(
        self, folder: Path, media: MediaFormat, options: ImageOptions, *, pinned: bool = False
    ) -> None:
        self._pinned = pinned
        self._of_kind: dict[MediaKind, Callable[[Media], Pixels]] = {}
        if "image" in media.kinds:
            self._of_kind["image"] = _ImagePreparer(folder, options).prepare
        if media.video is not None:
            self._of_kind["video"] = partial(_prepare_video, media.video)
        if media.sound is not None:
            self._of_kind["audio"] = partial(_prepare_sound, media.sound)

    def prepare(self, item: MediaItem) -> Pixels:
        """Returns the encoder's inputs for an image, a video or a sound. May be called on several
        threads.

        Raises:
            ParameterError: it is damaged, or `open_image`, `frames` or `samples` rejects it.
        """
        made = self._of_kind[item.medium.kind](item.medium)
        return {name: copy_to_pinned(each) for name, each in made.items()} if self._pinned else made


def copy_to_pinned(values: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to pinned memory. Uses numpy, because torch would start a team of threads for
    each calling thread.
    """
    made = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    np.copyto(made.view(torch.uint8).numpy(), values.contiguous().view(torch.uint8).numpy())
    return made


class _ImagePreparer:
    """Prepares images with transformers' processor."""

    def __init__(self, folder: Path, options: ImageOptions) -> None:
        self._processor: Any = _load_processor(folder, options.processors.get("image", {}))
        self._options: dict[str, Any] = {}
        # Mistral 3 crops to merged patches
        if merged := read_json(folder / "config.json").get("spatial_merge_size"):
            patch = self._processor.patch_size
            self._options["patch_size"] = merged * (
                patch if isinstance(patch, int) else patch["height"]
            )

    def prepare(self, image: Media) -> Pixels:
        try:
            with warnings.catch_warnings(), open_image(image) as picture:
                # about metadata, and about sizes within our own limit
                warnings.simplefilter("ignore")
                shown = decode_upright(picture)
        except SglError:
            raise
        except Exception as error:  # pillow raises errors of many kinds for damaged files
            raise ParameterError(
                "image", f"is damaged or truncated: {error}", hint="Save it again."
            ) from None
        return dict(self._processor(images=[[shown]], return_tensors="pt", **self._options))


def _prepare_video(video: VideoFormat, given: Media) -> Pixels:
    header = read_video_header(given)
    sample = video.sample(header, given.frames)
    return video_inputs(video, sample.sizes, decode_frames(given, header, sample.indices))


def video_inputs(
    video: VideoFormat, sizes: Sequence[tuple[int, int]], pictures: Iterable[Picture]
) -> Pixels:
    """Returns the inputs of an encoder for frames of a video. Computes the same as transformers'
    video processors, which use torchvision.

    Args:
        video: videos of the model.
        sizes: widths and heights to which each frame is scaled, one after another.
        pictures: the frames, in RGB.
    """
    scaled = []
    for picture in pictures:
        for size in sizes:
            picture = picture.resize(size, video.resample)
        scaled.append(np.asarray(picture))
    pixels = torch.from_numpy(np.stack(scaled)).float()  # [T, height, width, 3]
    pixels.div_(255).sub_(torch.tensor(video.mean)).div_(torch.tensor(video.std))
    if video.patches is None:
        made = {video.inputs: pixels.permute(0, 3, 1, 2)[None].contiguous()}
        if video.inputs == "pixel_values":  # a mask distinguishes these images from padding
            made["pixel_attention_mask"] = torch.ones(
                made[video.inputs].select(2, 0).shape, dtype=torch.int64
            )
        return made
    together, side, pixel = video.patches
    (columns, rows), times = (length // pixel for length in sizes[-1]), len(pixels) // together
    squares = pixels.view(
        times, together, rows // side, side, pixel, columns // side, side, pixel, 3
    )
    flat = squares.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(times * rows * columns, -1)
    return {video.inputs: flat, "image_grid_thw": torch.tensor([[times, rows, columns]])}


def _prepare_sound(sound: SoundFormat, given: Media) -> Pixels:
    """Returns the samples [1, n] of a sound, padded with silence to a multiple of the window, and
    the number of samples before padding, `count` [1].
    """
    heard = decode_samples(given, sound.rate, sound.seconds)
    padded = np.pad(heard, (0, -len(heard) % sound.window))
    return {"samples": torch.from_numpy(padded)[None], "count": torch.tensor([len(heard)])}


def _load_processor(folder: Path, given: Mapping[str, Any]) -> Any:  # of transformers
    from transformers import AutoImageProcessor  # imports all of transformers' processors

    try:
        found: Any = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, **given
        )
    except Exception as error:  # transformers raises many kinds of errors
        raise ModelError(
            f"{folder}: transformers can't make its image processor: {error}",
            hint="Read text alone with enable_multimodal=False, or mend preprocessor_config.json.",
        ) from error
    kinds = found.valid_kwargs
    if unknown := [*(given.keys() - kinds.__optional_keys__ - kinds.__required_keys__)]:
        raise ParameterError(
            "mm_process_config", f"the model's image processor has no {unknown[0]!r:.60}."
        )
    return found
