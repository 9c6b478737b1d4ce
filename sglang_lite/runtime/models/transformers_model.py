"""Any causal language model of transformers on our KV cache: transformers' own module with our
attention plugged in.

This module runs it with torch operations; gpu_transformers_model.py runs the same module as GPU
steps.

A trial run finds the cache layout that each layer needs. A second trial checks that nothing but
keys and values passes from token to token: a model that keeps other state, or has its own form of
attention, is rejected. A third trial repeats that check with narrow windows, chunks and other
limits.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only
from transformers import AttentionInterface

from sglang_lite.protocol import ModelError
from sglang_lite.protocol.anything import Foreign
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, AttentionRules, ExtendRow
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.kv_layout import KVLayout, Plane
from sglang_lite.runtime.kernels.reference.attention import attention, store_kv
from sglang_lite.runtime.models.cached_module import CachedModule

NAME = "sglang_lite"  # name that our attention is registered under in transformers
_TRIAL = 12  # tokens of the second trial run
# Largest difference between the trial run in one step and in several, relative to the norm of a
# token's hidden state: in float64, where rounding causes 3e-13 in 8 layers of random weights, and
# in their own dtype for quantised models, which have no other. In bfloat16 rounding causes 0.04 in
# 32 layers without experts, and up to 1.2 where it changes the choice of experts; an ignored window
# causes 0.56 or more.
_TOLERANCE = 1e-6
_COARSE = 0.2
# Names of limits in tokens that a module reads when it runs; those of transformers are found by
# tests/runtime/models/test_transformers_limits.py.
LIMITS = re.compile(r"window|chunk|extent|floor|distance|budget|^index_(topk|block|local)")
_NARROW = 3  # tokens of each limit in the third trial run
_HINT = "Use a model of the families in docs/models.md."
# Arguments of transformers' attention that have no effect here: the plan holds the positions, and
# dropout is off.
_WITHOUT_MEANING = frozenset({
    "attention_mask", "dropout", "position_ids", "cache_position", "past_key_values", "past_key_value", "use_cache",
    "output_attentions", "output_hidden_states", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "layer_idx", "return_dict", "logits_to_keep", "head_mask", "position_embeddings", "deterministic",
    "num_items_in_batch",
})  # fmt: skip


class AttendLayer(Protocol):
    """Callback that computes one layer's attention during one run of a module."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        """Stores keys and values [T, kv_heads, size] and attends with the queries.

        Args:
            layer: index of the layer.
            q: queries [T, heads, size].
            rules: scale, window, soft cap and sinks of the scores.

        Returns:
            Outputs [T, heads, value size].
        """
        ...


class AttentionProbe:
    """Attention callback of a trial run: records each layer's heads, cache planes and scoring
    rules; returns zeros.
    """

    def __init__(self) -> None:
        self.heads: list[int] = []
        self.planes: list[tuple[Plane, ...]] = []
        self.rules: list[AttentionRules] = []

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        self.heads.append(q.shape[1])
        self.planes.append((Plane(k.shape[1], k.shape[2]), Plane(v.shape[1], v.shape[2])))
        self.rules.append(rules)
        return v.new_zeros(len(q), q.shape[1], v.shape[2])


class TransformersModel(CachedModule):
    """Module of transformers that keeps its keys and values in our KV cache.

    Args:
        module: causal language model of transformers, loaded with our attention implementation.
        label: name of the model for messages.

    Raises:
        ModelError: the model keeps other state than keys and values, or its attention is not
            supported.
    """

    fused = False

    def __init__(self, module: Any, label: str) -> None:  # transformers has a class for each model
        self.label = label
        self.dtype = module.dtype
        self.device = module.device
        self._module = module
        self._attend: AttendLayer | None = None  # callback of the current run
        self._layer = 0  # index of the layer whose attention is called next
        self._output: Callable[..., object]  # class of the layers' output
        # hidden states that the layers return instead of computing them
        self._head_input: torch.Tensor | None = None
        body = module.get_decoder()
        if (
            body is None
            or body is module
            or "position_ids" not in inspect.signature(body.forward).parameters
        ):
            raise self._unsupported_module_error(
                "its code has no decoder that runs by itself, at positions that it is given"
            )
        self._layers = body.forward
        body.forward = self._run_layers_or_head_input
        for part in module.modules():
            part.__dict__["_sglang_lite"] = self
        module.requires_grad_(False)
        with torch.inference_mode():
            self.trial = self._probe_attention()
            self.kv_layout = KVLayout(tuple(self.trial.planes))
            if self.device.type != "meta":
                with _compute_in_float64(module):
                    self._check_against_reference()

    def _run_layers_or_head_input(
        self, *args: Any, **kwargs: Any
    ) -> Any:  # signature of the module's own forward
        """Runs the module's layers. If `_head_input` is set, returns `_head_input` as their output
        instead, and the module's head runs only on these rows.
        """
        if self._head_input is None:
            return self._layers(*args, **kwargs)
        return self._output(last_hidden_state=self._head_input)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, cache: KVCache
    ) -> torch.Tensor:
        """Computes hidden states [T, hidden_size] of new tokens and stores the tokens' keys and
        values in the cache.
        """

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: AttentionRules
        ) -> torch.Tensor:
            q = store_kv(cache, layer, plan.store_at, q.contiguous(), k, v)
            return attention(q, cache, layer, plan, rules)

        return self._run_module(ids, positions, attend)

    def raw_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Computes logits [R, V] in the head's dtype with the module's own head, including whatever
        the module applies to its logits. Writes them to `out` if given.
        """
        self._head_input = hidden[None]
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=self.device)
            found: torch.Tensor = self._module(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._head_input = None
        return found if out is None else out.copy_(found)

    def _run_module(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: AttendLayer
    ) -> torch.Tensor:
        self._attend = attend
        self._layer = 0
        try:
            out = self._layers(
                input_ids=ids[None].long(),
                position_ids=positions[None].long(),
                use_cache=False,
                return_dict=True,
            )
        finally:
            self._attend = None
        self._output = type(out)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        **more: Foreign,
    ) -> torch.Tensor:
        """Computes a layer's attention when transformers calls it; returns [1, T, heads, value
        size].

        Args:
            module: attention module that makes the call.
            q, k, v: queries, keys and values, [1, heads, T, size] each.
            scale: factor of the scores, or None for 1 / sqrt(size).
            more: further keyword arguments that transformers passes to an attention.

        Raises:
            ModelError: the attention is not causal, or takes an argument that is not supported.
        """
        assert self._attend is not None
        window = more.pop("sliding_window", None)
        softcap = more.pop("softcap", None)
        sinks = more.pop("s_aux", None)
        if unknown := [
            name
            for name, value in more.items()
            if value is not None and name not in _WITHOUT_MEANING
        ]:
            raise self._unsupported_module_error(f"its attention takes {', '.join(unknown)}")
        if not getattr(module, "is_causal", True):
            raise self._unsupported_module_error("it has attention that is not causal")
        layer = self._layer
        self._layer = self._layer + 1
        scale = q.shape[3] ** -0.5 if scale is None else scale
        rules = AttentionRules(scale, window, softcap, None if sinks is None else sinks.float())
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        # as modules expect that take a view of it
        return self._attend(layer, q, k, v, rules)[None].contiguous()

    # ----------------------------------------------------------------------------------- the trials

    def _probe_attention(self) -> AttentionProbe:
        self._check_layer_types()
        trial = AttentionProbe()
        try:
            self._run_module(
                torch.zeros(1, device=self.device), torch.zeros(1, device=self.device), trial
            )
        except (TypeError, AttributeError, KeyError) as error:
            if self.device.type == "meta":  # the code may need values
                raise
            raise self._unsupported_module_error(
                f"`{_innermost_failed_module(error)}` needs more than an attention over cached keys and values, "
                f"such as the masks that transformers builds ({type(error).__name__}: {error})"
            ) from error
        if not trial.planes:
            raise self._unsupported_module_error("its attention can't be replaced")
        self._check_rotation()
        self._check_windows({rules.window for rules in trial.rules})
        return trial

    def _check_layer_types(self) -> None:
        config = self._module.config.get_text_config()
        if left := {*(getattr(config, "layer_types", None) or ())} - {
            "full_attention",
            "sliding_attention",
        }:
            raise self._unsupported_module_error(f"it has layers of {', '.join(sorted(left))}")
        if getattr(config, "attention_chunk_size", None) is not None:
            raise self._unsupported_module_error(
                "it uses chunked attention (`attention_chunk_size`)"
            )

    def _check_windows(self, windows: set[int | None]) -> None:
        types = getattr(self._module.config.get_text_config(), "layer_types", None) or ()
        if "sliding_attention" in types and windows <= {None}:
            raise self._unsupported_module_error("its layers have a sliding window of unknown size")

    def _check_rotation(self) -> None:
        """Rejects longrope. With it, transformers chooses the factors of all rows by the longest
        row of the batch.
        """
        config = self._module.config.get_text_config()
        found = getattr(config, "rope_parameters", None) or {}
        longest = getattr(config, "max_position_embeddings", None)
        for rope in (found, *found.values()):  # one, or one for each kind of layers
            if not isinstance(rope, dict) or rope.get("rope_type") != "longrope":
                continue
            first = rope.get("original_max_position_embeddings")
            if first is None or longest is None or longest > first:
                raise self._unsupported_module_error(
                    "its rotary embedding depends on the longest row of a batch (longrope)"
                )

    def _check_against_reference(self) -> None:
        """Checks that transformers' hidden states of random tokens equal ours, which are computed
        in three steps over a cache. Repeats the check with windows and other limits so narrow that
        the tokens exceed them.
        """
        self._compare_with_reference(
            "its hidden states differ from transformers', so it keeps other state than keys and values, or has "
            "its own form of attention"
        )
        with _narrow_limits(self._module) as names:
            if names:
                self._compare_with_reference(
                    f"its hidden states differ from transformers' beyond its limits ({', '.join(names)})"
                )

    def _compare_with_reference(self, reason: str) -> None:
        vocab = self._module.config.get_text_config().vocab_size
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab, _TRIAL)).to(self.device)
        positions = torch.arange(_TRIAL, device=self.device)
        expected = self._run_reference(ids)
        cache = KVCache.allocate(self.kv_layout, _TRIAL, expected.dtype, self.device)
        half = _TRIAL // 2
        parts = []
        for start, end in ((0, half), (half, _TRIAL - 1), (_TRIAL - 1, _TRIAL)):
            parts.append(
                self.forward(
                    ids[start:end],
                    positions[start:end],
                    _single_row_plan(start, end, self.device),
                    cache,
                )
            )
        found = torch.cat(parts)
        if not self._agrees_with_reference(found, expected):
            if self._agrees_with_reference(found, self._run_reference(ids, positions)):
                reason = "its positions do not count from 0"
            raise self._unsupported_module_error(reason)

    def _agrees_with_reference(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        if found.shape != expected.shape:
            return False
        tolerance = _TOLERANCE if found.dtype == torch.float64 else _COARSE
        return bool(((found - expected).norm(dim=-1) <= tolerance * expected.norm(dim=-1)).all())

    def _run_reference(
        self, ids: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._module.set_attn_implementation("eager")
        try:
            given = {} if positions is None else {"position_ids": positions[None]}
            out = self._layers(input_ids=ids[None], use_cache=False, return_dict=True, **given)
        finally:
            self._module.set_attn_implementation(NAME)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _unsupported_module_error(self, reason: str) -> ModelError:
        name = type(self._module).__name__
        return ModelError(
            f"{self.label}: {name} can't be run through transformers: {reason}.", hint=_HINT
        )


@contextmanager
def _compute_in_float64(module: Any) -> Iterator[None]:  # a model of transformers
    """Makes a module compute in float64 unless it is quantised. Experts run one by one, as grouped
    matmuls don't support float64.
    """
    if getattr(module.config, "quantization_config", None) is not None:
        yield
        return
    experts = module.config._experts_implementation  # noqa: SLF001 # transformers has no other way to read it
    module.set_experts_implementation("eager")
    try:
        with InFloat64():
            yield
    finally:
        module.set_experts_implementation(experts)


@contextmanager
def _narrow_limits(module: nn.Module) -> Iterator[list[str]]:
    """Lowers all limits of a module, such as windows, to `_NARROW` tokens while the context is
    open. Yields the names of the limits that it lowered.
    """
    parts = list(module.modules())
    configs = [config for part in parts if (config := getattr(part, "config", None)) is not None]
    configs += [config.get_text_config() for config in configs]
    saved = []
    for owner in {id(owner): owner for owner in (*parts, *configs)}.values():
        for name, value in vars(owner).items():
            if LIMITS.search(name) and (narrow := _cap_limit(value)) != value:
                saved.append((owner, name, value))
                setattr(owner, name, narrow)
    try:
        yield sorted({name for _, name, _ in saved})
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)


def _cap_limit(value: Foreign) -> Foreign:
    """Caps a limit, or a list with one per layer, at `_NARROW` tokens. Returns any other value
    unchanged.
    """
    if isinstance(value, list | tuple):
        return type(value)(map(_cap_limit, value))
    return min(value, _NARROW) if type(value) is int else value


def _innermost_failed_module(error: BaseException) -> str:
    """Returns the class name of the innermost module whose code raised the error."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next(type(owner).__name__ for owner in reversed(owners) if isinstance(owner, nn.Module))


def _single_row_plan(start: int, end: int, device: torch.device) -> AttentionPlan:
    """Returns the attention plan of tokens start … end-1 of a single row, in which slots equal
    positions.
    """
    row = ExtendRow(0, end - start, slice(0, end))
    return AttentionPlan(torch.arange(start, end, device=device), (), (row,))


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention for transformers, through the TransformersModel that owns the module."""
    return module.__dict__["_sglang_lite"].attend(module, query, key, value, scaling, **more), None


def register() -> None:
    """Registers our attention with transformers.

    No mask function is registered, so transformers builds no masks: the attention plan defines what
    each token attends to.
    """
    AttentionInterface.register(NAME, _attend)


_SHORT = frozenset({torch.bfloat16, torch.float16, torch.float32})
# Operations that copy numbers: those taken from a table of all tokens or experts are converted
# where they are used.
_COPIES = frozenset(
    {
        torch.ops.aten.embedding.default,
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_select.default,
    }
)


class InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Context in which operations on 16-bit and 32-bit numbers compute and return float64, whatever
    dtype was requested. A weight is converted each time an operation uses it, and the copy is not
    kept.

    Two ways to compute the same thing differ by rounding. In bfloat16 that can be enough to change
    a router's choice of experts. In float64 they agree to about 1e-13, so a larger difference means
    that they compute different things.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # whatever an operation takes and returns
        given, named = tree_map(_widen_dtype, (args, kwargs or {}))
        if func.is_view or func in _COPIES:
            return func(*given, **named)
        # writes its first argument, which it returns
        if func.overloadpacket.__name__.endswith("_"):
            return func(given[0], *_widen_tensors(given[1:]), **_widen_tensors(named))
        return _widen_tensors(func(*_widen_tensors(given), **_widen_tensors(named)))


def _widen_dtype(value: Any) -> Any:  # any argument
    return torch.float64 if isinstance(value, torch.dtype) and value in _SHORT else value


def _widen_tensors(values: Any) -> Any:  # any argument or result
    return tree_map_only(
        torch.Tensor, lambda each: each.double() if each.dtype in _SHORT else each, values
    )
