"""The interface of model runners, as the step loop sees them: `cpu_runner` and `gpu_runner` meet it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.executor.prompt_logprobs import Scored
from sglang_lite.runtime.executor.sampler import DrawAdjustments, Masks, Sampled
from sglang_lite.runtime.models.model import Model
from sglang_lite.runtime.scheduler.batch import Batch


class LaunchedForward(Protocol):
    """A forward that was launched and may still be running.

    Attributes:
        batch: the batch that it computes.
        scored: by row of the batch, log-probabilities of prompt tokens that this step computes.
    """

    @property
    def batch(self) -> Batch: ...

    @property
    def scored(self) -> dict[int, Scored]: ...


class PendingTokens(Protocol):
    """Tokens that are being drawn."""

    def read(self) -> Sampled:
        """The tokens, after waiting for them."""
        ...


class ModelRunner(Protocol):
    """A model with its KV cache and the state of its slots. A step is two calls, `forward` and `sample`, so that what a
    draw depends on need not be known when the forward is launched."""

    @property
    def model(self) -> Model: ...

    def forward(self, batch: Batch) -> LaunchedForward:
        """Launches the computation of the batch's tokens, whose keys and values are stored."""
        ...

    def allocate_masks(self, rows: int, words: int) -> NDArray[np.int32]:
        """Memory for the masks of a step, int32 [rows, words], which the loop writes before `sample` and again once the
        step's tokens have been read."""
        ...

    def sample(
        self,
        forward: Any,  # this runner's own, as `forward` returned it
        rows: NDArray[np.int64],
        special: dict[int, DrawAdjustments],
        masks: Masks | None = None,
    ) -> PendingTokens:
        """Launches the draws of the next tokens of some rows.

        Args:
            rows: indices of rows of the batch [R].
            special: by index into `rows`, requirements of its draw beyond the sampling table.
            masks: allowed tokens of the rows that have a grammar.
        """
        ...

    def replace(self, model: Model) -> None:
        """Takes another model of the same shape. Keys and values in the cache stay those of the model before."""
        ...

    def close(self) -> None:
        """Frees the model's and the cache's memory. No other call may follow."""
        ...
