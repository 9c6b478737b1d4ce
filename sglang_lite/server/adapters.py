"""Routes that load and unload adapters (LoRA), in SGLang's form."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from starlette.responses import Response

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.server.endpoint import HttpRequest, Route, json_response, read_record
from sglang_lite.server.fields import Fields
from sglang_lite.server.service import Service
from sglang_lite.server.weight_paths import require_allowed_path

_LONGEST_S = 3600.0  # limit for reading an adapter, or for waiting until it is unused


class LoadRequest(msgspec.Struct, kw_only=True):
    """Request to load an adapter from a folder of the server's machine."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadRequest(msgspec.Struct, kw_only=True):
    """Request to unload an adapter."""

    lora_name: str


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
    return _loaded_adapters_response(service)


def _loaded_adapters_response(service: Service, error: str = "") -> Response:
    found = {"success": not error, "error_message": error, "loaded_adapters": service.adapters}
    return json_response(found, 400 if error else 200)


ROUTES = (
    Route("/load_lora_adapter", load, "Load an adapter", fields=LOAD, access="owner"),
    Route("/unload_lora_adapter", unload, "Forget an adapter", fields=UNLOAD, access="owner"),
)
