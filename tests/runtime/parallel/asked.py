"""Small models of each kind that ranks on GPUs share, and requests of all kinds."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import (
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from sglang_lite.protocol import Generation, Regex, SamplingParams
from sglang_lite.runtime.kernels.sampling import BLOCK
from tests.runtime.models.tiny import randomise, save

if TYPE_CHECKING:
    import sglang_lite as sgl
    from tests.runtime.parallel.sharing import InTurn

SHAPE: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=None, tie_word_embeddings=True,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
)
LATENTS: dict[str, Any] = dict(
    num_key_value_heads=4, head_dim=8, kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8,
    v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16,
    first_k_dense_replace=0, n_shared_experts=1,
)  # fmt: skip
MODELS: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "dense": (Qwen3ForCausalLM, {}), "experts": (Qwen3MoeForCausalLM, EXPERTS),
    "latents": (DeepseekV3ForCausalLM, LATENTS),
}  # fmt: skip


def saved(folder: Path, kind: str = "dense", **changes: Any) -> Path:
    """A model of a kind, in a folder."""
    made, own = MODELS[kind]
    config = made.config_class(**{"vocab_size": BLOCK + 100} | SHAPE | own | changes)
    return save(randomise(made(config)), folder)


REQUESTS: list[tuple[dict[str, Any], Any]] = [
    ({}, None),
    ({"temperature": 0.8, "seed": 3}, None),
    ({"temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9}, None),
    ({"temperature": 0.9, "seed": 5, "frequency_penalty": 0.7, "logit_bias": ((7, 2.0),)}, None),
    ({"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 2}, None),
    ({"temperature": 1.0, "seed": 6, "ignore_eos": False}, Regex("[a-d]{3,9}")),
]


def answers(engine: sgl.Engine | InTurn, block: int = BLOCK) -> list[Generation]:
    """Ids and log-probabilities of requests of all kinds, that run together, and of one behind a
    cached prefix.

    Args:
        block: number of logits that a program reads; prompts have a token of the second block.
    """
    found: list[Generation] = []
    asked = [
        ([5 + i, 9, block + 4, 17, 30 + i] * (1 + i % 3), *request)
        for i, request in enumerate(REQUESTS)
    ]
    behind = (asked[0][0] + [3, 1], REQUESTS[1][0] | {"max_tokens": 2}, None)
    for batch in (asked, [behind]):
        futures: list[Future[Any]] = []
        for prompt, given, constraint in batch:
            futures.append(Future())
            params = SamplingParams(
                **{"temperature": 0, "max_tokens": 3, "ignore_eos": True, **given}
            )
            engine.submit(prompt, params, constraint, sink=futures[-1].set_result)
        found += [future.result(timeout=300) for future in futures]
    return found


def compare(found: list[Generation], expected: list[Generation]) -> None:
    """Asserts equal tokens, with equal log-probabilities up to rounding."""
    for own, one in zip(found, expected, strict=True):
        assert own.token_ids == one.token_ids
        entries = zip(
            [*own.prompt_logprobs, *own.output_logprobs],
            [*one.prompt_logprobs, *one.output_logprobs],
        )
        for mine, its in entries:
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)
            assert [token for _, token, _ in mine.top] == [token for _, token, _ in its.top]
