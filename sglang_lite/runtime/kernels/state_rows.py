"""Rows of a step through layers with a recurrent state, which a pool keeps for each sequence.

Such a layer reads a row's state once, and writes the state after the row's last token once. A
convolution's state is its last inputs, a linear attention's is a matrix for each head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of a step, and the places of their states in a pool.

    A row has at least one token. It may write to the place it reads. No row writes to a place that
    another row reads, or writes. Several rows may read the same place, as forks do.

    Attributes:
        offsets: int32 [R + 1], first token of each row within the step, and then the number of
            tokens T.
        read: int32 [R], place whose state a row begins with; -1: it begins with zeros.
        write: int32 [R], place for the state after a row's last token; -1: it is not written, as
            for the padding rows of a CUDA graph.
        longest: number of tokens of the longest row, known to the host. If it is 1, every row has
            one token.
    """

    offsets: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class StateWave:
    """Rows of a step whose states can be computed at the same time. A row inside which a state is
    kept is computed in parts, one in each wave: a part begins with the state that the one before
    has written.

    Attributes:
        rows: the rows, or parts of rows.
        tokens: their tokens within the step: a slice, or indices int64 [N]; None for all tokens.
    """

    rows: StateRows
    tokens: torch.Tensor | slice | None = None
