"""Sounds in each model family's format. Needs neither torch nor av."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sglang_lite.media.files import MAX_SECONDS
from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.kernels.kv_layout import SoundPrefix
from sglang_lite.runtime.media.image_families import Config, Part


@dataclass(frozen=True, slots=True)
class SoundFormat:
    """Format of the sounds that a model takes, as spectrograms.

    Attributes:
        rate: samples in a second.
        hop: samples from one column of the spectrogram to the next.
        seconds: longest sound.
        window: sounds are padded to a multiple of this many samples; the encoder reads one such
            window after another.
        count: function from a spectrogram's columns to the number of its placeholders.
        named: text that stands for a sound in prompts; "" if it is the token that the config names.
    """

    rate: int
    hop: int
    seconds: float
    window: int
    count: Callable[[int], int]
    named: str = ""

    def sound_placeholders(self, samples: int) -> Sequence[Part]:
        """Returns the placeholders of a sound that has `samples` samples. Raises ParameterError if
        the sound is too short.
        """
        count = self.count(-(-samples // self.hop))
        if count < 1:
            raise ParameterError(
                "audio", f"{samples:,} samples are too short to hear.", hint="Send a longer sound."
            )
        return (count,)


def _spectrogram_format(
    settings: Config, count: Callable[[int], int], most_seconds: float = 0, named: str = ""
) -> SoundFormat:
    """Returns the format of models that read Whisper's spectrograms. Unless `most_seconds` is
    given, a sound may not exceed one window. Raises ModelError if the settings add noise or padding
    values.
    """
    for name in ("dither", "padding_value"):
        if settings.get(name):
            hint = "Set it to 0: sounds are read without noise, and with silence behind them."
            raise ModelError(
                f"preprocessor_config.json: {name} {settings[name]!r} is not supported.", hint=hint
            )
    rate = settings.get("sampling_rate", 16000)
    seconds = settings.get("chunk_length", 30)
    return SoundFormat(
        rate, settings.get("hop_length", 160), most_seconds or seconds, rate * seconds, count, named
    )


def _qwen2_audio_format(config: Config, settings: Config) -> SoundFormat:
    """Returns the format of Qwen2-Audio. A convolution halves the number of the spectrogram's
    columns, and pooling halves it again.
    """
    return _spectrogram_format(settings, lambda columns: ((columns - 1) // 2 - 1) // 2 + 1)


def _voxtral_format(config: Config, settings: Config) -> SoundFormat:
    """Returns the format of Voxtral: all frames of each window. The projector combines several
    frames into each feature.
    """
    audio = {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "max_source_positions": 1500,
        **config["audio_config"],
    }
    columns = 2 * audio["max_source_positions"]
    frames = audio["max_source_positions"]
    each = frames * audio["hidden_size"] // audio["intermediate_size"]
    return _spectrogram_format(settings, lambda count: -(-count // columns) * each, MAX_SECONDS)


def _whisper_format(config: Config, settings: Config) -> SoundFormat:
    """Returns the format of Whisper: all frames of a window, before the text."""
    tokens = SoundPrefix.from_frames(config["max_source_positions"]).tokens
    return _spectrogram_format(settings, lambda columns: tokens, named="<audio>")


SOUND_FAMILIES: Mapping[str, Callable[[Config, Config], SoundFormat]] = {
    "qwen2_audio": _qwen2_audio_format,
    "voxtral": _voxtral_format,
    "whisper": _whisper_format,
}
