"""Runs a transformers module on a GPU with our attention kernels and CUDA graphs.

Matrix products use the kernels of our own decoder. RMS norms and rotary embeddings, which
transformers writes as many small operations, are each replaced by one kernel if it gives the same
results on random inputs.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from sglang_lite.runtime.attention.base import StepAttention
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.gemv import SmallBatchLinear
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.kv_layout import SoundPrefix
from sglang_lite.runtime.kernels.kv_store import kv_store
from sglang_lite.runtime.kernels.norm import norm
from sglang_lite.runtime.kernels.reference.page_table import token_slots
from sglang_lite.runtime.kernels.rotate import rotate
from sglang_lite.runtime.models.layers.gpu_linear import GpuLinear
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import NO_ROPE, AttentionSpec
from sglang_lite.runtime.models.transformers_model import AttentionProbe, TransformersModel

_MEASURED = 1024  # tokens of the run that measures the memory per token


class GpuTransformersModel(TransformersModel):
    """Transformers module that runs on a GPU. Takes the arguments of TransformersModel.

    Attributes:
        uncapturable: reason why the model's steps can't be captured in a CUDA graph, or None
            if they can.

    Raises:
        ModelError: keys and values differ in size or heads, or TransformersModel rejects the
            module.
    """

    fused = True
    both_ways = False
    sound: SoundPrefix | None = None

    def __init__(self, module: Any, label: str) -> None:  # arguments of TransformersModel
        super().__init__(module, label)
        self.attentions = self._attention_specs(self.trial)
        self.precision = Precision(self.dtype, self.dtype, self.dtype)
        self.vocab_size: int = module.config.get_text_config().vocab_size
        self.uncapturable: str | None = None
        self.activation_elements = 0
        self.active_parameters = sum(weight.numel() for weight in module.parameters())
        if self.device.type != "meta":
            with torch.inference_mode():
                _use_kernels(module)
                if self.device.type == "cuda":
                    self.uncapturable = self._find_synchronisation()
                    self.activation_elements = self._measure_activations()

    @property
    def shares_prefixes(self) -> bool:
        return all(rules.window is None for rules in self.trial.rules)

    @torch.inference_mode()
    def run(self, plan: DevicePlan, cache: KVCache, attention: StepAttention) -> torch.Tensor:
        """Computes the plan's tokens and stores their keys and values.

        Args:
            plan: device plan of the step.
            cache: KV cache.
            attention: attention that has been prepared for this plan.

        Returns:
            Hidden states [T, hidden_size].
        """
        ids = torch.where(plan.ids < 0, plan.last_tokens[plan.slots], plan.ids)
        store_at = token_slots(plan, plan.slots, plan.positions)

        def attend_paged(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: AttentionRules
        ) -> torch.Tensor:
            k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
            kv_store(k, v, store_at, cache, layer)
            q = q.to(self.dtype)
            # the kernels need a token's heads to be contiguous
            if q.stride()[1:] != (q.shape[2], 1):
                q = q.contiguous()
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            attention.attend(q, cache, layer, out, rules)
            return out.to(v.dtype)

        return self._run_module(ids, plan.positions, attend_paged)

    def _attention_specs(self, trial: AttentionProbe) -> tuple[AttentionSpec, ...]:
        if any(len(set(planes)) > 1 for planes in trial.planes):
            raise self._unsupported_module_error(
                'on a GPU, as its keys and its values differ in size or heads: use device="cpu"'
            )
        return tuple(
            AttentionSpec(
                heads,
                keys.heads,
                keys.size,
                keys.size,
                rules.scale,
                NO_ROPE,
                sinks=rules.sinks is not None,
            )
            for heads, (keys, _), rules in zip(trial.heads, trial.planes, trial.rules)
        )

    def _find_synchronisation(self) -> str | None:
        """Runs a step in which CUDA synchronisation is forbidden. Returns the error of the
        operation that needs it, or None.
        """
        before = torch.cuda.get_sync_debug_mode()
        ids = torch.zeros(2, dtype=torch.int32, device=self.device)
        # initialises what a module creates at its first call
        self.raw_logits(self._run_module(ids, ids, AttentionProbe()))
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.raw_logits(self._run_module(ids, ids, AttentionProbe()))
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return str(error).partition("\n")[0]
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return None

    def _measure_activations(self) -> int:
        """Measures the peak number of activation elements per token in a trial run."""
        ids = torch.zeros(_MEASURED, dtype=torch.int32, device=self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._run_module(ids, ids, AttentionProbe())
        held = torch.cuda.max_memory_allocated(self.device) - before
        return -(-held // (_MEASURED * int(self.dtype.itemsize)))


# ----------------------------------------------------------------------- faster forwards of modules


def _use_kernels(module: nn.Module) -> None:
    """Replaces the forwards of a module's linear layers, RMS norms and attentions by equivalent
    faster ones.
    """
    few = SmallBatchLinear(next(module.parameters()).device)
    for part in module.modules():
        forward = (
            _forward_with_product_kernel(part, few)
            if type(part) is nn.Linear
            else _forward_with_norm_kernel(part) or _forward_with_rotary_kernel(part)
        )
        if forward is not None:
            part.forward = forward


def _forward_with_product_kernel(
    part: nn.Linear, few: SmallBatchLinear
) -> Callable[..., torch.Tensor]:
    product = GpuLinear(part.weight, part.bias, few)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return product(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], -1)

    return forward


def _forward_with_norm_kernel(part: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Returns a forward that computes an RMS norm with one kernel. Returns None if the module is
    not an RMS norm, or the kernel's results differ from the module's.
    """
    weight = getattr(part, "weight", None)
    eps = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    if (
        not type(part).__name__.endswith("RMSNorm")
        or not isinstance(weight, nn.Parameter)
        or weight.ndim != 1
    ):
        return None
    if not isinstance(eps, float) or len(inspect.signature(part.forward).parameters) != 1:
        return None

    def forward(x: torch.Tensor) -> torch.Tensor:
        return norm(x.reshape(-1, len(weight)), weight, eps).view(x.shape)

    x = _random_tensor((4, len(weight)), weight.dtype, weight.device)
    return forward if _equal_up_to_rounding(forward(x), part.forward(x)) else None


