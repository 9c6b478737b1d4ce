"""Drafters by their names in `EngineConfig.speculation`."""

from __future__ import annotations

from collections.abc import Callable

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.drafting.contexts import make_node_drafter, make_same_prompt_drafter
from sglang_lite.runtime.drafting.drafting import Drafting
from sglang_lite.runtime.drafting.grammar import GrammarDrafter
from sglang_lite.runtime.drafting.guess import Drafter
from sglang_lite.runtime.drafting.prompt import PromptDrafter
from sglang_lite.runtime.drafting.states import StateDrafter

DRAFTERS: dict[str, Callable[[EngineConfig], Drafter]] = {
    "again": make_same_prompt_drafter,
    "node": make_node_drafter,
    "state": StateDrafter,
    "prompt": PromptDrafter,
}


def make_drafting(
    config: EngineConfig, vocab_size: int, eos_ids: frozenset[int], *, fused: bool
) -> Drafting | None:
    """Creates the configured drafters. Adds the grammar drafter if `jump_forward` is "safe" and the
    model does not run on a GPU's runner. Returns None if there are no drafters.

    Args:
        config: configuration of the engine.
        vocab_size: number of token ids.
        eos_ids: tokens that may end a generation.
        fused: whether a GPU's runner runs the model.
    """
    jump = config.jump_forward == "safe"
    drafters = [DRAFTERS[name](config) for name in config.drafters]
    if jump and not fused:  # on a CPU, reading a step's tokens before the next step costs nothing
        drafters.append(GrammarDrafter())
    if not drafters:
        return None
    return Drafting(drafters, config.draft_tokens, vocab_size, eos_ids, jump=jump)
