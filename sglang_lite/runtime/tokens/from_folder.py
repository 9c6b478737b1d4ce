"""Builds tokenizers from Hugging Face folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import (
    MAX_TOKENS,
    TOKENIZER,
    abbreviate,
    check,
    read_json,
    read_text,
)
from sglang_lite.runtime.tokens.from_tekken import SPECIAL_TOKENS, TEKKEN, tekken_backend
from sglang_lite.runtime.tokens.token_bytes import (
    build_token_byte_table,
    convert_tokenizer_errors,
    is_control,
)
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.text.tool_formats import select_output_marks

TOKENIZER_FILES = (  # a folder with a tokenizer has at least one of these
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tiktoken.model", "vocab.json", "vocab.txt", "merges.txt", TEKKEN,
)  # fmt: skip


def tokenizer_from_folder(folder: Path, most: int | None = None) -> Tokenizer:
    """Builds the tokenizer of a folder from `tokenizer.json` (or `tekken.json`, or files that
    transformers can convert) and `tokenizer_config.json`.

    Args:
        folder: Hugging Face folder.
        most: size of the model's vocabulary. Added tokens beyond it are dropped (text models of the
            Gemma 3 family have one for images): their text is then ordinary text.

    Raises:
        ModelError: the folder has no tokenizer, or its kind is not supported.
    """
    with convert_tokenizer_errors(str(folder)):
        return _build_tokenizer(folder, most)


def word_tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Builds the tokenizer of an encoder. Any kind of tokenizer will do, since each token is
    decoded to its own name in the vocabulary.

    Raises:
        ModelError: the folder has no tokenizer, or the tokenizer is damaged.
    """
    with convert_tokenizer_errors(str(folder)):
        backend = _backend(folder)
        size = backend.get_vocab_size(with_added_tokens=True)
        if not 0 < size < MAX_TOKENS:
            raise ModelError(
                f"{folder}: the tokenizer has {size:,} tokens.", hint="Fetch the tokenizer again."
            )
        added = json.loads(backend.to_str()).get("added_tokens", ())
        pieces = [(backend.id_to_token(i) or "").encode() for i in range(size)]
        return Tokenizer(backend, pieces, [token["id"] for token in added if token["special"]])


def _backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.exists():
        return (
            tekken_backend(folder / TEKKEN)
            if _is_tekken(folder)
            else _build_backend_with_transformers(folder)
        )
    text = read_text(path)
    try:
        return Backend.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(
            f"{path}: not a tokenizer: {error}", hint="Fetch the file again."
        ) from error


def _is_tekken(folder: Path) -> bool:
    return (folder / TEKKEN).exists() and not (folder / "tokenizer.json").exists()


