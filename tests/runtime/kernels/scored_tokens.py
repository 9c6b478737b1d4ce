"""Case of scored tokens, for the kernel and its twin."""

from collections.abc import Callable
from functools import partial

import torch

from sglang_lite.runtime.kernels.sampling import TokenMasks
from tests.runtime.kernels.test_kernels import DEVICE, normal


def scored(run: Callable[..., None]) -> list[torch.Tensor]:
    """Rows with and without masks, whose blocks allow something or nothing; of one the mask allows
    only an unlikely token.
    """
    count, size = 4, 9000
    ints = partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    logits = normal(count, size) * 3
    logits[:, 8200:], logits[3, 5] = float("-inf"), -200.0
    masks = torch.zeros((2, -(-size // 32)), dtype=torch.int32, device=DEVICE)
    masks[0, :100], masks[1, 0] = torch.randint(-(2**31), 2**31, (100,)).int(), 1 << 5
    results = []
    for options in ({}, {"softcap": 20.0}, {"masks": TokenMasks(masks, ints([0, -1, 0, 1]))}):
        scores = torch.full((2, count), 9.0, device=DEVICE)
        run(logits, ints([0, 8100, 60, 5]), scores, **options)
        results.append(scores)
    return results
