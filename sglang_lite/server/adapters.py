"""Routes that load and unload adapters (LoRA), in SGLang's form."""

from __future__ import annotations

import asyncio
import shutil
import weakref
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from sglang_lite.engine.given_adapters import write_adapter_bytes
from sglang_lite.protocol import ModelError, ParameterError, SglError
from sglang_lite.server.endpoint import HttpRequest, Route, json_response, read_record
from sglang_lite.server.fields import Fields
from sglang_lite.server.service import Service
from sglang_lite.server.weight_paths import require_allowed_path
from sglang_lite.server.weight_routes import check_safetensors, decode_only_entry

_LONGEST_S = 3600.0  # limit for reading an adapter, or for waiting until it is unused


class LoadRequest(msgspec.Struct, kw_only=True):
    """Request to load an adapter from a folder of the server's machine."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadRequest(msgspec.Struct, kw_only=True):
    """Request to unload an adapter."""

    lora_name: str


class LoadFromTensorsRequest(msgspec.Struct, kw_only=True):
    """Request to load an adapter whose matrices are in the request, as base64 of a safetensors file."""

    lora_name: str
    config_dict: dict[str, Any]
    serialized_named_tensors: list[str]
    pinned: bool = False


LOAD_FROM_TENSORS = Fields(LoadFromTensorsRequest, {}, {"load_format": ()})
LOAD = Fields(LoadRequest, {}, {})
UNLOAD = Fields(UnloadRequest, {}, {})


async def load(service: Service, call: HttpRequest) -> Response:
    """Loads an adapter."""
    body = await read_record(service, call, LOAD)
    loading = partial(
        service.engine.load_lora_adapter, body.lora_name, body.lora_path, pinned=body.pinned
    )
    try:
        await asyncio.to_thread(require_allowed_path, service.settings, body.lora_path, "lora_path")
        await service.call_engine(loading, at_most_s=_LONGEST_S)
    except (ModelError, ParameterError) as error:
        return _loaded_adapters_response(service, str(error))
    service.adapters[body.lora_name] = body.lora_path
    return _loaded_adapters_response(service)


async def load_from_tensors(service: Service, call: HttpRequest) -> Response:
    """Loads an adapter whose matrices are in the request."""
    body = await read_record(service, call, LOAD_FROM_TENSORS)
    data = decode_only_entry(body.serialized_named_tensors)
    check_safetensors(data)
    engine = service.engine
    folder = await asyncio.to_thread(write_adapter_bytes, data, body.config_dict)
    remove = weakref.finalize(engine, shutil.rmtree, folder, ignore_errors=True)
    loading = partial(engine.load_lora_adapter, body.lora_name, folder, pinned=body.pinned)
    try:
        await service.call_engine(loading, at_most_s=_LONGEST_S)
    except SglError as error:
        remove()
        if isinstance(error, ModelError | ParameterError):
            return _loaded_adapters_response(service, str(error))
        raise
    service.adapters[body.lora_name] = str(folder)
    service.given_adapters[body.lora_name] = remove
    return _loaded_adapters_response(service)


async def unload(service: Service, call: HttpRequest) -> Response:
    """Unloads an adapter once no request uses it."""
    body = await read_record(service, call, UNLOAD)
    # no new request can name it while it is unloaded
    path = service.adapters.pop(body.lora_name, None)
    try:
        await service.call_engine(
            partial(service.engine.unload_lora_adapter, body.lora_name), at_most_s=_LONGEST_S
        )
    except ParameterError as error:
        if path is not None:
            service.adapters[body.lora_name] = path
        return _loaded_adapters_response(service, str(error))
    if remove := service.given_adapters.pop(body.lora_name, None):
        await asyncio.to_thread(remove)
    return _loaded_adapters_response(service)


def _loaded_adapters_response(service: Service, error: str = "") -> Response:
    found = {"success": not error, "error_message": error, "loaded_adapters": service.adapters}
    return json_response(found, 400 if error else 200)


ROUTES = (
    Route("/load_lora_adapter", load, "Load an adapter", fields=LOAD, access="owner"),
    Route(
        "/load_lora_adapter_from_tensors",
        load_from_tensors,
        "Load an adapter of the request",
        fields=LOAD_FROM_TENSORS,
        access="owner",
    ),
    Route("/unload_lora_adapter", unload, "Forget an adapter", fields=UNLOAD, access="owner"),
)
