"""Finds the tokens at the end of a prompt that need a new spelling once the following text is
known.

If a text ends inside a word or with a blank, a tokenizer that knew the following text would have
chosen other tokens for its end: " Paris" instead of " P" "ar".
"""

from __future__ import annotations

from collections.abc import Sequence

import regex

from sglang_lite.runtime.tokens.tokenizer import Tokenizer

# Tokenizers join a word with a blank before it, but with no other characters outside words.
_LAST_WORD = regex.compile(r"(?: ?[\p{L}\p{M}\p{N}]+|[^\p{L}\p{M}\p{N}]+)\Z")
# Text that a chat template writes after a control token to begin a turn: "assistant\n".
_TURN_BEGIN = regex.compile(r"\w*\n+")
_MAX_TOKENS = 6
_TURN_TOKENS = 4  # maximum number of tokens of such a text
_INSIDE = [bytes((byte,)) for byte in range(0x80, 0xC0)]


def count_end_tokens(tokenizer: Tokenizer, ids: Sequence[int], text_tokens: int) -> int:
    """Returns how many tokens at the end of a prompt have to be tokenised again together with the
    text that follows: the tokens of its last word, or of the blanks and punctuation after that.
    These are at most `_MAX_TOKENS` tokens, none of them a control token, and form whole characters.
    The text with which a chat's turn begins keeps its tokens.

    Args:
        tokenizer: tokenizer of the model.
        ids: token ids of the prompt.
        text_tokens: number of tokens at the prompt's end that the tokenizer has made from text.
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
    """Returns how many of the tokens after a control token spell the beginning of a chat's turn."""
    begin = _TURN_BEGIN.match(tokenizer.decode(ids))
    length = 0 if begin is None else len(begin[0].encode())
    spelled = 0
    count = 0
    while spelled < length:
        spelled += len(tokenizer.token_bytes[ids[count]])
        count += 1
    return count


def _begins_character(token: bytes) -> bool:
    """Returns whether a token begins at the start of a UTF-8 character, not inside one."""
    return token[:1] not in _INSIDE
