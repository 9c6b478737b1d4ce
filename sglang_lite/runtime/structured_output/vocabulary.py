"""Tokens of a model in the form that grammar engines need. Independent of tokenizers, and small
enough to send to a worker.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol.anything import Foreign

if TYPE_CHECKING:
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

_MARK = re.compile("<[!-~]*>")  # ASCII that all vocabularies spell unchanged


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens of a model.

    Attributes:
        tokens: bytes of each id; empty for special and padding ids, which have no text.
        eos_ids: ids that may end a complete text, sorted.
    """

    tokens: tuple[bytes, ...]
    eos_ids: tuple[int, ...]

    @staticmethod
    def from_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> Vocabulary:
        """Returns the vocabulary of a model.

        Args:
            tokenizer: tokenizer of the model.
            vocab_size: number of the model's tokens, padding included.
            eos_ids: ids that may end a complete text.
        """
        token_bytes = tokenizer.token_bytes[:vocab_size]
        tokens = (
            b"" if i in tokenizer.special_ids else token for i, token in enumerate(token_bytes)
        )
        return Vocabulary(
            (*tokens, *[b""] * (vocab_size - len(token_bytes))), tuple(sorted(eos_ids))
        )

    @property
    def size(self) -> int:
        return len(self.tokens)

    def eos_mask(self) -> NDArray[np.int32]:
        """Returns the mask that allows only the end of the sequence."""
        return build_token_mask(self.eos_ids, self.size)


def list_allowed_tokens(mask: NDArray[np.int32]) -> list[int]:
    """Returns the tokens that a mask allows."""
    words = np.flatnonzero(mask)
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(len(words), 32)
    rows, columns = np.nonzero(bits)
    found: list[int] = (32 * words[rows] + columns).tolist()
    return found


def build_token_mask(tokens: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """Returns the mask that allows the given tokens."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    allowed[list(tokens)] = 1
    return np.packbits(allowed, bitorder="little").view(np.int32)


def filter_allowed_tokens(mask: NDArray[np.int32], tokens: Iterable[int]) -> list[int]:
    """Returns those of the given tokens that a mask allows. Meant for a few tokens."""
    bits = memoryview(mask.data).cast("B")
    return [
        token for token in tokens if token >> 3 < len(bits) and bits[token >> 3] >> (token & 7) & 1
    ]


def without_tokens(mask: NDArray[np.int32], tokens: Iterable[int]) -> NDArray[np.int32]:
    """Returns the mask with the given tokens removed. Meant for a few tokens."""
    bits = bytearray(mask)  # item access is faster than an array's
    for token in tokens:
        if token >> 3 < len(bits):
            bits[token >> 3] &= ~(1 << (token & 7))
    return np.frombuffer(bits, np.int32)


def find_mark_tokens(tokenizer: Foreign) -> dict[bytes, int]:
    """Returns the ids of a tokenizer's marks by their text. A mark, such as `</think>`, is ordinary
    text that the tokenizer recognises only as a whole. Because of its spelling, llguidance would
    take it for a special token.

    Args:
        tokenizer: content of a tokenizer's JSON, in the format of Hugging Face's `tokenizers`.
    """
    by_name = isinstance(tokenizer["model"]["vocab"], dict)
    added = [each for each in tokenizer["added_tokens"] if by_name and not each["special"]]
    return {
        each["content"].encode(): each["id"] for each in added if _MARK.fullmatch(each["content"])
    }


def hide_special_tokens(tokenizer: Foreign) -> str:
    """Returns the JSON of a tokenizer whose special tokens have secret names, so that no text is
    encoded as one. Marks (`find_mark_tokens`) become ordinary tokens, so the tokenizer spells a
    mark's text with other tokens.

    Args:
        tokenizer: as for `find_mark_tokens`. It is modified.
    """
    secret = secrets.token_hex(8)
    model = tokenizer["model"]
    names = {
        each["content"]: f"<{secret} {each['id']}>"
        for each in tokenizer["added_tokens"]
        if each["special"]
    }
    marks = find_mark_tokens(tokenizer)
    added = [each for each in tokenizer["added_tokens"] if each["content"].encode() not in marks]
    if marks:
        model["vocab"] |= {mark.decode(): token for mark, token in marks.items()}
    for each in added:
        each["content"] = names.get(each["content"], each["content"])
    tokenizer["added_tokens"] = added
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): token for name, token in model["vocab"].items()}
    else:  # a Unigram vocabulary, with scores
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(tokenizer)
