"""Builds tokenizers from GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sglang_lite.protocol import ModelError
from sglang_lite.protocol.anything import Foreign
from sglang_lite.runtime.models.config_fields import (
    abbreviate,
    parse_token_ids,
)
from sglang_lite.runtime.tokens.token_bytes import (
    byte_level_bytes,
    convert_tokenizer_errors,
    is_control,
    sentencepiece_bytes,
)
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.text.tool_formats import select_output_marks

# Pre-tokenizers by name in `tokenizer.ggml.pre`: the patterns that split text before BPE, and
# whether whole words in the vocabulary skip the merges.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CASELESS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    _CASELESS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    _CASELESS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _WORDS % ("", "") + r"|\p{N}" + _REST
_GPT4O = _WORDS % (f"{_CASELESS}?", f"{_CASELESS}?") + r"|\p{N}{1,3}" + _REST
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters of bicameral scripts, as listed by DeepSeek's first models.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
)
_PRE_TOKENIZERS: dict[str, tuple[tuple[str, ...], bool]] = {
    "default": ((_GPT2,), False),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), ((_GPT2,), False)),
    "smollm": ((r"\p{N}", _GPT2), False),
    "starcoder": ((r"\p{N}", _GPT2), False),
    "refact": ((r"\p{N}", _GPT2), False),
    "codeshell": ((r"\p{N}", _GPT2), False),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), ((_LLAMA3,), True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), ((_LLAMA3,), False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), ((_QWEN2,), False)),
    "qwen35": ((_QWEN35,), False),
    "tekken": ((_TEKKEN,), True),
    **dict.fromkeys(("gpt-4o", "llama4"), ((_GPT4O,), False)),
    "command-r": ((r"\p{N}", _GPT2), False),
    "deepseek-llm": (_DEEPSEEK, False),
    "deepseek-coder": ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"), False),
    "deepseek-v3": (
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3),
        False,
    ),
}
_LONGEST_PIECE = 512  # maximum characters of a token, since every way to cut it is tried
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # GGUF token types


def tokenizer_from_gguf(
    metadata: Mapping[str, Foreign], label: str, *, later: bool = False
) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes, including its pre-tokenizer.

    Args:
        metadata: metadata of the file.
        label: name of the file for messages.
        later: whether the part that encodes texts is built and checked only when a text is first
            encoded.

    Raises:
        ModelError: the tokenizer or pre-tokenizer is damaged or not supported.
    """
    with convert_tokenizer_errors(label):
        return _build_from_metadata(metadata, label, later=later)


def _build_from_metadata(metadata: Mapping[str, Any], label: str, *, later: bool) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    make: Callable[[], Backend]
    make_continuation: Callable[[], Backend] | None = None
    try:
        tokens, types = _tokens_and_types(metadata, label)
        if kind == "gpt2":
            make = partial(_build_byte_level, metadata, tokens, label)
            table = [
                byte_level_bytes(token) if types[i] == _NORMAL else token.encode()
                for i, token in enumerate(tokens)
            ]
        elif kind == "llama":
            make, make_continuation = _sentencepiece_backends(metadata, tokens, label)
            table = [
                token.encode()
                if types[i] in (_CONTROL, _USER_DEFINED)
                else sentencepiece_bytes(token)
                for i, token in enumerate(tokens)
            ]
        else:
            raise ModelError(
                f"{label}: tokenizer {kind!r} is not supported.",
                hint="Supported: gpt2 (byte-level), llama.",
            )
    except KeyError as error:
        raise _missing_key_error(label, error) from error
    template = metadata.get("tokenizer.chat_template")
    unknown = [i for i, t in enumerate(types) if t == _UNKNOWN]
    named = [
        i
        for i, t in enumerate(types)
        if t == _CONTROL or (t == _USER_DEFINED and is_control(tokens[i], template))
    ]
    marks = select_output_marks(tokens)
    types = [
        _USER_DEFINED if t == _CONTROL and tokens[i] in marks else t for i, t in enumerate(types)
    ]
    special = [i for i, t in enumerate(types) if t in (_CONTROL, _UNKNOWN)]
    written = [i for i, t in enumerate(types) if t in (_CONTROL, _USER_DEFINED)]
    added = [AddedToken(tokens[i], special=types[i] == _CONTROL, normalized=False) for i in written]
    for key in (*_GGUF_SPECIALS.values(), "eot"):
        parse_token_ids(
            metadata.get(f"tokenizer.ggml.{key}_token_id"),
            len(tokens),
            label,
            f"tokenizer.ggml.{key}_token_id",
        )
    names = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_SPECIALS.items()
    }
    special_tokens = {name: tokens[i] for name, i in names.items() if i is not None}
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    ends = (names["eos_token"], metadata.get("tokenizer.ggml.eot_token_id"))
    backend = partial(_build_with_added_tokens, make, added, label)
    continuation = (
        None
        if make_continuation is None
        else partial(_build_with_added_tokens, make_continuation, added, label)
    )
    return Tokenizer(
        backend if later else backend(),
        table,
        special,
        bos_id=names["bos_token"] if adds_bos else None,
        eos_ids=[i for i in ends if i is not None],
        special_tokens=special_tokens,
        chat_template=template,
        continuation=continuation if later or continuation is None else continuation(),
        starts_segments=continuation is not None,
        control={i: AddedToken(tokens[i]) for i in (*named, *unknown)},
        unknown_ids=unknown,
    )


