"""What every backend of attention answers, against the CPU's attention of each row by itself."""

import pytest
import torch

from sglang_lite.runtime.attention import torch as torch_attention
from sglang_lite.runtime.attention.base import Needs
from sglang_lite.runtime.attention.choose import make_attention
from tests.runtime.kernels import BACKENDS, needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE, OPTIONS, Rows, close, close_by_head, in_eight_bits, normal

pytestmark = needs_kernels


@pytest.fixture(params=BACKENDS)
def attention(request):
    def make(rows, cache):
        return make_attention(
            request.param,
            Needs(rows.heads, rows.kv_heads, rows.dim, torch.float32, cache.k[0].dtype, DEVICE, most_rows=8, most_chunks=0),
        )  # fmt: skip

    return make


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scaled", [None, False, True])  # None: no 8 bits
@pytest.mark.parametrize("at_once", [1, 300, 1 << 16])  # tokens
def test_decoding_rows_beside_blocks(attention, options, scaled, at_once, monkeypatch):
    monkeypatch.setattr(
        torch_attention, "_AT_ONCE", at_once * 2 * 24
    )  # in torch's: rows one by one, some together, all
    lengths = [90, 1, 64, 130, 7]
    rows = Rows([*lengths, 45, 3], (6, 2), 24)
    # Rows 5 and 6 have 20 and 3 new tokens, in blocks of up to 16.
    blocks = [(5, 16, 5, 25), (21, 4, 5, 41), (25, 3, 6, 0)]
    slots = [*range(5), *[5] * 20, *[6] * 3]
    positions = [*(n - 1 for n in lengths), *range(25, 45), *range(3)]
    plan = rows.plan(5, slots, positions, blocks)
    q = normal(28, 10, 24)[:, :6]  # as it lies in the QKV product
    cache, asked = (rows.cache, q) if scaled is None else in_eight_bits(rows, q, scaled=scaled)
    out = torch.full((28, 6, 24), float("nan"), device=DEVICE)
    options = {"window": None, "softcap": None, **options}
    attention(rows, cache).begin(plan)(q, cache, 0, out, scale=0.3, **options)
    alone = [(i, 1, i, n) for i, n in enumerate(lengths)]
    expected = rows.twin(asked, [*alone, (5, 20, 5, 45), (25, 3, 6, 3)], scale=0.3, **options)
    (close if scaled is None else close_by_head)(out, expected)


def test_what_lies_beyond_a_row_is_not_read(attention):
    """Another's NaN would be weighed with 0, and still be one."""
    rows = Rows([5, 30], (4, 2), 16)
    for side in (rows.cache.k, rows.cache.v):
        side[0][:, rows.read_at(0, 8)[5:]] = float("nan")
    plan = rows.plan(2, [0, 1], [4, 29])
    out = torch.empty((2, 4, 16), device=DEVICE)
    attention(rows, rows.cache).begin(plan)(normal(2, 4, 16), rows.cache, 0, out, scale=0.3, window=None, softcap=None)
    assert out.isfinite().all()
