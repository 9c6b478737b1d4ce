"""Drafters by the names that `EngineConfig.speculation` has for them."""

from __future__ import annotations

from collections.abc import Callable

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.drafting.contexts import again, node
from sglang_lite.runtime.drafting.drafting import Drafting
from sglang_lite.runtime.drafting.grammar import GrammarDrafter
from sglang_lite.runtime.drafting.guess import Drafter
from sglang_lite.runtime.drafting.prompt import PromptDrafter
from sglang_lite.runtime.drafting.states import StateDrafter

DRAFTERS: dict[str, Callable[[EngineConfig], Drafter]] = {
    "again": again, "node": node, "state": StateDrafter, "prompt": PromptDrafter,
}  # fmt: skip


def make_drafting(config: EngineConfig, vocab_size: int, eos_ids: frozenset[int], *, fused: bool) -> Drafting | None:
    """Makes the drafters that a configuration asks for, on a CPU with that of grammars, or None if there is none.

    Args:
        config: configuration of the engine.
        vocab_size: number of token ids.
        eos_ids: tokens that may end a generation.
        fused: whether a GPU's runner runs the model.
    """
    jump = config.jump_forward == "safe"
    drafters = [DRAFTERS[name](config) for name in config.drafters]
    if jump and not fused:  # where a step that is read before the next costs nothing
        drafters.append(GrammarDrafter())
    if not drafters:
        return None
    return Drafting(drafters, config.draft_tokens, vocab_size, eos_ids, jump=jump)
