"""Records of what an encoder is asked, and the texts of a request as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.runtime.encoding.spec import EncoderSpec
from sglang_lite.runtime.resolved_params import shown

if TYPE_CHECKING:
    from tokenizers import Encoding

    from sglang_lite.runtime.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Texts that are to be read, one after another.

    Attributes:
        ids: int32 [T], the tokens of all texts.
        types: int32 [T], 0 but for those of a pair's second text.
        lengths: int32 [N], the tokens of each text.
    """

    ids: NDArray[np.int32]
    types: NDArray[np.int32]
    lengths: NDArray[np.int32]

    def texts(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Tokens and types of each text."""
        at = 0
        for length in self.lengths.tolist():
            yield self.ids[at : at + length], self.types[at : at + length]
            at += length


def tokenised(
    texts: Sequence[str] | Sequence[tuple[str, str]],
    tokenizer: Tokenizer,
    spec: EncoderSpec,
    *,
    truncate: bool = False,
    field: str = "prompt",
    first: int = 0,
) -> EncodeRequest:
    """The request of some texts, or pairs of texts, enclosed as the model wants them.

    Args:
        truncate: cut what is longer than the model's limit; of a pair the longer text.
        field, first: the parameter's name and the number of its first text here, for messages.

    Raises:
        ParameterError: no texts; one is none, empty, too long, or no Unicode.
    """
    backend = tokenizer.backend
    if not texts:
        raise ParameterError(field, "has no texts.")
    for index, each in enumerate(texts):
        for text in each if isinstance(each, tuple) else (each,):
            if not isinstance(text, str):
                raise ParameterError(f"{field}[{first + index}]", f"{shown(text)} is no text.")
            if not text.strip():
                raise ParameterError(f"{field}[{first + index}]", "is an empty text.")
    pairs = isinstance(texts[0], tuple)
    sides = zip(*texts) if pairs else [[f"{spec.prompt}{text}" for text in texts]]
    try:
        parts = [backend.encode_batch_fast(list(side), add_special_tokens=False) for side in sides]
    except TypeError:
        raise ParameterError(field, "is no valid Unicode: it has unpaired surrogates.") from None
    room = spec.limit - backend.num_special_tokens_to_add(pairs)
    enclosed = []
    for index, encodings in enumerate(zip(*parts)):
        if sum(map(len, encodings)) > room:
            if not truncate:
                raise ParameterError(
                    f"{field}[{first + index}]",
                    f"has {sum(map(len, encodings)) + spec.limit - room:,} tokens; the model reads {spec.limit:,}.",
                    hint="Shorten it, or use truncate=True.",
                )
            _cut(encodings, room)
        enclosed.append(backend.post_process(*encodings))
    return EncodeRequest(
        np.fromiter((i for each in enclosed for i in each.ids), np.int32),
        np.fromiter((i for each in enclosed for i in each.type_ids), np.int32),
        np.fromiter(map(len, enclosed), np.int32),
    )


def _cut(encodings: tuple[Encoding, ...], room: int) -> None:
    """Cuts a text, or a pair, to as many tokens: the longer text first, then both alike."""
    lengths = [len(each) for each in encodings]
    while (over := sum(lengths) - room) > 0:
        longest = lengths.index(max(lengths))
        other = lengths[1 - longest] if len(lengths) > 1 else 0
        lengths[longest] -= max(1, min(over, lengths[longest] - other))
    for encoding, length in zip(encodings, lengths):
        encoding.truncate(length)


def reads_no_text(name: str) -> CapabilityError:
    """The error of an embedding, score or class that is asked of a model that generates."""
    return CapabilityError(
        f"{name} generates text; this needs an embedding model.",
        hint="Start an engine with one, such as a folder of all-MiniLM-L6-v2.",
    )


def generates_no_text(name: str) -> CapabilityError:
    """The error of a generation by a model that only reads texts."""
    return CapabilityError(
        f"{name} generates no text: it gives embeddings, scores or classes.",
        hint="Use Engine.encode, score_pairs or classify; or start an engine with a model that generates.",
    )
