"""Kernels with features of images, and with images whose tokens see each other."""

from dataclasses import replace

import pytest
import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules
from sglang_lite.runtime.kernels.embed import add_features, embed
from sglang_lite.runtime.kernels.prefill_attention import prefill_attention
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE, Rows, close, normal

pytestmark = needs_kernels


@pytest.mark.parametrize("window", [None, 9])
def test_tokens_of_an_image_see_all_of_it(window):
    rows = Rows([9, 60], (4, 2), 16)
    # tokens 32 to 51
    limits = torch.tensor([7, 8, *[52] * 20, *range(53, 61)], dtype=torch.int32, device=DEVICE)
    count, start = len(limits), 30
    limits[:2] += start - 6
    blocks = [(first, min(16, count - first), 1, start + first) for first in range(0, count, 16)]
    plan = replace(
        rows.plan(0, [1] * count, [*range(start, start + count)], blocks, 16), limits=limits
    )
    q = normal(count, 4, 16)
    out = torch.full((count, 4, 16), float("nan"), device=DEVICE)
    prefill_attention(q, rows.cache, 0, plan, out, AttentionRules(0.3, window=window))
    for token, limit in enumerate(limits.tolist()):  # one by one, over what it sees
        first = 0 if window is None else max(start + token - window + 1, 0)
        at = rows.read_at(1, limit)[first:]
        keys, values = (
            side[0][:, at].repeat_interleave(2, 0) for side in (rows.cache.k, rows.cache.v)
        )
        weights = (torch.einsum("hd,hnd->hn", q[token], keys) * 0.3).softmax(-1)
        close(out[token], torch.einsum("hn,hnd->hd", weights, values))


def test_features_of_images_are_embedded_as_they_are():
    plan = Rows([4, 4]).plan(2, [1, 0, 1], [0, 0, 0])
    plan.ids.copy_(torch.tensor([-2, 7, -5]))
    table, features = normal(10, 24), normal(4, 24)
    assert torch.equal(
        embed(plan, table, 2.0, features), torch.stack((features[0], 2 * table[7], features[3]))
    )


def test_planes_of_features_are_added_to_tokens_of_images_alone():
    plan = Rows([4, 4]).plan(2, [1, 0, 1], [0, 0, 0])
    plan.ids.copy_(torch.tensor([-2, 7, -5]))
    table, features, hidden = normal(10, 24), normal(4, 3 * 24), normal(3, 24)
    assert torch.equal(embed(plan, table, 1.0, features)[2], features[3, :24])
    expected = torch.stack((hidden[0] + features[0, 48:], hidden[1], hidden[2] + features[3, 48:]))
    add_features(plan, features, 2, hidden)
    close(hidden, expected)
