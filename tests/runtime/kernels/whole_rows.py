"""What kernels of norms, activations and 8-bit rows and their twins are asked for in
test_reference.py.
"""

from functools import partial

import torch

from sglang_lite.runtime.kernels.eight_bit_rows import FLOAT8, Scales
from sglang_lite.runtime.kernels.reference.eight_bits import quantise_rows
from tests.runtime.kernels import ranks
from tests.runtime.kernels.test_kernels import DEVICE, normal


def scales(rows, columns):
    return Scales(torch.rand(rows, device=DEVICE), torch.rand(columns, device=DEVICE))


EIGHT_BITS = FLOAT8, torch.int8
NORMS = (40,), (2, 40)  # weights: of an RMS norm, of a layer norm


def norm(run):
    return [
        run(normal(3, 40) + 1, normal(*w), 1e-5, by) for w in NORMS for by in (None, scales(3, 40))
    ]


def norm_eight(run):
    return [
        run(normal(3, 40) + 1, normal(*weight), 1e-5, kind)
        for weight in NORMS
        for kind in EIGHT_BITS
    ]


def add_norm(run, *kind):
    return [
        (run(x, residual, normal(*weight), 1e-5, factors, *kind), residual)
        for weight in NORMS
        for factors in (None, scales(3, 40))
        for residual in (normal(3, 40),)
        for x in (normal(3, 40) + 1, normal(4, 3, 40))
    ]


def add_norm_eight(run):
    return [*add_norm(run, FLOAT8), *add_norm(partial(run, unquantised=True), torch.int8)]


def gated(run, *eight):
    return [
        run(normal(3, 2 * 40), kind, by, *eight)
        for kind in ("silu", "gelu", "gelu_tanh")
        for by in (None, scales(3, 80))
    ]


def gated_eight(run):
    return [*gated(run, FLOAT8), *gated(run, torch.int8)]


def ungated(run, *eight):
    kinds = ("silu", "gelu", "gelu_tanh", "relu2")
    return [run(normal(3, 40), kind, by, *eight) for kind in kinds for by in (None, scales(3, 40))]


def ungated_eight(run):
    return [*ungated(run, FLOAT8), *ungated(run, torch.int8)]


def _numbers(*size):
    return torch.randint(-127, 128, size, dtype=torch.int8, device=DEVICE)


def quantised(run):
    return [run(normal(3, 40), kind) for kind in EIGHT_BITS]


def integers(run):
    x, weight, by = (
        quantise_rows(normal(3, 272), torch.int8),
        _numbers(70, 272),
        torch.rand(70, device=DEVICE),
    )
    return [run(x, weight, by, bias, torch.float32) for bias in (None, normal(70))]


def integers_in_parts(run):
    x, weight = quantise_rows(normal(3, 512), torch.int8), _numbers(70, 512)
    return [run(x, weight, torch.rand(70, device=DEVICE), parts) for parts in (2, 4)]


CASES = {
    "norm": ranks.also(norm), "norm_eight": norm_eight, "add_norm": ranks.also(add_norm, added=True),
    "add_norm_eight": add_norm_eight, "apply_gated": gated, "apply_gated_eight": gated_eight, "apply_ungated": ungated,
    "apply_ungated_eight": ungated_eight, "quantise_rows": quantised, "int8_linear": integers, "int8_parts": integers_in_parts,
}  # fmt: skip
