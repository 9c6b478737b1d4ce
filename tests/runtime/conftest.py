"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import sglang_lite as sgl
from sglang_lite import Engine
from tests.runtime.scripted import CHAT, reciting_model


@pytest.fixture(scope="session")
def reciting(small_engine: sgl.Engine) -> Iterator[Engine]:
    """An engine with the default model's tokens that gives the default model's answer to CHAT, for
    a thousandth of its work.
    """
    with Engine.of(
        reciting_model(small_engine.tokenizer, CHAT, "The capital of France is Paris.<|im_end|>")
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
def same_weights_in_each_run() -> None:
    """What transformers draws for a new model is the same in each run, in any order of tests."""
    torch.manual_seed(0)
