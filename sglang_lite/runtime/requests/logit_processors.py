"""Logit processors, which change a request's logits, and logit readers, which only read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

# A caller's logit processor: maps the token ids so far and float32 logits [V] to logits [V].
LogitProcessor: TypeAlias = Callable[[list[int], "torch.Tensor"], "torch.Tensor"]


class LogitReader(ABC):
    """Reads the logits that a request draws from, after biases and penalties."""

    @property
    @abstractmethod
    def group(self) -> Hashable:
        """Key of the readers that can read together."""

    @abstractmethod
    def read_together(self, logits: torch.Tensor, readers: Sequence[LogitReader]) -> None:
        """Reads the logits of a step's requests whose readers belong to the same group as this one.
        Must not change them, and must not wait for the device.

        Args:
            logits: float32 [R, V], on their device.
            readers: reader of each row.
        """
