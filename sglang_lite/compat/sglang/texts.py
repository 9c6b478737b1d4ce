"""Conversions of text for scripts: printable prefixes, merged streams of an engine, base64 images, JSON schemas."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from sglang_lite.lang.media import load_image
from sglang_lite.protocol import ConstraintError, ParameterError
from sglang_lite.protocol.anything import Json


class Streaming(Protocol):
    """Interface of an engine whose streams are merged."""

    def generate(self, prompt: str, sampling_params: Mapping[str, Json], *, stream: bool) -> Json: ...
    async def async_generate(self, prompt: str, sampling_params: Mapping[str, Json], *, stream: bool) -> Json: ...


_CJK = (  # Unicode blocks in which each character counts as a word
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2CEAF), (0x2F800, 0x2FA1F),
)  # fmt: skip


def convert_json_schema_to_str(json_schema: object) -> str:
    """JSON text of a schema.

    Args:
        json_schema: dict, pydantic model, or text, which is returned unchanged.

    Raises:
        ParameterError: the value has another type.
    """
    if isinstance(json_schema, str):
        return json_schema
    if isinstance(json_schema, dict):
        return json.dumps(json_schema)
    if hasattr(json_schema, "model_json_schema"):
        return json.dumps(json_schema.model_json_schema())
    raise ParameterError(
        "json_schema",
        f"a {type(json_schema).__name__} is not a schema.",
        hint="Give a dict, a string or a pydantic model.",
    )


def encode_image_base64(image_path: object) -> str:
    """Bytes of an image in base64.

    Args:
        image_path: image as `sgl.image` accepts it, except a URL. The bytes of files and encoded images are kept; PIL
            images and arrays are encoded as PNG.

    Raises:
        ParameterError: the file can't be read, the value is not an image, or it is a URL.
    """
    image = load_image(image_path)
    if image.url:
        raise ParameterError(
            "image_path", "an address has no bytes to encode.", hint="Fetch the file with download_and_cache_file."
        )
    return base64.b64encode(image.data).decode()


def find_printable_text(text: str) -> str:
    """Beginning of a streamed text that can be printed already: up to the last blank, or all of the text if it ends
    with a line end or a CJK character."""
    if text.endswith("\n") or _is_cjk(text[-1:]):
        return text
    if _is_cjk(text[-2:-1]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


def _is_cjk(character: str) -> bool:
    return bool(character) and any(low <= ord(character) <= high for low, high in _CJK)


def trim_overlap(existing_text: str, new_chunk: str) -> str:
    """Text that a chunk adds to the text so far: the chunk without the longest beginning with which that text ends."""
    longest = min(len(existing_text), len(new_chunk))
    overlap = next(n for n in range(longest, -1, -1) if existing_text.endswith(new_chunk[:n]))
    return new_chunk[overlap:]


def stream_and_merge(llm: Streaming, prompt: str, sampling_params: Mapping[str, Json]) -> str:
    """Whole text of a generation that is streamed by an engine's `generate`."""
    text = ""
    for chunk in llm.generate(prompt, sampling_params, stream=True):
        text += trim_overlap(text, chunk["text"])
    return text


async def async_stream_and_merge(
    llm: Streaming, prompt: str, sampling_params: Mapping[str, Json]
) -> AsyncIterator[str]:
    """Yields the new text of each chunk of a generation that is streamed by an engine's `async_generate`."""
    text = ""
    async for chunk in await llm.async_generate(prompt, sampling_params, stream=True):
        piece = trim_overlap(text, chunk["text"])
        text += piece
        yield piece


def build_regex_from_object(object: object, whitespace_pattern: str | None = None) -> str:
    """Regex of the JSON documents that are valid under a schema. (`gen(type=Model)` enforces more of a schema.)

    Args:
        object: pydantic model, or schema as JSON text or dict.
        whitespace_pattern: regex of the whitespace between tokens; None for the default of outlines-core.

    Raises:
        ConstraintError: the schema can't be expressed as a regex.
    """
    from outlines_core.json_schema import build_regex_from_schema

    schema = convert_json_schema_to_str(object)
    try:
        json.loads(schema)
        regex: str = build_regex_from_schema(schema, whitespace_pattern)
    except Exception as error:  # outlines-core raises its own and bare exceptions
        raise ConstraintError(f"the schema can't be turned into a regex: {error}") from error
    return regex
