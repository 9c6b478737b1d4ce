"""What kernels of 4-bit numbers and their twins are asked for in test_reference.py."""

import torch

from sglang_lite.runtime.kernels.packed_weight import packed_weight
from tests.runtime.kernels.test_kernels import DEVICE, normal


def packed_matrices():
    """With one zero everywhere, with a zero a group, and of a code book."""
    for outputs, inputs, group, kind in ((130, 640, 64, "integers"), (40, 96, 32, "zeros"), (33, 80, 16, "e2m1")):
        numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
        by = torch.rand(outputs, inputs // group, device=DEVICE).div(64).half()
        zeros = torch.randint(0, 17, by.shape, dtype=torch.uint8, device=DEVICE) if kind == "zeros" else None
        yield packed_weight(
            numbers, by, zeros=zeros, zero=8 if kind == "integers" else 0, kind="e2m1" if kind == "e2m1" else "integers"
        )


def packed_decoded(run):
    return [run(weight, dtype) for weight in packed_matrices() for dtype in (torch.float32, torch.float16)]


def packed_few(run):
    results = []
    for weight in packed_matrices():
        outputs, inputs = weight.shape
        results += [run(normal(rows, inputs), weight, bias) for rows in (1, 17) for bias in (None, normal(outputs))]
        results += [run(normal(3, inputs), weight, None, "silu")] if outputs % 2 == 0 else []
        results += [run(normal(5, inputs), weight, None, parts=parts).sum(0) for parts in (2, 3)]
    return results


def packed_added(run):
    return [
        run(torch.randn(parts, 5, 70, device=DEVICE), dtype)
        for parts in (2, 3)
        for dtype in (torch.float32, torch.float16)
    ]


def packed_one(run):
    results = []
    for weight in packed_matrices():
        outputs, inputs = weight.shape
        x, residual, norm = normal(1, inputs), normal(1, inputs), normal(inputs)
        results += [*run(x, weight, None), *run(x, weight, normal(outputs), residual=residual, norm=norm, eps=1e-5)]
        results += [run(x, weight, None, norm=norm, eps=1e-5, gate="silu")[0]] if outputs % 2 == 0 else []
    return results


CASES = {
    "decoded": packed_decoded,
    "packed_rows": packed_few,
    "add_parts": packed_added,
    "packed_row": packed_one,
}
