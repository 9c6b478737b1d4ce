"""The interface between the interpreter and whatever generates.

A backend implements the native hooks (`agenerate`, `aselect`: coroutines that stream), or SGLang's blocking ones
(`generate`, `generate_stream`, `select`), which are then run on a bounded pool of threads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_lite.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sglang_lite.protocol import (
    CapabilityError,
    Choices,
    Constraint,
    Delta,
    Generation,
    JsonSchema,
    Prompt,
    Regex,
    SamplingParams,
    Selection,
)
from sglang_lite.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from sglang_lite.lang.interpreter import StreamExecutor


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can honour. A program that needs more is refused before the call that would need it.

    Attributes:
        constraints: the kinds of constraint it enforces.
        select: it scores choices.
        samples: `n` > 1 in one call.
        images: it can see.
    """

    constraints: frozenset[type] = frozenset({Regex, JsonSchema, Choices})
    select: bool = True
    samples: bool = True
    images: bool = False


class BaseBackend:
    """Subclass this for a backend of your own.

    Attributes:
        capabilities: what it can honour.
        chat_template: how roles become text.
        support_concate_and_append: SGLang's hook for joining KV caches; text is joined where it is False.
        max_threads: of the pool that runs blocking hooks.
    """

    capabilities: Capabilities = Capabilities()
    support_concate_and_append = False
    max_threads = 64

    def __init__(self) -> None:
        self.chat_template: ChatTemplate | None = None

    # ----------------------------------------------------------------------------------- native hooks

    def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Generates `params.n` continuations: deltas if `stream`, and at its end each sample's Generation."""
        raise CapabilityError(f"{type(self).__name__} can't generate: it has neither agenerate nor generate.")

    async def aselect(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Selection:
        """Scores the choices as continuations of the prompt."""
        raise CapabilityError(f"{type(self).__name__} can't select: it has neither aselect nor select.")

    # -------------------------------------------------------------------------- SGLang's blocking hooks

    def generate(self, s: StreamExecutor, sampling_params: Any) -> tuple[Any, dict[str, Any]]:
        """The continuation of `s.text_` (a list where n > 1), and what is to be known about it."""
        raise NotImplementedError

    def generate_stream(self, s: StreamExecutor, sampling_params: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """The same in pieces."""
        raise NotImplementedError

    def select(
        self, s: StreamExecutor, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        raise NotImplementedError

    def get_model_name(self) -> str:
        raise NotImplementedError

    def get_chat_template(self) -> ChatTemplate | None:
        """How roles become text; None where the model has no template."""
        return self.chat_template

    def cache_prefix(self, prefix_str: str) -> None:
        """A hint: many prompts will start with this text."""

    def uncache_prefix(self, rid: str) -> None:
        """The hint no longer holds."""

    def begin_program(self, s: StreamExecutor) -> None:
        """A program starts."""

    def end_program(self, s: StreamExecutor | list[StreamExecutor]) -> None:
        """A program has ended."""

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        """A hint, before a fork: several continuations of `s.text_` will follow."""

    def fork_program(self, src: StreamExecutor, dst: list[StreamExecutor], position_ids_offset: Any = None) -> None:
        """A state was forked."""

    def concatenate_and_append(self, src_rids: list[str], dst_rid: str) -> None:
        """Joins KV caches; only called where support_concate_and_append is True."""
        raise NotImplementedError

    def flush_cache(self) -> bool | None:
        """Drops cached prefixes; None where there is no cache to drop."""
        return None

    def get_server_info(self) -> dict[str, Any] | None:
        """What runs behind it; None where that is not known."""
        return None

    def shutdown(self) -> None:
        """Frees what the backend holds."""
