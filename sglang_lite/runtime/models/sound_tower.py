"""Encoders of sounds: transformers' modules, with the weights of their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.vision_tower import take_weights
from sglang_lite.runtime.models.weights.source import WeightSource


class SoundTower:
    """Qwen2-Audio's encoder of sounds with its projector.

    Args:
        folder, source, dtype, device: as for `VisionTower`.

    Attributes:
        planes: number of vectors in a feature: 1.
        parameters: its weights by transformers' names.

    Raises:
        ModelError: transformers can't make the encoder, or a tensor is missing or has a wrong shape.
    """

    planes = 1

    def __init__(self, folder: Path, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModel
        from transformers.initialization import no_init_weights

        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        try:
            with no_init_weights():
                self._encoder: Any = AutoModel.from_config(config.audio_config, dtype=dtype, attn_implementation="sdpa")
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder}: transformers can't make its encoder of sounds: {error}") from error
        self._projector = torch.nn.Linear(config.audio_config.d_model, config.text_config.hidden_size, dtype=dtype)
        projector = torch.nn.ModuleDict({"linear": self._projector})
        self._model = torch.nn.ModuleDict({"audio_tower": self._encoder, "multi_modal_projector": projector})
        self.parameters = take_weights(self._model, source, dtype, device)
        self._model.to(device).eval()
        self.dtype, self.device = dtype, device

    def encode(self, sounds: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Features [count, hidden size] of each sound.

        Args:
            sounds: `input_features` [1, mel bins, columns] of each, and its `attention_mask` [1, columns].
        """
        inputs = torch.cat([each["input_features"].to(self.device, self.dtype, non_blocking=True) for each in sounds])
        heard = [(int(each["attention_mask"].sum()) - 1) // 2 + 1 for each in sounds]  # behind the convolutions
        steps = torch.arange((inputs.shape[-1] - 1) // 2 + 1, device=self.device)
        mask = steps < torch.tensor(heard, device=self.device)[:, None]  # [sounds, steps]
        mask = mask[:, None, None].expand(-1, 1, len(steps), -1)
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            found = self._projector(self._encoder(inputs, attention_mask=mask).last_hidden_state)
        return [features[: (count - 2) // 2 + 1] for features, count in zip(found, heard)]
