"""Tokenizers of encoders. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.embedding.spec import BertSpec, EncoderSpec
from sglang_lite.runtime.models.config_fields import Field, check, read_json
from sglang_lite.runtime.tokens.from_folder import tokenizer_from_folder, word_tokenizer_from_folder
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


def encoder_tokenizer(path: Path, spec: EncoderSpec) -> Tokenizer:
    """Returns the tokenizer of the model in a folder.

    Raises:
        ModelError: the tokenizer is missing, is of an unknown kind, or has more tokens than the
            model.
    """
    if isinstance(spec.layers, BertSpec):
        tokenizer = word_tokenizer_from_folder(path)
    else:
        tokenizer = tokenizer_from_folder(path, spec.vocab_size)
        _append_eos(tokenizer, path / "tokenizer_config.json")
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model {spec.vocab_size:,}."
        )
    return tokenizer


def _append_eos(tokenizer: Tokenizer, settings: Path) -> None:
    """Makes the tokenizer append the end-of-sequence token to each text, if the config requests it
    and `tokenizer.json` does not already do so.

    Some embedding models that are based on decoders were trained with this token.
    """
    config = read_json(settings) if settings.exists() else {}
    check(config, {"add_eos_token": Field("flag")}, str(settings))
    name = tokenizer.special_tokens.get("eos_token")
    backend: Backend = tokenizer.backend
    eos = None if name is None else backend.token_to_id(name)
    if not config.get("add_eos_token") or eos is None or backend.encode("a").ids[-1] == eos:
        return
    end = processors.TemplateProcessing(
        single=f"$A {name}", pair=f"$A $B:1 {name}:1", special_tokens=[(name, eos)]
    )
    before = backend.post_processor
    backend.post_processor = end if before is None else processors.Sequence([before, end])
