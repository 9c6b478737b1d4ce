"""Prompts for the text between two given texts (`suffix`), for models that were trained to fill in
the middle.

The vocabulary of such a model has special tokens for this purpose. They determine how the prompt is
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_lite.protocol import ParameterError, Span
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """Tokens that a family of models puts around the two texts of a prompt.

    Attributes:
        prefix, suffix: token that precedes the text before the gap, and token that precedes the
            text after the gap.
        middle: token after both texts, where the model begins to write. None for a family whose
            prompts have the suffix first; its models begin to write after the prefix.
    """

    prefix: str
    suffix: str
    middle: str | None


# Source: the model cards, and the tokenizers' own code for CodeLlama and Codestral.
FAMILIES = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, StableCode
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    InfillTokens(" <PRE>", " <SUF>", " <MID>"),  # the same, as files of GGUF spell it
    InfillTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillTokens("[PREFIX]", "[SUFFIX]", None),  # Codestral
)  # fmt: skip
# Tokens that such models write after the middle, though not all configurations call them ends.
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>",
    "<fim_pad>", "<file_sep>", "<repo_name>", "<filename>", "<fim-pad>", "<|EOT|>", "▁<EOT>",
    " <EOT>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """Format of a model's prompts for filling in the text between two given texts.

    Attributes:
        prefix, suffix, middle: ids of the family's tokens.
        ends: ids of tokens that end the middle.
    """

    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]

    @classmethod
    def in_vocabulary(cls, tokenizer: Tokenizer) -> InfillFormat | None:
        """Returns the first known format whose tokens are all in a vocabulary, or None if there is
        none.
        """
        ids = {text: i for i, text in enumerate(tokenizer.token_bytes) if text in _KNOWN}
        for family in FAMILIES:
            prefix, suffix = _find(ids, family.prefix), _find(ids, family.suffix)
            middle = None if family.middle is None else _find(ids, family.middle)
            if prefix is None or suffix is None or (family.middle and middle is None):
                continue
            ends = {prefix, suffix, middle, *(_find(ids, each) for each in _ENDS)}
            return cls(prefix, suffix, middle, tuple(sorted(i for i in ends if i is not None)))
        return None

    def write_prompt(self, tokenizer: Tokenizer, before: str, after: str) -> list[int]:
        """Returns the token ids of the prompt for the text between two given texts. Names of
        special tokens in the given texts are encoded as ordinary text.
        """
        start = tokenizer.encode_spans((Span(before, special=False),))
        end = tokenizer.encode_spans((Span(after, special=False),), first=False)
        begins = tokenizer.bos_id is not None and list(start[:1]) == [tokenizer.bos_id]
        first = start[:begins]
        start = start[begins:]
        if self.middle is None:
            return [*first, self.suffix, *end, self.prefix, *start]
        return [*first, self.prefix, *start, self.suffix, *end, self.middle]


def require_infill_format(tokenizer: Tokenizer, model_name: str) -> InfillFormat:
    """Returns the format of a model. Raises ParameterError if it has none."""
    found = InfillFormat.in_vocabulary(tokenizer)
    if found is None:
        raise ParameterError(
            "suffix",
            f"{model_name} has no tokens for a text between two others (such as <|fim_prefix|>).",
            hint="Serve a model that has, such as Qwen2.5-Coder, or leave suffix out.",
        )
    return found


def _find(ids: Mapping[bytes, int], text: str) -> int | None:
    return ids.get(text.encode())


_KNOWN = frozenset(
    each.encode()
    for each in (
        *_ENDS,
        *(
            text
            for family in FAMILIES
            for text in (family.prefix, family.suffix, family.middle)
            if text is not None
        ),
    )
)
