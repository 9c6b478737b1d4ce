"""SGLang's routes that change and show the weights of a running engine. Other routes pause the
engine and release its memory.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from sglang_lite.engine import weights
from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.server.endpoint import HttpRequest, Route, json_response, read_record
from sglang_lite.server.fields import Fields
from sglang_lite.server.native import LONGEST_S
from sglang_lite.server.service import Service
from sglang_lite.server.weight_paths import require_allowed_path

R = TypeVar("R", bound=msgspec.Struct)


class UpdateFromDiskRequest(msgspec.Struct, kw_only=True):
    """Request to replace the weights with a checkpoint's."""

    model_path: str
    load_format: str | None = None
    flush_cache: bool = True
    weight_version: str | None = None


class UpdateFromTensorRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to replace weights with tensors."""

    # one, in base64: the bytes of a safetensors file, or a pickled bucket
    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    weight_version: str | None = None


class NameWeightsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to give the weights another name."""

    new_version: str
    abort_all_requests: bool = True


class InitGroupRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to join a group in which weights are sent."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class UpdateFromGroupRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to replace weights with tensors that a group's rank 0 sends."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    weight_version: str | None = None
    load_format: str | None = None


class DestroyGroupRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to leave a group."""

    group_name: str = "weight_update_group"


class OfferRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to create a group in which this engine sends its weights."""

    master_address: str
    ports: str  # one, as text; "0" for any
    group_name: str
    group_rank: int = 0
    world_size: int = 2
    backend: str = "nccl"


class SendRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to send tensors to a group that an OfferRequest has created."""

    master_address: str
    ports: str
    group_name: str
    names: list[str]


class GetWeightsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request for the first rows of a tensor."""

    name: str
    truncate_size: int = 100


class CheckWeightsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request for checksums of the weights, or to compare them with an earlier snapshot."""

    action: str = "checksum"


class PauseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to pause generation."""

    mode: str = "abort"


class BeginUpdateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to treat the following updates as a single update."""

    selector: str = "all"


class EndUpdateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to end the update that a BeginUpdateRequest has begun."""


class MemoryRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to release memory, or to allocate it again."""

    tags: list[str] | None = None


async def update_from_disk(service: Service, body: UpdateFromDiskRequest) -> Response:
    """Replaces the weights with another checkpoint's."""

    def check() -> None:
        require_allowed_path(service.settings, body.model_path, "model_path")

    update = partial(
        weights.update_from_disk,
        service.engine,
        body.model_path,
        load_format=body.load_format,
        weight_version=body.weight_version,
    )
    return await _run_and_report(
        service, update, "The weights are replaced.", check=check, num_paused_requests=0
    )


async def update_from_tensor(service: Service, body: UpdateFromTensorRequest) -> Response:
    """Replaces weights with tensors. The request has the tensors as safetensors data, or a handle
    of a flattened bucket on the engine's GPU.
    """
    if body.load_format not in (None, "flattened_bucket"):
        raise ParameterError(
            "load_format",
            f"{body.load_format!r} is not for tensors.",
            hint='Use "flattened_bucket".',
        )
    data = decode_only_entry(body.serialized_named_tensors)
    if body.load_format is None:
        check_safetensors(data)
    update = partial(
        weights.update_from_bytes if body.load_format is None else weights.update_from_handle,
        service.engine,
        data,
        flush_cache=body.flush_cache,
        weight_version=body.weight_version,
    )
    return await _run_and_report(service, update, "The weights are replaced.")


async def update_version(service: Service, body: NameWeightsRequest) -> Response:
    """Gives the weights another name. Aborts all requests first, unless the request disables that."""
    if body.abort_all_requests:
        service.async_engine.abort_all(None)
    await service.call_engine(
        partial(weights.update_weight_version, service.engine, body.new_version)
    )
    message = f"The weights are named {body.new_version}."
    return json_response({"success": True, "message": message, "new_version": body.new_version})


def decode_only_entry(serialized_named_tensors: Sequence[str]) -> bytes:
    """Decodes the only entry of a list of texts in base64. Raises ParameterError if the list
    doesn't have exactly one entry, or the entry isn't base64.
    """
    if len(serialized_named_tensors) != 1:
        raise ParameterError(
            "serialized_named_tensors", f"has {len(serialized_named_tensors)} entries, not one."
        )
    try:
        return base64.b64decode(serialized_named_tensors[0], validate=True)
    except (ValueError, binascii.Error) as error:
        raise ParameterError("serialized_named_tensors", f"is no base64: {error}.") from error


