"""Tokenizers of GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sglang_lite.protocol import ModelError
from sglang_lite.protocol.anything import Foreign
from sglang_lite.runtime.models.config_fields import (
    check_ids,
    shown,
)
from sglang_lite.runtime.tokens.token_bytes import byte_level_bytes, foreign, is_control, sentencepiece_bytes
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.text.tool_formats import marks_among

# The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`: the pattern that splits text before BPE, and
# whether whole words in the vocabulary skip the merges.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35 = _CASELESS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _WORDS % ("", "") + r"|\p{N}" + _REST
_GPT4O = _WORDS % (f"{_CASELESS}?", f"{_CASELESS}?") + r"|\p{N}{1,3}" + _REST
_PRE_TOKENIZERS: dict[str, tuple[tuple[str, ...], bool]] = {
    "default": ((_GPT2,), False),
    "gpt-2": ((_GPT2,), False),
    "smollm": ((r"\p{N}", _GPT2), False),
    "starcoder": ((r"\p{N}", _GPT2), False),
    "refact": ((r"\p{N}", _GPT2), False),
    "codeshell": ((r"\p{N}", _GPT2), False),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), ((_LLAMA3,), True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), ((_LLAMA3,), False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), ((_QWEN2,), False)),
    "qwen35": ((_QWEN35,), False),
    "tekken": ((_TEKKEN,), True),
    **dict.fromkeys(("gpt-4o", "llama4"), ((_GPT4O,), False)),
}
_LONGEST_PIECE = 512  # characters of a SentencePiece token: all ways to cut it are tried
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # GGUF token types


def tokenizer_from_gguf(metadata: Mapping[str, Foreign], label: str) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes, pre-tokenizer included.

    Raises:
        ModelError: a tokenizer or pre-tokenizer that is not supported.
    """
    with foreign(label):
        return _from_gguf(metadata, label)


def _from_gguf(metadata: Mapping[str, Any], label: str) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
        for key in ("token_type", "scores"):
            given = metadata.get(f"tokenizer.ggml.{key}") or tokens
            if not isinstance(given, list) or len(given) != len(tokens) or not tokens:
                raise ModelError(f"{label}: `tokenizer.ggml.{key}` is not one for each of {len(tokens):,} tokens.")
        if kind == "gpt2":
            backend = _gguf_byte_level(metadata, tokens, label)
            continuation = None
            table = [
                byte_level_bytes(token) if types[i] == _NORMAL else token.encode() for i, token in enumerate(tokens)
            ]
        elif kind == "llama":
            scores = metadata["tokenizer.ggml.scores"]
            if str(metadata.get("general.architecture")).startswith("gemma"):
                scores = [-i for i in range(len(tokens))]  # Gemma's merges have the order of its tokens
            space = metadata.get("tokenizer.ggml.add_space_prefix", True)
            backend = _gguf_sentencepiece(tokens, scores, label, prefix_space=space)
            continuation = _gguf_sentencepiece(tokens, scores, label, prefix_space=False) if space else None
            table = [
                token.encode() if types[i] in (_CONTROL, _USER_DEFINED) else sentencepiece_bytes(token)
                for i, token in enumerate(tokens)
            ]
        else:
            raise ModelError(
                f"{label}: tokenizer {kind!r} is not supported.", hint="Supported: gpt2 (byte-level), llama."
            )
    except KeyError as error:
        raise ModelError(f"{label}: the metadata key {error} is missing.") from error
    template = metadata.get("tokenizer.chat_template")
    unknown = [i for i, t in enumerate(types) if t == _UNKNOWN]
    named = [
        i for i, t in enumerate(types) if t == _CONTROL or (t == _USER_DEFINED and is_control(tokens[i], template))
    ]
    marks = marks_among(tokens)
    types = [_USER_DEFINED if t == _CONTROL and tokens[i] in marks else t for i, t in enumerate(types)]
    special = [i for i, t in enumerate(types) if t in (_CONTROL, _UNKNOWN)]
    written = [i for i, t in enumerate(types) if t in (_CONTROL, _USER_DEFINED)]
    for tokenizer in (backend, continuation):
        if tokenizer is not None:
            tokenizer.add_tokens(
                [AddedToken(tokens[i], special=types[i] == _CONTROL, normalized=False) for i in written]
            )
    for key in (*_GGUF_SPECIALS.values(), "eot"):
        check_ids(metadata.get(f"tokenizer.ggml.{key}_token_id"), len(tokens), label, f"tokenizer.ggml.{key}_token_id")
    names = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_SPECIALS.items()}
    special_tokens = {name: tokens[i] for name, i in names.items() if i is not None}
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    ends = (names["eos_token"], metadata.get("tokenizer.ggml.eot_token_id"))
    return Tokenizer(
        backend,
        table,
        special,
        bos_id=names["bos_token"] if adds_bos else None,
        eos_ids=[i for i in ends if i is not None],
        special_tokens=special_tokens,
        chat_template=template,
        continuation=continuation,
        starts_segments=continuation is not None,
        control={i: AddedToken(tokens[i]) for i in (*named, *unknown)},
        unknown_ids=unknown,
    )


_GGUF_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _gguf_byte_level(metadata: Mapping[str, Any], tokens: list[str], label: str) -> Backend:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{label}: pre-tokenizer {name!r} is not supported.",
            hint=f"Supported: {', '.join(_PRE_TOKENIZERS)}.",
        )
    patterns, ignore_merges = _PRE_TOKENIZERS[name]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise ModelError(f"{label}: the merge {shown(' '.join(merge))} is not of tokens of the vocabulary.")
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    if name in ("qwen2", "qwen35", "deepseek-r1-qwen", "megrez"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _gguf_sentencepiece(tokens: list[str], scores: list[float], label: str, *, prefix_space: bool) -> Backend:
    """SentencePiece BPE joins the neighbours whose union has the best score: merges ranked by that score."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, i in vocab.items():
        if len(token) > _LONGEST_PIECE:
            raise ModelError(f"{label}: a token has {len(token):,} characters; the limit is {_LONGEST_PIECE}.")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[i], vocab[left], vocab[right], left, right))
    merges.sort()
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=[m[3:] for m in merges],
            fuse_unk=True,
            byte_fallback=True,
            unk_token=tokens[0],
        )
    )
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend
