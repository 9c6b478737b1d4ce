"""The local API server, and backends that are shut down after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.testing import ServerForTests


@pytest.fixture
def api() -> Iterator[ServerForTests]:
    with sgl.server_for_tests() as api:
        yield api


@pytest.fixture
def connected(api: ServerForTests) -> Iterator[Callable[..., Any]]:
    """Makes a backend of a class and a model on the local server; without the SDK's retries unless told otherwise."""
    backends = []

    def connect(kind: Any, model: str, *, path: str = "", **options: Any) -> Any:
        options = {"api_key": "sk-secret-0123456789", "base_url": api.url + path, "max_retries": 0, **options}
        backends.append(kind(model, **options))
        return backends[-1]

    yield connect
    for backend in backends:
        backend.shutdown()


@pytest.fixture
def openai(connected: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an OpenAI backend on the local server."""
    from sglang_lite.lang.backend.openai import OpenAI

    return lambda model="gpt-4o", **options: connected(OpenAI, model, path="/v1", **options)
