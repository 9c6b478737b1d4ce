"""What the programs of the docs share: one engine, and stand-ins for what needs a key or a network."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_lite as sgl
from tests.server.conftest import serving

KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AZURE_OPENAI_API_KEY")
ANSWERS = {
    "Extract name and age": '{"name": "Maria Lopez", "age": 34}', "Adult or child?": "adult", "a code of": "fr",
    "capital": "Paris",
}  # fmt: skip


@pytest.fixture(scope="session")
def documented(model_file: Path) -> Iterator[sgl.Engine]:
    """The engine whose answers the docs show."""
    with sgl.Engine(deterministic=True, dtype="float32", in_process=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def address(documented: sgl.Engine) -> Iterator[str]:
    """The address of a server with that engine."""
    with serving(documented, served_model_name="qwen3") as url:
        yield url


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[sgl.testing.ServerForTests]:
    """Server with OpenAI's and Anthropic's APIs, to which their SDKs send what has no other
    address.
    """
    with sgl.server_for_tests(ANSWERS) as server:
        for name in KEYS:
            monkeypatch.setenv(name, "key-for-tests")
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
        yield server
