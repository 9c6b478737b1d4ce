"""The registry is the one list of attention backends: the config takes its names, and each has a
class that can refuse.
"""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.attention.base import AttentionRequirements
from sglang_lite.runtime.attention.registry import (
    BUILTIN_BACKENDS,
    AttentionBackendName,
    make_attention,
)
from sglang_lite.runtime.config import EngineConfig
from tests.runtime.kernels import needs_kernels

HALF = torch.float16


@needs_kernels
def test_only_our_own_kernels_give_the_same_bits_in_every_batch():
    requirements = AttentionRequirements(
        2,
        1,
        64,
        HALF,
        HALF,
        torch.device("cpu"),
        max_rows=1,
        max_chunks=0,
        batch_invariant=True,
        longest=64,
    )
    assert {type(make_attention(name, requirements)).__name__ for name in ("auto", "triton")} == {
        "InvariantAttention"
    }
    with pytest.raises(
        ParameterError, match=r"'torch' can't run this model: its results depend .* can: 'triton'"
    ):
        make_attention("torch", requirements)
    with pytest.raises(
        ParameterError, match=r"attention sinks are not supported. Leave deterministic out"
    ):
        make_attention("auto", replace(requirements, sinks=True))
    with pytest.raises(ParameterError, match=r"ALiBi is not supported. Leave deterministic out"):
        make_attention("auto", replace(requirements, alibi=True))


@needs_kernels
@pytest.mark.parametrize("name", get_args(AttentionBackendName))
def test_a_name_of_the_registry_is_a_setting_with_a_backend(name):
    assert EngineConfig(attention_backend=name).attention_backend == name
    requirements = AttentionRequirements(
        2, 1, 64, HALF, HALF, torch.device("cpu"), max_rows=1, max_chunks=0
    )
    if name == "auto" or name in BUILTIN_BACKENDS:
        assert callable(make_attention(name, requirements).plan_step)
    else:  # packages, which need a GPU
        with pytest.raises(
            ParameterError, match=f"'{name}' can't run this model: .* can: 'triton', 'torch'"
        ):
            make_attention(name, requirements)
