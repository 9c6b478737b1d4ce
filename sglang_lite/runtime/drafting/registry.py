"""Drafters by the names that `EngineConfig.speculation` has for them."""

from __future__ import annotations

from collections.abc import Callable

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.drafting.contexts import again, node
from sglang_lite.runtime.drafting.drafting import Drafting
from sglang_lite.runtime.drafting.guess import Drafter
from sglang_lite.runtime.drafting.prompt import PromptDrafter

DRAFTERS: dict[str, Callable[[], Drafter]] = {"again": again, "node": node, "prompt": PromptDrafter}


def make_drafting(config: EngineConfig, vocab_size: int, eos_ids: frozenset[int]) -> Drafting | None:
    """Makes the drafters that a configuration asks for, or None if it asks for none.

    Args:
        config: configuration of the engine.
        vocab_size: number of token ids.
        eos_ids: tokens that may end a generation.
    """
    if not config.drafters:
        return None
    drafters = [DRAFTERS[name]() for name in config.drafters]
    jump = config.jump_forward == "safe"
    return Drafting(drafters, config.draft_tokens, vocab_size, eos_ids, jump=jump)