def _build_with_added_tokens(
    make: Callable[[], Backend], added: list[AddedToken], label: str
) -> Backend:
    """Builds a backend with added tokens, which are found in text before all others."""
    with convert_tokenizer_errors(label):
        try:
            backend = make()
        except KeyError as error:
            raise _missing_key_error(label, error) from error
        backend.add_tokens(added)
        return backend


def _missing_key_error(label: str, error: KeyError) -> ModelError:
    problem = f"{label}: the metadata key {error} is missing."
    return ModelError(problem, hint="Fetch the file again, or use the HF folder.")


def _tokens_and_types(metadata: Mapping[str, Any], label: str) -> tuple[list[str], list[int]]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    for key in ("token_type", "scores"):
        given = metadata.get(f"tokenizer.ggml.{key}") or tokens
        if not isinstance(given, list) or len(given) != len(tokens) or not tokens:
            raise ModelError(
                f"{label}: `tokenizer.ggml.{key}` is not one for each of {len(tokens):,} tokens.",
                hint="Fetch the file again.",
            )
    return tokens, metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)


_GGUF_SPECIALS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def _build_byte_level(metadata: Mapping[str, Any], tokens: list[str], label: str) -> Backend:
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
        if len(merge) != 2 or not (
            merge[0] in vocab and merge[1] in vocab and "".join(merge) in vocab
        ):
            raise ModelError(
                f"{label}: the merge {abbreviate(' '.join(merge))} is not of tokens of the vocabulary.",
                hint="Fetch the file again.",
            )
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    if name in ("qwen2", "qwen35", "deepseek-r1-qwen", "megrez", "command-r"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backends(
    metadata: Mapping[str, Any], tokens: list[str], label: str
) -> tuple[Callable[[], Backend], Callable[[], Backend] | None]:
    """Returns a function that builds the backend for the beginning of a text, and one that builds
    the backend for later text. The second is None if the backend is the same.
    """
    scores = metadata["tokenizer.ggml.scores"]
    if str(metadata.get("general.architecture")).startswith("gemma"):
        scores = [-i for i in range(len(tokens))]  # Gemma's merges are ranked by token id
    space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    make = partial(_build_sentencepiece, tokens, scores, label)
    return partial(make, prefix_space=space), partial(make, prefix_space=False) if space else None


def _build_sentencepiece(
    tokens: list[str], scores: list[float], label: str, *, prefix_space: bool
) -> Backend:
    """Builds a SentencePiece BPE backend. SentencePiece joins the neighbours whose union has the
    best score, so merges are ranked by that score.
    """
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, i in vocab.items():
        if len(token) > _LONGEST_PIECE:
            raise ModelError(
                f"{label}: a token has {len(token):,} characters; the limit is {_LONGEST_PIECE}.",
                hint="Fetch the file again.",
            )
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
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
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend
