"""Videos in each model family's format: which frames, at what size, and between which texts. Needs
neither torch nor pillow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import numpy as np

from sglang_lite.media.files import VideoHeader
from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.media.image_families import (
    IDEFICS_LIMIT,
    Config,
    Part,
    fit_to_grid,
    idefics_tile_placeholders,
    scale_to_longest,
)
from sglang_lite.runtime.tokens.image_span import Grid

# Settings of transformers' video processors that an engine's `mm_process_config` may replace.
VIDEO_SETTINGS = ("fps", "num_frames", "size")
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
# numbers of pillow's filters
_LANCZOS = 1
_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """Frames of a video that a model sees.

    Attributes:
        indices: ascending frame numbers in the video.
        sizes: widths and heights to which each frame is scaled, one after another.
        parts: what stands for the frames in a prompt.
    """

    indices: Sequence[int]
    sizes: Sequence[tuple[int, int]]
    parts: Sequence[Part]


# takes a video and the requested frame count, 0 for any
Sampling: TypeAlias = Callable[[VideoHeader, int], Sample]


@dataclass(frozen=True, slots=True)
class VideoFormat:
    """Format of a model's videos.

    Attributes:
        sample: chooses frames. Raises ParameterError if the model can't see them.
        inputs: name of the encoder's input.
        patches: frames in a patch, squares per side, and pixels per side of a square; None if the
            encoder takes frames.
        mean, std: mean and standard deviation of red, green and blue, from 0 to 1.
        resample: number of pillow's filter that scales frames.
        named: text that stands for a video in prompts; "" if it is that of the placeholder token.
    """

    sample: Sampling
    inputs: str
    patches: tuple[int, int, int] | None
    mean: Sequence[float]
    std: Sequence[float]
    resample: int
    named: str = ""


def _qwen2_format(config: Config, settings: Config) -> VideoFormat:
    """Returns the format of Qwen2-VL and Qwen2.5-VL: patches of two frames each. Qwen2.5-VL encodes
    seconds in positions.
    """
    size = settings.get("size") or {}
    patches = _patch_sizes(settings, 14)
    least = size.get("shortest_edge") or 128 * 28 * 28
    most = size.get("longest_edge") or 28 * 28 * 768
    per_second = (
        config["vision_config"].get("tokens_per_second", 4)
        if config["model_type"] == "qwen2_5_vl"
        else 0
    )

    def sample(video: VideoHeader, wanted: int) -> Sample:
        count = _count_frames_to_show(video, wanted, settings, least=4, most=768)
        count -= count % patches[0] if count > patches[0] else 0
        indices = [int(i * (video.frames / count)) for i in range(count)]
        rows, columns = fit_to_grid(video.width, video.height, patches[1] * patches[2], least, most)
        planes = -(-count // patches[0])
        seconds = patches[0] * video.frames / (count * video.fps)  # from plane to plane
        interval = np.float32(per_second * seconds) if per_second else np.float32(1)
        times = tuple((np.arange(planes, dtype=np.float32) * interval).astype(int).tolist())
        grid = Grid(rows, columns, times)
        if times[-1] >= grid.size:
            problem = f"its {count} frames are {seconds * planes:,.0f} seconds, which {grid.size:,} tokens can't tell."
            raise ParameterError("video", problem, hint="Show more frames, or cut it.")
        return _sample_in_patches(indices, patches, grid, [grid])

    return _make_format(sample, settings, _CLIP, _BICUBIC, patches=patches)


def _qwen3_format(config: Config, settings: Config) -> VideoFormat:
    """Returns the format of Qwen3-VL: patches of two frames each, with their seconds as text."""
    size = settings.get("size") or {}
    patches = _patch_sizes(settings, 16)
    least = size.get("shortest_edge") or 128 * 32 * 32
    most = size.get("longest_edge") or 32 * 32 * 768
    unit = patches[1] * patches[2]

    def sample(video: VideoHeader, wanted: int) -> Sample:
        count = _count_frames_to_show(video, wanted, settings, least=4, most=768)
        indices = np.linspace(0, video.frames - 1, count).round().astype(int).tolist()
        if count < patches[0]:
            indices = indices * patches[0]
            count = patches[0]
        width = video.width
        height = video.height
        if min(width, height) < unit:
            grow = max(unit / height, unit / width)
            width = int(width * grow)
            height = int(height * grow)
        grid = Grid(*_fit_frames_to_grid(width, height, count, patches[0], unit, least, most))
        parts: list[Part] = []
        padded = [*indices, *indices[-1:] * (-count % patches[0])]
        for first, last in zip(padded[:: patches[0]], padded[patches[0] - 1 :: patches[0]]):
            second = (first / video.fps + last / video.fps) / 2
            parts += [f"<{second:.1f} seconds><|vision_start|>", grid, "<|vision_end|>"]
        return _sample_in_patches(indices, patches, grid, parts)

    named = "<|vision_start|><|video_pad|><|vision_end|>"
    return _make_format(sample, settings, _HALF, _BICUBIC, patches=patches, named=named)


def _fit_frames_to_grid(
    width: int, height: int, count: int, together: int, unit: int, least: int, most: int
) -> tuple[int, int]:
    """Returns the rows and columns of squares to which Qwen3-VL scales each of `count` frames. A
    square is `unit` pixels wide. All frames together have `least` to `most` pixels.
    """
    rows = round(height / unit)
    columns = round(width / unit)
    frames = round(count / together) * together
    if frames * rows * columns * unit**2 > most:
        shrink = math.sqrt(count * height * width / most)
        return max(1, math.floor(height / shrink / unit)), max(1, math.floor(width / shrink / unit))
    if frames * rows * columns * unit**2 < least:
        grow = math.sqrt(least / (count * height * width))
        return math.ceil(height * grow / unit), math.ceil(width * grow / unit)
    return rows, columns


def _onevision_format(config: Config, settings: Config) -> VideoFormat:
    """Returns the format of LLaVA-OneVision: frames as images of one tile each, pooled, with one
    token after all of them.
    """
    vision = config["vision_config"]
    size = (settings["size"]["width"], settings["size"]["height"])
    pooled = math.ceil(vision["image_size"] // vision["patch_size"] / 2)

    def sample(video: VideoHeader, wanted: int) -> Sample:
        if not (wanted or settings.get("fps")):
            wanted = settings.get("num_frames") or 32
        count = _count_frames_to_show(video, wanted, settings, least=1, most=768)
        indices = [int(i * (video.frames / count)) for i in range(count)]
        return Sample(indices, (size,), (count * pooled**2 + 1,))

    return _make_format(sample, settings, _CLIP, _BICUBIC, inputs="pixel_values_videos")


def _smolvlm_format(config: Config, settings: Config) -> VideoFormat:
    """Returns the format of SmolVLM: frames as images of one tile each, with their minutes and
    seconds as text.
    """
    before, tokens, behind = idefics_tile_placeholders(config)
    tile = settings["max_image_size"]["longest_edge"]
    longest = settings["size"]["longest_edge"]
    fps = settings.get("fps") or 1

    def sample(video: VideoHeader, wanted: int) -> Sample:
        most = wanted or settings.get("num_frames") or 64
        seconds = video.frames / video.fps
        if most >= len(_NUMBERS):
            problem = f"{most} frames are wanted, and {len(_NUMBERS) - 1} is the limit."
            raise ParameterError("video", problem, hint="Show fewer.")
        first = 0
        last = video.frames - 1
        if seconds - 2 > most * fps:  # without its first and last second
            first = int(video.fps)
            last = min(int(video.frames - video.fps), last)
        count = min(most, video.frames) if wanted else max(min(round(fps * seconds), most), 1)
        indices = np.unique(np.linspace(first, last, count, dtype=int)).tolist()
        parts: list[Part] = [
            f"You are provided the following series of {_NUMBERS[len(indices)]} frames from a "
            f"{timedelta(seconds=int(seconds))} [H:MM:SS] video.\n"
        ]
        for second in (int(index / video.fps) for index in indices):
            parts += [f"\nFrame from {second // 60:02d}:{second % 60:02d}:{before}", tokens, behind]
        first_size = scale_to_longest(video.width, video.height, min(longest, IDEFICS_LIMIT))
        return Sample(indices, (first_size, (tile, tile)), (*parts, "\n\n"))

    return _make_format(sample, settings, _HALF, _LANCZOS, named="<video>")


def video_settings(saved: Config, given: Config) -> Config:
    """Returns the settings `saved` of a video processor, under transformers' current names. Those
    in `given` take precedence.
    """
    rule = saved.get("video_sampling") or {}
    size = dict(saved.get("size") or {})
    for ours, older in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if saved.get(older):
            size[ours] = saved[older]
    renamed = {
        "fps": rule.get("fps"),
        "num_frames": rule.get("max_frames"),
        "size": rule.get("video_size") or size,
    }
    return {**saved, **{name: value for name, value in renamed.items() if value}, **given}


def _count_frames_to_show(
    video: VideoHeader, wanted: int, settings: Config, *, least: int, most: int
) -> int:
    """Returns how many frames of a video the model is shown: as many as requested, or some per
    second. Raises ParameterError if too many are requested.
    """
    if wanted > most:
        raise ParameterError(
            "video", f"{wanted:,} frames are wanted, and {most} is the limit.", hint="Show fewer."
        )
    count = wanted or settings.get("num_frames")
    if not count:
        count = int(video.frames / video.fps * (settings.get("fps") or 2))
        count = min(
            max(count, settings.get("min_frames") or least), settings.get("max_frames") or most
        )
    return max(min(count, video.frames), 1)


def _patch_sizes(settings: Config, pixels: int) -> tuple[int, int, int]:
    return (
        settings.get("temporal_patch_size", 2),
        settings.get("merge_size", 2),
        settings.get("patch_size", pixels),
    )


def _sample_in_patches(
    indices: list[int], patches: tuple[int, int, int], grid: Grid, parts: Sequence[Part]
) -> Sample:
    """Returns the sample of frames that are cut into patches. The last frame is repeated to fill a
    patch.
    """
    unit = patches[1] * patches[2]
    padded = [*indices, *indices[-1:] * (-len(indices) % patches[0])]
    return Sample(padded, ((grid.columns * unit, grid.rows * unit),), parts)


def _make_format(
    sample: Sampling,
    settings: Config,
    normal: tuple[Sequence[float], Sequence[float]],
    resample: int,
    *,
    inputs: str = "pixel_values",
    patches: tuple[int, int, int] | None = None,
    named: str = "",
) -> VideoFormat:
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not settings.get(name, True):
            raise ValueError(f"{name}=False is not supported for videos")
    mean = settings.get("image_mean", normal[0])
    std = settings.get("image_std", normal[1])
    return VideoFormat(
        sample, inputs, patches, mean, std, settings.get("resample", resample), named
    )


_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_NUMBERS = (
    "zero", *_ONES, "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", *(f"{ten}-{one}".removesuffix("-") for ten in _TENS for one in ("", *_ONES)),
)  # fmt: skip
VIDEO_FAMILIES: Mapping[str, Callable[[Config, Config], VideoFormat]] = {
    "qwen2_vl": _qwen2_format,
    "qwen2_5_vl": _qwen2_format,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _qwen3_format),
    "llava_onevision": _onevision_format,
    "smolvlm": _smolvlm_format,
}
