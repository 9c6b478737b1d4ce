"""Detection of the server software behind OpenAI's protocol, by what each server reports of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

PATIENCE: Final = 2.0  # seconds to wait for each answer
_LARGEST: Final = 2**20  # bytes of the largest answer that is read


def _by_models(body: Mapping[str, Any]) -> str | None:
    """Kind of server by `/v1/models`: each of these servers is the owner of its models, under its own name."""
    models = body.get("data")
    owners = {each.get("owned_by") for each in models if isinstance(each, dict)} if isinstance(models, list) else set()
    profile_names = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "sglang_lite": "sglang_lite"}
    return profile_names.get(str(owners.pop())) if len(owners) == 1 else None


def _by_server_info(body: Mapping[str, Any]) -> str | None:
    if "sglang_lite" in body:
        return "sglang_lite"
    return "sglang" if "internal_states" in body or "mem_fraction_static" in body else None


def _by_props(body: Mapping[str, Any]) -> str | None:
    return "llamacpp" if "default_generation_settings" in body else None


def _by_version(body: Mapping[str, Any]) -> str | None:
    return "vllm" if body.keys() == {"version"} else None  # vLLM's answer has nothing else


_QUESTIONS: Final[tuple[tuple[str, Callable[[Mapping[str, Any]], str | None]], ...]] = (
    ("v1/models", _by_models),
    ("server_info", _by_server_info),
    ("props", _by_props),
    ("version", _by_version),
)


def kind_of_server(base_url: str, api_key: str | None) -> str | None:
    """Name of the profile of a server, or None if its software is unknown. Blocks until the server has answered.

    Args:
        base_url: address of the API as an SDK takes it, with or without "/v1" at its end.
    """
    import httpx2

    root = base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx2.Client(timeout=PATIENCE, headers=headers) as client:
        for path, read in _QUESTIONS:
            try:
                answer = client.get(f"{root}/{path}")
                body = answer.json() if answer.is_success and len(answer.content) <= _LARGEST else None
            except httpx2.TransportError:
                return None  # not reached: the next request reports that
            except ValueError:
                continue
            found = read(body) if isinstance(body, dict) else None
            if found is not None:
                return found
    return None
