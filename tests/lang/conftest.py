"""The engine of the language's tests, in both forms: in the tests' process, and in one of its own."""

from collections.abc import Iterator

import pytest

import sglang_lite as sgl


@pytest.fixture(scope="session")
def engine_process(model_file) -> Iterator[sgl.Engine]:
    """One for all tests."""
    with sgl.Engine(dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="session", params=["in process", "own process"])
def engine(request) -> Iterator[sgl.Engine]:
    if request.param == "own process":
        yield request.getfixturevalue("engine_process")
    else:
        with sgl.Engine(dtype="float32", in_process=True) as engine:
            yield engine