def check_safetensors(data: bytes) -> None:
    """Raises ParameterError if data does not begin like a safetensors file."""
    if not len(data) > 8 or data[8:9] != b"{":  # the length of a JSON header, then the header
        raise ParameterError(
            "serialized_named_tensors",
            "is no safetensors file. Pickled tensors are refused: they would run their sender's code.",
            hint="Send base64 of what `safetensors.torch.save` returns.",
        )


def _change_handler(
    change: Callable[..., None], message: str
) -> Callable[[Service, msgspec.Struct], Awaitable[Response]]:
    """Returns a handler that calls a function of the engine with the fields of a request."""

    async def handle(service: Service, body: msgspec.Struct) -> Response:
        return await _run_and_report(
            service, partial(change, service.engine, **msgspec.structs.asdict(body)), message
        )

    return handle


async def _run_and_report(
    service: Service,
    ask: Callable[[], dict[str, Any] | None],
    message: str = "",
    *,
    check: Callable[[], object] | None = None,
    **more: int,
) -> Response:
    """Calls `check`, which may wait for a disk, then `ask`. Returns a response that reports success
    or failure. The response includes `more` and, on success, the fields that `ask` returned.
    """
    try:
        if check is not None:
            await asyncio.to_thread(check)
        found = await service.call_engine(ask, at_most_s=LONGEST_S)
    except ModelError as error:
        return json_response({"success": False, "message": str(error), **more}, 400)
    return json_response({"success": True, "message": message, **more, **(found or {})})


async def offer_weight_group(service: Service, body: OfferRequest) -> Response:
    """Creates a group in which another engine can receive the weights, and returns their names,
    dtypes and shapes.
    """
    if (body.group_rank, body.world_size) != (0, 2) or not body.ports.isdecimal():
        raise ParameterError(
            "ports", "is not one port, for a group of two in which this engine has rank 0."
        )
    offered = partial(
        weights.offer_weights,
        service.engine,
        body.master_address,
        int(body.ports),
        body.group_name,
        body.backend,
    )
    return await _run_and_report(service, offered)


async def send(service: Service, body: SendRequest) -> Response:
    """Sends tensors to a group that `offer_weight_group` has created."""
    sent = partial(weights.send_weights, service.engine, body.group_name, body.names)
    return await _run_and_report(service, lambda: {"weight_version": sent()})


async def get_weights(service: Service, body: GetWeightsRequest) -> Response:
    """Returns the first rows of a tensor."""
    read = partial(weights.read_weights, service.engine, body.name, body.truncate_size)
    try:
        return json_response(await service.call_engine(read))
    except ModelError as error:
        return json_response({"success": False, "message": str(error)}, 400)


async def check_weights(service: Service, body: CheckWeightsRequest) -> Response:
    """Returns checksums of the tensors, and which of them have changed."""
    found = await service.call_engine(
        partial(weights.check_weights, service.engine, body.action), at_most_s=LONGEST_S
    )
    changed = found.get("changed", [])
    message = f"{len(changed)} tensors differ from the snapshot." if changed else ""
    return json_response({"success": not changed, "message": message, **found})


async def pause(service: Service, body: PauseRequest) -> Response:
    """Pauses generation until /continue_generation."""
    count = await service.call_engine(partial(weights.pause_generation, service.engine, body.mode))
    return json_response(
        {"status": "ok", "message": "Generation paused.", "num_paused_requests": count}
    )


async def resume(service: Service, _: HttpRequest) -> Response:
    """Resumes generation."""
    await service.call_engine(partial(weights.continue_generation, service.engine))
    return json_response({"status": "ok", "message": "Generation continued."})


def _memory_handler(
    move: Callable[..., None],
) -> Callable[[Service, MemoryRequest], Awaitable[Response]]:
    """Returns a handler that calls `move`, which releases memory or allocates it again."""

    async def handle(service: Service, body: MemoryRequest) -> Response:
        return await _release_or_allocate(service, partial(move, service.engine, body.tags))

    return handle


async def sleep(service: Service, call: HttpRequest) -> Response:
    """Releases the memory of weights and KV cache."""
    level = call.query.get("level", "1")
    if level not in ("1", "2"):
        raise ParameterError("level", f"{level[:20]!r} is neither 1 nor 2.")
    return await _release_or_allocate(service, partial(weights.sleep, service.engine, int(level)))


async def wake_up(service: Service, _: HttpRequest) -> Response:
    """Allocates all released memory again."""
    return await _release_or_allocate(service, partial(weights.wake, service.engine))


