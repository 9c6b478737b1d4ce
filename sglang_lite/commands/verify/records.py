"""Records of a verification: the model, each check, and the whole report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.loading.description import Description
from sglang_lite.runtime.loading.model_files import ModelFiles

Status: TypeAlias = Literal["passed", "failed", "left out"]
FORMAT: Final = 1  # of the report's JSON


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes:
        name: name of the check, as given to `--only`.
        status: "passed", "failed", or "left out" if it could not be made.
        summary: what was found, or why the check was left out, in one sentence.
        figures: everything that was measured, as JSON.
    """

    name: str
    status: Status
    summary: str
    figures: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """Model to verify.

    Attributes:
        name: name or path given by the user.
        path: its GGUF file or folder.
        files: contents of its files, except the weights.
        description: how it would run.
        sha256: SHA-256 of its files, by name.
        settings: settings of the served engine; others have `Engine`'s defaults.
    """

    name: str
    path: Path
    files: ModelFiles
    description: Description
    sha256: Mapping[str, str]
    settings: Mapping[str, str]

    @property
    def context_length(self) -> int:
        """Longest sequence of the model, in tokens."""
        return self.files.spec.max_positions


@dataclass(frozen=True, slots=True)
class Unread:
    """Reason why transformers' version of a model or tokenizer is not available."""

    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of a verification.

    Attributes:
        model: name of the model: an alias or a hub id as given, or the last part of a path.
        architecture: its architecture, as named in its files.
        sha256: SHA-256 of its files, by name.
        settings: settings that were given for the served engine.
        date: day of the verification, such as 2026-11-28.
        long: whether the long prompt filled the whole context.
        versions, machine: where it ran.
        checks: what was checked, in order.
    """

    model: str
    architecture: str
    sha256: Mapping[str, str]
    settings: Mapping[str, str]
    date: str
    long: bool
    versions: Mapping[str, str]
    machine: Mapping[str, Json]
    checks: tuple[Check, ...]

    def as_json(self) -> dict[str, Json]:
        """Returns the report as a JSON object."""
        return {"format": FORMAT, **_replace_non_finite_floats(asdict(self))}


def _replace_non_finite_floats(value: Json) -> Json:
    """Replaces floats that JSON lacks with text: "inf", "nan"."""
    if isinstance(value, dict):
        return {name: _replace_non_finite_floats(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite_floats(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
