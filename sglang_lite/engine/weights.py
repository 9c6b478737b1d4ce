"""Functions for the weights of a running engine: replacing, reading and checking them. Other
functions pause the engine or release its memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ParameterError
from sglang_lite.runtime import calls
from sglang_lite.runtime.core.submission import check_field_type

if TYPE_CHECKING:
    import torch

    from sglang_lite.engine.engine import Engine


def update_from_disk(
    engine: Engine, path: str, *, load_format: str | None = None, weight_version: str | None = None
) -> None:
    """Replaces the weights with those of another checkpoint of the same architecture, between two
    steps.

    All tensors are read and checked before the first is written. Nothing that the old weights have
    computed is used again: cached prefixes are dropped, and running requests are recomputed up to
    their current position. No step runs during the update. The update needs memory for 1 GiB of
    staged weights and for one part of a layer.

    Args:
        path: folder or name of the checkpoint, like EngineConfig's `model`.
        load_format: like EngineConfig's; None for the engine's own.
        weight_version: name of the new weights; None keeps the current name.

    Raises:
        ParameterError: an argument isn't a string.
        ModelError: the checkpoint can't be read, has another architecture, or has numbers that are
            not finite. The engine continues with the old weights.
    """
    engine.answer(calls.UpdateWeights(path, weight_version, load_format))


def update_from_tensors(
    engine: Engine,
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    load_format: str | None = None,
    flush_cache: bool = True,
    weight_version: str | None = None,
) -> None:
    """Replaces some or all weights with tensors, like `update_from_disk`.

    Args:
        named_tensors: tensors by their names in a checkpoint; quantized ones with their scales.
            Weights without a tensor stay.
        load_format: None, or "flattened_bucket" for SGLang's `flattened_tensor` with its
            `metadata`.
        flush_cache: whether the update is complete. If not, the engine waits for more tensors and
            rejects requests until then.
        weight_version: name of the new weights; None keeps the current name.

    Raises:
        ParameterError: an argument is invalid, or a tensor is given twice.
        ModelError: a tensor has no place in the model, has another shape or numbers that are not
            finite, or needs other tensors of its matmul that the engine has in fewer bits or has
            dropped. The engine continues with the weights that it has.
    """
    if load_format not in (None, "flattened_bucket"):
        raise ParameterError(
            "load_format", f"{load_format!r} is not for tensors.", hint='Use "flattened_bucket".'
        )
    check_field_type("flush_cache", flush_cache, bool)
    if weight_version is not None:
        check_field_type("weight_version", weight_version, str)
    from sglang_lite.runtime.models.weights.given import (  # needs torch
        unpack_flattened_bucket,
        validate_named_tensors,
    )

    tensors = validate_named_tensors(
        unpack_flattened_bucket(named_tensors) if load_format else named_tensors
    )
    engine.answer(calls.WriteTensors(tensors, flush_cache, weight_version))


def update_from_bytes(
    engine: Engine, data: bytes, *, flush_cache: bool = True, weight_version: str | None = None
) -> None:
    """Replaces weights like `update_from_tensors`, from the contents of a safetensors file."""
    from sglang_lite.runtime.models.weights.given import in_memory_folder  # needs torch

    with tempfile.NamedTemporaryFile(suffix=".safetensors", dir=in_memory_folder()) as file:
        file.write(data)
        file.flush()
        engine.answer(calls.UpdateTensors(file.name, flush_cache, weight_version))


def update_from_handle(
    engine: Engine, bucket: bytes, *, flush_cache: bool = True, weight_version: str | None = None
) -> None:
    """Replaces weights like `update_from_tensors`, with tensors in the memory of the engine's GPU
    that belong to another process. `bucket` is a flattened bucket, pickled in that process by
    SGLang's `MultiprocessingSerializer`. Only memory handles are read from the pickle.
    """
    engine.answer(calls.OpenTensors(bucket, flush_cache, weight_version))


def update_weight_version(engine: Engine, new_version: str) -> None:
    """Sets the version that later results report for the weights. Nothing else changes.

    Prefixes that were moved from the device to host memory or files may have to be computed again,
    because their pages are stored under the version's name.

    Raises:
        ParameterError: the name isn't a string.
    """
    check_field_type("new_version", new_version, str)
    engine.answer(calls.NameWeights(new_version))


def init_update_group(
    engine: Engine,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str = "weight_update_group",
    backend: str = "nccl",
) -> None:
    """Joins a group of processes in which a trainer will broadcast weights. The trainer has rank 0.

    The trainer creates the group with torch.distributed at the same time, like
    `init_custom_process_group` of SGLang and its clients. All wait for each other, at most
    `dist_timeout`.

    Args:
        master_address, master_port: where the trainer runs torch's TCP store.
        rank_offset: rank of this engine.
        world_size: number of processes.
        group_name: name of the group.
        backend: "nccl" for tensors on GPUs, "gloo" for tensors on CPUs.

    Raises:
        ParameterError: an argument is invalid, or the group already exists.
        ModelError: the others have not joined in time.
    """
    for name, value, kind in (
        ("master_address", master_address, str),
        ("master_port", master_port, int),
        ("rank_offset", rank_offset, int),
        ("world_size", world_size, int),
        ("group_name", group_name, str),
        ("backend", backend, str),
    ):
        check_field_type(name, value, kind)
    engine.answer(
        calls.JoinGroup(master_address, master_port, rank_offset, world_size, group_name, backend)
    )


def update_from_group(
    engine: Engine,
    names: Sequence[str],
    dtypes: Sequence[str | torch.dtype],
    shapes: Sequence[Sequence[int]],
    group_name: str = "weight_update_group",
    flush_cache: bool = True,
    weight_version: str | None = None,
    load_format: str | None = None,
) -> None:
    """Replaces some or all weights with tensors that rank 0 of a group broadcasts, like
    `update_from_tensors`.

    Requests continue while tensors are received. If that fails, nothing has changed, and the engine
    leaves the group.

    Args:
        names: names of the tensors in a checkpoint, in the order in which they are sent.
        dtypes: dtype of each tensor, such as "bfloat16" or "torch.bfloat16".
        shapes: shape of each tensor.
        group_name: name of the group.
        flush_cache: whether the update is complete, as for `update_from_tensors`.
        weight_version: name of the new weights; None keeps the current name.
        load_format: None, or "flattened_bucket" if they are sent as one tensor of their bytes.

    Raises:
        ParameterError: an argument is invalid, or there is no such group.
        ModelError: a tensor has not arrived within `dist_timeout`, its sender is gone, or for a
            reason that `update_from_tensors` lists.
    """
    if load_format not in (None, "flattened_bucket"):
        raise ParameterError(
            "load_format", f"{load_format!r} is not for tensors.", hint='Use "flattened_bucket".'
        )
    check_field_type("flush_cache", flush_cache, bool)
    for name, value in (("group_name", group_name), ("weight_version", weight_version)):
        check_field_type(name, value, str, *(() if name == "group_name" else (type(None),)))
    for name, each in (("names", names), ("dtypes", dtypes), ("shapes", shapes)):
        check_field_type(name, each, list, tuple)
    for shape in shapes:
        check_field_type("shapes", shape, list, tuple)
        if not all(isinstance(size, int) and abs(size) < 1 << 63 for size in shape):
            raise ParameterError("shapes", f"{short_repr(list(shape))} is no shape.")
    lists = tuple(names), tuple(map(str, dtypes)), tuple(map(tuple, shapes))
    engine.answer(
        calls.ReceiveWeights(
            group_name, *lists, load_format is not None, flush_cache, weight_version
        )
    )


def destroy_update_group(engine: Engine, group_name: str = "weight_update_group") -> None:
    """Leaves a group. Raises ParameterError if there is none with this name."""
    check_field_type("group_name", group_name, str)
    engine.answer(calls.LeaveGroup(group_name))


def offer_weights(
    engine: Engine, master_address: str, port: int, group_name: str, backend: str = "nccl"
) -> dict[str, Any]:  # JSON
    """Creates a group of two processes. Another engine can join it to receive this engine's
    weights.

    Returns:
        `names`, `dtypes` and `shapes` of the tensors, the `port` of the group, and the
            `weight_version`.

    Raises:
        ParameterError: an argument is invalid, or the group already exists.
        ModelError: a tensor can't be sent because the engine has it in fewer bits or is asleep.
    """
    for name, value, kind in (
        ("master_address", master_address, str),
        ("ports", port, int),
        ("group_name", group_name, str),
        ("backend", backend, str),
    ):
        check_field_type(name, value, kind)
    return engine.answer(calls.OfferWeights(master_address, port, group_name, backend))


def send_weights(engine: Engine, group_name: str, names: Sequence[str]) -> str:
    """Sends some of the tensors that `offer_weights` has listed to the group that it has created.
    They are packed into one tensor of bytes. Without names, ends the group.

    Returns:
        Version of the weights.

    Raises:
        ParameterError: there is no such group.
        ModelError: the weights have changed meanwhile, or nobody has received them in time.
    """
    check_field_type("group_name", group_name, str)
    return engine.answer(calls.SendWeights(group_name, tuple(names)))


def release_memory_occupation(engine: Engine, tags: Sequence[str] | None = None) -> None:
    """Releases memory until `resume_memory_occupation`. New requests wait; those that are running
    are recomputed afterwards.

    Args:
        tags: what to release: "kv_cache", "weights" (the host keeps a copy), "cuda_graph" (captured
            again on resuming, which takes seconds). None for everything; the graphs are then
            captured again once both weights and KV cache are resumed.

    Raises:
        ParameterError: a tag is unknown.
        CapabilityError: a tag's memory is already released, the engine is on a GPU and was started
            without `enable_memory_saver`, or transformers' code runs its model.
    """
    engine.answer(calls.ReleaseMemory(_check_tags(tags), keep=True))


def resume_memory_occupation(engine: Engine, tags: Sequence[str] | None = None) -> None:
    """Allocates released memory again. The engine continues once it has everything.

    Args:
        tags: see `release_memory_occupation`; None for everything that is released.

    Raises:
        ParameterError: a tag is unknown.
        CapabilityError: a tag's memory is not released.
        ModelError: weights that were not kept can't be read.
    """
    engine.answer(calls.ResumeMemory(_check_tags(tags)))


def sleep(engine: Engine, level: int = 1) -> None:
    """Releases the memory of weights and KV cache until `wake`. Captured graphs stay.

    Args:
        level: 1 to keep the weights in the host's memory; 2 to drop them and read them again from
            the checkpoint. If the weights came as tensors, they must be sent again after level 2.

    Raises:
        ParameterError: the level is neither.
        CapabilityError: the engine is asleep; see also `release_memory_occupation`.
    """
    if level not in (1, 2) or isinstance(level, bool):
        raise ParameterError("level", f"{short_repr(level)} is neither 1 nor 2.")
    engine.answer(calls.ReleaseMemory(("kv_cache", "weights"), keep=level == 1))


def wake(engine: Engine) -> None:
    """Allocates all memory again and continues. Raises like `resume_memory_occupation`."""
    engine.answer(calls.ResumeMemory(()))


def is_sleeping(engine: Engine) -> bool:
    """Returns True while memory of the engine is released."""
    return bool(engine.stats()["asleep"])


def _check_tags(tags: Sequence[str] | None) -> tuple[str, ...]:
    check_field_type("tags", tags, list, tuple, set, frozenset, type(None))
    for tag in tags or ():
        check_field_type("tags", tag, str)
    return tuple(tags or ())


# numbers, or lists of them
def read_weights(engine: Engine, name: str, truncate_size: int = 100) -> list[Any]:
    """Returns the first rows of a tensor in the engine, as nested lists of numbers.

    Args:
        name: name of the tensor in a checkpoint.
        truncate_size: number of rows.

    Raises:
        ParameterError: an argument is invalid.
        ModelError: the model has no such tensor, or has it in fewer bits.
    """
    check_field_type("name", name, str)
    check_field_type("truncate_size", truncate_size, int)
    if truncate_size < 1:
        raise ParameterError("truncate_size", f"{truncate_size} is not above 0.")
    return engine.answer(calls.ReadWeights(name, truncate_size))


def check_weights(engine: Engine, action: str = "checksum") -> dict[str, Any]:  # JSON
    """Returns the SHA-256 `checksums` of all tensors by name. Quantized tensors can't be read, so
    only their names are returned, as `unreadable`.

    Args:
        action: "checksum"; "snapshot" to keep them; "compare" to add the names of tensors that have
            `changed` since.

    Raises:
        ParameterError: the action is unknown, or no snapshot was made.
    """
    check_field_type("action", action, str)
    return engine.answer(calls.CheckWeights(action))


def pause_generation(engine: Engine, mode: str = "abort") -> int:
    """Pauses generating until `continue_generation`. New requests wait. All weight updates during
    the pause count as one update.

    Args:
        mode: "abort" ends all requests; "retract" recomputes them from their tokens, with the
            weights after the pause; "in_place" keeps the keys and values of running requests, so
            they may mix weights.

    Returns:
        Number of requests that were running or waiting.

    Raises:
        ParameterError: the mode is unknown.
    """
    check_field_type("mode", mode, str)
    return engine.answer(calls.PauseGeneration(mode))


def continue_generation(engine: Engine) -> None:
    """Ends a pause. Does nothing if there is none."""
    engine.answer(calls.ContinueGeneration())


def begin_update(engine: Engine, selector: str = "all") -> None:
    """Begins an update that consists of all weight changes until `end_update`. Requests continue
    with the old weights until the first of these changes, and then wait.

    Args:
        selector: must be "all" or "target": drafts come from text, and have no weights.

    Raises:
        ParameterError: the selector is neither.
        ModelError: an update has begun already, or the weights can't be replaced.
        CapabilityError: the engine has several ranks.
    """
    if selector not in ("all", "target"):
        raise ParameterError(
            "selector",
            f"{short_repr(selector)} is not here.",
            hint='Use "all": drafts have no weights.',
        )
    engine.answer(calls.BeginUpdate())


def end_update(engine: Engine) -> None:
    """Ends the update that `begin_update` began. In a pause, requests wait until
    `continue_generation`.

    Raises:
        ModelError: no update has begun.
        BackendError: a write has failed, and its tensors have not been sent again.
        CapabilityError: the engine has several ranks.
    """
    engine.answer(calls.EndUpdate())
