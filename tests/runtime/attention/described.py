"""Functions of other packages that our attention calls, as their documentation has them, by the
CPU's attention.
"""

import sys
from types import ModuleType

import torch

from sglang_lite.runtime.attention.flash_attn import FlashAttention
from sglang_lite.runtime.attention.flashinfer import FlashInferAttention
from sglang_lite.runtime.kernels.attention_metadata import ExtendRow
from sglang_lite.runtime.kernels.reference.attention import AttentionRules, attend_rows


def put_in_place(monkeypatch):
    for name, content in (
        (
            "flashinfer",
            {"BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper},
        ),
        ("flash_attn", {}),
        ("flash_attn.cute", {"flash_attn_varlen_func": flash_attn_varlen_func}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for kind in (FlashInferAttention, FlashAttention):
        monkeypatch.setattr(kind, "unsupported_reason", staticmethod(lambda requirements: None))


def _attend(q, k, v, pages, length, *, scale, left, softcap):
    """Tokens at the end of a sequence; k and v [pages, kv_heads, page_size, head_dim]."""
    k, v = (side[pages.long()].transpose(0, 1).flatten(1, 2)[:, :length] for side in (k, v))
    row = ExtendRow(0, len(q), slice(0, length))
    return attend_rows(q, k, v, row, AttentionRules(scale, None if left < 0 else left + 1, softcap))


class BatchPrefillWithPagedKVCacheWrapper:
    """https://docs.flashinfer.ai/api/attention.html"""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        assert kv_layout == "HND"
        assert backend in ("auto", "fa2")
        assert not float_workspace_buffer.any()

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type,
    ):  # fmt: skip
        for indices in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert indices.dtype == torch.int32
        assert causal
        self.types = q_data_type, kv_data_type
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk
        self.options = {"scale": sm_scale, "left": window_left, "softcap": logits_soft_cap}
        starts, pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.rows = [
            (slice(*starts[i : i + 2]), paged_kv_indices[slice(*pages[i : i + 2])], (pages[i + 1] - pages[i] - 1) * page_size + last)
            for i, last in enumerate(paged_kv_last_page_len.tolist())
        ]  # fmt: skip

    def run(self, q, paged_kv_cache, *, out):
        k, v = paged_kv_cache
        assert (q.dtype, k.dtype) == self.types
        assert (q.shape[1], k.shape[1], q.shape[2]) == self.shape
        assert q.shape == out.shape
        assert len(q) == self.rows[-1][0].stop
        for tokens, pages, length in self.rows:
            out[tokens] = _attend(q[tokens], k, v, pages, length, **self.options)


def flash_attn_varlen_func(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    seqused_k,
    max_seqlen_q,
    page_table,
    softmax_scale,
    causal,
    window_size,
    softcap,
):
    """https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/cute/interface.py"""
    assert causal
    assert q.dtype == k.dtype == v.dtype
    assert page_table.shape[0] == len(seqused_k) == len(cu_seqlens_q) - 1
    assert {page_table.dtype, seqused_k.dtype, cu_seqlens_q.dtype} == {torch.int32}
    assert k.stride(-1) == page_table.stride(-1) == 1
    out, starts = torch.full_like(q, float("nan")), cu_seqlens_q.tolist()
    assert starts[-1] == len(q)
    left, right = window_size
    assert right == (None if left is None else 0)
    for i, length in enumerate(seqused_k.tolist()):
        tokens = slice(starts[i], starts[i + 1])
        assert tokens.stop - tokens.start <= max_seqlen_q
        pages = page_table[i, : -(-length // k.shape[1])]
        out[tokens] = _attend(
            q[tokens], k.transpose(1, 2), v.transpose(1, 2), pages, length, scale=softmax_scale,
            left=-1 if left is None else left, softcap=softcap or None,
        )  # fmt: skip
    return out, None
