"""Backends on the local API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hidden_sdks import hide_sdks


@pytest.fixture
def openai(connected: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an OpenAI backend on the local server."""
    from sglang_lite.lang.backend.openai import OpenAI

    return lambda model="gpt-4o", **options: connected(OpenAI, model, path="/v1", **options)


@pytest.fixture(params=["sdk", "builtin"])
def either_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has backends use the SDKs of OpenAI and Anthropic, or, as if those were not installed, the
    built-in clients.
    """
    if request.param == "builtin":
        hide_sdks(monkeypatch)
