"""Reads next-token distributions from logits and sums them up by the tokens' outcomes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.exact.beginnings import Beginning, MassRow
from sglang_lite.runtime.requests.logit_processors import LogitReader
from sglang_lite.runtime.structured_output.outcomes import FIRST_END, Outcomes

_MAX_NUMBERS = 8 << 20  # most probabilities that are in memory at the same time
_FEW_ENDS = 8


class OutcomeReader(LogitReader):
    """Sums the probabilities of a row's next tokens by outcome, on the device of the logits.

    Args:
        outcomes: outcomes of the tokens.

    Attributes:
        outcomes: the argument of this name. Rows with the same outcomes are read together.
        found: table of the rows that were read together, and the index of this reader's row in it;
            None before `read_together`.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self.outcomes = outcomes
        self.found: tuple[_Table, int] | None = None

    @property
    def group(self) -> Hashable:
        return self.outcomes

    def read_together(self, logits: torch.Tensor, readers: Sequence[LogitReader]) -> None:
        classes, live = _tensors_of_outcomes(self.outcomes, logits.device)
        ends = len(self.outcomes.ends)
        chunk = max(_MAX_NUMBERS // logits.shape[1], 1)
        pieces = []
        for start in range(0, len(logits), chunk):
            rows = logits[start : start + chunk]
            shares = rows.double().softmax(-1)  # float64: small masses are compared, too
            if ends <= _FEW_ENDS:  # a GPU's atomic additions to few numbers are slow
                masks = (classes == FIRST_END + end for end in range(ends))
                sums = [(shares * mask).sum(-1, keepdim=True) for mask in masks]
            else:
                zeros = shares.new_zeros(len(rows), FIRST_END + ends)
                sums = [zeros.index_add_(1, classes, shares)[:, FIRST_END:]]
            pieces.append(torch.cat((*sums, shares[:, live]), 1))
        table = _Table(torch.cat(pieces))
        for row, reader in enumerate(readers):
            assert isinstance(reader, OutcomeReader)
            reader.found = table, row

    def read_row(self, beginning: Beginning) -> MassRow:
        """Returns the distribution that was read, as the row of a beginning. Must not be called
        before `read_together`.
        """
        assert self.found is not None
        table, row = self.found
        count = len(self.outcomes.ends)
        numbers = table.rows[row]
        return MassRow(beginning, self.outcomes, numbers[:count], numbers[count:])


class _Table:
    """Numbers on a device. The first use of `rows` copies all of them to the host.

    Args:
        numbers: float64 [R, N].
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers

    @cached_property
    def rows(self) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self._numbers.cpu().numpy()
        return found


@lru_cache(32)
def _tensors_of_outcomes(
    outcomes: Outcomes, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors on the device: the class of each token, int32 [V], and the live tokens,
    int64 [L].
    """
    classes = torch.from_numpy(outcomes.build_classes())
    return classes.to(device), torch.from_numpy(outcomes.live_tokens).to(device)
