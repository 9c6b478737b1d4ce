"""The engine of the language's tests, in both forms: in the tests' process, and in one of its own.
Where a model's words matter, `smollm` has them. And the local API server, with backends that are
shut down after the test.
"""

import asyncio
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.lang.execution import retries
from sglang_lite.testing import ServerForTests
from tests.lang.fakes import TimeLimits


@pytest.fixture
def time_limits(monkeypatch) -> TimeLimits:
    """The time limits of runs and nodes."""
    limits = TimeLimits()
    monkeypatch.setattr(
        retries, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": limits.timeout})
    )
    return limits


@pytest.fixture(scope="session")
def engine_process(small_file) -> Iterator[sgl.Engine]:
    """Engine process of all tests."""
    with sgl.Engine(small_file, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="session", params=["in process", "own process"])
def engine(request) -> sgl.Engine:
    return request.getfixturevalue(
        "engine_process" if request.param == "own process" else "small_engine"
    )


@pytest.fixture
def api() -> Iterator[ServerForTests]:
    with sgl.server_for_tests() as api:
        yield api


@pytest.fixture
def connected(api: ServerForTests) -> Iterator[Callable[..., Any]]:
    """Makes a backend of a class and a model on the local server; without the SDK's retries unless
    told otherwise.
    """
    backends = []

    def connect(kind: Any, model: str, *, path: str = "", **options: Any) -> Any:
        options = {
            "api_key": "sk-secret-0123456789",
            "base_url": api.url + path,
            "max_retries": 0,
            **options,
        }
        backends.append(kind(model, **options))
        return backends[-1]

    yield connect
    for backend in backends:
        backend.shutdown()


@pytest.fixture(scope="module")
def raw():
    """Tools, resources and prompts of the raw MCP server of the newest version."""
    server = Path(__file__).with_name("mcp_raw_server.py")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of an odd tool
        tools = sgl.mcp([sys.executable, str(server), "2026-07-28"])
    with tools:
        yield tools
