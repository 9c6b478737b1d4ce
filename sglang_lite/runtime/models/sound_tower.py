"""Encoders of sounds: transformers' modules, with the weights of their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.kv_layout import SoundPrefix
from sglang_lite.runtime.models.vision_tower import take_weights
from sglang_lite.runtime.models.weights.source import WeightSource

Inputs: TypeAlias = Mapping[str, torch.Tensor]  # of an encoder, by name


class SoundTower:
    """Encoder of sounds, with the projector of a model that has one.

    Args:
        folder, source, dtype, device: as for `VisionTower`.

    Attributes:
        width: number of elements of a feature.
        parameters: its weights by transformers' names.

    Raises:
        ModelError: transformers can't make the encoder, or a tensor is missing or has a wrong shape.
    """

    def __init__(self, folder: Path, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoConfig
        from transformers.initialization import no_init_weights

        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        try:
            with no_init_weights():
                parts, self._encode = _FAMILIES[config.model_type](config, dtype)
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder}: transformers can't make its encoder of sounds: {error}") from error
        self.width: int = getattr(config, "text_config", config).hidden_size
        self._model = torch.nn.ModuleDict(parts)
        self.parameters = take_weights(self._model, source, dtype, device)
        self._model.to(device).eval()
        self.dtype, self.device = dtype, device

    def encode(self, sounds: Sequence[Inputs]) -> list[torch.Tensor]:
        """Features [count, width] of each sound.

        Args:
            sounds: `input_features` [windows, mel bins, columns] of each, of equal shapes, and its `attention_mask`
                [1, columns of all windows].
        """
        inputs = torch.cat([each["input_features"].to(self.device, self.dtype, non_blocking=True) for each in sounds])
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return self._encode(inputs, sounds)


_Encode: TypeAlias = Callable[[torch.Tensor, Sequence[Inputs]], list[torch.Tensor]]
_Family: TypeAlias = Callable[[Any, torch.dtype], tuple[dict[str, torch.nn.Module], _Encode]]  # of a config's model


def _qwen2_audio(config: Any, dtype: torch.dtype) -> tuple[dict[str, torch.nn.Module], _Encode]:
    encoder = _encoder(config.audio_config, dtype)
    projector = torch.nn.Linear(config.audio_config.d_model, config.text_config.hidden_size, dtype=dtype)

    def encode(inputs: torch.Tensor, sounds: Sequence[Inputs]) -> list[torch.Tensor]:
        heard = [(int(each["attention_mask"].sum()) - 1) // 2 + 1 for each in sounds]  # behind the convolutions
        steps = torch.arange((inputs.shape[-1] - 1) // 2 + 1, device=inputs.device)
        mask = steps < torch.tensor(heard, device=inputs.device)[:, None]  # [sounds, steps]
        mask = mask[:, None, None].expand(-1, 1, len(steps), -1)
        found = projector(encoder(inputs, attention_mask=mask).last_hidden_state)
        return [features[: (count - 2) // 2 + 1] for features, count in zip(found, heard)]

    return {"audio_tower": encoder, "multi_modal_projector": torch.nn.ModuleDict({"linear": projector})}, encode


def _voxtral(config: Any, dtype: torch.dtype) -> tuple[dict[str, torch.nn.Module], _Encode]:
    from transformers.models.voxtral.modeling_voxtral import VoxtralMultiModalProjector

    encoder = _encoder(config.audio_config, dtype)
    projector = VoxtralMultiModalProjector(config).to(dtype)

    def encode(inputs: torch.Tensor, sounds: Sequence[Inputs]) -> list[torch.Tensor]:
        heard = encoder(inputs).last_hidden_state  # [all windows, frames, hidden size]
        return [*projector(heard.reshape(len(sounds), -1, config.audio_config.intermediate_size))]

    return {"audio_tower": encoder, "multi_modal_projector": projector}, encode


def _whisper(config: Any, dtype: torch.dtype) -> tuple[dict[str, torch.nn.Module], _Encode]:
    encoder = _encoder(config, dtype).encoder
    padding = SoundPrefix.of(config.max_source_positions).padding

    def encode(inputs: torch.Tensor, _: Sequence[Inputs]) -> list[torch.Tensor]:
        return [*F.pad(encoder(inputs).last_hidden_state, (0, 0, 0, padding))]

    return {"encoder": encoder}, encode


def _encoder(config: Any, dtype: torch.dtype) -> Any:  # transformers' config and module
    from transformers import AutoModel

    return AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")


_FAMILIES: Mapping[str, _Family] = {"qwen2_audio": _qwen2_audio, "voxtral": _voxtral, "whisper": _whisper}
