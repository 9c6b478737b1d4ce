"""Builds tokenizers from Mistral's `tekken.json`, which lists tokens as bytes by rank, like
tiktoken, and has no merges.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import MAX_TOKENS, read_json
from sglang_lite.runtime.tokens.token_bytes import byte_level_text

TEKKEN = "tekken.json"
SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
_FIRST_SPECIALS = (  # by id, for files that don't list them
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
_LONGEST_TOKEN = 1024  # maximum bytes of a token, since every way to cut it is tried


def tekken_backend(file: Path) -> Backend:
    """Builds the tokenizer that a `tekken.json` describes. It adds `<s>` before texts.

    Raises:
        ModelError: the file is damaged.
    """
    content = read_json(file)
    try:
        config = content["config"]
        specials = _special_texts(content, config["default_num_special_tokens"])
        size: int = config.get("default_vocab_size", len(content["vocab"]) + len(specials))
        tokens = [
            base64.b64decode(each["token_bytes"])
            for each in content["vocab"][: size - len(specials)]
        ]
        split = Regex(config["pattern"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(f"{file}: damaged: {error!r}", hint="Fetch the file again.") from error
    if len(tokens) + len(specials) != size or len(set(tokens)) < len(tokens):
        raise ModelError(
            f"{file}: has {len(set(tokens)):,} tokens, and says {size - len(specials):,}.",
            hint="Fetch the file again.",
        )
    texts = list(map(byte_level_text, tokens))
    vocab = {text: i for i, text in enumerate((*specials, *texts))}
    merges = [(texts[left], texts[right]) for left, right in _derive_merges(tokens, file)]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in specials]
    )
    bos = SPECIAL_TOKENS["bos_token"]
    backend.post_processor = processors.TemplateProcessing(
        f"{bos} $A", special_tokens=[(bos, vocab[bos])]
    )
    return backend


def _special_texts(content: Mapping[str, Any], count: int) -> list[str]:
    """Returns the texts of `count` special tokens, by id. Raises ValueError if more than `count`
    are listed, or their ids are not consecutive from 0 on.
    """
    listed = content.get("special_tokens")
    texts = dict(enumerate(_FIRST_SPECIALS))
    if listed is not None:
        texts = {each["rank"]: each["token_str"] for each in listed}
    if sorted(texts) != list(range(len(texts))) or not len(texts) <= count < MAX_TOKENS:
        raise ValueError(f"the special tokens are not the first of {count}")
    return [texts.get(i, f"<SPECIAL_{i}>") for i in range(count)]


def _derive_merges(tokens: list[bytes], file: Path) -> list[tuple[int, int]]:
    """Returns the merges, which are pairs of ranks to join. They are sorted by the rank of the
    token that they form, lowest first.
    """
    rank = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[int, int]] = []
    for token in tokens:
        if len(token) > _LONGEST_TOKEN:
            raise ModelError(
                f"{file}: a token has {len(token):,} bytes; the limit is {_LONGEST_TOKEN:,}.",
                hint="Fetch the file again.",
            )
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += sorted(
            (rank[left], rank[right]) for left, right in cuts if left in rank and right in rank
        )
    return merges