def _build_tokenizer(folder: Path, most: int | None) -> Tokenizer:
    backend = _backend(folder)
    largest = max(backend.get_vocab(with_added_tokens=False).values(), default=-1)
    if not 0 <= largest < MAX_TOKENS:
        raise ModelError(
            f"{folder}: the tokenizer has no tokens, or one with the id {largest:,}.",
            hint="Fetch the tokenizer again.",
        )
    description = json.loads(backend.to_str())
    if most is not None and any(
        token["id"] >= most for token in description.get("added_tokens", ())
    ):
        description["added_tokens"] = [
            token for token in description["added_tokens"] if token["id"] < most
        ]
        backend = Backend.from_str(json.dumps(description))
    settings = folder / "tokenizer_config.json"
    config = read_json(settings) if settings.exists() else {}
    if _is_tekken(folder):
        config = SPECIAL_TOKENS | config
    check(config, TOKENIZER, str(settings))
    template_file = folder / "chat_template.jinja"
    template = (
        read_text(template_file) if template_file.exists() else _chat_template(config, settings)
    )
    added = description.get("added_tokens", ())
    control = {t["id"]: t for t in added if t["special"] or is_control(t["content"], template)}
    texts = select_output_marks(token["content"] for token in added)
    marks = [token for token in added if token["special"] and token["content"] in texts]
    if marks:  # for readers and grammars, these tokens are text
        for token in marks:
            token["special"] = False
        backend = Backend.from_str(json.dumps(description))
    special_tokens = {
        name: _token_text(token, name, settings)
        for name, token in config.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    bos = special_tokens.get("bos_token")
    # Whisper appends it
    adds_bos = bos is not None and backend.token_to_id(bos) in backend.encode("a").ids[:-1]
    eos = (
        backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    )
    prefixed = _without_prefix_space(description)
    unknown = backend.token_to_id(_unknown_token(description["model"]))
    return Tokenizer(
        backend,
        build_token_byte_table(backend, description, str(folder)),
        [t["id"] for t in added if t["special"]],
        bos_id=backend.token_to_id(bos) if adds_bos and bos else None,
        eos_ids=() if eos is None else (eos,),
        special_tokens=special_tokens,
        chat_template=template,
        continuation=Backend.from_str(json.dumps(prefixed)) if prefixed else None,
        starts_segments='"Prepend"' in json.dumps(description.get("normalizer")),
        control={
            i: AddedToken(
                t["content"], lstrip=t["lstrip"], rstrip=t["rstrip"], single_word=t["single_word"]
            )
            for i, t in control.items()
        },
        unknown_ids=() if unknown is None else (unknown,),
    )


def _token_text(token: Any, name: str, file: Path) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ModelError(
            f"{file}: `{name}`: {abbreviate(token)} is neither text nor an object with a content.",
            hint="Correct it, or fetch the file again.",
        )
    return text


def _chat_template(config: Mapping[str, Any], file: Path) -> str | None:
    """Returns the chat template, or the default one of several named templates; None if the config
    has none.
    """
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict)]
        template = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ModelError(
            f"{file}: `chat_template`: {abbreviate(template)} is no text.",
            hint="Correct it, or fetch the file again.",
        )
    return template


def _unknown_token(model: Mapping[str, Any]) -> str:
    """Returns the text of the token that stands for characters which the vocabulary lacks, or "" if
    the tokenizer has no such token.
    """
    if model.get("unk_id") is not None:  # Unigram
        return str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token") or ""


def _build_backend_with_transformers(folder: Path) -> Backend:
    """Returns the backend that transformers builds from a folder's files. Runs in another process
    if torch is not loaded, so that an engine's handle loads neither torch nor transformers.
    """
    try:
        if "torch" in sys.modules:
            return Backend.from_str(_convert(str(folder)))
        code = (
            f"import sys; sys.path[:] = {[os.path.abspath(path) for path in sys.path]!r}\n"
            f"from {__name__} import _convert\n"
            f"sys.stdout = sys.stderr; text = _convert({str(folder.absolute())!r})\n"
            f"sys.__stdout__.buffer.write(text.encode())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True
        )
        if done.returncode:
            raise ModelError(done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2])
        return Backend.from_str(done.stdout.decode())
    # any error from transformers means that the folder has no usable tokenizer
    except Exception as error:
        raise ModelError(
            f"{folder}: no tokenizer.json, and transformers can't convert another tokenizer: {error}",
            hint="Fetch the tokenizer's files again, or take a folder that has a tokenizer.json.",
        ) from error


def _convert(folder: str) -> str:
    """Converts the tokenizer of a folder to the content of a `tokenizer.json`."""
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())


def _without_prefix_space(description: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the tokenizer's description without the space that it adds before a text, or None if
    it adds none.
    """
    changed = False

    def strip(part: Any) -> Any:
        nonlocal changed
        if isinstance(part, list):
            kept = [
                strip(p) for p in part if not (isinstance(p, dict) and p.get("type") == "Prepend")
            ]
            changed |= len(kept) != len(part)
            return kept
        if isinstance(part, dict):
            part = {key: strip(value) for key, value in part.items()}
            if part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never":
                part["prepend_scheme"] = "never"
                changed = True
        return part

    stripped = dict(description)
    for key in ("normalizer", "pre_tokenizer"):
        part = stripped.get(key)
        if isinstance(part, dict) and part.get("type") == "Prepend":
            stripped[key] = None
            changed = True
        else:
            stripped[key] = strip(part)
    return stripped if changed else None
