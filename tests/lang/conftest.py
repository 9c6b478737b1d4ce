"""The engine of the language's tests, in both forms: in the tests' process, and in one of its own. Where a model's words
matter, `smollm` has them."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import sglang_lite as sgl
from sglang_lite.lang.execution import retries
from tests.lang.fakes import TimeLimits


@pytest.fixture
def time_limits(monkeypatch) -> TimeLimits:
    """The time limits of runs and nodes."""
    limits = TimeLimits()
    monkeypatch.setattr(retries, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": limits.timeout}))
    return limits


@pytest.fixture(scope="session")
def engine_process(small_file) -> Iterator[sgl.Engine]:
    """Engine process of all tests."""
    with sgl.Engine(small_file, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="session", params=["in process", "own process"])
def engine(request) -> sgl.Engine:
    return request.getfixturevalue("engine_process" if request.param == "own process" else "small_engine")
