"""Ollama's other routes: models and their descriptions, embeddings, and the version."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response

from sglang_lite.engine import embedding
from sglang_lite.protocol import ParameterError, SglError
from sglang_lite.runtime.models.resolve import resolve_for_engine
from sglang_lite.server.endpoint import HttpRequest, Route, json_response, read_record
from sglang_lite.server.fields import OLLAMA_EMBEDDINGS_NEUTRAL, Fields
from sglang_lite.server.ollama.lines import resolve_ollama_model_name
from sglang_lite.server.ollama.ollama_request import OllamaRequest, read_options
from sglang_lite.server.service import Service
from sglang_lite.version import __version__

# version of Ollama whose protocol this is; clients compare it with what they need
_SPOKEN = "0.12.6"
_LEVELS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # Ollama's names
_NEVER = "9999-12-31T23:59:59Z"  # when the model will be unloaded


class OllamaEmbed(OllamaRequest, kw_only=True):
    """Ollama's request for embeddings of unit length."""

    input: str | list[str]
    truncate: bool = True
    dimensions: int | None = None


class OllamaEmbeddings(OllamaRequest, kw_only=True):
    """Ollama's older request for the embedding of one text."""

    prompt: str
    truncate: bool = True


class OllamaShow(msgspec.Struct, kw_only=True):
    """Ollama's request to describe a model; `name` is an older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool = False  # reported: no field is left out of a short description


EMBED: Fields[OllamaEmbed] = Fields(OllamaEmbed, {}, {})
EMBEDDINGS: Fields[OllamaEmbeddings] = Fields(OllamaEmbeddings, OLLAMA_EMBEDDINGS_NEUTRAL, {})
SHOW: Fields[OllamaShow] = Fields(OllamaShow, {}, {})


async def embed(service: Service, call: HttpRequest) -> Response:
    """Returns embeddings of texts, of unit length."""
    body = await read_record(service, call, EMBED)
    texts = [body.input] if isinstance(body.input, str) else body.input
    rows, tokens = await _embed_texts(
        service, call, body, texts, body.dimensions, truncate=body.truncate
    )
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return json_response(
        {"model": body.model, "embeddings": rows.tolist(), "prompt_eval_count": sum(tokens)}
    )


async def embeddings(service: Service, call: HttpRequest) -> Response:
    """Returns the embedding of a text."""
    body = await read_record(service, call, EMBEDDINGS)
    rows, _ = await _embed_texts(service, call, body, [body.prompt], None, truncate=body.truncate)
    return json_response({"embedding": rows[0].tolist()})


async def _embed_texts(
    service: Service,
    call: HttpRequest,
    body: OllamaRequest,
    texts: list[str],
    dimensions: int | None,
    *,
    truncate: bool,
) -> embedding.Numbers:
    adapter = service.find_requested_adapter(resolve_ollama_model_name(service, body.model))
    read_options(body, call)
    if not texts:
        return np.zeros((0, 1), np.float32), []
    return await service.encode(
        embedding.embeddings, texts, dimensions, truncate=truncate, lora_path=adapter, field="input"
    )


class _Files:
    """A model's files: their description in `config.json`, if there is one, and their total size in
    bytes.
    """

    def __init__(self, service: Service) -> None:
        config = service.engine.config
        path = resolve_for_engine(config.model, config.revision)
        files = sorted(
            each for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file()
        )
        sizes = {str(each.relative_to(path)): each.stat().st_size for each in files}
        self.size = sum(sizes.values())
        self.changed = max(each.stat().st_mtime for each in files)
        # Not of the contents, which may be hundreds of gigabytes.
        self.digest = hashlib.sha256(
            msgspec.json.encode([str(path), sizes, self.changed])
        ).hexdigest()
        self.config = _read_model_config(path)

    @property
    def architecture(self) -> str:
        return str(self.config.get("model_type", ""))


def _read_model_config(path: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode((path / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):  # of a file in GGUF
        return {}
    return found if isinstance(found, dict) else {}


def _model_details(service: Service, files: _Files, adapter: str | None) -> dict[str, Any]:
    config = service.engine.config
    stored = files.config.get("dtype") or files.config.get("torch_dtype") or ""
    level = config.quantization or (stored if config.dtype == "auto" else config.dtype)
    return {
        "parent_model": "" if adapter is None else service.model_name,
        "format": "safetensors" if files.config else "gguf",
        "family": files.architecture,
        "families": [files.architecture] if files.architecture else None,
        "parameter_size": "",  # unknown
        "quantization_level": _LEVELS.get(level, level.upper()),
    }


def _ollama_model_card(service: Service, files: _Files, adapter: str | None) -> dict[str, Any]:
    name = service.model_name if adapter is None else adapter
    return {
        "name": name,
        "model": name,
        "size": files.size,
        "digest": files.digest,
        "details": _model_details(service, files, adapter),
    }


async def tags(service: Service, _: HttpRequest) -> Response:
    """Returns the model and its adapters."""
    files = _Files(service)
    changed = datetime.fromtimestamp(files.changed, UTC).isoformat()
    cards = [_ollama_model_card(service, files, adapter) for adapter in (None, *service.adapters)]
    return json_response({"models": [{**card, "modified_at": changed} for card in cards]})


async def loaded_models(service: Service, _: HttpRequest) -> Response:
    """Describes the loaded model, which is never unloaded."""
    files = _Files(service)
    context = service.engine.context_length
    card = {
        **_ollama_model_card(service, files, None),
        "expires_at": _NEVER,
        "context_length": context,
    }
    return json_response({"models": [card]})


async def show(service: Service, call: HttpRequest) -> Response:
    """Describes a model."""
    body = await read_record(service, call, SHOW)
    if body.verbose:
        call.unused.append("verbose")
    given = body.model or body.name
    if not given:
        raise ParameterError("model", "is missing.")
    name = resolve_ollama_model_name(service, given)
    files = _Files(service)
    adapter = service.find_requested_adapter(name)
    engine = service.engine
    architecture = files.architecture or "unknown"
    template = engine.chat_template()
    reads = engine.core.encoder is not None
    sizes = {
        "context_length": engine.context_length,
        "embedding_length": files.config.get("hidden_size"),
    }
    info = {f"{architecture}.{key}": value for key, value in sizes.items() if value is not None}
    return json_response(
        {
            "modelfile": f"FROM {name}\n",
            "parameters": "",
            "license": "",
            "template": "" if template is None else template.source,
            "details": _model_details(service, files, adapter),
            "model_info": {"general.architecture": architecture, **info},
            "capabilities": ["embedding"] if reads else _capabilities(service),
            "modified_at": datetime.fromtimestamp(files.changed, UTC).isoformat(),
        }
    )


def _capabilities(service: Service) -> list[str]:
    found = ["completion", *(["vision"] if service.engine.reads_images else [])]
    try:
        chat = service.reader.chat_format
    except SglError:  # an invalid template
        return found
    if service.engine.chat_template() is not None:
        found.append("tools")
    return found if chat.reasoning is None else [*found, "thinking"]


async def alive(_: Service, __: HttpRequest) -> Response:
    """Returns status 200, as a health check for Ollama's clients."""
    return Response(status_code=200)


async def version(_: Service, __: HttpRequest) -> Response:
    """Returns the version of Ollama whose protocol this is."""
    return json_response({"version": _SPOKEN, "server": f"sglang_lite {__version__}"})


ROUTES = (
    Route(
        "/",
        alive,
        "Is the server there?",
        ("HEAD",),
        protocol="ollama",
        access="open",
        media_type="",
    ),
    Route("/api/tags", tags, "The models", ("GET",), protocol="ollama"),
    Route("/api/ps", loaded_models, "The models that are loaded", ("GET",), protocol="ollama"),
    Route("/api/show", show, "A model", protocol="ollama", fields=SHOW),
    Route("/api/version", version, "The version of the protocol", ("GET",), protocol="ollama"),
    Route(
        "/api/embed",
        embed,
        "Embeddings of texts",
        protocol="ollama",
        fields=EMBED,
        counts_as_open=True,
    ),
    Route(
        "/api/embeddings",
        embeddings,
        "Embedding of a text",
        protocol="ollama",
        fields=EMBEDDINGS,
        counts_as_open=True,
    ),
)
