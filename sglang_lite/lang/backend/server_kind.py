"""Kinds of servers that speak OpenAI's protocol, told by what each says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

PATIENCE: Final = 2.0  # seconds, for each question
_LARGEST: Final = 2**20  # bytes of an answer that is looked at


def _by_models(said: Mapping[str, Any]) -> str | None:
    """`/v1/models`: each of these servers owns its models by its own name."""
    models = said.get("data")
    owners = {each.get("owned_by") for each in models if isinstance(each, dict)} if isinstance(models, list) else set()
    known = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "sglang_lite": "sglang_lite"}
    return known.get(str(owners.pop())) if len(owners) == 1 else None


def _by_server_info(said: Mapping[str, Any]) -> str | None:
    if "sglang_lite" in said:
        return "sglang_lite"
    return "sglang" if "internal_states" in said or "mem_fraction_static" in said else None


def _by_props(said: Mapping[str, Any]) -> str | None:
    return "llamacpp" if "default_generation_settings" in said else None


def _by_version(said: Mapping[str, Any]) -> str | None:
    return "vllm" if said.keys() == {"version"} else None  # which has nothing else there


_QUESTIONS: Final[tuple[tuple[str, Callable[[Mapping[str, Any]], str | None]], ...]] = (
    ("v1/models", _by_models),
    ("server_info", _by_server_info),
    ("props", _by_props),
    ("version", _by_version),
)


def kind_of_server(base_url: str, api_key: str | None) -> str | None:
    """The name of the profile of a server; None: it is not one that is known, or it does not say. Waits for it.

    Args:
        base_url: of its API, as an SDK takes it: with "/v1" at its end, or without.
    """
    import httpx2

    root = base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx2.Client(timeout=PATIENCE, headers=headers) as client:
        for path, read in _QUESTIONS:
            try:
                answer = client.get(f"{root}/{path}")
                said = answer.json() if answer.is_success and len(answer.content) <= _LARGEST else None
            except httpx2.TransportError:
                return None  # nobody is there: what is asked for next says so
            except ValueError:
                continue
            found = read(said) if isinstance(said, dict) else None
            if found is not None:
                return found
    return None
