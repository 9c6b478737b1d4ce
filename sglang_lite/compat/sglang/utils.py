"""SGLang's helper functions: texts, data files, images in base64, placeholders for late imports,
notebooks.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from sglang_lite.lang.media import load_image
from sglang_lite.notebook.output import progress_bar
from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import ConstraintError, DownloadError, ParameterError
from sglang_lite.protocol.anything import Foreign, Json, UserValue


class Streaming(Protocol):
    """Interface of an engine whose streams can be merged."""

    def generate(
        self, prompt: str, sampling_params: Mapping[str, Json], *, stream: bool
    ) -> Json: ...
    async def async_generate(
        self, prompt: str, sampling_params: Mapping[str, Json], *, stream: bool
    ) -> Json: ...


_CJK = (  # Unicode blocks in which each character counts as a word
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


def convert_json_schema_to_str(json_schema: object) -> str:
    """Converts a schema to JSON text.

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
    """Encodes an image in base64.

    Args:
        image_path: image as `sgl.image` accepts it, except a URL. The bytes of files and encoded
            images are kept; PIL images and arrays are encoded as PNG.

    Raises:
        ParameterError: the file can't be read, the value is not an image, or it is a URL.
    """
    image = load_image(image_path)
    if image.url:
        raise ParameterError(
            "image_path",
            "an address has no bytes to encode.",
            hint="Fetch the file with download_and_cache_file.",
        )
    return base64.b64encode(image.data).decode()


def find_printable_text(text: str) -> str:
    """Returns the beginning of a streamed text that can already be printed: up to the last space,
    or the whole text if it ends with a newline or a CJK character.
    """
    if text.endswith("\n") or _is_cjk(text[-1:]):
        return text
    if _is_cjk(text[-2:-1]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


def _is_cjk(character: str) -> bool:
    return bool(character) and any(low <= ord(character) <= high for low, high in _CJK)


def trim_overlap(existing_text: str, new_chunk: str) -> str:
    """Returns a chunk without the longest prefix that the existing text already ends with."""
    longest = min(len(existing_text), len(new_chunk))
    overlap = next(n for n in range(longest, -1, -1) if existing_text.endswith(new_chunk[:n]))
    return new_chunk[overlap:]


def stream_and_merge(llm: Streaming, prompt: str, sampling_params: Mapping[str, Json]) -> str:
    """Returns the whole text of a generation that an engine's `generate` streams."""
    text = ""
    for chunk in llm.generate(prompt, sampling_params, stream=True):
        text += trim_overlap(text, chunk["text"])
    return text


async def async_stream_and_merge(
    llm: Streaming, prompt: str, sampling_params: Mapping[str, Json]
) -> AsyncIterator[str]:
    """Yields the new text of each chunk of a generation that an engine's `async_generate` streams."""
    text = ""
    async for chunk in await llm.async_generate(prompt, sampling_params, stream=True):
        piece = trim_overlap(text, chunk["text"])
        text += piece
        yield piece


def build_regex_from_object(object: object, whitespace_pattern: str | None = None) -> str:
    """Returns a regex for the JSON documents that a schema describes. `gen(type=Model)` enforces
    more of a schema than this regex.

    Args:
        object: pydantic model, or schema as JSON text or dict.
        whitespace_pattern: regex of the whitespace between tokens; None for the default of
            outlines-core.

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


def read_jsonl(filename: str | os.PathLike[str]) -> Iterator[Json]:
    """Yields the values of a JSON-lines file, except empty lines and lines that start with #."""
    with open(filename, encoding="utf-8") as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                yield json.loads(line)


def dump_state_text(
    filename: str | os.PathLike[str], states: Sequence[UserValue], mode: str = "w"
) -> None:
    """Writes the texts of states to a file, each after its number. Objects without a `text` method
    are written as strings.
    """
    with open(filename, mode, encoding="utf-8") as file:
        for i, state in enumerate(states):
            text = state.text() if hasattr(state, "text") else state
            file.write(f"{'=' * 40} {i} {'=' * 40}\n{text}\n{'=' * 80}\n\n")


def download_and_cache_file(url: str, filename: str | None = None) -> str:
    """Downloads a file, unless it exists already, and returns its path.

    Args:
        url: http(s) URL of the file.
        filename: path of the file; None for a path in the system's folder for temporary files,
            which depends on the URL.

    Raises:
        DownloadError: the file could not be downloaded completely.
    """
    import tempfile

    import httpx2

    target = Path(filename) if filename else Path(tempfile.gettempdir()) / _name_of(url)
    if target.exists():
        return str(target)
    part = target.with_name(f"{target.name}.part-{random_id()}")
    try:
        # Not compressed, so that the content-length header is the size of the file.
        plain = {"Accept-Encoding": "identity"}
        with httpx2.stream(
            "GET", url, timeout=60, headers=plain, follow_redirects=True
        ) as response:
            response.raise_for_status()
            whole = "content-encoding" not in response.headers
            size = int(response.headers.get("content-length", 0)) if whole else 0
            bar = progress_bar(total=size or None, unit="B", unit_scale=True, desc=target.name)
            with open(part, "wb") as file, bar:
                for chunk in response.iter_bytes(1 << 16):
                    file.write(chunk)
                    bar.update(len(chunk))
        if size and part.stat().st_size != size:
            raise DownloadError(
                f"{url}: {part.stat().st_size:,} of {size:,} bytes arrived.", hint="Try again."
            )
        part.replace(target)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise DownloadError(f"{url}: {error}", hint="Check the address and the network.") from error
    finally:
        part.unlink(missing_ok=True)
    return str(target)


def _name_of(url: str) -> str:
    """Returns a file name for a URL: a digest of the URL, and the last part of its path."""
    return f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{urlsplit(url).path.rpartition('/')[2][-100:]}"


class LazyImport:
    """Placeholder for a class or function of a module that is imported on first use.

    Args:
        module_name: name of the module.
        class_name: name of the class or function in the module.
    """

    def __init__(self, module_name: str, class_name: str) -> None:
        self.module_name = module_name
        self.class_name = class_name

    def _load(self) -> Any:
        return getattr(importlib.import_module(self.module_name), self.class_name)

    def __getattr__(self, name: str) -> Foreign:
        if name.startswith("__"):  # names that `copy` and `pickle` look for
            raise AttributeError(name)
        return getattr(self._load(), name)

    def __call__(self, *args: Foreign, **kwargs: Foreign) -> Foreign:
        return self._load()(*args, **kwargs)


def print_highlight(html_content: str) -> None:
    """Shows HTML in bold blue in a notebook; prints it if IPython is not installed."""
    try:
        from IPython.display import HTML, display  # only in notebooks
    except ImportError:
        print(html_content)
        return
    display(HTML(f"<strong style='color: #00008B;'>{html_content}</strong>"))
