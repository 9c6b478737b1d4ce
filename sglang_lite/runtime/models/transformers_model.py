"""Any causal language model of transformers, over our pages: its own module, whose attention is ours.

Here as torch operations; gpu_transformers_model.py runs the same module as steps on a GPU.

What a token's keys and values take is found by one trial run. A second one shows that nothing else passes from token to
token: a model that keeps other state, or attends in a way of its own, is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface

from sglang_lite.protocol import ModelError
from sglang_lite.protocol.anything import Foreign
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.kv_layout import KVLayout, Plane
from sglang_lite.runtime.kernels.reference.attention import Scoring, attention, store_kv
from sglang_lite.runtime.kernels.reference.kv_copy import copy_kv

NAME = "sglang_lite"  # of our attention, among transformers'
_TRIAL = 12  # tokens
# Of the length of a token's hidden state, between the trial in one piece and in several: in 32 bits, and in fewer,
# where rounding alone makes 0.07 in 32 layers of random weights.
_TOLERANCE, _COARSE = 2e-3, 0.2
# Arguments of transformers' attention that change nothing here: positions are in the plan, and there is no dropout.
_WITHOUT_MEANING = frozenset({
    "attention_mask", "dropout", "position_ids", "cache_position", "past_key_values", "past_key_value", "use_cache",
    "output_attentions", "output_hidden_states", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "layer_idx", "return_dict", "logits_to_keep", "head_mask", "position_embeddings", "deterministic",
    "num_items_in_batch",
})  # fmt: skip


class AttendLayer(Protocol):
    """Attention of a layer, in one run of a module."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Scoring) -> torch.Tensor:
        """Stores keys and values [T, kv_heads, size], and attends.

        Args:
            q: [T, heads, size].

        Returns:
            [T, heads, size of a value].
        """
        ...


class AttentionProbe:
    """Run that finds what a module asks of attention: layer by layer, what each of its calls came with."""

    def __init__(self) -> None:
        self.heads: list[int] = []
        self.planes: list[tuple[Plane, ...]] = []
        self.rules: list[Scoring] = []

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Scoring) -> torch.Tensor:
        self.heads.append(q.shape[1])
        self.planes.append((Plane(k.shape[1], k.shape[2]), Plane(v.shape[1], v.shape[2])))
        self.rules.append(how)
        return v.new_zeros(len(q), q.shape[1], v.shape[2])


