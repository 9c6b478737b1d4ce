"""Fields of an output's result: spans, scores and metadata."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from sglang_lite.protocol import Span, TokenLogprob, TokenScores
from sglang_lite.runtime.kv_cache.cache_miss import Miss
from sglang_lite.runtime.tokens.detokenize import IncrementalDecoder
from sglang_lite.runtime.tokens.tokenizer import Tokenizer

# maximum number of uncached tokens to count characters of: more would block the loop's thread too
# long
_COUNTED = 512
_SHOWN = 40  # maximum number of characters of an excerpt in a CacheMiss

Top: TypeAlias = tuple[tuple[float, int, str | None], ...]


def append_closing_brackets(spans: tuple[Span, ...], brackets: str) -> tuple[Span, ...]:
    """Returns a text's spans, followed by the brackets that close it."""
    if not brackets:
        return spans
    if spans and spans[-1].ids is None:
        return (*spans[:-1], Span(spans[-1].text + brackets, special=False))
    return (*spans, Span(brackets, special=False))


def miss_fields(miss: Miss, tokenizer: Tokenizer) -> dict[str, object]:
    """Converts a miss to the fields of a CacheMiss, omitting those with default values."""
    decode = partial(tokenizer.decode, skip_special=False)
    fields: dict[str, object] = {"reason": miss.reason, "at": miss.at}
    if 0 < len(miss.uncached) <= _COUNTED:
        fields["left"] = len(decode(miss.uncached.tolist()))
    for name, tokens in (("now", miss.now), ("before", miss.before)):
        if len(tokens):
            fields[name] = decode(tokens.tolist())[:_SHOWN]
    return fields


def forced_text_spans(
    decoder: IncrementalDecoder,
    output: Sequence[int],
    jumps: Sequence[tuple[int, int]],
    length: int,
) -> list[list[int]]:
    """Returns spans of the text that the grammar forced, as [start, end] character offsets within
    the first `length` characters. The decoder must have decoded nothing yet.
    """
    found = []
    index = 0
    chars = 0
    for start, count in jumps:
        chars += len(decoder.push(output[index:start]))
        begin = chars
        chars = chars + len(decoder.push(output[start : start + count]))
        index = start + count
        if begin < min(chars, length):
            found.append([begin, min(chars, length)])
    return found


def build_token_scores(
    decoder: IncrementalDecoder,
    ids: Sequence[int],
    scores: Sequence[tuple[float | None, float | None]],
    length: int,
) -> TokenScores:
    """Builds the scores of a text's tokens. Includes the end of sequence if no other token may end
    the text.

    Args:
        decoder: decoder that has decoded nothing yet.
        ids: the tokens; at least one.
        scores: log-probability of each token, and of all that were allowed in its place.
        length: number of characters of the text.
    """
    ends = []
    end = 0
    for token in ids[: len(scores)]:
        end += len(decoder.push((token,)))
        ends.append(min(end + decoder.pending, length))
    logprobs, allowed = zip(*scores)
    return TokenScores(logprobs, allowed, tuple(ends))


def add_token_texts(logprob: TokenLogprob, tokenizer: Tokenizer) -> TokenLogprob:
    """Returns a token's log-probability after adding the texts of the token and of all other tokens
    listed with it.
    """

    def decode_entries(entries: Top) -> Top:
        return tuple(
            (value, i, tokenizer.decode((i,), skip_special=False)) for value, i, _ in entries
        )

    text = tokenizer.decode((logprob.token_id,), skip_special=False)
    return TokenLogprob(
        logprob.logprob,
        logprob.token_id,
        text,
        decode_entries(logprob.top),
        decode_entries(logprob.ids),
    )