async def _release_or_allocate(service: Service, move: Callable[[], None]) -> Response:
    """Calls a function that releases memory or allocates it again, and answers with status 200."""
    await service.call_engine(move, at_most_s=LONGEST_S)
    service.asleep = await service.call_engine(partial(weights.is_sleeping, service.engine))
    return Response(status_code=200)


async def is_sleeping(service: Service, _: HttpRequest) -> Response:
    """Returns whether memory is released."""
    return json_response(
        {"is_sleeping": await service.call_engine(partial(weights.is_sleeping, service.engine))}
    )


def _build_weight_route(
    path: str,
    record: type[R],
    handler: Callable[[Service, R], Awaitable[Response]],
    summary: str,
    methods: tuple[str, ...] = ("POST",),
    *,
    media_type: str = "application/json",
    may_be_empty: bool = False,
) -> Route:
    """Creates a route that only the server's owner may use, whose handler receives the body as a
    record.
    """
    fields = Fields(record, {}, {})

    async def handle(service: Service, call: HttpRequest) -> Response:
        is_empty = may_be_empty and not call.data
        return await handler(
            service, record() if is_empty else await read_record(service, call, fields)
        )

    return Route(
        path,
        handle,
        summary,
        methods,
        fields=fields,
        access="owner",
        media_type=media_type,
        acts=True,
    )


_GET_OR_POST = ("GET", "POST")
release = _memory_handler(weights.release_memory_occupation)
take_again = _memory_handler(weights.resume_memory_occupation)
init_group = _change_handler(weights.init_update_group, "The group is there.")
update_from_group = _change_handler(weights.update_from_group, "The weights are replaced.")
destroy_group = _change_handler(weights.destroy_update_group, "The group is left.")
begin_update = _change_handler(weights.begin_update, "An update has begun.")
end_update = _change_handler(weights.end_update, "The update is complete.")
ROUTES = (
    _build_weight_route(
        "/begin_weight_update",
        BeginUpdateRequest,
        begin_update,
        "Combine the following updates into one",
        may_be_empty=True,
    ),
    _build_weight_route(
        "/end_weight_update",
        EndUpdateRequest,
        end_update,
        "End the combined update",
        may_be_empty=True,
    ),
    _build_weight_route(
        "/release_memory_occupation",
        MemoryRequest,
        release,
        "Give memory back",
        _GET_OR_POST,
        media_type="",
        may_be_empty=True,
    ),
    _build_weight_route(
        "/resume_memory_occupation",
        MemoryRequest,
        take_again,
        "Take it again",
        _GET_OR_POST,
        media_type="",
        may_be_empty=True,
    ),
    Route("/sleep", sleep, "Sleep", query=("level",), access="owner", media_type=""),
    Route("/wake_up", wake_up, "Wake", access="owner", media_type=""),
    Route("/is_sleeping", is_sleeping, "Does it sleep?", ("GET",)),
    _build_weight_route(
        "/update_weights_from_disk", UpdateFromDiskRequest, update_from_disk, "Replace the weights"
    ),
    _build_weight_route(
        "/update_weights_from_tensor",
        UpdateFromTensorRequest,
        update_from_tensor,
        "Replace weights",
    ),
    _build_weight_route(
        "/update_weight_version", NameWeightsRequest, update_version, "Name the weights"
    ),
    _build_weight_route(
        "/init_weights_update_group", InitGroupRequest, init_group, "Join a sender of weights"
    ),
    _build_weight_route(
        "/update_weights_from_distributed",
        UpdateFromGroupRequest,
        update_from_group,
        "Receive weights",
    ),
    _build_weight_route(
        "/destroy_weights_update_group", DestroyGroupRequest, destroy_group, "Leave it"
    ),
    _build_weight_route(
        "/init_weights_send_group_for_remote_instance",
        OfferRequest,
        offer_weight_group,
        "Offer the weights",
    ),
    _build_weight_route("/send_weights_to_remote_instance", SendRequest, send, "Send them"),
    _build_weight_route(
        "/get_weights_by_name", GetWeightsRequest, get_weights, "Show a tensor", _GET_OR_POST
    ),
    _build_weight_route(
        "/weights_checker", CheckWeightsRequest, check_weights, "Checksums of tensors", _GET_OR_POST
    ),
    _build_weight_route(
        "/pause_generation", PauseRequest, pause, "Stop generating", may_be_empty=True
    ),
    Route("/continue_generation", resume, "Generate again", access="owner"),
)
