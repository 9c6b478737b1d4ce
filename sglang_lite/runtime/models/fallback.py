"""Any causal language model of transformers, over our pages: its own module, whose attention is ours.

What a token's keys and values take is found by one trial run. A second one shows that nothing else passes from token to
token: a model that keeps other state, or attends in a way of its own, is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from sglang_lite.protocol import ModelError
from sglang_lite.protocol.anything import Foreign
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.kv_layout import KVLayout, Plane
from sglang_lite.runtime.kernels.reference.attention import attention, store_kv
from sglang_lite.runtime.kernels.reference.kv_copy import copy_kv

NAME = "sglang_lite"  # of our attention, among transformers'
_TRIAL = 12  # tokens
# Of the largest hidden number, between the trial in one piece and in several: in 32 bits, and in fewer.
_TOLERANCE, _COARSE = 2e-3, 5e-2
# Arguments of transformers' attention that change nothing here: positions are in the plan, and there is no dropout.
_WITHOUT_MEANING = frozenset({
    "attention_mask", "dropout", "position_ids", "cache_position", "past_key_values", "past_key_value", "use_cache",
    "output_attentions", "output_hidden_states", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "layer_idx", "return_dict", "logits_to_keep", "head_mask", "position_embeddings", "deterministic",
    "num_items_in_batch",
})  # fmt: skip


@dataclass(slots=True)
class _Step:
    """A run of the module: what its attention reads and writes.

    Attributes:
        cache: None in the trial that finds its layout.
        planes: of the calls so far, in that trial.
        windows: of the calls so far.
    """

    plan: AttentionPlan | None
    cache: KVCache | None
    layer: int = 0
    planes: list[tuple[Plane, ...]] = field(default_factory=list)
    windows: set[int | None] = field(default_factory=set)


class FallbackModel:
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
        self._step: _Step | None = None
        self._output: Callable[..., object]  # the class of what the layers give
        self._given: torch.Tensor | None = None  # hidden states that the layers are to give
        body = module.get_decoder()
        if body is None or body is module or "position_ids" not in inspect.signature(body.forward).parameters:
            raise self._refusal("its layers can't be told from its head, or take no positions")
        self._layers, body.forward = body.forward, self._body
        for part in module.modules():
            part.__dict__["_sglang_lite"] = self
        with torch.inference_mode():
            self.layout = self._find_layout()
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
        return self.layout.numbers * size

    def allocate_cache(self, slots: int) -> KVCache:
        return KVCache.allocate(self.layout, slots, self.dtype, self.device)

    def copy_slots(self, cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
        copy_kv(cache, source, target)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, cache: KVCache) -> torch.Tensor:
        """Hidden states [T, hidden_size]."""
        return self._run(ids, positions, _Step(plan, cache))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, V], by the module's own head and what it does to logits."""
        self._given = hidden[None]
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=self.device)
            found: torch.Tensor = self._module(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            self._given = None
        return found

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, step: _Step) -> torch.Tensor:
        self._step = step
        # Where there are no numbers, transformers must not look for packed sequences in the positions.
        mask = torch.ones_like(ids[None]) if ids.is_meta else None
        try:
            out = self._layers(
                input_ids=ids[None].long(), position_ids=positions[None].long(), attention_mask=mask, use_cache=False,
                return_dict=True,
            )  # fmt: skip
        finally:
            self._step = None
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
        step = self._step
        assert step is not None
        window, softcap, sinks = more.pop("sliding_window", None), more.pop("softcap", None), more.pop("s_aux", None)
        if unknown := [name for name, value in more.items() if value is not None and name not in _WITHOUT_MEANING]:
            raise self._refusal(f"its attention takes {', '.join(unknown)}")
        if not getattr(module, "is_causal", True):
            raise self._refusal("it has attention that is not causal")
        layer, step.layer = step.layer, step.layer + 1
        step.windows.add(window)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        if step.cache is None:
            step.planes.append((Plane(k.shape[1], k.shape[2]), Plane(v.shape[1], v.shape[2])))
            return v.new_zeros(1, len(q), q.shape[1], v.shape[2])
        assert step.plan is not None
        scale = q.shape[2] ** -0.5 if scale is None else scale
        q = store_kv(step.cache, layer, step.plan.store_at, q.contiguous(), k, v)
        sinks = None if sinks is None else sinks.float()
        out = attention(q, step.cache, layer, step.plan, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return out[None]

    # ------------------------------------------------------------------------------------------- the trials

    def _find_layout(self) -> KVLayout:
        step = _Step(None, None)
        self._run(torch.zeros(1, device=self.device), torch.zeros(1, device=self.device), step)
        if not step.planes:
            raise self._refusal("its attention can't be replaced")
        self._check_windows(step.windows)
        return KVLayout(tuple(step.planes))

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
        if found.shape != expected.shape or not (found - expected).abs().max() <= tolerance * expected.abs().max():
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


def _no_mask(*_: Any, **__: Any) -> None:
    """Mask of our attention, which reads from a plan who sees whom."""


def register() -> None:
    """Makes our attention known to transformers."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def outline(path: Path) -> tuple[int, KVLayout | None]:
    """Size of the model in a folder, in numbers, and what a token of it takes, without any of its weights; None where
    that shows only when they are there.

    Raises:
        ModelError: transformers has no such model, or it can't be run so.
    """
    register()
    made = {"attn_implementation": NAME, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, **made)
    except Exception as error:  # as below
        raise _refused(path, error) from error
    numbers = sum(tensor.numel() for tensor in module.parameters())
    try:
        return numbers, FallbackModel(module.eval(), str(path)).layout
    except ModelError:
        raise
    except Exception:  # a choice by numbers, of experts for one, needs numbers
        return numbers, None


def _refused(path: Path, error: Exception) -> ModelError:
    told = f"{type(error).__name__}: {error}".partition("\n")[0]
    return ModelError(f"{path}: there is no code of our own for it, and transformers' can't run it: {told}")


def load_fallback(path: Path, dtype: torch.dtype, device: torch.device, *, dummy: bool = False) -> FallbackModel:
    """Loads the folder at `path`. No code of the folder is run.

    Args:
        dummy: random weights.

    Raises:
        ModelError: transformers has no such model, or it can't be run so.
    """
    register()
    made = {"dtype": dtype, "attn_implementation": NAME, "trust_remote_code": False}
    try:
        if dummy:
            module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), **made)
        else:
            module = AutoModelForCausalLM.from_pretrained(path, **made)
        made_as = type(module).__name__
        if made_as not in (module.config.architectures or ()):
            raise ModelError(f"{path}: config.json names {module.config.architectures}, its model_type is {made_as}'s.")
        return FallbackModel(module.to(device).eval(), str(path))
    except ModelError:
        raise
    except Exception as error:  # transformers' code and each model's raise many kinds
        raise _refused(path, error) from error
