"""Which rows with several tokens are decoded, so that a captured graph runs the step."""

import numpy as np
import pytest

from sglang_lite.runtime.executor.gpu_inputs import build_gpu_inputs
from sglang_lite.runtime.kv_cache.table import SlotTable
from sglang_lite.runtime.scheduler.batch import Batch

MOST = 512
TABLE = SlotTable(4, 20_000, 16)
TABLE.tokens[:] = np.arange(TABLE.tokens.size).reshape(TABLE.tokens.shape)


def batch(*rows):
    """A batch of rows [start, end], those with one token first."""
    starts, ends = np.array(rows, dtype=np.int32).T
    slots, singles = np.arange(len(rows), dtype=np.int32), int((ends - starts == 1).sum())
    nothing = np.zeros(0, dtype=np.int32)
    return Batch(
        step=0, requests=(), slots=slots, epochs=slots, starts=starts, ends=ends, decoding=singles, singles=singles,
        samples=np.ones(len(rows), dtype=bool), unknown=np.zeros(len(rows), dtype=bool), fresh=(),
        copies=(nothing, nothing),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "captured", "decoded"),
    [
        ([(0, 512)], True, True),  # a prompt that reads 131,328 tokens
        ([(0, 513)], True, False),  # more tokens than can be decoded
        ([(5, 6), (0, 300), (0, 200)], True, True),
        ([(5, 6), (0, 300), (0, 212)], True, False),
        ([(1950, 2078)], True, True),  # 257,856 tokens
        ([(2050, 2178)], True, False),
        ([(9000, 9001), (0, 100)], True, True),  # what rows with one token read does not count
        ([(0, 100)], False, False),
        ([(0, 16)], False, True),
        ([(9000, 9016)], False, True),
    ],
)
def test_short_prompts_are_decoded_where_that_is_captured(rows, captured, decoded):
    inputs = build_gpu_inputs(batch(*rows), TABLE, MOST, captured=captured)
    assert inputs.decoding == (len(inputs.ids) if decoded else sum(end - start == 1 for start, end in rows))
    assert bool(len(inputs.blocks)) != decoded
    expected = [(slot, position) for slot, (start, end) in enumerate(rows) for position in range(start, end)]
    assert list(zip(inputs.slots.tolist(), inputs.positions.tolist())) == expected
    assert inputs.ids.tolist() == [TABLE.tokens[at] for at in expected]
