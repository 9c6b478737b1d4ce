"""Collectives through shared memory give what those through sockets give, on all ranks the same
bits.
"""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sglang_lite.runtime.kernels import shared_sums
from sglang_lite.runtime.models import cpu_ranks
from sglang_lite.runtime.models.cpu_ranks import CpuRanks, connect
from sglang_lite.runtime.parallel.collectives import GlooCollectives, exchange_bytes
from sglang_lite.runtime.parallel.layout import Parallel

TIMEOUT_S = 60


def on_ranks(tp, meeting, run):
    """Results of a function of each rank's collectives, each in a thread of its own."""

    def rank(index):
        return run(connect(GlooCollectives(Parallel(tp=tp, rank=index), meeting, TIMEOUT_S)))

    with ThreadPoolExecutor(tp) as threads:
        return list(threads.map(rank, range(tp)))


def drawn(rank, step, shape, dtype):
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))
        .mul(100)
        .to(dtype)
    )


@pytest.fixture
def small_slots(monkeypatch):
    """Makes numbers be exchanged in pieces."""
    for module in (shared_sums, cpu_ranks):
        monkeypatch.setattr(module, "SLOT", 4096)


@pytest.mark.parametrize("tp", [2, 3, 5])
def test_sums_are_right_and_the_same_bits_on_all_ranks(tp, tmp_path, small_slots):
    dice = random.Random(tp)
    cases = [
        (
            dice.choice([torch.float32, torch.bfloat16, torch.int32]),
            (dice.choice([0, 1, 7]), dice.choice([1, 33, 1500])),
        )
        for _ in range(60)
    ]

    def sums(ranks):
        assert isinstance(ranks, CpuRanks)
        rank = ranks.parallel.rank
        return [
            ranks.sum(drawn(rank, step, shape, dtype)) for step, (dtype, shape) in enumerate(cases)
        ]

    found = on_ranks(tp, tmp_path / "meeting", sums)
    for step, (dtype, shape) in enumerate(cases):
        exact = sum(drawn(rank, step, shape, dtype).double() for rank in range(tp))
        # of numbers up to some hundreds
        near = {torch.float32: 1e-4, torch.bfloat16: 4.0, torch.int32: 0}[dtype]
        torch.testing.assert_close(found[0][step].double(), exact, atol=near, rtol=0)
        assert all(torch.equal(each[step], found[0][step]) for each in found)


@pytest.mark.parametrize("sizes", [[5, 3], [300, 300, 299], [1, 2000]], ids=str)
def test_columns_of_any_sizes_are_gathered_in_order(sizes, tmp_path, small_slots):
    tp, rows = len(sizes), 11

    def gathered(ranks):
        rank = ranks.parallel.rank
        return [
            ranks.gather_columns(drawn(rank, step, (rows, sizes[rank]), torch.float32), sizes)
            for step in range(3)
        ]

    for each in on_ranks(tp, tmp_path / "meeting", gathered):
        for step, found in enumerate(each):
            parts = [
                drawn(rank, step, (rows, size), torch.float32) for rank, size in enumerate(sizes)
            ]
            assert torch.equal(found, torch.cat(parts, 1))


def test_a_rank_that_does_not_come_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_ranks, "_TIMEOUT_S", 0.01)

    def run(ranks):
        if ranks.parallel.rank == 0:
            with pytest.raises(RuntimeError, match="rank 1 of 2 has not come within"):
                ranks.sum(torch.ones(3))

    on_ranks(2, tmp_path / "meeting", run)


def test_bytes_of_any_lengths_are_swapped(tmp_path):
    contents = [b"", b"a", bytes(range(256))]
    found = on_ranks(
        3, tmp_path / "meeting", lambda ranks: exchange_bytes(ranks, contents[ranks.parallel.rank])
    )
    assert found == [contents] * 3


def test_without_a_compiler_the_host_sums(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_ranks, "load_cpu_library", lambda *_: None)
    both = on_ranks(2, tmp_path / "meeting", lambda ranks: (ranks, ranks.sum(torch.ones(3))))
    for ranks, found in both:
        assert isinstance(ranks, GlooCollectives)
        assert found.tolist() == [2, 2, 2]
