"""Options of an engine for images, videos and sounds, as given by SGLang's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import UserValue

_KINDS = ("image", "video", "audio")


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Options for images, videos and sounds.

    Attributes:
        processors: settings that replace those of the model's processor, by kind.
        most: maximum number in a prompt, by kind; other kinds have no limit.
        text_alone: whether a model that takes media is served as a text-only model.
        wanted_by: name of a setting that needs a model which reads images; a text-only model is
            then rejected. None accepts any model.
    """

    processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    text_alone: bool = False
    wanted_by: str | None = None


def parse_media_setting(name: str, value: UserValue) -> dict[str, UserValue]:
    """Returns the values of a setting by kind of media, given as a mapping or as JSON; {} for None.

    Raises:
        ParameterError: the value is something else.
    """
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError as error:
            raise ParameterError(name, f"{short_repr(value)} is no JSON: {error}") from None
    if not isinstance(found, Mapping) or not set(found) <= set(_KINDS):
        if found is None:
            return {}
        raise ParameterError(
            name,
            f"{short_repr(value)} is no object with {', '.join(_KINDS)}.",
            hint='Write {"image": …}.',
        )
    return dict(found)
