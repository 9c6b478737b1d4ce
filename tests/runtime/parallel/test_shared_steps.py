"""Replicas that share feed-forwards give the tokens of one process, whichever of them has something
to compute.
"""

from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_lite.protocol import BackendError
from sglang_lite.runtime.parallel import shared_steps
from sglang_lite.runtime.parallel.layout import Parallel
from tests.runtime.models.test_families import engine
from tests.runtime.parallel.sharing import InTurn, sharing
from tests.runtime.parallel.test_cuts import folder_of
from tests.runtime.parallel.test_random_requests import SETTINGS, tokens_of


@pytest.mark.parametrize(("name", "count", "ep"), [
    ("qwen3-moe", 2, 2), ("deepseek-v2", 2, 1), ("qwen3", 2, 1), ("qwen3-moe", 4, 2), ("deepseek-v2", 4, 4),
], ids=str)  # fmt: skip
@pytest.mark.sampled(5)
def test_random_requests_get_the_same_tokens(name, count, ep, tmp_path):
    folder = folder_of(name, tmp_path / "model")
    with engine(folder, **SETTINGS) as whole:
        expected = tokens_of(whole, 0), tokens_of(whole, 1)
    with sharing(
        folder, Parallel(tp=count, dp=count, ep=ep), tmp_path / "meeting", **SETTINGS
    ) as engines:
        # all but one have nothing to do
        found = tokens_of(InTurn(engines), 0), tokens_of(engines[1], 1)
        assert all(each.stats()["steps"] for each in engines)
    for own, one in zip(found, expected, strict=True):
        both = [(a, b) for a, b in zip(own, one, strict=True) if a is not None and b is not None]
        assert [a for a, _ in both] == [b for _, b in both]
        assert len(both) > len(own) / 2


def test_a_step_that_another_replica_never_begins_fails_and_names_it(monkeypatch):
    monkeypatch.setattr(shared_steps, "_REASON_S", 0.0)
    ranks: Any = SimpleNamespace(parallel=Parallel(tp=2, dp=2, rank=1))
    problem = r"replica 1 of 2 failed in a step of all: BackendError: replica 0 did not begin it within 0\.01 s"
    with BytesIO() as inbox, BytesIO() as other:
        steps = shared_steps.SharedSteps(ranks, inbox, [other], 0.01)
        with pytest.raises(BackendError, match=problem), steps.enter_step(3):
            pass
