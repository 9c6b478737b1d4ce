"""Kernels that are compiled before an engine starts, in processes: the variants that its own warm-up launches."""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch

from sglang_lite.runtime.executor import compile_ahead
from sglang_lite.runtime.executor.compile_ahead import Compiling, Runner, start_process, tell_variants
from sglang_lite.runtime.kernels.card import Card
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, RopeSpec

A10 = Card("A10", 101_376, 1 << 16, 72, (8, 6))
H200 = Card("H200", 232_448, 1 << 16, 132, (9, 0))
BFLOAT16 = torch.bfloat16


LAYER = LayerSpec(AttentionSpec(4, 2, 64, 64, 0.125, RopeSpec(theta=1e4)), DenseSpec(512))
SPEC = ModelSpec(
    architecture="llama", vocab_size=1000, hidden_size=256, max_positions=512, rms_eps=1e-5, layers=(LAYER,) * 4,
    tied_embeddings=True,
)  # fmt: skip
RUNNER = Runner(
    SPEC, Precision(BFLOAT16, BFLOAT16, BFLOAT16), longest=512, max_running=8, page_size=16, step_tokens=256,
    attention="auto",
)  # fmt: skip


def told(*cards: Card) -> list[list[tuple[str, str]]]:
    """Names and keys of the variants on each card, in their order."""
    found: list[list[tuple[str, str]]] = [[] for _ in cards]
    for card, own in zip(cards, found):
        tell_variants(RUNNER, card, lambda variant, own=own: own.append((variant.name, variant.key)))
    return found


@pytest.fixture
def pool():
    """A process whose Triton compiles: this one's interprets."""
    kept = os.environ.pop("TRITON_INTERPRET", None)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = [pool.submit(told, H200), pool.submit(told, H200, A10)]
        found = [variants for future in futures for variants in future.result()]
        if kept is not None:
            os.environ["TRITON_INTERPRET"] = kept
        yield found


@pytest.mark.slow
def test_processes_meet_the_same_variants_in_the_same_order(pool):
    first, second, other = pool
    assert first == second
    assert len(set(first)) == len(first)
    names, older = ({name for name, _ in of} for of in (first, other))
    assert {"decode_attention._decode", "prefix_attention._prefix", "rope_store._rope_store"} <= names & older
    assert names - older == {"prefill_attention_hopper.prefill_kernel", "tiled._tiled"} & names
    assert "prefill_attention_hopper.prefill_kernel" in names


@pytest.mark.slow
def test_a_process_that_has_no_share_meets_all_and_ends_well():
    assert start_process(RUNNER, H200, 10**6 - 1, 10**6).wait() == 0


def test_nothing_is_started_where_the_cache_has_it_all(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    started = []

    class Process:
        def wait(self, timeout=None):
            return 0

    def start(runner, card, index, count):
        started.append((card.name, index, count))
        return Process()

    monkeypatch.setattr(compile_ahead, "start_process", start)
    first = Compiling(RUNNER, A10, 2)
    first.wait()
    assert started == [("A10", 0, 2), ("A10", 1, 2)]
    Compiling(RUNNER, A10, 2)
    assert len(started) == 4  # what was not kept is not there
    first.kept()
    Compiling(RUNNER, A10, 2).wait()
    assert len(started) == 4
    Compiling(replace(RUNNER, max_running=16), A10, 1)
    Compiling(RUNNER, H200, 1)
    assert started[4:] == [("A10", 0, 1), ("H200", 0, 1)]
    Compiling(replace(RUNNER, max_running=16), A10, 0)
    assert len(started) == 6


def test_a_process_that_fails_is_said_and_leaves_it_to_the_engine(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    Compiling(RUNNER, A10, 1).wait()
    assert "ended with status 1: the engine compiles its share" in caplog.text


def test_where_no_process_can_be_started_it_is_left_to_the_engine(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    Compiling(RUNNER, A10, 1).wait()
    assert "no process to compile kernels can be started" in caplog.text
