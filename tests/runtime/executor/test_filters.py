"""Top-k, top-p and min-p, in both orders, against their definitions."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.executor.sampler import SamplingTable, sample
from sglang_lite.runtime.kernels.race import draw_exponentials
from sglang_lite.runtime.requests.resolved_params import resolve_params
from tests.runtime.executor.test_sampling import set_row


def test_frequencies_are_the_probabilities():
    """After top-k, top-p and min-p too: those that are left, in proportion."""
    probs = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    n = 20_000
    for options, kept in (
        ({}, 5),
        ({"top_k": 3}, 3),
        ({"top_p": 0.65}, 2),
        ({"min_p": 0.4}, 3),
        ({"top_p": 0.85, "top_k": 2}, 2),
        ({"top_p": 0.75, "top_k": 3, "min_p": 0.1}, 2),
        ({"top_p": 0.75, "top_k": 3, "min_p": 0.1, "sampling_order": "joint"}, 3),
        ({"top_p": 0.75, "top_k": 3}, 3),
        ({"top_p": 0.75, "top_k": 3, "sampling_order": "sequential"}, 2),
    ):
        table = SamplingTable(1)
        set_row(table, resolve_params(SamplingParams(**options), 5), 1)
        slots = np.zeros(n, dtype=np.int32)
        drawn = sample(
            probs.log().repeat(n, 1), table, slots, np.arange(n, dtype=np.int32), {}
        ).tokens
        frequencies = torch.bincount(torch.tensor(drawn), minlength=5) / n
        expected = torch.where(torch.arange(5) < kept, probs, 0)
        assert torch.allclose(frequencies, expected / expected.sum(), atol=0.012), options


def winners(logits, seed, count):
    """The tokens that win the races of a seed at positions 0 to count - 1."""
    return [
        int((logits - np.log(draw_exponentials(seed, position, len(logits)))).argmax())
        for position in range(count)
    ]


def kept_by_hand(logits, top_k, top_p, min_p, order):
    """The definition, token by token in plain Python: which tokens are left, most likely first, of
    equal ones lower ids first. In SGLang's order, which is the sequential one where min-p applies,
    top-k and top-p renormalise.
    """
    highest = max(logits)
    weights = [math.exp(x - highest) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    largest = ranked[:top_k] if top_k > 0 else ranked
    whole = largest if order == "sequential" or (order is None and min_p > 0) else ranked
    total, before, left = math.fsum(weights[i] for i in whole), 0.0, []
    for i in largest:
        if before / total <= top_p and weights[i] >= min_p:
            left.append(i)
        before += weights[i]
    return left


@pytest.mark.parametrize("order", [None, "joint", "sequential"])
def test_each_order_leaves_the_tokens_that_its_definition_leaves(order):
    """Over all combinations of filters on few tokens, no two of which are equally likely."""
    random = np.random.default_rng(7)
    differing = 0
    for top_k, top_p, min_p in itertools.product(
        (-1, 2, 3, 5), (1.0, 0.9, 0.6, 0.3), (0.0, 0.05, 0.3)
    ):
        logits = random.permutation(8) * 0.5 + random.random(8) * 0.2
        given = {} if order is None else {"sampling_order": order}
        params = resolve_params(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, **given), 8)
        table, n = SamplingTable(1), 400
        set_row(table, params, 5)
        row = torch.from_numpy(logits).float().repeat(n, 1)
        drawn = sample(
            row, table, np.zeros(n, dtype=np.int32), np.arange(n, dtype=np.int32), {}
        ).tokens
        left = kept_by_hand(logits.tolist(), top_k, top_p, min_p, order)
        kept = np.isin(np.arange(8), left)
        assert drawn == winners(np.where(kept, logits, -np.inf), 5, n), (top_k, top_p, min_p)
        differing += left != kept_by_hand(logits.tolist(), top_k, top_p, min_p, "joint")
    assert bool(differing) == (order != "joint")


def sorted_filters(probs, top_k, top_p, min_p, *, sequential):
    """The definition: all tokens in descending order, of equal ones lower ids first."""
    values, order = probs.sort(descending=True, stable=True)
    rank = torch.arange(len(values))
    before = values.cumsum(-1) - values
    last = top_k or len(values)
    most = float(top_p) * float(values[:last].double().sum()) if sequential else top_p
    dropped = (
        (rank >= last) | (before > most if top_p < 1 else False) | (values < values[0] * min_p)
    )
    return probs.masked_fill(torch.zeros_like(dropped).scatter(0, order, dropped), 0.0)


@pytest.mark.parametrize("size", [1, 2, 5, 40, 999, 20_000])
def test_filters_keep_the_tokens_that_a_sort_of_the_vocabulary_keeps(size):
    """Flat rows and steep ones, with equal logits, with tokens ruled out; each filter alone and
    together.
    """
    random = np.random.default_rng(size)
    cases = 12 if size == 20_000 else 80
    for _ in range(cases):
        logits = random.normal(size=size) * random.choice([0.0, 0.1, 1, 3, 10])
        logits = (logits * 4).round() / 4 if random.random() < 0.5 else logits
        logits[1:][random.random(size - 1) < random.choice([0, 0.5])] = -np.inf
        options: dict[str, Any] = {
            "top_k": int(random.choice([-1, 1, 3, 50, size])),
            "top_p": float(random.choice([1, 0.9999999, 0.999, 0.9, 0.5, 0.1, 1e-6])),
            "min_p": float(random.choice([0, 0.05, 0.5, 1])),
            "sampling_order": str(random.choice(["joint", "sequential"])),
        }
        table, n = SamplingTable(1), 40
        set_row(table, resolve_params(SamplingParams(**options), size), int(random.integers(2**32)))
        row = torch.from_numpy(logits).float().unsqueeze(0)
        positions, slots = np.arange(n, dtype=np.int32), np.zeros(n, dtype=np.int32)
        sequential = options["sampling_order"] == "sequential"
        probs = sorted_filters(
            row.softmax(-1)[0],
            max(options["top_k"], 0),
            *table_filters(table),
            sequential=sequential,
        )
        kept = np.where(probs.numpy() > 0, row[0].numpy(), -np.inf)
        expected = winners(kept, int(table.rows["seed"][0]), n)
        assert sample(row.repeat(n, 1), table, slots, positions, {}).tokens == expected, (
            size,
            options,
        )


def table_filters(table):
    return torch.tensor(table.rows["top_p"][0]), torch.tensor(table.rows["min_p"][0])
