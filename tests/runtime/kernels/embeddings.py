"""Runs of the kernels that embed tokens and features of images, for test_reference.py."""

from __future__ import annotations

import torch

from tests.runtime.kernels.test_kernels import DEVICE, Rows, normal


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def embedded(run):
    plan = Rows([4, 4]).plan(2, [1, 0, 1], [0, 0, 0])
    plan.ids.copy_(numbers(-1, 7, -4))
    plan.last_tokens.copy_(numbers(5, 3, 0))
    return [run(plan, normal(10, 24), 1.5, normal(3, 48))]


def planes_added(run):
    plan, out = Rows([4, 4]).plan(2, [1, 0, 1], [0, 0, 0]), normal(3, 24)
    plan.ids.copy_(numbers(-3, 7, -1))
    run(plan, normal(4, 48), 1, out)
    return out


CASES = {"embed": embedded, "add_features": planes_added}
