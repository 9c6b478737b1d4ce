"""Loads Whisper: an encoder of sounds, and a decoder whose sequences begin with a sound."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.kernels.kv_layout import SoundPrefix
from sglang_lite.runtime.loading.model_files import ModelFiles
from sglang_lite.runtime.models.sound_tower import SoundTower
from sglang_lite.runtime.models.weights.source import WeightSource
from sglang_lite.runtime.models.whisper import WhisperDecoder


def load_whisper(
    config: EngineConfig,
    files: ModelFiles,
    sound: SoundPrefix,
    source: Callable[[], WeightSource],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[WhisperDecoder, SoundTower]:
    """Loads Whisper's decoder and encoder.

    Args:
        config: settings of the engine.
        files: files of the model.
        sound: tokens of a sound.
        source: opens the weights of the model. Called only once the settings are known to be valid;
            all weights are taken.
        dtype, device: data type and device of the weights and the computation.

    Raises:
        ModelError: the folder lacks what sounds need, or a tensor is missing or superfluous.
        ParameterError: the settings leave no room for text after a sound, or a sound would not fill
            whole pages.
    """
    if files.media is None:
        raise ModelError(
            f"{files.path}: {files.spec.architecture} hears nothing without a tokenizer and preprocessor_config.json.",
            hint="Add them, and leave enable_multimodal and skip_tokenizer_init out.",
        )
    if config.context_length is not None and config.context_length <= sound.tokens:
        raise ParameterError(
            "context_length", f"a sound alone takes {sound.tokens:,} tokens.", hint="Leave it out."
        )
    if config.page_size and sound.tokens % config.page_size:
        raise ParameterError(
            "page_size",
            f"the {sound.tokens:,} tokens of a sound are no whole pages.",
            hint="Use 16.",
        )
    weights = source()
    tower = SoundTower(files.path, weights, dtype, device)
    decoder = WhisperDecoder(files.path, weights, dtype, device, sound)
    weights.check_all_used()
    return decoder, tower
