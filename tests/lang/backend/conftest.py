"""Backends on the local API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def openai(connected: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an OpenAI backend on the local server."""
    from sglang_lite.lang.backend.openai import OpenAI

    return lambda model="gpt-4o", **options: connected(OpenAI, model, path="/v1", **options)
