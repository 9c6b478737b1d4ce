"""Interface of the model runners for the step loop, implemented by `cpu_runner` and `gpu_runner`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol import RecordName, TokenArray
from sglang_lite.runtime.executor.prompt_logprobs import PromptLogprobs
from sglang_lite.runtime.executor.sampler import Draws, SampledTokens
from sglang_lite.runtime.executor.step_record import StepRecord
from sglang_lite.runtime.kernels.arena import Arena
from sglang_lite.runtime.kv_cache.host_tier import PageMemory
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.models.model import Model


class LaunchedForward(Protocol):
    """Forward that has been launched and may still be running.

    Attributes:
        scored: log-probabilities of prompt tokens that the forward computes, by row of the step.
    """

    @property
    def scored(self) -> dict[int, PromptLogprobs]: ...


class PendingTokens(Protocol):
    """Tokens whose draws have been launched and may still be running.

    Attributes:
        ready: True once they can be read without waiting.
    """

    @property
    def ready(self) -> bool: ...

    def wait_for_tokens(self) -> SampledTokens:
        """Waits for the draws and returns the tokens."""
        ...


class ModelRunner(Protocol):
    """Model with its KV cache and the state of its slots. A step takes two calls, `forward` and
    `sample`, so that a forward can be launched before masks and other inputs of its draws are
    known.
    """

    @property
    def model(self) -> Model: ...

    def forward(self, record: StepRecord) -> LaunchedForward:
        """Launches the forward of a step and stores the keys and values of its tokens. Everything
        the runner knows about slots comes from the records so far.
        """
        ...

    def allocate_masks(self, rows: int, words: int) -> NDArray[np.int32]:
        """Allocates int32 [rows, words] for the token masks of a step. The step loop fills it
        before `sample`, and again only after the step's tokens have been read.
        """
        ...

    # the value that this runner's `forward` returned
    def sample(self, forward: Any, draws: Draws) -> PendingTokens:
        """Launches draws from the logits of a forward."""
        ...

    def read_recorded_values(
        self, token_slots: Ints, names: Iterable[RecordName]
    ) -> dict[str, TokenArray]:
        """Waits for the forwards launched so far. Then returns values that the cache has recorded
        for the tokens in `token_slots`, int32 [N], such as the experts they chose.
        """
        ...

    def allocate_page_memory(self, slots: int) -> PageMemory:
        """Allocates host memory for copies of `slots` pages of the KV cache."""
        ...

    def allocate_state_memory(self, slots: int) -> PageMemory:
        """Allocates host memory for copies of `slots` states. Its pages are the places of states."""
        ...

    @property
    def cache_memory(self) -> Arena | None:
        """Memory of the KV cache, if it can be released."""
        ...

    def drop_graphs(self) -> None:
        """Frees the captured graphs, if there are any."""
        ...

    def capture_graphs(self) -> None:
        """Captures the graphs again."""
        ...

    def close(self) -> None:
        """Frees the memory of the model and the cache. No method may be called afterwards."""
        ...
