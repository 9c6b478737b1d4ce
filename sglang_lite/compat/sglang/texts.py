"""Texts as scripts show and merge them: printable parts, streams of an engine, images in base64, schemas."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from sglang_lite.lang.media import load_image
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Json


class Streaming(Protocol):
    """An engine, as far as it is needed here."""

    def generate(self, prompt: str, sampling_params: Mapping[str, Json], *, stream: bool) -> Json: ...
    async def async_generate(self, prompt: str, sampling_params: Mapping[str, Json], *, stream: bool) -> Json: ...


_CJK = (  # blocks of Unicode whose characters are words by themselves
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2CEAF), (0x2F800, 0x2FA1F),
)  # fmt: skip


def convert_json_schema_to_str(json_schema: object) -> str:
    """JSON text of a schema: from a dict, a pydantic model, or text as it is.

    Raises:
        ParameterError: it is none of these.
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
    """An image's bytes in base64.

    Args:
        image_path: what `sgl.image` takes, but for an address: a file's or given bytes as they are, else a PNG.

    Raises:
        ParameterError: no such file, no image, or an address.
    """
    image = load_image(image_path)
    if image.url:
        raise ParameterError(
            "image_path", "an address has no bytes to encode.", hint="Fetch the file with download_and_cache_file."
        )
    return base64.b64encode(image.data).decode()


def find_printable_text(text: str) -> str:
    """The beginning of a text that more text does not change: whole words, or all behind a line end or a character of
    Chinese."""
    if text.endswith("\n") or _is_cjk(text[-1:]):
        return text
    if _is_cjk(text[-2:-1]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


def _is_cjk(character: str) -> bool:
    return bool(character) and any(low <= ord(character) <= high for low, high in _CJK)


def trim_overlap(existing_text: str, new_chunk: str) -> str:
    """Text that a piece of a stream adds: without the longest beginning of it that the text so far ends with."""
    longest = min(len(existing_text), len(new_chunk))
    overlap = next(n for n in range(longest, -1, -1) if existing_text.endswith(new_chunk[:n]))
    return new_chunk[overlap:]


def stream_and_merge(llm: Streaming, prompt: str, sampling_params: Mapping[str, Json]) -> str:
    """The text of a stream of an engine's `generate`."""
    text = ""
    for chunk in llm.generate(prompt, sampling_params, stream=True):
        text += trim_overlap(text, chunk["text"])
    return text


async def async_stream_and_merge(
    llm: Streaming, prompt: str, sampling_params: Mapping[str, Json]
) -> AsyncIterator[str]:
    """Pieces of the text of an engine's stream, each with what is new, as they come."""
    text = ""
    async for chunk in await llm.async_generate(prompt, sampling_params, stream=True):
        piece = trim_overlap(text, chunk["text"])
        text += piece
        yield piece
