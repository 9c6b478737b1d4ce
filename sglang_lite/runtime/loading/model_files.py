"""Reads a model's files except its weights: its specification, tokenizer and end-of-sequence
tokens. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.media.placeholders import MediaFormat, read_media_format
from sglang_lite.runtime.models.config_fields import GENERATION, check, parse_token_ids, read_json
from sglang_lite.runtime.models.folder_config import config_file, read_config
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.read_gguf import spec_from_gguf
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.transformers_config import (
    WHISPER,
    TransformersSpec,
    fallback_spec,
    is_natively_supported,
)
from sglang_lite.runtime.models.weights.gguf_file import GgufFile
from sglang_lite.runtime.tokens.from_folder import TOKENIZER_FILES, tokenizer_from_folder
from sglang_lite.runtime.tokens.from_gguf import tokenizer_from_gguf
from sglang_lite.runtime.tokens.image_options import ImageOptions
from sglang_lite.runtime.tokens.tokenizer import NoTokenizer, Tokenizer

Implementation: TypeAlias = Literal["auto", "native", "transformers"]
_DEFAULTS = ImageOptions()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Contents of a model's files, without the weights.

    Attributes:
        path: Hugging Face folder or GGUF file.
        spec: specification of the model; a TransformersSpec if transformers' code will run it.
        tokenizer: tokenizer of the model.
        eos_ids: ids of the tokens that end a text.
        gguf: the opened file if `path` is a GGUF file, else None.
        media: how prompts contain images, videos and sounds; None if the model takes none.
    """

    path: Path
    spec: ModelSpec | TransformersSpec
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    gguf: GgufFile | None = None
    media: MediaFormat | None = None


def open_model_files(
    path: Path,
    implementation: Implementation = "auto",
    options: ImageOptions = _DEFAULTS,
    *,
    tokenizer: bool = True,
    encodes_later: bool = False,
) -> ModelFiles:
    """Reads everything except the weights from the GGUF file or folder at `path`.

    Args:
        implementation: "native" for our own code, "transformers" for transformers' code, "auto" for
            our own if it supports the model.
        options: options for images, videos and sounds.
        tokenizer: whether a missing tokenizer is an error.
        encodes_later: whether the encoder of a GGUF file's tokenizer is built and checked only when
            it encodes the first text. This takes half a second for 150,000 tokens.

    Raises:
        ModelError: the files are damaged or the model is not supported.
        ParameterError: the options ask for images or other media, and the model takes only text.
    """
    if path.is_file() and implementation == "transformers":
        raise ModelError(
            f"{path}: transformers' code runs no GGUF file here.", hint="Use a Hugging Face folder."
        )
    if path.is_file():
        found = _open_gguf(path, encodes_later)
    else:
        found = _open_folder(path, implementation, tokenizer, options)
    if found.tokenizer.vocab_size > found.spec.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has {found.tokenizer.vocab_size:,} tokens, the model {found.spec.vocab_size:,}.",
            hint="The folder mixes the files of two models.",
        )
    if options.wanted_by is not None and found.media is None:
        raise ParameterError(
            options.wanted_by, f"{path} has a model that reads no images.", hint="Leave it out."
        )
    return found


def read_spec(path: Path, implementation: Implementation = "auto") -> ModelSpec | TransformersSpec:
    """Reads a model's specification from the GGUF file or folder at `path`. Raises ModelError if
    the model is damaged, not supported, or an encoder.
    """
    if path.is_file():
        return spec_of_gguf(GgufFile(path))
    file = config_file(path)
    config = read_config(path)
    native = implementation == "native" or (
        implementation == "auto" and is_natively_supported(config)
    )
    if not native or config.get("architectures") == [WHISPER]:
        return fallback_spec(config, str(file))
    spec = spec_from_config(config, str(file))
    if not spec.causal:
        raise ModelError(
            f"{file}: the model reads texts in both directions: it generates none.",
            hint="Use a causal model.",
        )
    return spec


def spec_of_gguf(file: GgufFile) -> ModelSpec:
    """Returns the specification of the model in a GGUF file. Raises ModelError if it is damaged or
    not supported.
    """
    return spec_from_gguf(file.metadata, frozenset(file.tensors), str(file.path))


def _open_gguf(path: Path, encodes_later: bool) -> ModelFiles:
    file = GgufFile(path)
    spec = spec_of_gguf(file)
    tokenizer = tokenizer_from_gguf(file.metadata, str(path), later=encodes_later)
    return ModelFiles(path, spec, tokenizer, tokenizer.eos_ids, file)


def _open_folder(
    path: Path, implementation: Implementation, with_tokenizer: bool, options: ImageOptions
) -> ModelFiles:
    spec = read_spec(path, implementation)
    if with_tokenizer or any((path / name).exists() for name in TOKENIZER_FILES):
        tokenizer = tokenizer_from_folder(path, spec.vocab_size)
    else:
        tokenizer = NoTokenizer(spec.vocab_size)
    generation = path / "generation_config.json"
    also = read_json(generation) if generation.exists() else {}
    check(also, GENERATION, str(generation))
    media = None
    takes_media = isinstance(spec, ModelSpec) or spec.sound is not None
    if takes_media and tokenizer.knows_text and not options.text_alone:
        media = read_media_format(path, tokenizer, spec.vocab_size, options)
    more = parse_token_ids(
        also.get("eos_token_id"), spec.vocab_size, str(generation), "eos_token_id"
    )
    return ModelFiles(
        path, spec, tokenizer, tokenizer.eos_ids | frozenset(spec.eos_ids) | more, media=media
    )
