"""Steps of an encoder of images, videos and sounds: selects the media for a step, encodes them, and
reports failures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch

from sglang_lite.protocol import BackendError, OverloadedError, SglError
from sglang_lite.runtime.executor import memory_shortage
from sglang_lite.runtime.media.prepare import Pixels
from sglang_lite.runtime.tokens.image_span import MediaItem

# pixel values that a GPU encodes together: 49 images of LLaVA 1.5, 80 ms of a large tower
NUMBERS_TOGETHER = 1 << 24
Shapes: TypeAlias = Mapping[str, torch.Size]


class MediaEncoder(Protocol):
    """Encoder of images, videos or sounds, in this process or over a connection."""

    def encode(self, media: Sequence[Pixels], /) -> Sequence[torch.Tensor]: ...


class Preparer(Protocol):
    """Prepares an encoder's inputs, on any thread."""

    def prepare(self, item: MediaItem, /) -> Pixels: ...


def input_shapes(pixels: Pixels) -> Shapes:
    return {name: each.shape for name, each in pixels.items()}


def select_batch(shapes: Sequence[Shapes], most_numbers: int) -> list[int]:
    """Returns the indices of the media to encode in one step: the first, and others whose inputs
    have the same shapes.

    Args:
        shapes: input shapes of each medium; at least one.
        most_numbers: maximum number of input values, unless there is only one medium.
    """
    numbers = sum(map(math.prod, shapes[0].values()))
    alike = [i for i, each in enumerate(shapes) if each == shapes[0]]
    return alike[: max(most_numbers // max(numbers, 1), 1)]


def encode(
    encoder: MediaEncoder,
    items: Sequence[MediaItem],
    pixels: Sequence[Callable[[], Pixels]],
    *,
    fetch: bool = False,
) -> Sequence[torch.Tensor | SglError]:
    """Encodes media whose inputs have equal shapes. Returns the features [count, size] of each
    medium, or an error for a medium that can't be encoded.

    If they can't be encoded together, they are encoded one by one.

    Args:
        pixels: for each medium, a function that returns its inputs. Exceptions of these functions
            count as errors of the encoder.
        fetch: whether to wait for a GPU and return features in the host's memory. If not, NaN
            features are detected only when they make logits NaN.
    """
    try:
        return _encode_batch(encoder, items, pixels, fetch=fetch)
    except SglError as error:
        if len(items) == 1:
            return [error]
        return [
            encode(encoder, [item], [each], fetch=fetch)[0] for item, each in zip(items, pixels)
        ]


def _encode_batch(
    encoder: MediaEncoder,
    items: Sequence[MediaItem],
    pixels: Sequence[Callable[[], Pixels]],
    *,
    fetch: bool,
) -> Sequence[torch.Tensor]:
    """Encodes media in one call of the encoder, and returns their features.

    Raises:
        SglError: an input was refused.
        OverloadedError: there is too little memory.
        BackendError: the encoder fails, or features are NaN or infinite.
    """
    try:
        found = encoder.encode([each() for each in pixels])
        if fetch:
            found = [each.contiguous().cpu() for each in found]
    except SglError:
        raise
    except Exception as error:  # transformers' code can raise anything
        if not memory_shortage.is_out_of_memory(error):
            raise BackendError(f"the image can't be encoded: {error!r}") from error
        raise OverloadedError(
            f"not enough memory to encode the image: {str(error).partition(chr(10))[0]}",
            hint="Send a smaller image, or lower mem_fraction.",
        ) from None
    for item, features in zip(items, found):
        if len(features) != item.count:
            raise BackendError(f"the image has {len(features):,} features, not {item.count:,}.")
        if features.device.type == "cpu" and not features.isfinite().all():
            raise BackendError(
                "the image has features that are NaN or infinite.",
                hint="Check the encoder's weights.",
            )
    return found
