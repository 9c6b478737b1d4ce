"""Fixtures for pytest: `pytest_plugins = ["sglang_lite.testing.fixtures"]` in a conftest.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.testing.network import no_network

_RECORD = "SGLANG_LITE_RECORD"  # if set, tests record


@pytest.fixture
def recorded(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[Callable[[], sgl.BaseBackend]], sgl.BaseBackend]]:
    """Yields a function that returns a test's backend: `recorded(lambda: sgl.OpenAI("gpt-4o"))`.

    The backend replays `recordings/TEST.jsonl` next to the test's file. Network access is then
    forbidden, and the lambda isn't called. With SGLANG_LITE_RECORD=1 in the environment, the lambda
    is called, and the file is recorded with its backend.
    """
    folder = request.path.parent / "recordings"
    file = folder / f"{request.path.stem}.{_as_file_name(request.node.name)}.jsonl"
    if os.environ.get(_RECORD):
        folder.mkdir(exist_ok=True)
        made: list[sgl.BaseBackend] = []

        def recording(make: Callable[[], sgl.BaseBackend]) -> sgl.BaseBackend:
            recorder = sgl.record(file, make())
            made.append(recorder)
            return recorder

        yield recording
        for backend in made:
            backend.shutdown()
    else:
        with no_network():
            yield lambda make: _replay(file)


def _replay(file: Path) -> sgl.BaseBackend:
    if not file.exists():
        raise sgl.ProgramError(
            f"{file} is not recorded yet.", hint=f"Run the test once with {_RECORD}=1."
        )
    return sgl.Replay(file)


def _as_file_name(name: str) -> str:
    return "".join(each if each.isalnum() or each in "-_" else "_" for each in name)
