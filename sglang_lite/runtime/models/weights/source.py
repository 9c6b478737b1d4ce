"""What the decoder asks of a checkpoint, and the bookkeeping that leaves no tensor over unnoticed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from sglang_lite.protocol import ModelError

# Tensors that checkpoints carry and a decoder computes for itself.
_IGNORABLE = ("rotary_emb.inv_freq", "rope_freqs.weight")


@dataclass(frozen=True, slots=True)
class Blocks4:
    """A matrix in 4-bit blocks of 32 along its rows: value = scale * q + minimum.

    Attributes:
        q: uint8 [rows, columns], each 0 … 15.
        scale, minimum: float32 [rows, columns / 32].
    """

    q: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor

    def dequantise(self) -> torch.Tensor:
        rows, columns = self.q.shape
        blocks = self.q.view(rows, -1, 32).float()
        return torch.addcmul(self.minimum.unsqueeze(-1), blocks, self.scale.unsqueeze(-1)).view(rows, columns)


class WeightSource(ABC):
    """A checkpoint, read one tensor at a time.

    Args:
        label: the file or folder, for messages.
        names: every tensor in it, by Hugging Face name.
    """

    def __init__(self, label: str, names: set[str]) -> None:
        self.label = label
        self._left = set(names)

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | Blocks4:
        """The tensor, once; float of any precision, or 4-bit blocks as stored.

        Raises:
            ModelError: missing, truncated or of another shape.
        """
        if name not in self._left:
            raise ModelError(f"{self.label}: the tensor {name!r} is missing.")
        self._left.remove(name)
        tensor = self._read(name)
        found = tuple(tensor.q.shape if isinstance(tensor, Blocks4) else tensor.shape)
        if found != shape:
            raise ModelError(f"{self.label}: {name} has shape {found}, the config says {shape}.")
        return tensor

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Says that all was taken. Raises ModelError when tensors are left that the model does not know."""
        left = sorted(n for n in self._left if not n.endswith(_IGNORABLE) and n not in ignored)
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise ModelError(
                f"{self.label}: the model has no place for {', '.join(left[:5])}{more}.",
                hint="The checkpoint is of another architecture than its config says.",
            )

    @abstractmethod
    def _read(self, name: str) -> torch.Tensor | Blocks4: ...
