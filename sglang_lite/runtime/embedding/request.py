"""Requests to encoders, and the tokenization of their texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang_lite.errors import short_repr
from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.runtime.calls import EngineCall
from sglang_lite.runtime.embedding.spec import EncoderSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Encoding

    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

# a text, a pair of texts, or token ids
EncoderInput: TypeAlias = str | tuple[str, str] | Sequence[int]


class EncodeRequest(EngineCall["NDArray[np.float32]"], frozen=True, eq=False, tag="encode"):
    """Texts for an encoder to read, as concatenated tokens. The response is float32 [N, width], one
    row per text.

    Attributes:
        ids: int32 [T], tokens of all texts.
        types: int32 [T], token types: 1 for the second text of a pair, else 0.
        lengths: int32 [N], number of tokens in each text.
        adapters: name of each text's adapter (LoRA), or None; empty if none has one.
    """

    ids: NDArray[np.int32]
    types: NDArray[np.int32]
    lengths: NDArray[np.int32]
    adapters: tuple[str | None, ...] = ()

    def texts(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Yields the tokens and token types of each text."""
        at = 0
        for length in self.lengths.tolist():
            yield self.ids[at : at + length], self.types[at : at + length]
            at += length


def build_encode_request(
    texts: Sequence[EncoderInput],
    tokenizer: Tokenizer,
    spec: EncoderSpec,
    *,
    prompt: str = "",
    truncate: bool = False,
    field: str = "prompt",
    first: int = 0,
) -> EncodeRequest:
    """Builds the request for texts or pairs, adding the model's special tokens. Token ids are used
    unchanged.

    Args:
        texts: texts, pairs of texts, or lists of token ids.
        tokenizer: tokenizer of the model.
        spec: specification of the model.
        prompt: text added before each text, but not before pairs or token ids.
        truncate: whether to cut texts that exceed the model's limit; of a pair, the longer text is
            cut first.
        field: name of the parameter, for messages.
        first: index of the first text in the parameter, for messages.

    Raises:
        ParameterError: `texts` is empty, or a text is empty, too long, not valid Unicode, or of a
            wrong type.
    """
    if not texts:
        raise ParameterError(field, "has no texts.")
    names = [f"{field}[{first + index}]" for index in range(len(texts))]
    for each, name in zip(texts, names):
        _check_input(each, name, spec)
    tokens: list[tuple[Sequence[int], Sequence[int]]] = [([], [])] * len(texts)
    for kind in (str, tuple, list):
        mine = [index for index, each in enumerate(texts) if _input_kind(each) is kind]
        if kind is list:
            for index in mine:
                ids: Any = texts[index]
                if len(ids) > spec.limit and not truncate:
                    raise too_long_error(names[index], len(ids), spec.limit)
                tokens[index] = ids[: spec.limit], [0] * min(len(ids), spec.limit)
        elif mine:
            sides: Any = (
                zip(*(texts[i] for i in mine))
                if kind is tuple
                else [[f"{prompt}{texts[i]}" for i in mine]]
            )
            enclosed = _encode_with_special_tokens(
                sides, tokenizer, spec.limit, [names[i] for i in mine], truncate=truncate
            )
            for index, encoding in zip(mine, enclosed):
                tokens[index] = encoding.ids, encoding.type_ids
    # imported late: it takes longer than starting an engine's process, which must not wait for it
    import numpy as np

    return EncodeRequest(
        np.fromiter((i for ids, _ in tokens for i in ids), np.int32),
        np.fromiter((i for _, types in tokens for i in types), np.int32),
        np.fromiter((len(ids) for ids, _ in tokens), np.int32),
    )


def is_token_id_list(given: object) -> bool:
    """Returns True if `given` is a non-empty list or tuple of integers: the token ids of one text."""
    return (
        isinstance(given, list | tuple) and bool(given) and all(type(each) is int for each in given)
    )


def _input_kind(given: EncoderInput) -> type:
    return str if isinstance(given, str) else list if is_token_id_list(given) else tuple


def _check_input(given: EncoderInput, name: str, spec: EncoderSpec) -> None:
    if is_token_id_list(given):
        for each in given:
            if not 0 <= int(each) < spec.vocab_size:
                raise ParameterError(name, f"{each} is no token id (0 to {spec.vocab_size - 1:,}).")
        return
    for text in given if isinstance(given, tuple) else (given,):
        if not isinstance(text, str):
            raise ParameterError(name, f"{short_repr(text)} is no text, and no list of token ids.")
        if not text.strip():
            raise ParameterError(name, "is an empty text.")


def too_long_error(name: str, tokens: int, limit: int) -> ParameterError:
    """Returns the error for a text with more tokens than the model reads."""
    return ParameterError(
        name,
        f"has {tokens:,} tokens; the model reads {limit:,}.",
        hint="Shorten it, or use truncate=True.",
    )


def _encode_with_special_tokens(
    sides: Iterable[Sequence[str]],
    tokenizer: Tokenizer,
    limit: int,
    names: Sequence[str],
    *,
    truncate: bool,
) -> Iterator[Encoding]:
    """Tokenizes texts, or pairs of first and second texts, and yields each encoding with the
    tokenizer's special tokens.
    """
    backend = tokenizer.backend
    try:
        parts = [backend.encode_batch_fast(list(side), add_special_tokens=False) for side in sides]
    except TypeError:
        raise ParameterError(
            names[0].partition("[")[0], "is no valid Unicode: it has unpaired surrogates."
        ) from None
    room = limit - backend.num_special_tokens_to_add(len(parts) == 2)
    for name, encodings in zip(names, zip(*parts)):
        length = sum(map(len, encodings))
        if length > room:
            if not truncate:
                raise too_long_error(name, length + limit - room, limit)
            _truncate_to_room(encodings, room)
        yield backend.post_process(*encodings)


def _truncate_to_room(encodings: tuple[Encoding, ...], room: int) -> None:
    """Truncates a text or pair to `room` tokens in total. The longer text of a pair is cut first;
    once both have the same length, they are cut equally.
    """
    lengths = [len(each) for each in encodings]
    while (over := sum(lengths) - room) > 0:
        longest = lengths.index(max(lengths))
        other = lengths[1 - longest] if len(lengths) > 1 else 0
        lengths[longest] -= max(1, min(over, lengths[longest] - other))
    for encoding, length in zip(encodings, lengths):
        encoding.truncate(length)


def not_an_encoder_error(name: str) -> CapabilityError:
    """Returns the error for requesting an embedding, score or class from a model that generates
    text.
    """
    return CapabilityError(
        f"{name} generates text; this needs an embedding model.",
        hint="Start an engine with one, such as a folder of all-MiniLM-L6-v2.",
    )


def not_a_generator_error(name: str, *, encoder_only: bool = False) -> CapabilityError:
    """Returns the error for requesting generated text from a model that can't generate. Such a
    model only reads texts, or has only its media encoder loaded.
    """
    if encoder_only:
        return CapabilityError(
            f"of {name}, the encoder of media alone is loaded.",
            hint="Ask a server that has this one in encoder_urls.",
        )
    return CapabilityError(
        f"{name} generates no text: it gives embeddings, scores or classes.",
        hint="Use Engine.encode, score_pairs or classify; or start an engine with a model that generates.",
    )
