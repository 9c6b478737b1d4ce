"""Adapters that an engine starts with, in the form of SGLang's `lora_paths`. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import UserValue

_KEYS = {"lora_name", "lora_path", "pinned"}


@dataclass(frozen=True, slots=True)
class LoraPath:
    """An adapter's name, its folder, and whether it stays on the device."""

    name: str
    path: str
    pinned: bool = False


def normalise_lora_paths(value: UserValue) -> tuple[str, ...]:
    """Converts `lora_paths` to strings that `read_lora_path` parses, one per adapter.

    Args:
        value: list of paths, of `name=path`, and of objects with lora_name, lora_path and pinned,
            which may also be JSON strings; or a mapping of names to paths.

    Raises:
        ParameterError: the value is none of these, or two adapters have the same name.
    """
    if isinstance(value, Mapping):
        value = [f"{name}={path}" for name, path in value.items()]
    if not isinstance(value, list | tuple):
        raise ParameterError("lora_paths", f"{short_repr(value)} is no list.")
    texts = tuple(json.dumps(dict(each)) if isinstance(each, Mapping) else each for each in value)
    names = [read_lora_path(each).name for each in texts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ParameterError("lora_paths", f"two adapters are named {short_repr(twice)}.")
    return texts


def read_lora_path(text: object) -> LoraPath:
    """Reads an entry of `lora_paths`. Raises ParameterError if it is invalid."""
    if not isinstance(text, str) or not text:
        raise ParameterError("lora_paths", f"{short_repr(text)} is no path.")
    if text.startswith("{"):
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ParameterError("lora_paths", f"{short_repr(text)} is no JSON: {error}") from error
        name = given.get("lora_name")
        path = given.get("lora_path")
        pinned = given.get("pinned", False)
        if not (
            isinstance(name, str)
            and isinstance(path, str)
            and isinstance(pinned, bool)
            and given.keys() <= _KEYS
        ):
            raise ParameterError(
                "lora_paths", f"{short_repr(text)} has not lora_name, lora_path and maybe pinned."
            )
        return LoraPath(name, path, pinned)
    name, equals, path = text.partition("=")
    return LoraPath(name, path) if equals else LoraPath(text, text)
