"""A deterministic engine on a GPU, here under Triton's interpreter: requests have the same bits in
any company.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.runtime.executor import prefix_groups
from tests.runtime.executor.test_gpu_runner import answers, device, folder, greedy  # noqa: F401 # fixtures
from tests.runtime.kernels import needs_kernels

pytestmark = needs_kernels


@given(
    st.lists(st.integers(0, 700), min_size=2, max_size=9),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 33),
)
def test_prefixes_and_their_chunks_end_at_pieces(own, shared_pages, rows_per_block, target):
    from sglang_lite.runtime.kernels.invariant_attention import piece_borders

    page, borders = 32, piece_borders(9000)
    pages = np.arange(len(own) * 64, dtype=np.int32).reshape(len(own), 64)
    pages[:, :shared_pages] = pages[0, :shared_pages]
    found = prefix_groups.split_shared_prefixes(
        pages, np.array([shared_pages + n // page for n in own], dtype=np.int32),
        np.arange(len(own), dtype=np.int32), page, rows_per_block=rows_per_block, max_items=len(own) + target,
        target_chunks=target, borders=borders,
    )  # fmt: skip
    if found is None:
        return
    assert set(found.lengths.tolist()) == {int(borders[borders <= shared_pages * page][-1])}
    read = np.zeros((len(own), 64 * page), dtype=np.int64)
    for first, count, slot, start, end, _ in found.items.tolist():
        assert {start, end} <= set(borders.tolist())
        for row in found.order[first : first + count]:
            assert (pages[slot, : end // page] == pages[row, : end // page]).all()
            read[row, start:end] += 1
    assert all(
        (read[row] == (np.arange(64 * page) < found.lengths[row])).all() for row in range(len(own))
    )


@pytest.mark.parametrize("device", ["triton"], indirect=True)
def test_a_request_has_the_same_bits_alone_in_a_batch_and_in_chunks(device):  # noqa: F811 # the fixture
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    asked = [[*range(2, 23)], [*range(2, 23), 7, 7], [9, 8, 7]]
    params = greedy(max_tokens=2, return_logprob=True)
    whole, chunked = (
        device(deterministic=True, dtype="float16", max_running=4, page_size=4, step_tokens=size)
        for size in (64, 9)
    )
    together = [(g.token_ids, g.output_logprobs) for g in answers(whole, asked, params)]
    assert [
        (g.token_ids, g.output_logprobs) for g in answers(chunked, asked[:2], params)
    ] == together[:2]
    assert [
        (g.token_ids, g.output_logprobs) for g in answers(whole, asked[2:], params)
    ] == together[2:]
