"""Hides the installed SDKs of OpenAI and Anthropic, so that backends use the built-in clients."""

import importlib.metadata

import pytest


def hide_sdks(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def find(package: str) -> str:
        if package in ("openai", "anthropic"):
            raise importlib.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", find)
