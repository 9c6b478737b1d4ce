"""Finds the bytes of tokens, and recognises control tokens, from the description of a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from tokenizers import Tokenizer as Backend

from sglang_lite.protocol import ModelError, SglError
from sglang_lite.protocol.anything import Json
from sglang_lite.text.tool_formats import NON_TURN_MARKS

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


@contextmanager
def convert_tokenizer_errors(label: str) -> Iterator[None]:
    """Converts exceptions of the tokenizers library about a damaged description to ModelError."""
    try:
        yield
    except BaseException as error:  # a panic of its Rust code is not an Exception
        if isinstance(error, SglError) or not (
            isinstance(error, Exception) or type(error).__name__ == "PanicException"
        ):
            raise
        raise ModelError(
            f"{label}: the tokenizer can't be used: {error!r}"[:1000],
            hint="Fetch the tokenizer again.",
        ) from error


_MARKED = re.compile(r"<[|｜].+|.+[|｜]>", re.DOTALL)
_BRACKETED = re.compile(r"[^\w\s].+[^\w\s]", re.DOTALL)


def is_control(token: str, template: object) -> bool:
    """Returns True if an added token is a control token that its tokenizer does not mark as
    special, such as one that begins a turn. Blanks, words and marks that models write themselves
    count as text.
    """
    if token in NON_TURN_MARKS:
        return False
    written = isinstance(template, str) and token in template
    return bool(_MARKED.fullmatch(token) or (written and _BRACKETED.fullmatch(token)))


def build_token_byte_table(
    backend: Backend, description: dict[str, Json], label: str
) -> list[bytes]:
    parts = json.dumps([description.get("decoder"), description.get("pre_tokenizer")])
    byte_level = '"ByteLevel"' in parts
    if not byte_level and '"Metaspace"' not in parts and '"ByteFallback"' not in parts:
        raise ModelError(
            f"{label}: the tokenizer is neither byte-level nor SentencePiece.",
            hint="Supported: BPE and Unigram tokenizers with a ByteLevel, Metaspace or ByteFallback decoder.",
        )
    added = {t["id"]: t["content"] for t in description.get("added_tokens", [])}
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        if i in added:
            table[i] = added[i].encode()
        else:
            table[i] = byte_level_bytes(token) if byte_level else sentencepiece_bytes(token)
    return table


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[int, int]:
    """Maps code points of GPT-2's printable stand-ins to the bytes for which they stand. Maps all
    other code points below 256 to a value that is not a byte.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte if byte in printable else 0x100 for byte in range(256)} | {
        0x100 + i: byte for i, byte in enumerate(others)
    }


def byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_byte_level_alphabet()).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()  # a token outside the byte alphabet represents itself


def byte_level_text(token: bytes) -> str:
    """Returns GPT-2's printable stand-ins for the bytes of a token."""
    return token.decode("latin-1").translate(_printable_code_points())


@lru_cache(maxsize=1)
def _printable_code_points() -> dict[int, int]:
    """Maps bytes to the code points of GPT-2's printable stand-ins."""
    return {byte: point for point, byte in _byte_level_alphabet().items() if byte < 0x100}


def sentencepiece_bytes(token: str) -> bytes:
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode("utf-8", "replace")
