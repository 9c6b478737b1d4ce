"""Tokenizers: Qwen's, from its `.tiktoken` file (in the PyPI package `dashscope`), the default
model's.
"""

from __future__ import annotations

import base64
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.models.weights.gguf_file import GgufFile
from sglang_lite.runtime.tokens.from_gguf import tokenizer_from_gguf
from sglang_lite.runtime.tokens.tokenizer import Tokenizer

PADDED = 151_936  # logits of a row: more than Qwen has tokens


def tiktoken_tokenizer(path: Path) -> Tokenizer:
    """Tokenizer of a file's tokens, and of the merges that it leaves out: for each token its last
    pair.
    """
    ranks = {
        base64.b64decode(token): int(rank)
        for token, rank in map(str.split, path.read_text().splitlines())
    }
    # GPT-2's alphabet of bytes: printed ones stand for themselves, the others for what comes after
    # them all.
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    alphabet = {byte: chr(byte) for byte in printed} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }

    def name(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[best] >= rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            merges.append((name(parts[0]), name(parts[1])))
    backend = Backend(models.BPE({name(token): rank for token, rank in ranks.items()}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, list(ranks), [])


def default_tokenizer() -> Tokenizer:
    path = resolve("smollm2-135m")
    return tokenizer_from_gguf(GgufFile(path).metadata, str(path))
