"""Transcription of speech: prompts for models that are trained for it, and how to read their
answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from sglang_lite.errors import short_repr
from sglang_lite.protocol import CapabilityError, Media, ParameterError, Prompt, Span
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.media.placeholders import MediaFormat
from sglang_lite.runtime.media.sound_families import SoundFormat
from sglang_lite.runtime.media.whisper_rules import apply_whisper_rules
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sglang_lite.runtime.requests.logit_processors import LogitProcessor

Task: TypeAlias = Literal["transcribe", "translate"]
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_TIMES_A_SECOND = 50


class Segment(NamedTuple):
    """Part of a transcript.

    Attributes:
        start, end: seconds from the beginning of the window.
        ids: token ids of its text.
    """

    start: float
    end: float
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WhisperSpeech:
    """Builds the prompts for transcripts by Whisper, and reads its answers.

    Attributes:
        sound: sounds of the model.
        tokenizer: tokenizer of the model.
        settings: content of its `generation_config.json`.
        languages: token of each selectable language, by code; empty for an English-only model.
    """

    sound: SoundFormat
    tokenizer: Tokenizer
    settings: Mapping[str, Json]
    languages: Mapping[str, int]

    @property
    def end(self) -> int:
        """Token that ends a transcript. All text tokens have lower ids."""
        return self._special_id("<|endoftext|>")

    def instructions(self, language: str | None, task: Task, *, timed: bool) -> list[int]:
        """Returns the tokens that begin a transcript.

        Args:
            language: code of the spoken language. None if it is unknown: then only the first token
                is returned.
            task: whether to write what is said or a translation into English.
            timed: whether to write when segments begin and end.

        Raises:
            ParameterError: the model has no such language.
            CapabilityError: the model knows only English, and a translation or another language is
                requested.
        """
        ids = [self._special_id("<|startoftranscript|>")]
        if self.languages:
            if language is None:
                return ids
            if language not in self.languages:
                problem = f"{short_repr(language)} is no language of the model."
                raise ParameterError(
                    "language", problem, hint=f"It has {', '.join(self.languages)}."[:900]
                )
            ids += [self.languages[language], self._special_id(f"<|{task}|>")]
        elif task == "translate" or language not in (None, "en"):
            raise CapabilityError(
                "the model knows English alone.", parameter="language", hint="Leave it out."
            )
        return ids if timed else [*ids, self._first_timestamp_token - 1]

    def prompt(self, sound: Media, instructions: Sequence[int], before: str = "") -> Prompt:
        """Returns the prompt for a transcript of a sound.

        Args:
            sound: the sound, at most one window long.
            instructions: tokens that begin the transcript.
            before: text treated as what was said before; only the end of a long text is used.
        """
        ids = [*instructions]
        if before:
            most = max(int(self.settings.get("max_length", 448)) // 2 - 1, 1)
            said = self.tokenizer.encode_spans(
                [Span(f" {before.strip()}", special=False)], first=False
            )
            ids = [self._special_id("<|startofprev|>"), *said[-most:], *ids]
        return Prompt((Span("<audio>", ()), Span("", tuple(ids))), images=(sound,))

    def logit_rules(self, instructions: Sequence[int], *, timed: bool) -> LogitProcessor | None:
        """Returns the logit processor for a transcript that begins with these instructions, or None
        if its logits need no change.
        """
        never = tuple(self.settings.get("suppress_tokens") or ())
        not_first = tuple(self.settings.get("begin_suppress_tokens") or ())
        if not (timed or never or not_first):
            return None
        return partial(
            apply_whisper_rules,
            instructions[0],
            len(instructions),
            self.end,
            self._first_timestamp_token if timed else 0,
            self.settings.get("max_initial_timestamp_index"),
            never,
            not_first,
        )

    def read_segments(self, ids: Sequence[int], seconds: float) -> tuple[list[Segment], float]:
        """Splits a transcript with times into segments. Returns the segments, and the time in
        seconds up to which the transcript is complete.

        Args:
            ids: its token ids.
            seconds: length of the sound.
        """
        first = self._first_timestamp_token
        ids = [each for each in ids if each < self.end or each >= self._first_timestamp_token]
        times = [each >= first for each in ids]
        # one segment ends, the next begins
        borders = [i for i in range(1, len(ids)) if times[i - 1] and times[i]]
        whole = times[-2:] == [False, True]  # nothing has begun after the last segment
        parts = [
            ids[start:end] for start, end in zip([0, *borders], [*borders, len(ids)]) if start < end
        ]
        if borders and not whole:
            parts.pop()  # begun and not ended
        found = []
        for part in parts:
            said = [
                min((each - first) / _TIMES_A_SECOND, seconds) for each in part if each >= first
            ]
            start = said[0] if part[0] >= first else 0.0
            end = said[-1] if part[-1] >= first and len(part) > 1 else seconds
            if text := tuple(each for each in part if each < first):
                found.append(Segment(start, max(start, end), text))
        heard = (
            seconds if whole or not borders else (ids[borders[-1] - 1] - first) / _TIMES_A_SECOND
        )
        return found, heard if heard > 0 else seconds

    @property
    def _first_timestamp_token(self) -> int:
        return self._special_id("<|notimestamps|>") + 1

    def _special_id(self, text: str) -> int:
        found: int | None = self.tokenizer.backend.token_to_id(text)
        if found is None:
            raise CapabilityError(
                f"the model's tokenizer has no {text}.",
                hint="Use one of Whisper's own checkpoints.",
            )
        return found


@dataclass(frozen=True, slots=True)
class VoxtralSpeech:
    """Builds the prompts for transcripts by Voxtral, which have no times.

    Attributes:
        sound: sounds of the model.
        placeholder: text that stands for a sound.
    """

    sound: SoundFormat
    placeholder: str

    def prompt(self, sound: Media, language: str | None) -> Prompt:
        """Returns the prompt for a transcript of a sound. Raises ParameterError if the language is
        not a language code.
        """
        if language is not None and not re.fullmatch("[a-z]{2}", language):
            problem = f"{short_repr(language)} is no code of a language."
            raise ParameterError("language", problem, hint='Write it as ISO 639-1 does: "en".')
        behind = "[/INST]" + (f"lang:{language}" if language else "") + "[TRANSCRIBE]"
        return Prompt(
            (Span("[INST][BEGIN_AUDIO]"), Span(self.placeholder, ()), Span(behind)), images=(sound,)
        )


def load_speech_format(
    media: MediaFormat | None, tokenizer: Tokenizer, folder: Callable[[], Path]
) -> WhisperSpeech | VoxtralSpeech:
    """Returns the `WhisperSpeech` or `VoxtralSpeech` that builds a model's transcription prompts.
    Raises CapabilityError if the model is not trained to transcribe.
    """
    sound = None if media is None else media.sound
    if media is not None and sound is not None and media.begins:
        file = folder() / "generation_config.json"
        settings = read_json(file) if file.exists() else {}
        ids = tokenizer.backend.get_vocab()
        languages = {
            found[1]: ids[text]
            for text in tokenizer.control_texts
            if (found := _LANGUAGE.fullmatch(text))
        }
        return WhisperSpeech(
            sound, tokenizer, settings, languages if settings.get("is_multilingual", True) else {}
        )
    if (
        media is not None
        and sound is not None
        and tokenizer.backend.token_to_id("[TRANSCRIBE]") is not None
    ):
        return VoxtralSpeech(sound, media.kinds["audio"].named)
    raise CapabilityError(
        "the model writes no transcripts.",
        hint="Serve Whisper or Voxtral; ask others about a sound in a chat.",
    )