_ROTATION = "apply_rotary_pos_emb"  # name of the function in most of transformers' model files


def _forward_with_rotary_kernel(part: nn.Module) -> Callable[..., Any] | None:
    """Returns a forward for an attention module that uses our rotary kernel. Returns None if the
    module's rotation is not of the common kind.
    """
    forward = inspect.unwrap(type(part).forward)  # 5.24 renames arguments around it
    if not isinstance(forward, types.FunctionType) or _ROTATION not in forward.__code__.co_names:
        return None
    theirs = forward.__globals__.get(_ROTATION)
    first = next(part.parameters())
    if theirs is None or not _has_equal_rotation(theirs, first.dtype, first.device):
        return None

    def rotate_with_kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *more: Any,
        **named: Any,
    ) -> Any:
        rows = q, k, cos, sin
        if (
            more
            or named
            or any(
                x.shape[-1] != q.shape[-1] or x.stride(-1) != 1 or x.dtype != q.dtype for x in rows
            )
        ):
            return theirs(*rows, *more, **named)
        return rotate(*rows)

    ours = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTATION: rotate_with_kernel},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    ours.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(ours, part)


@cache
def _has_equal_rotation(
    theirs: Callable[..., Any], dtype: torch.dtype, device: torch.device
) -> bool:
    names = list(inspect.signature(theirs).parameters.values())
    if [name.name for name in names[:4]] != ["q", "k", "cos", "sin"] or any(
        n.default is n.empty for n in names[4:]
    ):
        return False
    tables = (_random_tensor((1, 3, 16), dtype, device, seed) for seed in (0, 1))
    rows = (
        _random_tensor((1, 2, 3, 16), dtype, device, 2),
        _random_tensor((1, 1, 3, 16), dtype, device, 3),
        *tables,
    )
    try:
        expected = theirs(*rows)
    except RuntimeError:  # its tables have another shape
        return False
    return all(map(_equal_up_to_rounding, rotate(*rows), expected))


def _random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _equal_up_to_rounding(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns whether two tensors differ by no more than rounding."""
    tolerance = max(1e-5, 2 * torch.finfo(expected.dtype).eps)
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())
