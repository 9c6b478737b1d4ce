"""Engines that several modules use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.media.seeing import Seeing, engine_of
from tests.runtime.media.whispering import save_whisper


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("models") / "whisper"
    model = save_whisper(folder)
    with engine_of(folder) as engine:
        yield Seeing(folder, model, engine)
