"""Preparing of images for an encoder: decoding within bounds, and transformers' image processors. Takes long, so not on
the loop's thread."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, TypeAlias

import torch

from sglang_lite.protocol import Image, ModelError, ParameterError, SglError
from sglang_lite.runtime.media.header import open_image, upright
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.tokens.image_options import ImageOptions

Pixels: TypeAlias = dict[str, torch.Tensor]  # inputs of an encoder, by name


class ImagePreparer:
    """Preparer of images for the model in a folder, with the folder's settings.

    Args:
        folder: folder of the model.
        options: options for images.
        pinned: whether what it makes is in pinned memory, from which a GPU copies while the host goes on.

    Raises:
        ModelError: transformers has no such image processor.
        ParameterError: the processor has not a setting of the options.
    """

    def __init__(self, folder: Path, options: ImageOptions, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._processor: Any = _processor(folder, options)
        self._options: dict[str, Any] = {}
        if merged := read_json(folder / "config.json").get("spatial_merge_size"):  # Mistral 3 cuts for merged patches
            patch = self._processor.patch_size
            self._options["patch_size"] = merged * (patch if isinstance(patch, int) else patch["height"])

    def prepare(self, image: Image) -> Pixels:
        """Inputs of the encoder for an image. May be called on several threads.

        Raises:
            ParameterError: the image is damaged; or as `open_image`.
        """
        try:
            with warnings.catch_warnings(), open_image(image) as picture:
                warnings.simplefilter("ignore")  # about metadata, and sizes within our own bound
                shown = upright(picture)
        except SglError:
            raise
        except Exception as error:  # pillow raises errors of many kinds for damaged files
            raise ParameterError("image", f"is damaged or truncated: {error}", hint="Save it again.") from None
        made: Pixels = dict(self._processor(images=[[shown]], return_tensors="pt", **self._options))
        return {name: each.pin_memory() for name, each in made.items()} if self._pinned else made


def _processor(folder: Path, options: ImageOptions) -> Any:  # of transformers
    from transformers import AutoImageProcessor  # imports all of transformers' processors

    try:
        found: Any = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, **options.processor
        )
    except Exception as error:  # of transformers, of many kinds
        raise ModelError(
            f"{folder}: transformers can't make its image processor: {error}",
            hint="Read text alone with enable_multimodal=False, or mend preprocessor_config.json.",
        ) from error
    kinds = found.valid_kwargs
    if unknown := [*(options.processor.keys() - kinds.__optional_keys__ - kinds.__required_keys__)]:
        raise ParameterError("mm_process_config", f"the model's image processor has no {unknown[0]!r:.60}.")
    return found
