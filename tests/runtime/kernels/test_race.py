"""Draws on a CPU against the race's definition, published random numbers and the draws of a GPU."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from sglang_lite.runtime.kernels import race, sampling
from sglang_lite.runtime.kernels.race import draw_exponentials, draw_tokens
from sglang_lite.runtime.kernels.reference.sampling import draw as draw_like_gpu
from tests.counts import some


def draw(logits, temperature, seed, positions):
    """The tokens drawn from each row of logits [R, V]."""
    count = len(positions)
    return draw_tokens(
        logits,
        np.arange(count),
        np.full(count, temperature, dtype=np.float32),
        np.full(count, seed, dtype=np.uint64),
        np.asarray(positions, dtype=np.int32),
    ).tolist()


def random_row(random):
    """A row of logits, its temperature and its seed."""
    size = int(random.choice([1, 2, 30, 1023, 1025, 5000, 20_000]))
    logits = random.normal(size=size) * random.choice([0, 0.1, 1, 5, 50])
    if random.random() < 0.4:
        logits[1:][random.random(size - 1) < random.choice([0.5, 0.999])] = -np.inf
    seed = int(random.integers(2**64, dtype=np.uint64))
    return (
        torch.from_numpy(logits).float().unsqueeze(0),
        float(random.choice([0.01, 0.7, 1, 3])),
        seed,
    )


def test_the_random_numbers_are_those_of_philox():
    """The first vector that the authors publish for Philox4x32-10: key and counter 0."""
    bits = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    noise = draw_exponentials(0, 0, 4096)[[0, 1024, 2048, 3072]]
    assert np.allclose(1 - np.exp(-noise), np.array(bits) / 2**32, rtol=0, atol=1e-7)


def test_the_token_with_the_highest_score_is_drawn(monkeypatch):
    random = np.random.default_rng(0)
    for case in range(some(300, 3000)):
        logits, temperature, seed = random_row(random)
        noise = np.log(draw_exponentials(seed, case, logits.shape[1]))
        scores = logits[0].double().numpy() / np.float32(temperature) - noise
        assert draw(logits, temperature, seed, [case]) == [int(scores.argmax())], case
        with monkeypatch.context() as patch:  # as on a machine without a compiler
            patch.setattr(race, "compile_race", lambda: None)
            assert draw(logits, temperature, seed, [case]) == [int(scores.argmax())], case


def test_a_gpu_draws_the_same_tokens():
    """Its scores are float32, so that the first two may be equal there."""
    random = np.random.default_rng(1)
    different = 0
    for case in range(some(200, 2000)):
        logits, temperature, seed = random_row(random)
        slots = sampling.DeviceSampling.allocate(1, torch.device("cpu"))
        slots.temperature[0] = temperature
        slots.seed[0] = int(np.uint64(seed).astype(np.int64))
        zero, tokens = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        draw_like_gpu(logits, zero, zero + case - 1, slots, zero.clone(), tokens)
        drawn = draw(logits, temperature, seed, [case])
        if drawn != tokens.tolist():
            different += 1
            noise = np.log(draw_exponentials(seed, case, logits.shape[1]))
            scores = logits[0].double().numpy() / temperature - noise
            assert abs(scores[drawn[0]] - scores[int(tokens[0])]) < 1e-6 * abs(scores).clip(1).max()
    assert different <= 2


def test_a_draw_without_the_rejected_token_is_a_new_draw():
    """Frequencies of the first and the second token: those of drawing without replacement."""
    probs = np.array([0.5, 0.25, 0.15, 0.1])
    logits = torch.from_numpy(np.log(probs)).float()
    count = 20_000
    rows = logits.repeat(count, 1)
    first = draw(rows, 1.0, 5, range(count))
    rows[torch.arange(count), torch.tensor(first)] = float("-inf")
    pairs = Counter(zip(first, draw(rows, 1.0, 5, range(count))))
    for a, b in itertools.permutations(range(4), 2):
        expected = count * probs[a] * probs[b] / (1 - probs[a])
        assert abs(pairs[a, b] - expected) < 4.5 * expected**0.5, (a, b)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_row_changes_no_other(broken):
    logits = torch.randn(3, 5000)
    alone = draw(logits, 0.8, 3, [7, 8, 9])
    logits[1] = broken
    assert draw(logits, 0.8, 3, [7, 8, 9])[::2] == alone[::2]


def test_rows_of_a_larger_tensor_are_drawn():
    logits = torch.randn(6, 300)[:, :200]
    params = np.ones(2, np.float32), np.arange(2, dtype=np.uint64), np.arange(2, dtype=np.int32)
    drawn = draw_tokens(logits, np.array([4, 1]), *params)
    copied = draw_tokens(logits[[4, 1]].contiguous(), np.arange(2), *params)
    assert drawn.tolist() == copied.tolist()
