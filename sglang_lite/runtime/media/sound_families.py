"""Sounds, as families of models hear them. Needs neither torch nor av."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.media.image_families import Config, Part


@dataclass(frozen=True, slots=True)
class SoundFormat:
    """Sounds of a model, which hears a spectrogram.

    Attributes:
        rate: samples in a second.
        hop: samples from one column of the spectrogram to the next.
        seconds: length that it hears at once.
        count: number of placeholders of a spectrogram of so many columns.
    """

    rate: int
    hop: int
    seconds: float
    count: Callable[[int], int]

    def parts(self, samples: int) -> Sequence[Part]:
        """Placeholders of a sound of so many samples. Raises ParameterError if it is too short."""
        count = self.count(-(-samples // self.hop))
        if count < 1:
            raise ParameterError("audio", f"{samples:,} samples are too short to hear.", hint="Send a longer sound.")
        return (count,)


def _qwen2_audio(config: Config, settings: Config) -> SoundFormat:
    """Qwen2-Audio: Whisper's spectrogram, halved by a convolution and again by pooling."""
    return SoundFormat(
        settings.get("sampling_rate", 16000), settings.get("hop_length", 160), settings.get("chunk_length", 30),
        lambda columns: ((columns - 1) // 2 - 1) // 2 + 1,
    )  # fmt: skip


SOUND_FAMILIES: Mapping[str, Callable[[Config, Config], SoundFormat]] = {"qwen2_audio": _qwen2_audio}
