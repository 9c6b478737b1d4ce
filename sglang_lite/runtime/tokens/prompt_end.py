"""Finds the end of a prompt that has to be spelled anew together with the text that follows it.

A text that ends inside a word, or with a blank, ends with tokens that a tokenizer would not have
chosen if the following text was known: " P" "ar" in place of " Paris".
"""

from __future__ import annotations

from collections.abc import Sequence

import regex

from sglang_lite.runtime.tokens.tokenizer import Tokenizer

# Tokenizers don't join a word with what is not part of one, but for a blank before it.
_LAST_WORD = regex.compile(r"(?: ?[\p{L}\p{M}\p{N}]+|[^\p{L}\p{M}\p{N}]+)\Z")
# What a chat's template writes behind a control token to begin a turn: "assistant\n".
_TURN_BEGIN = regex.compile(r"\w*\n+")
_MAX_TOKENS = 6
_TURN_TOKENS = 4  # of such a beginning
_INSIDE = [bytes((byte,)) for byte in range(0x80, 0xC0)]


def count_end_tokens(tokenizer: Tokenizer, ids: Sequence[int], text_tokens: int) -> int:
    """Returns how many tokens at the end of a prompt have to be spelled anew: those of its last
    word, or of what follows it. They are whole characters, and at most 6 of which none is a control
    token. A prompt that ends with the beginning of a chat's turn stays as it is.

    Args:
        tokenizer: tokenizer of the model.
        ids: token ids of the prompt.
        text_tokens: number of its last tokens that the tokenizer has made of text.
    """
    count = 0
    for token in reversed(ids[len(ids) - min(text_tokens, _MAX_TOKENS + _TURN_TOKENS) :]):
        if tokenizer.is_control(token):
            count -= _count_turn_tokens(tokenizer, ids[len(ids) - count :])
            break
        count += 1
    # something must come before the first token
    count = min(count, _MAX_TOKENS, len(ids) - 1)
    tokens = ids[len(ids) - count :]
    found = _LAST_WORD.search(tokenizer.decode(tokens))
    length = 0 if found is None else len(found[0].encode())
    spelled = 0
    needed = 0
    while spelled < length and needed < count:
        needed += 1
        spelled += len(tokenizer.token_bytes[tokens[-needed]])
    while needed and not _begins_character(tokenizer.token_bytes[tokens[-needed]]):
        if needed == count:
            return 0
        needed += 1
    return needed


def _count_turn_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Returns how many tokens behind a control token have text of the beginning of a turn."""
    begin = _TURN_BEGIN.match(tokenizer.decode(ids))
    length = 0 if begin is None else len(begin[0].encode())
    spelled = 0
    count = 0
    while spelled < length:
        spelled += len(tokenizer.token_bytes[ids[count]])
        count += 1
    return count


def _begins_character(token: bytes) -> bool:
    """Returns whether a token doesn't begin inside a character of UTF-8."""
    return token[:1] not in _INSIDE
