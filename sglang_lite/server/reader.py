"""Reader of requests: converts bodies to records, prompts and token ids. Needs no engine, so it can
also run in another process (reader_pool.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_lite.engine.core_client import load_tokenizer_and_media
from sglang_lite.engine.engine import Engine
from sglang_lite.protocol import MediaKind, Prompt, SglError, Span
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.embedding.spec import EncoderSpec
from sglang_lite.runtime.media.placeholders import MediaFormat, prompt_spans
from sglang_lite.runtime.models.resolve import resolve_for_engine
from sglang_lite.runtime.tokens.token_log import TokenLog
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.server.infill import InfillFormat, require_infill_format
from sglang_lite.server.settings import ServerSettings
from sglang_lite.text.chat_format import ChatFormat, Conversation, RenderedConversation
from sglang_lite.text.chat_template import JinjaTemplate


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that a reader in another process needs.

    Attributes:
        config: settings of the engine.
        path: folder or file of the model.
        name: name of the model.
        context_length: most tokens of a sequence.
        vocab_size: number of the model's tokens.
        longest: most tokens of a prompt and its answer.
        template: source of the chat template; None without one, or the error of an invalid one.
        settings: settings of the server.
        takes_media: whether the engine takes images, videos or sounds.
    """

    config: EngineConfig
    path: Path
    name: str
    context_length: int
    vocab_size: int
    longest: int
    template: str | SglError | None
    settings: ServerSettings
    takes_media: bool = False

    @classmethod
    def from_engine(cls, engine: Engine, settings: ServerSettings) -> ModelFacts:
        """Collects the facts of an engine's model."""
        template: str | SglError | None
        try:
            found = engine.chat_template()
            template = None if found is None else found.source
        except SglError as error:
            template = error
        path = resolve_for_engine(engine.config.model, engine.config.revision)
        return cls(
            engine.config,
            path,
            engine.model_name,
            engine.context_length,
            engine.vocab_size,
            engine.core.capacity.longest,
            template,
            settings,
            bool(engine.media_kinds),
        )

    def reader(self) -> RequestReader:
        """Creates a reader that tokenises prompts, for a process without an engine."""
        encoder, tokenizer, media = load_tokenizer_and_media(self.config, self.path)

        def template() -> JinjaTemplate | None:
            if isinstance(self.template, SglError):
                raise self.template
            return (
                None
                if self.template is None
                else JinjaTemplate(self.template, tokenizer.special_tokens)
            )

        return RequestReader(
            tokenizer,
            encoder,
            template,
            self.settings,
            self.name,
            self.context_length,
            self.vocab_size,
            self.longest,
            all_special=self.config.special_tokens_in_roles,
            tokenises=True,
            media=media if self.takes_media else None,
        )


@dataclass(frozen=True, eq=False)
class RequestReader:
    """Reader of requests for a model.

    Attributes:
        tokenizer: tokenizer of the model.
        encoder: specification of an encoder model; None for a model that generates text.
        template: function that returns the chat template.
        settings: settings of the server.
        model_name, context_length, vocab_size: name and sizes of the model.
        longest: most tokens of a prompt and its answer.
        all_special: whether every text can name special tokens.
        tokenises: whether prompts are tokenised here, rather than where they are submitted.
        media: format of images, videos and sounds in prompts; None if the model takes none.
    """

    tokenizer: Tokenizer
    encoder: EncoderSpec | None
    template: Callable[[], JinjaTemplate | None]
    settings: ServerSettings
    model_name: str
    context_length: int
    vocab_size: int
    longest: int
    all_special: bool
    tokenises: bool
    media: MediaFormat | None

    @classmethod
    def from_engine(cls, engine: Engine, settings: ServerSettings) -> RequestReader:
        """Creates a reader for a process that has an `Engine`. It doesn't tokenise prompts, because
        that happens when they are submitted.
        """
        return cls(
            engine.tokenizer,
            engine.core.encoder,
            engine.chat_template,
            settings,
            engine.model_name,
            engine.context_length,
            engine.vocab_size,
            engine.core.capacity.longest,
            all_special=engine.config.special_tokens_in_roles,
            tokenises=False,
            media=engine.core.builder.media if engine.media_kinds else None,
        )

    @property
    def media_kinds(self) -> frozenset[MediaKind]:
        """Kinds of media that the model takes."""
        return frozenset(() if self.media is None else self.media.kinds)

    @cached_property
    def chat_format(self) -> ChatFormat:
        """Format of the model's conversations. Raises TemplateError if the chat template is
        invalid.
        """
        settings = self.settings
        control = self.tokenizer.control_texts
        return ChatFormat(
            self.template(), control, settings.tool_call_parser, settings.reasoning_parser
        )

    @cached_property
    def infill_format(self) -> InfillFormat:
        """Format of prompts for the text between two given texts. Raises ParameterError if the
        model has none.
        """
        return require_infill_format(self.tokenizer, self.model_name)

    def render(self, conversation: Conversation, unused: list[str]) -> RenderedConversation:
        """Renders a conversation: see `ChatFormat.render`. Appends the fields that the template
        doesn't show to `unused`.
        """
        found = self.chat_format.render(conversation)
        unused += found.unused
        return (
            replace(found, prompt=self._tokenise_prompt(found.prompt)) if self.tokenises else found
        )

    def ids(self, prompt: Prompt | str) -> Sequence[int]:
        """Returns the token ids of a prompt."""
        given = prompt if isinstance(prompt, Prompt) else Prompt((Span(prompt),))
        spans = prompt_spans(given, self.media, self.model_name)
        return TokenLog(self.tokenizer, spans, all_special=self.all_special).ids()

    def prepare_prompt(self, prompt: Prompt | str | Sequence[int]) -> Prompt | str | Sequence[int]:
        """Returns the prompt to submit: tokenised, if this reader does that."""
        if not self.tokenises:
            return prompt
        if isinstance(prompt, Prompt):
            return self._tokenise_prompt(prompt)
        if isinstance(prompt, str):
            return self.ids(prompt)
        try:
            return array("i", prompt)
        except (OverflowError, TypeError):  # the engine refuses them with the reason
            return prompt

    def _tokenise_prompt(self, prompt: Prompt) -> Prompt:
        """Converts a prompt to token ids. A prompt with images is returned unchanged, because the
        images must be submitted with it.
        """
        if prompt.images:
            return prompt
        ids: Any = self.ids(prompt)  # an array: a million ids in a tuple would take long to pass on
        return Prompt((Span("", ids),))
