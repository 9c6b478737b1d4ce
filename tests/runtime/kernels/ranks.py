"""Cases of kernels that ranks run. Ranks of one process exchange numbers one after the other: what
they send is sent before the first one waits.
"""

import torch

from sglang_lite.runtime.kernels.all_reduce import Peers, rank_memory_shape, words_per_program
from sglang_lite.runtime.kernels.reference.all_reduce import send, send_each
from sglang_lite.runtime.kernels.reference.two_shot import send_parts, send_sum
from sglang_lite.runtime.kernels.sampling import TokenMasks
from sglang_lite.runtime.kernels.two_shot import PartPeers, memory_bytes
from tests.runtime.kernels.test_kernels import DEVICE, normal, sampling

COUNTS = 2, 3
TYPES = torch.float32, torch.float16


def make_ranks(count, row_bytes):
    memories = [
        torch.zeros(rank_memory_shape(count, row_bytes), dtype=torch.int64, device=DEVICE)
        for _ in range(count)
    ]
    addresses = [memory.data_ptr() for memory in memories]
    return [Peers.for_rank(rank, addresses, *memories) for rank in range(count)]


def chunks(x):
    bits = x.view(-1).view(torch.int32)
    return bits.split(words_per_program(len(bits)))


def rows(x):
    return list(x.view(torch.int32))


def in_turn(function, ranks, xs, parts=chunks):
    """Results of all ranks' calls, with the inputs that they have."""
    for peers, x in zip(ranks, xs):
        send(parts(x), peers)
    return [function(x, peers) for x, peers in zip(xs, ranks)]


def exchanged(run):
    """Three exchanges, of few numbers, of many and of few again."""
    results = []
    for count in COUNTS:
        for dtype in TYPES:
            ranks = make_ranks(count, 2048)
            for shape in ((1, 300), (5, 150), (2, 32)):
                results += in_turn(run, ranks, [normal(*shape, dtype=dtype) for _ in range(count)])
    return results


def scattered(run):
    """Three sums, of few numbers, of many and of few again, each rank's part of which it gets."""
    results = []
    for count in COUNTS:
        for dtype in TYPES:
            ranks = make_ranks(count, 2048)
            for shape in ((1, 300), (5, 150), (2, 32)):
                xs = [normal(count, *shape, dtype=dtype) for _ in ranks]
                for x, peers in zip(xs, ranks):
                    send_each(x, peers)
                results += [run(x, peers) for x, peers in zip(xs, ranks)]
    return results


def in_parts(run):
    """Three sums, of few numbers, of many and of few again."""
    results = []
    for count in COUNTS:
        memories = [
            torch.zeros(memory_bytes(count), dtype=torch.uint8, device=DEVICE) for _ in range(count)
        ]
        addresses = [memory.data_ptr() for memory in memories]
        ranks = [
            PartPeers.for_rank(rank, addresses, *memories, programs=2) for rank in range(count)
        ]
        for rows, dtype in ((1, torch.float16), (110 * count, torch.float32), (2, torch.float32)):
            xs = [normal(rows, 24 * count, dtype=dtype) for _ in range(count)]
            for send_all in (send_parts, send_sum):
                for x, peers in zip(xs, ranks):
                    send_all(x, peers)
            results += [run(x, peers) for x, peers in zip(xs, ranks)]
    return results


def also(cases, *, added=False):
    """Cases of a norm, and those whose input is added up first. `added`: whether it takes a
    residual.
    """
    return lambda run: cases(run) + summed_norms(run, added)


def summed_norms(run, added):
    results = []
    for count in COUNTS:
        ranks, weight = make_ranks(count, 4 * 40), normal(40)
        for _ in range(2):
            kept = normal(3, 40)
            residuals = [kept.clone() for _ in range(count)]
            left = iter(residuals)
            results += in_turn(
                lambda x, peers: run(
                    x, *([next(left)] if added else []), weight, 1e-5, None, peers
                ),  # called at once
                ranks,
                [normal(3, 40) for _ in range(count)],
                rows,
            )
            results += residuals
    return results


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def raced(run):
    """The winners of the second part of a vocabulary, whose last block has no tokens."""
    logits, table = (
        normal(3, 4200) * 3,
        sampling(3, temperature=[0.0, 0.7, 1.3], seed=[0, 1, 2**40 + 3]),
    )
    logits[1, 5], logits[2, :4096] = float("inf"), float("-inf")
    masks = torch.randint(-(2**31), 2**31, (2, -(-4200 // 32)), device=DEVICE).int()
    results = []
    for options in ({}, {"softcap": 20.0, "masks": TokenMasks(masks, _ints(1, -1, 0))}):
        found = run(logits, _ints(0, 1, 2), _ints(4, 5, 6), table, 3, 3, **options)[:, :9]
        results += [found[::2].nan_to_num(99), found[1::2].contiguous().view(torch.int32)]
    return results


def picked(run):
    """Winners of rows of all kinds, among those of three parts of two blocks."""
    parts = normal(3, 4, 8)
    parts[:, 1] = torch.randint(90, (3, 8), device=DEVICE).int().view(torch.float32)
    parts[:, 3] = 0
    parts[1, 3, 2] = _ints(1).view(torch.float32)[0]  # of row 1
    parts[:, 2, 4:6] = float("-inf")  # of row 2
    last, tokens = _ints(*[-9] * 4), _ints(*[-9] * 4)
    run(parts, 2, _ints(3, 2, 1, 0), sampling(4, temperature=[0.0, 1.0, 0.0, 1.0]), last, tokens)
    return [last, tokens]


CASES = {
    "sum_ranks": exchanged,
    "gather_ranks": exchanged,
    "reduce_scatter": scattered,
    "sum_parts": in_parts,
    "draw_part": raced,
    "pick_winner": picked,
}
