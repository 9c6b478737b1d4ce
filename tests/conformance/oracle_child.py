"""The process of an engine that runs the oracle's rule in place of its model."""

from __future__ import annotations

from typing import Any

from sglang_lite.engine.child import main as first_steps


def main(*arguments: Any) -> None:
    from sglang_lite.runtime.loading import load_model
    from tests.conformance.oracle_model import model

    load_model.load = lambda *_: model()  # type: ignore[assignment]  # takes what the process gives
    first_steps.main(*arguments)
