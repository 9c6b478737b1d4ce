"""Records of the calls to an engine that have a single answer. Each record is generic in the type
of the answer.

The cores answer them (`EngineCore.submit_call`), messages carry them unchanged to an engine's process
(engine/frames.py), and the methods of `Engine` document them. Submissions, which send events to a
sink, are in core/submission.py.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from sglang_lite.protocol import Constraint, Media, Prompt

R = TypeVar("R")


class EngineCall(msgspec.Struct, Generic[R], frozen=True, array_like=True):
    """Call whose answer has the type R. Its tag names the method of `Engine`."""


class CompileGrammar(EngineCall[Any], frozen=True, tag="compile_grammar"):
    """Call that compiles a grammar. Answered with the CompiledGrammar, which stays in the engine's
    process.
    """

    constraint: Constraint


class UpdateWeights(EngineCall[str], frozen=True, tag="update_weights"):
    """Call that replaces the weights with a checkpoint. Answered with the new name of the model."""

    path: str
    version: str | None
    load_format: str | None = None  # None for the engine's own


class UpdateTensors(EngineCall[str], frozen=True, tag="update_weights_from_tensor"):
    """Call that replaces weights with the tensors in a file. Answered with the version of the
    weights.
    """

    file: str  # in the format of safetensors; any of the model's tensors
    last: bool  # whether the update is complete
    version: str | None


class WriteTensors(EngineCall[str], frozen=True, tag="update_weights_here"):
    """`UpdateTensors` for tensors that don't leave the engine's process."""

    tensors: Any  # by name
    last: bool
    version: str | None


class OpenTensors(EngineCall[str], frozen=True, tag="update_weights_from_handles"):
    """`UpdateTensors` for tensors in a GPU's memory that SGLang has flattened into one bucket. The
    process that owns this memory keeps it until the call is answered.
    """

    bucket: bytes  # pickled
    last: bool
    version: str | None


class NameWeights(EngineCall[str], frozen=True, tag="update_weight_version"):
    """Call that renames the version of the weights. Answered with the new name."""

    version: str


class JoinGroup(EngineCall[None], frozen=True, tag="init_weights_update_group"):
    """Call that makes the engine join a process group. Answered when all processes of the group
    have joined.
    """

    address: str
    port: int
    rank: int  # of the engine
    size: int
    name: str
    backend: str  # "gloo" or "nccl"


class ReceiveWeights(EngineCall[str], frozen=True, tag="update_weights_from_distributed"):
    """Call that replaces weights with tensors that another member of a process group sends.
    Answered with the version of the weights.
    """

    group: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flattened: bool  # whether they come as one tensor of their bytes
    last: bool
    version: str | None


class LeaveGroup(EngineCall[None], frozen=True, tag="destroy_weights_update_group"):
    name: str


class OfferWeights(EngineCall[dict[str, Any]], frozen=True, tag="offer_weights"):
    """Call that creates a group in which another engine can receive the weights. Answered with
    `names`, `dtypes` and `shapes` of all tensors, their `weight_version`, and the group's `port`.
    """

    address: str
    port: int  # 0 for any
    group: str
    backend: str  # "gloo" or "nccl"


class SendWeights(EngineCall[str], frozen=True, tag="send_weights"):
    """Call that sends tensors to a group. Answered with the version of the weights, once the
    tensors are sent.
    """

    group: str
    names: tuple[str, ...]  # () to end the group


class ReadWeights(EngineCall[list[Any]], frozen=True, tag="get_weights_by_name"):
    """Call that reads the first rows of a tensor. Answered with their numbers, as nested lists."""

    name: str
    rows: int  # maximum number of rows


class CheckWeights(EngineCall[dict[str, Any]], frozen=True, tag="check_weights"):
    """Call that computes checksums of the weights. Answered with `checksums` by name, the names
    that are `unreadable` and, for the action "compare", the names that `changed`.
    """

    action: str  # "checksum", "snapshot" or "compare"


class PauseGeneration(EngineCall[int], frozen=True, tag="pause_generation"):
    """Call that pauses the engine. Answered with the number of requests that were running or
    waiting.
    """

    mode: str  # "abort", "retract" or "in_place"


class ContinueGeneration(EngineCall[None], frozen=True, tag="continue_generation"):
    pass


class BeginUpdate(EngineCall[None], frozen=True, tag="begin_weight_update"):
    """Call that makes all updates of the weights one, until `EndUpdate`."""


class EndUpdate(EngineCall[None], frozen=True, tag="end_weight_update"):
    """Call that ends the update that `BeginUpdate` began."""


MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")


class ReleaseMemory(EngineCall[None], frozen=True, tag="release_memory_occupation"):
    tags: tuple[str, ...]  # of `MEMORY_TAGS`; () for all
    keep: bool  # whether the host keeps the weights


class ResumeMemory(EngineCall[None], frozen=True, tag="resume_memory_occupation"):
    tags: tuple[str, ...]


class LoadLoraAdapter(EngineCall[None], frozen=True, tag="load_lora_adapter"):
    name: str
    path: str
    pinned: bool


class UnloadLoraAdapter(EngineCall[None], frozen=True, tag="unload_lora_adapter"):
    """Call that unloads an adapter. Answered when no request uses the adapter any more."""

    name: str


class Loras(EngineCall[list[dict[str, Any]]], frozen=True, tag="loras"):
    """Call that lists the adapters. Answered with the adapters in the order of their names."""


class EncodeMedia(EngineCall[bytes], frozen=True, tag="encode_media"):
    """Call that encodes images, videos or sounds. Answered with their features in the format of
    safetensors: a tensor [count, size] for each medium, named by the medium's hash
    (`MediaItem.key`) in hexadecimal.
    """

    media: tuple[Media, ...]


class FlushCache(EngineCall[int], frozen=True, tag="flush_cache"):
    """Call that empties the prefix cache. Answered with the number of tokens that were freed."""


class FreezeObjects(EngineCall[None], frozen=True, tag="freeze_gc"):
    """Call that exempts the objects of the engine's process from garbage collection."""


class EndSession(EngineCall[None], frozen=True, tag="end_session"):
    """Call that closes a session. Answered once the engine has no open session of this name."""

    name: str


class ExportPrefix(EngineCall[int], frozen=True, tag="export_prefix"):
    """Call that writes a cached prefix to a file. Answered with the number of tokens that were
    written.
    """

    prompt: Prompt | str
    ids: tuple[int, ...]  # instead of a prompt
    path: str
    namespace: str
    secret: str | None = None


class ImportPrefix(EngineCall[int], frozen=True, tag="import_prefix"):
    """Call that reads a prefix from a file into the cache. Answered with the number of tokens that
    were read.
    """

    path: str
    namespace: str
    secret: str | None = None


class Stats(EngineCall[dict[str, Any]], frozen=True, tag="stats"):
    """Call that reads the engine's statistics. Answered with counts (int) and seconds (float)."""


class StartProfile(EngineCall[None], frozen=True, tag="start_profile"):
    folder: str
    with_stack: bool
    record_shapes: bool


class RecordExperts(EngineCall[list[list[int]]], frozen=True, tag="expert_distribution_record"):
    """Call that records which experts are chosen. Answered with the number of rows that have chosen
    each expert of each layer since the record was started.
    """

    action: str  # "start", "stop" or "dump"


class StopProfile(EngineCall[str], frozen=True, tag="stop_profile"):
    """Call that stops a profile. Answered with the path of the trace."""
