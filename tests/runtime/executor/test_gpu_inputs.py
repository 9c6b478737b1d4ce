"""Which rows with several tokens are decoded, so that a captured graph runs the step, and what
these read once.
"""

import numpy as np
import pytest

from sglang_lite.runtime.executor.gpu_inputs import build_gpu_inputs
from sglang_lite.runtime.executor.prefix_groups import PrefixGroups
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from tests.runtime.executor.records import step

MOST = 512
TABLE = SlotTable(65, 10_000, 16)
TABLE.tokens[:] = np.arange(TABLE.tokens.size).reshape(TABLE.tokens.shape)


def steps(*rows):
    """A step of rows [start, end], those with one token first; and the pages of its slots."""
    return step(TABLE, *np.array(rows, dtype=np.int32).T)


@pytest.mark.parametrize(
    ("rows", "max_token_reads", "queries_per_read", "decoded"),
    [
        ([(0, 256)], 32_896, 1, True),
        ([(0, 256)], 32_895, 1, False),
        ([(0, 257)], 1 << 20, 1, False),  # as a captured step that reads a prompt
        ([(0, 64)] * 8, 1 << 20, 1, True),
        ([(9, 10), *[(0, 64)] * 8], 1 << 20, 1, False),  # more tokens than can be decoded
        ([(5, 6), (0, 150), (0, 100)], 16_375, 1, True),
        ([(5, 6), (0, 150), (0, 100)], 16_374, 1, False),
        ([(2000, 2128)], 264_256, 1, True),
        ([(2000, 2128)], 264_255, 1, False),
        ([(2000, 2128)], 16_256, 32, True),  # what is before them is read four times
        ([(2000, 2128)], 16_255, 32, False),
        ([(2000, 2016), (0, 17)], 32_289, 32, True),  # so few read it one by one
        ([(2000, 2016), (0, 17)], 32_288, 32, False),
        ([(9000, 9001), (0, 100)], 5050, 1, True),  # what rows with one token read does not count
        ([(0, 17)], 0, 1, False),
        ([(0, 16)], 0, 1, True),
        ([(9000, 9016)], 0, 1, True),
        ([(0, 16)] * 33, 4488, 1, True),  # more tokens, as each row has few
        ([(0, 16)] * 33, 4487, 1, False),
        ([(0, 16)] * 65, 1 << 20, 1, False),
    ],
)
def test_short_prompts_are_decoded_where_they_read_little(
    rows, max_token_reads, queries_per_read, decoded
):
    inputs = build_gpu_inputs(
        steps(*rows)[0], MOST, max_token_reads=max_token_reads, queries_per_read=queries_per_read
    )
    assert inputs.decoding == (
        len(inputs.ids) if decoded else sum(end - start == 1 for start, end in rows)
    )
    assert bool(len(inputs.blocks)) != decoded
    expected = [
        (slot, position) for slot, (start, end) in enumerate(rows) for position in range(start, end)
    ]
    assert list(zip(inputs.slots.tolist(), inputs.positions.tolist())) == expected
    assert inputs.ids.tolist() == [TABLE.tokens[at] for at in expected]


def test_tokens_of_a_decoded_row_share_the_full_pages_before_them():
    rows, pages = steps((7000, 7001), (1000, 1010), (2009, 2029), (0, 30))
    groups = PrefixGroups(pages, 4, 8)
    found = groups.find_prefixes(rows, int, multi_token_rows=True)
    # the last have nothing before them
    assert found.lengths.tolist() == [0, *[992] * 10, *[2000] * 20, *[0] * 30]
    assert found.order.tolist() == [*range(1, 31)]
    assert {tuple(item) for item in found.items[:, :3].tolist()} == {
        (0, 8, 1), (8, 2, 1), (10, 8, 2), (18, 8, 2), (26, 4, 2)
    }  # fmt: skip
    assert groups.find_prefixes(rows, int, multi_token_rows=False) is None
    few, pages = steps((1000, 1001), (1000, 1005))
    # for which a kernel does not pay
    assert PrefixGroups(pages, 4, 8).find_prefixes(few, int, multi_token_rows=True) is None
