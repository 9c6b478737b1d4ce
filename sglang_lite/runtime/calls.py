"""The table of an engine's calls that have one answer: a record for each, with the type of its answer.

The cores answer them (`EngineCore.ask`), messages carry them to an engine's process as they are (engine/frames.py), and
the methods of `Engine` document them. Submissions, whose events go to a sink, are in core/submission.py.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from sglang_lite.protocol import Constraint, Prompt

R = TypeVar("R")


class EngineCall(msgspec.Struct, Generic[R], frozen=True, array_like=True):
    """Call whose answer is an R. The tag is the name of the method of `Engine`."""


class CompileGrammar(EngineCall[Any], frozen=True, tag="compile_grammar"):
    """Answered by the CompiledGrammar, which doesn't leave its process."""

    constraint: Constraint


class UpdateWeights(EngineCall[str], frozen=True, tag="update_weights"):
    """Answered by the new name of the model."""

    path: str
    version: str | None


class LoadLoraAdapter(EngineCall[None], frozen=True, tag="load_lora_adapter"):
    name: str
    path: str
    pinned: bool


class UnloadLoraAdapter(EngineCall[None], frozen=True, tag="unload_lora_adapter"):
    """Answered when no request uses the adapter any more."""

    name: str


class Loras(EngineCall[list[dict[str, Any]]], frozen=True, tag="loras"):
    """Answered by the adapters, in the order of their names."""


class FlushCache(EngineCall[int], frozen=True, tag="flush_cache"):
    """Answered by the number of tokens that were freed."""


class ExportPrefix(EngineCall[int], frozen=True, tag="export_prefix"):
    """Answered by the number of tokens that were written."""

    prompt: Prompt | str
    ids: tuple[int, ...]  # instead of a prompt
    path: str
    namespace: str


class ImportPrefix(EngineCall[int], frozen=True, tag="import_prefix"):
    """Answered by the number of tokens that were read."""

    path: str
    namespace: str


class Stats(EngineCall[dict[str, Any]], frozen=True, tag="stats"):
    """Answered by counts (int) and seconds (float)."""


class StartProfile(EngineCall[None], frozen=True, tag="start_profile"):
    folder: str
    with_stack: bool
    record_shapes: bool


class StopProfile(EngineCall[str], frozen=True, tag="stop_profile"):
    """Answered by the path of the trace."""
