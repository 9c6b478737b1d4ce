"""Encoders of sounds: transformers modules with weights from the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.kv_layout import SoundPrefix
from sglang_lite.runtime.models.vision_tower import build_without_weights, load_encoder_weights
from sglang_lite.runtime.models.weights.source import WeightSource

Inputs: TypeAlias = Mapping[str, torch.Tensor]  # of an encoder, by name


class SoundTower:
    """Encoder of sounds, with its projector if the model has one.

    Args:
        folder, source, dtype, device: as for `VisionTower`.

    Attributes:
        width: number of elements of a feature.
        parameters: its weights by transformers' names.

    Raises:
        ModelError: transformers can't make the encoder, or a tensor is missing or has a wrong
            shape.
    """

    def __init__(
        self, folder: Path, source: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        def make(config: Any) -> tuple[dict[str, torch.nn.Module], _Encode]:
            return _FAMILIES[config.model_type](config, dtype)

        config, (parts, self._encode) = build_without_weights(folder, "encoder of sounds", make)
        self.width: int = getattr(config, "text_config", config).hidden_size
        self._model = torch.nn.ModuleDict(parts)
        self.parameters = load_encoder_weights(self._model, source, dtype, device)
        self._model.to(device).eval()
        self._spectrograms = _Spectrograms(folder, device)
        self.dtype = dtype
        self.device = device

    def encode(self, sounds: Sequence[Inputs]) -> list[torch.Tensor]:
        """Computes features [count, width] of each sound.

        Args:
            sounds: for each sound, `samples` [1, n], padded to whole windows and of equal shapes,
                and `count` [1], the number of samples that are not padding.
        """
        samples = torch.cat([each["samples"].to(self.device, non_blocking=True) for each in sounds])
        columns = [-(-int(each["count"]) // self._spectrograms.hop) for each in sounds]
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return self._encode(
                self._spectrograms.compute_spectrograms(samples).to(self.dtype), columns
            )


class _Spectrograms:
    """Computes spectrograms for Whisper's encoder (arXiv:2212.04356, section 2.2), with the
    settings of the folder's feature extractor.

    Args:
        folder: folder of the model.
        device: device of the samples.

    Attributes:
        hop: samples from one column to the next.

    Raises:
        ModelError: transformers can't make the folder's extractor.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        from transformers import AutoFeatureExtractor

        try:
            made: Any = AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
            # [mel bins, frequencies]
            filters = torch.from_numpy(made.mel_filters.T)
            length = made.n_fft
            self._columns = int(made.nb_max_frames)
            self.hop = int(made.hop_length)
        except Exception as error:  # of transformers, of many kinds
            raise ModelError(
                f"{folder}: transformers can't make its extractor of sounds: {error}",
                hint="Read text alone with enable_multimodal=False, or mend preprocessor_config.json.",
            ) from error
        self._filters = filters.to(device, torch.float32)
        self._window = torch.hann_window(length, device=device)

    def compute_spectrograms(self, samples: torch.Tensor) -> torch.Tensor:
        """Computes spectrograms [all windows, mel bins, columns] of sounds [sounds, n], where n is
        a whole number of windows. A spectrogram has the log power of each bin, cut off 80 dB below
        the sound's maximum.
        """
        length = len(self._window)
        waves = torch.stft(samples, length, self.hop, window=self._window, return_complex=True)[
            ..., :-1
        ]
        log = (self._filters @ waves.abs().square().contiguous()).clamp(min=1e-10).log10()
        log = torch.maximum(log, log.amax((1, 2), keepdim=True) - 8).add(4).div(4)
        return log.view(*log.shape[:2], -1, self._columns).transpose(1, 2).flatten(0, 1)


# computes features from spectrograms and their numbers of columns
_Encode: TypeAlias = Callable[[torch.Tensor, Sequence[int]], list[torch.Tensor]]
# builds the modules of a config's model, and the function that computes features with them
_Family: TypeAlias = Callable[[Any, torch.dtype], tuple[dict[str, torch.nn.Module], _Encode]]


def _build_qwen2_audio(
    config: Any, dtype: torch.dtype
) -> tuple[dict[str, torch.nn.Module], _Encode]:
    encoder = _build_encoder(config.audio_config, dtype)
    projector = torch.nn.Linear(
        config.audio_config.d_model, config.text_config.hidden_size, dtype=dtype
    )

    def encode(inputs: torch.Tensor, columns: Sequence[int]) -> list[torch.Tensor]:
        heard = [(count - 1) // 2 + 1 for count in columns]  # after the convolutions
        steps = torch.arange((inputs.shape[-1] - 1) // 2 + 1, device=inputs.device)
        mask = steps < torch.tensor(heard, device=inputs.device)[:, None]  # [sounds, steps]
        mask = mask[:, None, None].expand(-1, 1, len(steps), -1)
        found = projector(encoder(inputs, attention_mask=mask).last_hidden_state)
        return [features[: (count - 2) // 2 + 1] for features, count in zip(found, heard)]

    return {
        "audio_tower": encoder,
        "multi_modal_projector": torch.nn.ModuleDict({"linear": projector}),
    }, encode


def _build_voxtral(config: Any, dtype: torch.dtype) -> tuple[dict[str, torch.nn.Module], _Encode]:
    from transformers.models.voxtral.modeling_voxtral import VoxtralMultiModalProjector

    encoder = _build_encoder(config.audio_config, dtype)
    projector = VoxtralMultiModalProjector(config).to(dtype)

    def encode(inputs: torch.Tensor, columns: Sequence[int]) -> list[torch.Tensor]:
        heard = encoder(inputs).last_hidden_state  # [all windows, frames, hidden size]
        return [*projector(heard.reshape(len(columns), -1, config.audio_config.intermediate_size))]

    return {"audio_tower": encoder, "multi_modal_projector": projector}, encode


def _build_whisper(config: Any, dtype: torch.dtype) -> tuple[dict[str, torch.nn.Module], _Encode]:
    encoder = _build_encoder(config, dtype).encoder
    padding = SoundPrefix.from_frames(config.max_source_positions).padding

    def encode(inputs: torch.Tensor, _: Sequence[int]) -> list[torch.Tensor]:
        return [*F.pad(encoder(inputs).last_hidden_state, (0, 0, 0, padding))]

    return {"encoder": encoder}, encode


def _build_encoder(config: Any, dtype: torch.dtype) -> Any:  # transformers' config and module
    from transformers import AutoModel

    return AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")


_FAMILIES: Mapping[str, _Family] = {
    "qwen2_audio": _build_qwen2_audio,
    "voxtral": _build_voxtral,
    "whisper": _build_whisper,
}
