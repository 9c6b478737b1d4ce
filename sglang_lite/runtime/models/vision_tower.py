"""Encoders of images: transformers modules with weights from the checkpoint."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.qwen_encoder import fuse_encoder
from sglang_lite.runtime.models.weights.source import EncodedMatrix, WeightSource

_FRAMES = "pixel_values_videos"
_DECODERS = ("language_model", "text_model")  # names of transformers' modules for the text
_TINY = {
    "num_hidden_layers": 0,
    "layer_types": [],
    "vocab_size": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_T = TypeVar("_T")


class VisionTower:
    """Image encoder with its projector: the parts of a transformers model other than the decoder.

    Args:
        folder: folder of the model.
        source: weights of the model; only the encoder's are taken.
        dtype, device: data type and device of the weights and the computation.

    Attributes:
        planes: number of vectors in a feature: one that replaces a token's embedding, and those that
            are added after the decoder's first layers (DeepStack, arXiv:2406.04334).
        width: number of elements of a feature.
        parameters: its weights by transformers' names.

    Raises:
        ModelError: transformers can't make the encoder, or a tensor is missing or has a wrong
            shape.
    """

    def __init__(
        self, folder: Path, source: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        from transformers import AutoModel

        def make(config: Any) -> Any:
            for name, value in _TINY.items():  # shrinks the decoder, which is not needed
                if hasattr(config.text_config, name):
                    setattr(config.text_config, name, value)
            return AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")

        self.planes = count_feature_vectors(folder)
        config, self._model = build_without_weights(folder, "encoder of images", make)
        self.width: int = self.planes * config.text_config.hidden_size
        for name in _DECODERS:
            if hasattr(self._model, name):
                delattr(self._model, name)
        self.parameters = load_encoder_weights(self._model, source, dtype, device)
        self._model.to(device).eval()
        if config.model_type.startswith("qwen"):
            fuse_encoder(self._model.visual, dtype, device)
        self.dtype = dtype
        self.device = device
        self._inputs = inspect.signature(self._model.get_image_features).parameters

    def encode(self, images: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Computes features [count, planes * hidden size] of each image or video.

        Args:
            images: inputs of each image or video, as the model's processor returns them, of equal
                shapes. Inputs that the encoder does not take are ignored. Pinned memory is copied
                asynchronously.
        """
        inputs = {
            name: torch.cat([self._to_device(each[name]) for each in images])
            for name in images[0]
            if name in self._inputs or name == _FRAMES
        }
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            if _FRAMES in inputs:
                return self._pool_frames(inputs[_FRAMES])
            found = self._model.get_image_features(**inputs)
            planes = [found.pooler_output, *(found.deepstack_features if self.planes > 1 else ())]
            return list(
                torch.cat([_join_features(plane) for plane in planes], -1).chunk(len(images))
            )

    def _pool_frames(self, frames: torch.Tensor) -> list[torch.Tensor]:
        """Computes features of videos [videos, T, 3, height, width], pooled as in LLaVA-OneVision.
        Appends a newline feature to each, because some versions of transformers append it only in
        the whole model.
        """
        found = self._model.get_video_features(frames).pooler_output
        vision = self._model.config.vision_config
        count = frames.shape[1] * math.ceil(vision.image_size // vision.patch_size / 2) ** 2
        return [
            *torch.cat((found[:, :count], self._model.image_newline.expand(len(found), 1, -1)), 1)
        ]

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype if values.is_floating_point() else None
        return values.to(device=self.device, dtype=dtype, non_blocking=True)


def count_feature_vectors(folder: Path) -> int:
    """Returns the number of vectors in each image or sound feature of a model, as in
    `VisionTower.planes`. Raises ModelError if the decoder has too few layers to add them.
    """
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    deep = len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", ()))
    if deep and deep >= config.text_config.num_hidden_layers:
        raise ModelError(
            f"{folder}: deepstack_visual_indexes: {deep} are as many as the decoder's layers.",
            hint="Correct config.json, or fetch it again.",
        )
    return 1 + deep


def _join_features(found: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins the features of all images to [T, hidden size]; some versions of transformers return
    them in parts.
    """
    parts = [found] if isinstance(found, torch.Tensor) else found
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in parts])


# of transformers
def build_without_weights(folder: Path, part: str, make: Callable[[Any], _T]) -> tuple[Any, _T]:
    """Builds a part of a folder's model without weights. Returns the folder's config and the part.

    Args:
        folder: folder of the model.
        part: name of the part, for messages.
        make: builds it from the config.

    Raises:
        ModelError: transformers can't build it.
    """
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    try:
        with no_init_weights():
            return config, make(config)
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: transformers can't make its {part}: {error}") from error


def load_encoder_weights(
    model: torch.nn.Module, source: WeightSource, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.nn.Parameter]:
    """Loads an encoder's weights and returns them by name. Raises ModelError if a tensor is missing
    or has a wrong shape.
    """
    parameters = dict(model.named_parameters())
    for name, values in read_encoder_weights(parameters, source):
        parameters[name].data = values.to(device=device, dtype=dtype)
    return parameters


def read_encoder_weights(
    parameters: Mapping[str, torch.nn.Parameter], source: WeightSource, *, whole: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Takes an encoder's tensors from a source. Yields each parameter's name with its values.

    Args:
        parameters: the encoder's parameters, by transformers' names.
        source: source of the weights.
        whole: whether the source must have all of them; if not, missing ones are left out.

    Raises:
        ModelError: a tensor is missing or has a wrong shape.
    """
    for name, parameter in parameters.items():
        stored = next(filter(source.has_tensor, possible_stored_names(name)), name)
        if whole or source.has_tensor(stored):
            weight = source.take_tensor(stored, tuple(parameter.shape))
            yield (
                name,
                weight.decode(0, weight.shape[0]) if isinstance(weight, EncodedMatrix) else weight,
            )


def possible_stored_names(name: str) -> tuple[str, ...]:
    """Returns the names that a checkpoint may have for a parameter: transformers' own, and those of
    older layouts.
    """
    part, _, rest = name.partition(".")
    return name, f"model.{name}", f"{part}.vision_model.{rest}", f"model.{part}.vision_model.{rest}"