class TransformersModel:
    """
    Args:
        module: of transformers, with our attention.
        label: of it, for messages.

    Raises:
        ModelError: it can't be run so.
    """

    fused = False
    spec = None

    def __init__(self, module: Any, label: str) -> None:  # of transformers: each model has its own class
        self.label, self.dtype, self.device = label, module.dtype, module.device
        self.rounds = self.dtype.itemsize < 4
        self._module = module
        self._attend: AttendLayer | None = None  # of the run that is on
        self._layer = 0  # whose turn it is
        self._output: Callable[..., object]  # the class of what the layers give
        self._given: torch.Tensor | None = None  # hidden states that the layers are to give
        body = module.get_decoder()
        if body is None or body is module or "position_ids" not in inspect.signature(body.forward).parameters:
            raise self._refusal("its layers can't be told from its head, or take no positions")
        self._layers, body.forward = body.forward, self._body
        for part in module.modules():
            part.__dict__["_sglang_lite"] = self
        module.requires_grad_(False)
        with torch.inference_mode():
            self.trial = self._try()
            self.kv_layout = KVLayout(tuple(self.trial.planes))
            if self.device.type != "meta":
                self._check()

    def _body(self, *args: Any, **kwargs: Any) -> Any:  # as the module's own
        """The layers; or what they are told to give, so that the head's own code runs for some rows alone."""
        if self._given is None:
            return self._layers(*args, **kwargs)
        return self._output(last_hidden_state=self._given)

    @property
    def format(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def token_bytes(self) -> int:
        size: int = self.dtype.itemsize
        return self.kv_layout.numbers * size

    def allocate_cache(self, slots: int) -> KVCache:
        return KVCache.allocate(self.kv_layout, slots, self.dtype, self.device)

    def copy_slots(self, cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
        copy_kv(cache, source, target)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, cache: KVCache) -> torch.Tensor:
        """Hidden states [T, hidden_size]."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Scoring) -> torch.Tensor:
            q = store_kv(cache, layer, plan.store_at, q.contiguous(), k, v)
            return attention(
                q, cache, layer, plan, scale=how.scale, window=how.window, softcap=how.softcap, sinks=how.sinks
            )

        return self._run(ids, positions, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, V]."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] by the module's own head and what it does to them, in the format that it has."""
        self._given = hidden[None]
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=self.device)
            found: torch.Tensor = self._module(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._given = None
        return found

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, attend: AttendLayer) -> torch.Tensor:
        self._attend, self._layer = attend, 0
        try:
            out = self._layers(
                input_ids=ids[None].long(), position_ids=positions[None].long(), use_cache=False, return_dict=True
            )
        finally:
            self._attend = None
        self._output = type(out)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, **more: Foreign
    ) -> torch.Tensor:
        """A layer's attention: [1, T, heads, size of a value].

        Args:
            q, k, v: [1, heads, T, size] each.
            more: what else transformers hands to an attention.
        """
        assert self._attend is not None
        window, softcap, sinks = more.pop("sliding_window", None), more.pop("softcap", None), more.pop("s_aux", None)
        if unknown := [name for name, value in more.items() if value is not None and name not in _WITHOUT_MEANING]:
            raise self._refusal(f"its attention takes {', '.join(unknown)}")
        if not getattr(module, "is_causal", True):
            raise self._refusal("it has attention that is not causal")
        layer, self._layer = self._layer, self._layer + 1
        scale = q.shape[3] ** -0.5 if scale is None else scale
        how = Scoring(scale, window, softcap, None if sinks is None else sinks.float())
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self._attend(layer, q, k, v, how)[None]

    # ------------------------------------------------------------------------------------------- the trials

    def _try(self) -> AttentionProbe:
        trial = AttentionProbe()
        self._run(torch.zeros(1, device=self.device), torch.zeros(1, device=self.device), trial)
        if not trial.planes:
            raise self._refusal("its attention can't be replaced")
        self._check_windows({how.window for how in trial.rules})
        return trial

    def _check_windows(self, windows: set[int | None]) -> None:
        config = self._module.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        if left := kinds - {"full_attention", "sliding_attention"}:
            raise self._refusal(f"it has layers of {', '.join(sorted(left))}")
        if "sliding_attention" in kinds and windows <= {None}:
            raise self._refusal("its layers see a window, and don't say of how many tokens")
        if getattr(config, "attention_chunk_size", None) is not None:
            raise self._refusal("it attends by chunks")

    def _check(self) -> None:
        """Compares the trial as transformers runs it with ours, which has its tokens in two steps."""
        vocab = self._module.config.get_text_config().vocab_size
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab, _TRIAL)).to(self.device)
        positions = torch.arange(_TRIAL, device=self.device)
        expected = self._as_it_is(ids)
        cache = self.allocate_cache(_TRIAL)
        half = _TRIAL // 2
        parts = []
        for start, end in ((0, half), (half, _TRIAL - 1), (_TRIAL - 1, _TRIAL)):
            parts.append(self.forward(ids[start:end], positions[start:end], _plan(start, end, self.device), cache))
        found = torch.cat(parts)
        tolerance = _COARSE if self.rounds else _TOLERANCE
        if found.shape != expected.shape or not _close(found.float(), expected.float(), tolerance):
            raise self._refusal("it keeps more than keys and values, or attends in a way of its own")

    def _as_it_is(self, ids: torch.Tensor) -> torch.Tensor:
        self._module.set_attn_implementation("eager")
        try:
            out = self._layers(input_ids=ids[None], use_cache=False, return_dict=True)
        finally:
            self._module.set_attn_implementation(NAME)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _refusal(self, why: str) -> ModelError:
        return ModelError(f"{self.label}: {type(self._module).__name__} can't be run through transformers: {why}.")


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool(((found - expected).norm(dim=-1) <= tolerance * expected.norm(dim=-1)).all())


def _plan(start: int, end: int, device: torch.device) -> AttentionPlan:
    """The plan of a row's tokens start … end-1, whose slots are its positions."""
    row = ExtendRow(0, end - start, slice(0, end))
    return AttentionPlan(torch.arange(start, end, device=device), (), (row,))


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, **more: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention as transformers calls it: the model's that the module is of."""
    return module.__dict__["_sglang_lite"].attend(module, query, key, value, scaling, **more), None


def register() -> None:
    """Makes our attention known to transformers, which makes no masks for one that has no mask function: a plan says
    who sees whom."""
    AttentionInterface.register(NAME, _attend)
